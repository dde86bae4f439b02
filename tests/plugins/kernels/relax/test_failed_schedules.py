"""A kernel whose schedule fails runs by a slower one, and that is told."""

from __future__ import annotations

import numpy as np
import pytest

from tests.relax.mixed_net import INPUTS, mixed_net
from tests.support.log_lines import log_lines
from tests.support.stages import model_outputs, run_stages
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.core.platform import Device
from tvm_pipeline_kernels.relax.schedules import depthwise
from tvm_pipeline_tvm.relax.compiled import RelaxModel

TARGET = "llvm -mcpu=x86-64-v2"


def failing(*_: object) -> None:
    raise RuntimeError("no loop is left to split")


def test_a_failed_schedule_is_told_and_right(
    own_cache: object, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device("cpu0", "host", (0,), TARGET)
    frame = {name: noise(Port(name, shape, "float32")) for name, shape in INPUTS.items()}
    found, told = [], []
    for _ in range(2):
        told.append(log_lines("INFO"))
        model = RelaxModel.compile(mixed_net(), [TARGET], lambda _: None)
        names = model.graph.operator_names
        found.append(model_outputs(model, run_stages(model, [(names, device)], frame)))

        if len(told) == 1:
            told[0] = told[0].copy()
            monkeypatch.setattr(depthwise, "schedule", failing)
            monkeypatch.setenv("TVM_PIPELINE_CACHE", str(tmp_path_factory.mktemp("other")))
    assert not any("failed" in line for line in told[0])
    (line,) = (line for line in told[1] if "failed" in line)
    assert "depthwise failed: " in line
    assert "no loop is left to split" in line
    again = log_lines("INFO")
    RelaxModel.compile(mixed_net(), [TARGET], lambda _: None)
    assert line in again, "what the cache has is told as well"
    (slow,) = model.slow_operators(device)
    assert slow.startswith("conv2d+")
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
