"""What a GPU has of the slots of a pipeline: the array itself, or a copy, and what stays on it between two stages."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.fake_backend import make_plan
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline import Pipeline
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import PAGE, Port, aligned_empty
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline_tvm.devices import mirrors
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.relay.compiled import RelayModel

import tvm  # isort: skip

FRAMES = 6


@pytest.fixture
def names(model: RelayModel) -> list[str]:
    return model.graph.operator_names


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    """Forget what devices said of themselves in another test."""
    mirrors.shares_memory.cache_clear()
    yield
    mirrors.shares_memory.cache_clear()


@pytest.fixture
def integrated(software_cuda: SoftwareCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTWARE_CUDA_INTEGRATED", "1")


def copied(software_cuda: SoftwareCuda, run: Callable[[], object]) -> tuple[int, int]:
    """Return how many bytes `run` copies to the device, and back."""
    before = software_cuda.copied()
    run()
    after = software_cuda.copied()
    return after[0] - before[0], after[1] - before[1]


def given(ports: tuple[Port, ...], seed: int) -> list[Array]:
    random = np.random.default_rng(seed)
    arrays = [port.buffer() for port in ports]
    for array in arrays:
        array[...] = random.standard_normal(array.shape)
    return arrays


@pytest.mark.usefixtures("integrated")
def test_a_gpu_with_the_memory_of_the_host_computes_in_place(
    model: RelayModel, names: list[str], gpu: Device, software_cuda: SoftwareCuda
) -> None:
    stage = model.stage(names[1:-1], gpu)
    for seed in range(3):  # each time other arrays, as slots are
        inputs, outputs = given(stage.inputs, seed), [port.buffer() for port in stage.outputs]
        assert any(array.nbytes >= PAGE for array in (*inputs, *outputs))
        before = software_cuda.copied()
        stage.run(inputs, outputs)
        to_gpu, to_host = np.subtract(software_cuda.copied(), before)
        assert (to_gpu, to_host) == (less_than_a_page(inputs), less_than_a_page(outputs))


def less_than_a_page(arrays: list[Array]) -> int:
    return sum(array.nbytes for array in arrays if array.nbytes < PAGE)


@pytest.mark.usefixtures("integrated")
@pytest.mark.parametrize("can_register", ["1", "0"])
def test_results_in_place_and_where_the_driver_refuses(
    can_register: str, model: RelayModel, names: list[str], gpu: Device, cpu: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTWARE_CUDA_HOST_REGISTER", can_register)
    half = len(names) // 2
    for seed in range(2):
        frame = random_frame(model.graph.inputs, seed)
        expected = model_outputs(model, run_stages(model, [(names, cpu)], frame))
        found = model_outputs(model, run_stages(model, [(names[:half], gpu), (names[half:], gpu)], frame))
        for own, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_memory_of_the_host_is_registered_while_it_is_used(
    model: RelayModel, names: list[str], gpu: Device, software_cuda: SoftwareCuda
) -> None:
    model.stage(names, gpu).close()
    gc.collect()
    assert wait_until_released(tvm.device("cuda", 0))
    before = software_cuda.registered()
    stage = model.stage(names[1:-1], gpu)
    inputs, outputs = given(stage.inputs, 0), [port.buffer() for port in stage.outputs]
    for _ in range(2):
        stage.run(inputs, outputs)
    pages = [array for array in (*inputs, *outputs) if array.nbytes >= PAGE]
    assert software_cuda.registered().ranges - before.ranges == len(pages) > 0
    stage.close()
    del stage, inputs, outputs, pages
    gc.collect()
    assert wait_until_released(tvm.device("cuda", 0))
    assert software_cuda.registered() == before


def three_stages(model: RelayModel) -> tuple[Plan, str]:
    """Return a plan GPU, CPU, GPU in which a tensor goes from the first stage to the third, and its name."""
    graph = model.graph
    names = graph.operator_names
    for first in range(1, len(names) - 1):
        for second in range(first + 1, len(names)):
            parts = names[:first], names[first:second], names[second:]
            read = [{t for o in graph.operators if o.name in part for t in o.inputs} for part in parts]
            written = {t.name for o in graph.operators if o.name in parts[0] for t in o.outputs}
            skipping = sorted((written & read[2]) - read[1] - set(graph.outputs))
            if skipping:
                stages = (((device,), part) for device, part in zip(("gpu", "cpu0", "gpu"), parts, strict=True))
                return make_plan(graph, *stages), skipping[0]
    raise AssertionError(f"no tensor of {graph.name} skips a stage")


def test_a_tensor_stays_between_two_stages_on_the_gpu(
    model: RelayModel, gpu: Device, cpu: Device, software_cuda: SoftwareCuda
) -> None:
    plan, skipping = three_stages(model)
    platform = Platform("both", (cpu, gpu))
    stages = [model.stage(stage.operators, platform.device(stage.devices[0])) for stage in plan.stages]
    names = model.graph.operator_names
    frames = [random_frame(model.graph.inputs, index) for index in range(FRAMES)]
    expected = [model_outputs(model, run_stages(model, [(names, cpu)], frame)) for frame in frames]
    first, second, third = ({port.name: port.buffer().nbytes for port in stage.inputs} for stage in stages)
    made, last = ({port.name: port.buffer().nbytes for port in stages[index].outputs} for index in (0, 2))
    assert skipping in made.keys() & third.keys()
    to_gpu = sum(first.values()) + sum(size for name, size in third.items() if name not in made)
    to_host = sum(last.values()) + sum(size for name, size in made.items() if name in second)
    with Pipeline(model, plan, platform) as pipeline:
        for result in pipeline.map(iter(frames)):
            for own, wanted in zip(result.outputs.values(), expected[result.frame], strict=True):
                np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
    with Pipeline(model, plan, platform) as pipeline:
        moved = copied(software_cuda, lambda: list(pipeline.map(iter(frames))))
    assert moved == (FRAMES * to_gpu, FRAMES * to_host)


def test_a_buffer_of_a_page_begins_at_a_page_and_shares_none() -> None:
    for count in (1, PAGE // 4 - 1, PAGE // 4, PAGE // 4 + 1, 100_000):
        array = aligned_empty((count,), "float32")
        whole = array.nbytes >= PAGE
        assert array.ctypes.data % (PAGE if whole else 64) == 0
        owner = array.base
        assert owner is not None
        if whole:
            end = array.ctypes.data + array.nbytes
            assert end + -end % PAGE <= owner.ctypes.data + owner.nbytes
