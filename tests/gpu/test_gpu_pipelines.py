"""Pipelines over CPU and GPU: frames in order, once each, with the unsplit model's results, whatever fails."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.fake_backend import make_plan
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline import Bundle, Pipeline, Problem, open_bundle, planning, profile_model, write_bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.registry import platform_backend
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.errors import RunError, StageError
from tvm_pipeline.runtime import LivePipeline, Result
from tvm_pipeline_tvm.devices.releasing import wait_until_released
from tvm_pipeline_tvm.relay.compiled import RelayModel

import tvm  # isort: skip

FRAMES = 30


@pytest.fixture
def platform(cpu: Device, gpu: Device) -> Platform:
    return Platform("both", (cpu, gpu))


def frames(model: RelayModel, count: int) -> Iterator[dict[str, Array]]:
    for index in range(count):
        yield random_frame(model.graph.inputs, index % 3)


def answers(model: RelayModel, device: Device) -> list[list[Array]]:
    whole = model.graph.operator_names
    return [
        model_outputs(model, run_stages(model, [(whole, device)], random_frame(model.graph.inputs, index)))
        for index in range(3)
    ]


def check(results: list[Result], model: RelayModel, expected: list[list[Array]], count: int) -> None:
    assert [result.frame for result in results] == list(range(count))
    for result in results:
        for own, wanted in zip(result.outputs.values(), expected[result.frame % 3], strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def halves(model: RelayModel) -> tuple[list[str], list[str]]:
    names = model.graph.operator_names
    return names[: len(names) // 2], names[len(names) // 2 :]


def problem(model: RelayModel, platform: Platform) -> Problem:
    devices = {d.name: DeviceProfile.in_order(model.graph, [1e-4] * len(model.graph)) for d in platform.devices}
    return Problem(model.graph, platform, Profile(model.graph.name, model.graph.fingerprint, devices))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("turns", ["cpu gpu", "gpu cpu", "cpu gpu cpu", "gpu cpu gpu", "gpu + cpu"])
def test_stages_and_replicas(turns: str, model: RelayModel, platform: Platform, cpu: Device) -> None:
    names = model.graph.operator_names
    if "+" in turns:
        stages = [(("gpu", "cpu0"), names)]
    else:
        devices = [{"cpu": "cpu0"}.get(name, name) for name in turns.split()]
        bounds = [round(index * len(names) / len(devices)) for index in range(len(devices) + 1)]
        stages = [((d,), names[a:b]) for d, a, b in zip(devices, bounds, bounds[1:], strict=False)]
    plan = make_plan(model.graph, *stages)
    with Pipeline(model, plan, platform) as pipeline:
        check(list(pipeline.map(frames(model, FRAMES))), model, answers(model, cpu), FRAMES)


def test_plan_profile_and_bundle(
    model: RelayModel, platform: Platform, cpu: Device, tmp_path: Path, software_cuda: SoftwareCuda
) -> None:
    profile = profile_model(platform_backend(platform), model, platform, repeats=2)
    assert profile.device("gpu").receive is not None
    decision = planning.plan(Problem(model.graph, platform, profile))
    assert decision.plan.stages
    first, second = halves(model)
    plan = make_plan(model.graph, (("cpu0",), first), (("gpu",), second))
    write_bundle(tmp_path / "both.tar", Bundle(model.graph, platform, profile, plan, model))
    with (
        open_bundle(tmp_path / "both.tar") as bundle,
        Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline,
    ):
        check(list(pipeline.map(frames(model, FRAMES))), model, answers(model, cpu), FRAMES)


def test_plans_are_exchanged_while_they_run(model: RelayModel, platform: Platform, cpu: Device) -> None:
    first, second = halves(model)
    given = problem(model, platform)
    plans = [
        make_plan(model.graph, (("gpu",), first), (("cpu0",), second)),
        make_plan(model.graph, (("cpu0",), first), (("gpu",), second)),
        make_plan(model.graph, (("gpu", "cpu0"), [*first, *second])),
    ]
    live = LivePipeline(model, given, plans[0])
    found: list[Result] = []
    with live:
        reader = threading.Thread(target=lambda: found.extend(live.map(frames(model, 120))))
        reader.start()
        for plan in itertools.islice(itertools.cycle(plans), 12):
            if not reader.is_alive():
                break
            live.switch(plan, "a test")
            time.sleep(0.02)
        reader.join()
    check(found, model, answers(model, cpu), 120)


def test_a_kernel_that_fails_names_the_device_after_the_results_before(
    model: RelayModel, platform: Platform, cpu: Device, software_cuda: SoftwareCuda
) -> None:
    first, second = halves(model)
    plan = make_plan(model.graph, (("cpu0",), first), (("gpu",), second))
    taken: list[Result] = []
    try:
        with Pipeline(model, plan, platform) as pipeline:
            results = pipeline.map(frames(model, FRAMES))
            taken += itertools.islice(results, 5)
            software_cuda.fail_launch(3)
            with pytest.raises(StageError, match=r"stage 1 on gpu .* a kernel or a copy failed: ") as caught:
                taken.extend(results)
    finally:
        software_cuda.reset()
    check(taken, model, answers(model, cpu), len(taken))
    assert caught.value.device == "gpu (stand-in)"
    assert len(str(caught.value)) < 300


def test_a_lost_gpu_costs_no_frame(
    model: RelayModel, platform: Platform, cpu: Device, software_cuda: SoftwareCuda
) -> None:
    first, second = halves(model)
    given = problem(model, platform)
    live = LivePipeline(model, given, make_plan(model.graph, (("cpu0",), first), (("gpu",), second)))
    found: list[Result] = []
    try:
        with live:
            for result in live.map(frames(model, FRAMES)):
                found.append(result)
                if len(found) == 5:
                    software_cuda.fail_launch(2)
    finally:
        software_cuda.reset()
    check(found, model, answers(model, cpu), FRAMES)
    assert any(event.kind == "failure" for event in live.events)
    assert "gpu" not in live.plan.devices


def test_a_driver_that_hangs_costs_no_frame(
    model: RelayModel, platform: Platform, cpu: Device, software_cuda: SoftwareCuda
) -> None:
    first, second = halves(model)
    expected = answers(model, cpu)
    plan = make_plan(model.graph, (("cpu0",), first), (("gpu",), second))
    # A stage on the CPU of a busy machine may take more than a second.
    live = LivePipeline(model, problem(model, platform), plan, watchdog_s=5.0)
    found: list[Result] = []
    try:
        with live:
            for result in live.map(frames(model, FRAMES)):
                found.append(result)
                if len(found) == 5:
                    software_cuda.hang_launch()
    finally:
        software_cuda.release()
    check(found, model, expected, FRAMES)
    assert "gpu" not in live.plan.devices


@pytest.mark.thorough
def test_garbage_of_a_gpu_that_hangs_keeps_no_other_thread(
    model: RelayModel, gpu: Device, software_cuda: SoftwareCuda
) -> None:
    """Any thread may be the one that collects it, such as that of a stage on the CPU."""
    whole = model.graph.operator_names
    stages = [model.stage(whole, gpu) for _ in range(2)]
    inputs, outputs = [p.buffer() for p in stages[0].inputs], [p.buffer() for p in stages[0].outputs]
    for stage in stages:
        stage.run(inputs, outputs)
    gc.collect()  # what earlier tests left, some of it raw arrays of TVM's
    assert wait_until_released(tvm.device("cuda", 0))
    garbage: list[object] = [stages.pop()]
    garbage.append(garbage)  # a cycle, as exceptions make them
    software_cuda.hang_launch()
    hanging = threading.Thread(target=stages[0].run, args=(inputs, outputs), daemon=True)
    hanging.start()
    while not software_cuda.hangs():
        time.sleep(0.001)
    del garbage, stage
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(10.0)
    was_kept = collecting.is_alive()
    software_cuda.release()
    hanging.join()
    assert not was_kept
    assert wait_until_released(tvm.device("cuda", 0))


def test_a_device_without_memory_says_how_much_is_wanted(
    model: RelayModel, gpu: Device, software_cuda: SoftwareCuda
) -> None:
    whole = model.graph.operator_names
    software_cuda.fail_allocation()
    try:
        with pytest.raises(RunError, match=r"device gpu .*cannot hold a stage of .* bytes of activations"):
            model.stage(whole, gpu)
    finally:
        software_cuda.reset()
    model.stage(whole, gpu).close()


def test_outputs_are_logical(model: RelayModel, gpu: Device) -> None:
    stage = model.stage(model.graph.operator_names, gpu)
    array = stage.outputs[0].buffer()
    assert to_logical(array, stage.outputs[0].layout).shape == model.graph.tensors[model.graph.outputs[0]].shape
