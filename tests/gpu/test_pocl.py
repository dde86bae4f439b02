"""Slices through OpenCL, on PoCL: OpenCL on CPU cores. Only where it is installed (Debian: pocl-opencl-icd)."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, as_model, image, module_of
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.files import seal
from tvm_pipeline_tvm.agreement import check_agreement
from tvm_pipeline_tvm.devices.runtimes import ready_to_run
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.relay.compiled import RelayModel

from tvm import relay  # isort: skip


def network() -> Model:
    """Return a few operators: PoCL takes a second or more to compile each."""
    weights = Weights()
    pooled = relay.nn.max_pool2d(weights.conv(image(extent=8), 8), (2, 2), (2, 2))
    body = relay.nn.softmax(weights.dense(relay.nn.batch_flatten(pooled), 16))
    return as_model("few", module_of(body), weights.params)


@pytest.fixture
def pocl(monkeypatch: pytest.MonkeyPatch) -> Device:
    needs("PoCL")
    found = [gpu for gpu in survey().gpus if gpu.kind == "opencl" and gpu.is_software]
    ready_to_run("opencl")
    return Device("gpu", "gpu", (), f"{found[0].address} -device=intel_graphics -max_num_threads=256", stand_in="PoCL")


@pytest.mark.thorough
def test_slices_equal_the_unsplit_model(cpu: Device, pocl: Device) -> None:
    model = RelayModel.compile(network(), [cpu.target, pocl.target], bind, host=cpu.target)
    names = model.graph.operator_names
    frame = random_frame(model.graph.inputs)
    host = model_outputs(model, run_stages(model, [(names, cpu)], frame))
    whole = model_outputs(model, run_stages(model, [(names, pocl)], frame))
    cut = random_stages(model.graph, Random(0), 3)
    alone = model_outputs(model, run_stages(model, [(part, pocl) for part in cut], frame))
    for own, expected in zip(alone, whole, strict=True):
        np.testing.assert_array_equal(own, expected)
    turns = [(part, (cpu, pocl)[index % 2]) for index, part in enumerate(cut)]
    for own, expected in zip(model_outputs(model, run_stages(model, turns, frame)), host, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    folder = model.libraries[compiler_target(pocl.target)].folder
    assert folder is not None
    check_agreement(model, [cpu, pocl])
    assert list(folder.glob("programs-*.bin")), "compiled programs are not kept"


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_operators_that_the_driver_does_not_compile_are_refused_with_its_reason(cpu: Device, pocl: Device) -> None:
    """Kernels call a function that is not there, as where a driver lacks an extension that they use."""
    weights = Weights()
    body = relay.nn.softmax(relay.nn.relu(weights.dense(relay.var("data", shape=(1, 16)), 16)))
    mod = module_of(body)
    described, targets = as_model("scores", mod, weights.params), [cpu.target, pocl.target]
    folder = (
        RelayModel.compile(described, targets, bind, host=cpu.target).libraries[compiler_target(pocl.target)].folder
    )
    assert folder is not None
    kernels = (folder / "kernels.so").read_bytes()
    assert b"exp(" in kernels
    (folder / "kernels.so").write_bytes(kernels.replace(b"exp(", b"exq("))
    seal(folder)  # else the cache takes it for damaged
    model = RelayModel.compile(described, targets, bind, host=cpu.target)
    check_agreement(model, [cpu, pocl])
    names = model.graph.operator_names
    refused = [operator.name for operator in model.graph.operators if "softmax" in operator.kind]
    assert refused
    assert model.computes(pocl) == [name for name in names if name not in refused]
    reasons = set(model.refused[compiler_target(pocl.target)].values())
    assert reasons == {"it fails there: a kernel or a copy failed: Error: CL_BUILD_PROGRAM_FAILURE"}
    assert np.isnan(model.time_operators(pocl, 1)).sum() == len(refused)
