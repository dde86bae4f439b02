"""Kernels that are compiled where the driver is older than nvrtc: machine code, which not every newer GPU runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

import tvm
from tvm import relay

from tests.support.networks import as_model
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.compiled import RelayModel

# The kinds of code, by the driver's version: that of nvrtc is 12.9.
MACHINE_CODE, PTX = "12020", "12090"


def compiled(architecture: str) -> RelayModel:
    x = relay.var("x", shape=(1, 64))
    mod = tvm.IRModule.from_expr(relay.nn.softmax(relay.exp(x)))
    targets = [f"cuda -arch={architecture}"]
    return RelayModel.compile(as_model("softmax", mod, {}), targets, bind, host=host_target())


def result(model: RelayModel) -> np.ndarray:
    gpu = Device("gpu", "gpu", target=next(iter(model.libraries)))
    names = model.graph.operator_names
    return model_outputs(model, run_stages(model, [(names, gpu)], random_frame(model.graph.inputs)))[0]


@pytest.mark.thorough
def test_machine_code_is_for_its_generation(
    software_cuda: SoftwareCuda,
    empty_cache: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It runs on a newer GPU of the same major version; on others the error says what to do, and nothing starts."""
    results = []
    for kind, driver in (("ptx", PTX), ("machine", MACHINE_CODE)):
        monkeypatch.setenv("TVM_PIPELINE_CACHE", str(empty_cache(tmp_path / "cache" / kind)))
        monkeypatch.setenv("SOFTWARE_CUDA_DRIVER_VERSION", driver)
        monkeypatch.setenv("SOFTWARE_CUDA_CAPABILITY", "75")
        model = compiled("sm_70")
        results.append(result(model))
        (tmp_path / kind).mkdir()
        model.save(tmp_path / kind)
        model.close()
    np.testing.assert_array_equal(*results)
    monkeypatch.setenv("SOFTWARE_CUDA_CAPABILITY", "86")
    np.testing.assert_array_equal(result(RelayModel.load(tmp_path / "ptx", bind)), results[0])
    launches, message = software_cuda.launches(), r"machine code of sm_70, which this GPU, sm_86, .*with `-arch=sm_86`"
    with pytest.raises(PlatformError, match=message):
        result(RelayModel.load(tmp_path / "machine", bind))
    with pytest.raises(PlatformError, match=message):  # a platform file may name an older architecture
        compiled("sm_70")
    assert software_cuda.launches() == launches
