"""Slices of Relax on a GPU, which is made of software: CUDA of our own, and OpenCL by PoCL."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import onnxruntime
import pytest

from tests.relax.branching_net import branching_net, picture
from tests.relax.test_slices import bind, check_equal, outputs, whole
from tests.support import software_cuda
from tests.support.fake_backend import make_plan
from tests.support.stages import random_stages
from tvm_pipeline import Bundle, Pipeline, open_bundle, profile_model, write_bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.registry import platform_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlanError
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import bind as bind_thread
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relax.compiled import RelaxModel

FRAMES = 30


@pytest.fixture(scope="module")
def model() -> Model:
    return branching_net()


@pytest.fixture(scope="module")
def frame() -> dict[str, Array]:
    return picture()


@pytest.fixture(scope="module")
def cpu() -> Device:
    return Device("cpu0", "host", (0,), host_target())


@pytest.fixture(scope="module", params=["software_cuda_device", "pocl"])
def gpu(request: pytest.FixtureRequest) -> Device:
    device: Device = request.getfixturevalue(request.param)
    return device


@pytest.fixture(scope="module")
def compile_for(model: Model, cpu: Device, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], RelaxModel]:
    """Return what compiles the model for the CPU and a GPU, once for each."""
    folder = tmp_path_factory.mktemp("cache")

    @cache
    def compiled_for(target: str) -> RelaxModel:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TVM_PIPELINE_CACHE", str(folder))
            return RelaxModel.compile(model, [cpu.target, target], bind_thread, host=cpu.target)

    return compiled_for


@pytest.fixture
def compiled(compile_for: Callable[[str], RelaxModel], gpu: Device) -> RelaxModel:
    return compile_for(gpu.target)


@pytest.fixture
def listed(gpu: Device, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the GPU be found where this process and its children list devices."""
    if gpu.target.startswith("cuda"):
        folder = request.getfixturevalue("software_cuda_folder")
        for name, value in software_cuda.environment(folder).items():
            monkeypatch.setenv(name, value)
    survey.cache_clear()
    yield
    survey.cache_clear()


def test_values_are_those_of_onnxruntime(
    compiled: RelaxModel, gpu: Device, model: Model, frame: dict[str, Array]
) -> None:
    session = onnxruntime.InferenceSession(model.content, providers=["CPUExecutionProvider"])
    for found, right in zip(whole(compiled, gpu, frame), session.run(None, frame), strict=True):
        np.testing.assert_allclose(found.reshape(right.shape), right, rtol=1e-4, atol=1e-5)


def test_random_cuts_are_equal_bit_for_bit(compiled: RelaxModel, gpu: Device, frame: dict[str, Array]) -> None:
    right, draw = whole(compiled, gpu, frame), Random(1)
    for _ in range(6):
        parts = random_stages(compiled.graph, draw, draw.randint(2, 4))
        check_equal(outputs(compiled, [(part, gpu) for part in parts], frame), right, parts)


def test_stages_on_cpu_and_gpu_in_turn(compiled: RelaxModel, cpu: Device, gpu: Device, frame: dict[str, Array]) -> None:
    """The libraries have one operator graph, though the CPU's has images in blocks."""
    right, draw = whole(compiled, cpu, frame), Random(2)
    for first in (0, 1):
        cut = random_stages(compiled.graph, draw, 3)
        parts = [(part, (cpu, gpu)[(index + first) % 2]) for index, part in enumerate(cut)]
        for found, expected in zip(outputs(compiled, parts, frame), right, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_arrays_take_turns_and_a_tensor_stays_on_the_device(
    compiled: RelaxModel, gpu: Device, frame: dict[str, Array]
) -> None:
    """A pipeline has an array for each frame inside; what stays on the device is never in that of the host."""
    operators = compiled.graph.operator_names
    stages = [compiled.stage(operators[:3], gpu), compiled.stage(operators[3:], gpu)]
    between = {port.name for port in stages[1].inputs}
    ports = {port.name: port for stage in stages for port in (*stage.inputs, *stage.outputs)}
    sets = [{name: port.buffer() for name, port in ports.items()} for _ in range(3)]
    for name in between:
        for arrays in sets:
            arrays[name][...] = 7
        for stage in stages:
            assert stage.keep(name, [arrays[name] for arrays in sets], copied=False)
    pictures = [{name: array * (index + 1) for name, array in frame.items()} for index in range(3)]
    for given, arrays in zip(pictures, sets, strict=True):
        for name, array in given.items():
            arrays[name][...] = array
    for stage in stages:  # all frames in the first stage, before any is in the second
        for arrays in sets:
            stage.run(*([arrays[port.name] for port in each] for each in (stage.inputs, stage.outputs)))
    for given, arrays in zip(pictures, sets, strict=True):
        right = dict(zip(compiled.graph.outputs, whole(compiled, gpu, given), strict=True))
        for name in right.keys() - between:
            np.testing.assert_array_equal(arrays[name], right[name])
    with pytest.raises(PlanError):
        compiled.stage(["none of this name"], gpu)


@pytest.mark.usefixtures("listed")
def test_a_profile_a_bundle_and_a_pipeline(
    compiled: RelaxModel, cpu: Device, gpu: Device, frame: dict[str, Array], tmp_path: Path
) -> None:
    platform = Platform("both", (cpu, gpu))
    profile = profile_model(platform_backend(platform), compiled, platform, repeats=2)
    measured = profile.device("gpu")
    assert measured.seconds.keys() == set(compiled.graph.operator_names)
    assert min(measured.seconds.values()) > 0
    assert measured.receive is not None
    assert measured.send is not None
    half = len(compiled.graph) // 2
    plan = make_plan(
        compiled.graph,
        (("cpu0",), compiled.graph.operator_names[:half]),
        (("gpu",), compiled.graph.operator_names[half:]),
    )
    write_bundle(tmp_path / "both.tar", Bundle(compiled.graph, platform, profile, plan, compiled))
    pictures = [{name: array * (index + 1) for name, array in frame.items()} for index in range(3)]
    right = [whole(compiled, cpu, given) for given in pictures]
    with (
        open_bundle(tmp_path / "both.tar") as bundle,
        Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline,
    ):
        results = list(pipeline.map(pictures[index % 3] for index in range(FRAMES)))
    assert [result.frame for result in results] == list(range(FRAMES))
    for result in results:
        for found, expected in zip(result.outputs.values(), right[result.frame % 3], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("listed")
def test_copies_beside_kernels_change_no_bit(
    compiled: RelaxModel, cpu: Device, gpu: Device, frame: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each frame is another picture, so that a copy into the wrong one shows, in one stage and between two others."""
    if not gpu.target.startswith("cuda"):  # PoCL would use the arrays of the host in place
        for mirrors in (mirrors_of(gpu.target), mirrors_of(gpu.target).on_a_queue_of_their_own()):
            monkeypatch.setattr(mirrors.device, "has_host_memory", False)
    apart = replace(gpu, concurrent_copies=True)
    platform, operators = Platform("both", (cpu, apart)), compiled.graph.operator_names
    third = len(operators) // 3
    middle = ((["cpu0"], operators[:third]), (["gpu"], operators[third:-third]), (["cpu0"], operators[-third:]))
    pictures = [{name: array * (index + 1) for name, array in frame.items()} for index in range(FRAMES)]
    for stages in (((["gpu"], operators),), middle):
        ends = [(part, cpu if name == "cpu0" else gpu) for (name,), part in stages]
        right = [outputs(compiled, ends, given) for given in pictures]
        with Pipeline(compiled, make_plan(compiled.graph, *stages), platform) as pipeline:
            results = list(pipeline.map(pictures))
        assert [result.frame for result in results] == list(range(FRAMES))
        for result, expected in zip(results, right, strict=True):
            check_equal(list(result.outputs.values()), expected, (stages, result.frame))


def test_a_saved_model_outlives_the_first(
    compiled: RelaxModel, gpu: Device, frame: dict[str, Array], tmp_path: Path
) -> None:
    right = whole(compiled, gpu, frame)
    compiled.save(tmp_path)
    first, second = RelaxModel.load(tmp_path, bind), RelaxModel.load(tmp_path, bind)
    whole(first, gpu, frame)
    first.close()
    del first
    gc.collect()
    check_equal(whole(second, gpu, frame), right, "loaded")
