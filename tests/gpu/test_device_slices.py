"""Slices on a device with memory of its own: the unsplit model's results, and only what crosses a cut is copied."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

import tvm

from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import RunError
from tvm_pipeline.profiling.links import SIZES
from tvm_pipeline_tvm.devices import cuda_events
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.relay.compiled import RelayModel

NETWORKS = ["branching", "shapes"]  # tests/tvm/test_slicing.py cuts all of them
Mixed = Callable[[str], RelayModel]


def outputs(model: RelayModel, stages: list[tuple[list[str], Device]]) -> list[np.ndarray]:
    return model_outputs(model, run_stages(model, stages, random_frame(model.graph.inputs)))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NETWORKS)
def test_slices_on_the_gpu_equal_its_unsplit_model(name: str, mixed: Mixed, gpu: Device, cpu: Device) -> None:
    model = mixed(name)
    whole, host = (
        outputs(model, [(model.graph.operator_names, gpu)]),
        outputs(model, [(model.graph.operator_names, cpu)]),
    )
    for own, expected in zip(whole, host, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
    random = Random(0)
    for stages in (2, 3, 4):
        cut = random_stages(model.graph, random, min(stages, len(model.graph)))
        for own, expected in zip(outputs(model, [(part, gpu) for part in cut]), whole, strict=True):
            np.testing.assert_array_equal(own, expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_stages_on_cpu_and_gpu_in_turn(name: str, mixed: Mixed, gpu: Device, cpu: Device) -> None:
    model, random = mixed(name), Random(1)
    host = outputs(model, [(model.graph.operator_names, cpu)])
    for stages in (2, 3, 4):
        cut = random_stages(model.graph, random, min(stages, len(model.graph)))
        for first in (0, 1):
            found = outputs(model, [(part, (cpu, gpu)[(index + first) % 2]) for index, part in enumerate(cut)])
            for own, expected in zip(found, host, strict=True):
                np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.thorough
def test_parameters_are_on_the_device_once_for_all_slices(
    mixed: Mixed, gpu: Device, software_cuda: SoftwareCuda
) -> None:
    model = mixed("branching")
    model.stage(model.graph.operator_names, gpu).close()
    model.close()
    gc.collect()
    assert wait_until_released(tvm.device("cuda", 0))
    before = software_cuda.allocated()
    whole = [model.stage(model.graph.operator_names, gpu) for _ in range(3)]
    single = [model.stage([name], gpu) for name in model.graph.operator_names]
    params = sum(array.numpy().nbytes for array in model.libraries[gpu.target].params.values())
    arenas = sum(stage.activation_bytes for stage in (*whole, *single))
    crossing = sum(port.buffer().nbytes for stage in (*whole, *single) for port in (*stage.inputs, *stage.outputs))
    assert software_cuda.allocated() - before <= params + arenas + crossing + 256 * len(single)
    assert params > 0
    for stage in (*whole, *single):
        stage.close()
    model.close()
    del whole, single, stage
    gc.collect()
    assert wait_until_released(tvm.device("cuda", 0))
    assert software_cuda.allocated() <= before


@pytest.mark.thorough
def test_only_what_crosses_a_cut_is_copied(mixed: Mixed, gpu: Device, software_cuda: SoftwareCuda) -> None:
    model = mixed("branching")
    operators = model.graph.operator_names
    stage = model.stage(operators[1:-1], gpu)
    inputs, found = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
    for array in inputs:
        array.fill(0)
    stage.run(inputs, found)
    before = [software_cuda.copies(direction) for direction in ("to device", "to host", "on device")]
    stage.run(inputs, found)
    after = [software_cuda.copies(direction) for direction in ("to device", "to host", "on device")]
    moved = [b.n_bytes - a.n_bytes for a, b in zip(before, after, strict=True)]
    assert moved == [sum(array.nbytes for array in inputs), sum(array.nbytes for array in found), 0]


def test_a_model_loaded_twice_outlives_the_first(mixed: Mixed, gpu: Device, tmp_path: Path) -> None:
    mixed("branching").save(tmp_path)
    first, second = RelayModel.load(tmp_path, bind), RelayModel.load(tmp_path, bind)
    expected = outputs(first, [(first.graph.operator_names, gpu)])
    outputs(second, [(second.graph.operator_names, gpu)])
    first.close()
    del first
    gc.collect()
    for own, wanted in zip(outputs(second, [(second.graph.operator_names, gpu)]), expected, strict=True):
        np.testing.assert_array_equal(own, wanted)


def test_operators_and_transfers_are_timed(mixed: Mixed, gpu: Device, cpu: Device) -> None:
    model = mixed("branching")
    seconds = model.time_operators(gpu, 3)
    assert seconds.shape == (3, len(model.graph))
    assert (seconds > 0).all()
    received, sent = model.time_transfers(gpu, SIZES, 2) or ([], [])
    assert received.shape == sent.shape == (2, len(SIZES))
    assert model.time_transfers(cpu, SIZES, 2) is None


def test_kernels_are_timed_between_events(
    mixed: Mixed, gpu: Device, software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel runs between two events, and none is waited for; they are not left behind."""
    model = mixed("branching")
    waits, sync = [], tvm.runtime.Device.sync
    monkeypatch.setattr(tvm.runtime.Device, "sync", lambda self: waits.append(self) or sync(self))
    recorded, handles = software_cuda.recorded(), software_cuda.handles()
    nodes = len(model.cut(model.graph.operator_names, gpu).operator_nodes)
    assert nodes > 5
    assert (model.time_operators(gpu, 10) > 0).all()
    assert software_cuda.recorded() - recorded == 10 * (nodes + 1)
    assert software_cuda.handles() == handles
    assert len(waits) < 10


def test_without_the_runtime_library_the_host_times(
    mixed: Mixed, gpu: Device, software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A TVM that has CUDA's runtime inside leaves no library that makes events."""
    monkeypatch.setattr(cuda_events, "loaded_runtime", lambda: None)
    recorded, model = software_cuda.recorded(), mixed("branching")
    assert (model.time_operators(gpu, 3) > 0).all()
    assert software_cuda.recorded() == recorded


def test_a_closed_stage_says_so(mixed: Mixed, gpu: Device) -> None:
    model = mixed("branching")
    stage = model.stage(model.graph.operator_names, gpu)
    stage.close()
    with pytest.raises(RunError, match=r"a stage on gpu .* was closed; make a new one"):
        stage.run([], [])
