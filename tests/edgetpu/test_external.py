"""External delegates of TFLite as devices: what one takes, leaves, and does wrongly (`fakes/delegate.c`)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.edgetpu.fakes import external_delegate
from tests.edgetpu.networks import Op, Options, Type, Writer, run, schema
from tests.edgetpu.test_engine import written
from tests.support.fake_backend import make_plan
from tvm_pipeline import Pipeline, load
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlanError, PlatformError
from tvm_pipeline.workflow.machine import HERE
from tvm_pipeline_edgetpu import EdgeTpuBackend

CORE = min(os.sched_getaffinity(0))
CPU = Device("cpu0", "edgetpu", (CORE,), "tflite")


def npu(options: str = "") -> Device:
    return Device("npu", "edgetpu", (), f"tflite delegate={external_delegate()} {options}".strip())


def sums() -> bytes:
    """Return a file of six sums of float tensors, and a product behind them."""
    writer = Writer()

    def tensor() -> int:
        return writer.tensor((1, 8, 8, 4), Type.FLOAT32, scale=0)

    inputs = [tensor(), tensor()]
    known = list(inputs)
    for number in range(6):
        reads = [known[-1], known[number % 2]]
        known += writer.operator(Op.ADD, reads, [tensor()], Options.AddOptions, schema.AddOptionsT(), version=1)
    product = tensor()
    writer.operator(Op.MUL, [known[-1], known[0]], [product], Options.MulOptions, schema.MulOptionsT(), version=1)
    return writer.content(inputs, [product])


@pytest.fixture
def backend() -> Iterator[EdgeTpuBackend]:
    with closing(EdgeTpuBackend()) as made:
        yield made


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load(written(tmp_path, sums()))


def test_a_stage_of_the_delegate_and_one_of_the_cpu_give_the_models_outputs(
    backend: EdgeTpuBackend, model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    device = backend.settle(npu())
    compiled = backend.compile(model, [CPU, device])
    names = compiled.graph.operator_names
    assert compiled.computes(device) == names[:6]
    assert compiled.computes(CPU) == names
    [line] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"net: {device.target} runs 6 of 7 operators, and leaves others to other devices: mul_6, since" in line
    with pytest.raises(PlanError, match=r"device npu cannot compute operator mul_6 of net: .*takes none"):
        compiled.stage(names, device)
    draw = np.random.default_rng(0)
    frame = {f"tensor/{index}:0": draw.standard_normal((1, 8, 8, 4)).astype(np.float32) for index in range(2)}
    [expected] = run(model.content, frame).values()
    plan = make_plan(compiled.graph, (["npu"], names[:6]), (["cpu0"], names[6:]))
    with Pipeline(compiled, plan, Platform("p", (CPU, device))) as pipeline:
        [result] = pipeline.map([frame])
    [found] = result.outputs.values()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_its_figures_follow_from_whole_stages(backend: EdgeTpuBackend, model: Model) -> None:
    platform = Platform("p", (CPU, backend.settle(npu())))
    with closing(backend.compile(model, platform.devices)) as compiled:
        profile = HERE.profile(backend, compiled, platform, 4, False)
    seconds = list(profile.devices["npu"].seconds.values())
    assert seconds[-1] is None
    assert all(each > 0 for each in seconds[:-1])
    assert any("device npu tells no times of operators" in line for line in profile.warnings)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("add=wrong", "computes something else than the CPU: tensor/2:0 is off by"),
        ("add=nan", "computes something else than the CPU: tensor/2:0 is infinite or no number"),
        ("add=fail", "failed to invoke"),
        ("add=die", "the process that tried it first was killed by SIGABRT"),
    ],
)
def test_what_it_does_wrongly_runs_nowhere(backend: EdgeTpuBackend, model: Model, options: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"runs none of its operators: .*{reason}"):
        backend.compile(model, [backend.settle(npu(options))])


def test_that_of_another_machine_is_compiled_for_there(backend: EdgeTpuBackend) -> None:
    with pytest.raises(PlatformError, match=r"device npu is a delegate .* of another machine"):
        backend.settle_elsewhere(npu())


def test_what_is_no_delegate_is_refused_before_anything_runs(backend: EdgeTpuBackend, tmp_path: Path) -> None:
    (tmp_path / "empty.so").touch()
    for target, message in (
        ("tflite delegate=/usr/lib/libvx_delegate.so", "device npu: /usr/lib/libvx_delegate.so cannot be used as"),
        (f"tflite delegate={tmp_path}/empty.so", "empty.so cannot be used as a delegate of TFLite: .*file too short"),
        (f"{npu().target} make=nothing", "cannot be used as a delegate of TFLite: .*the NPU is busy"),
        (f"{npu().target} speed", "device npu: tflite takes no property 'speed' = ''"),
        ("tflite threads=2", "names no delegate; write the path of its library first"),
    ):
        with pytest.raises(PlatformError, match=message):
            backend.settle(Device("npu", "edgetpu", (), target))
