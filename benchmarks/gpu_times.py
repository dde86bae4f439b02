"""The parts of gpu.py that are about time: prediction, overhead, speed. On software only the first two say anything."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gpu_devices import CONSOLE, CORES, Gpu, model_of, one_kernel, show, two_stages
from networks import MODELS, load
from prediction import row

from tests.support.speed import machine_speed
from tvm_pipeline import Pipeline, Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.backends.ports import aligned_empty, noise
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.runtime.comparison import Measured, compare
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.devices.mirrors import Mirror, mirrors_on
from tvm_pipeline_tvm.devices.runtimes import ready_to_run
from tvm_pipeline_tvm.devices.targets import compiler_target, index_of, kind_of
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.device_executor import DeviceSlice

import tvm  # isort: skip

# In smaller ones a frame takes about a millisecond, of which the runtime takes a tenth and more.
PREDICTED = ("squeezenet@112", "mobilenet@112", "resnet-18@112")
COPIED_SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
SIZES = (4 << 10, 64 << 10, 1 << 20)  # of the tensor that a stage of one kernel reads, and of that which it writes


# 3. Prediction


def prediction(gpu: Gpu, options: argparse.Namespace) -> bool:
    if len(CORES) < 2 and not gpu.is_real:
        CONSOLE.print("3. Prediction was left out: it needs a core for PoCL and another one for the CPU's stages")
        return True
    # Of plans with both devices, and of others: errors, and errors at the machine's speed of the run.
    errors: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name in options.models or PREDICTED:
        backend, model, platform = gpu.compiled(model_of(name))
        profile = profile_model(backend, model, platform)
        for warning in profile.warnings:
            CONSOLE.print(f"{name}: {warning}", highlight=False)
        problem = Problem(model.graph, platform, profile)
        plans = [*planning.plan(problem).candidates, *_in_two(problem)]
        before = machine_speed(model, platform, profile)
        found = compare(model, platform, list({plan.stages: plan for plan in plans}.values()), seconds=2.0, rounds=5)
        speed = statistics.mean([before, machine_speed(model, platform, profile)])
        for result in found:
            corrected = (1 + result.prediction_error) * speed - 1
            errors[len(set(result.plan.devices)) > 1].append((abs(result.prediction_error), abs(corrected)))
        title = f"3. {name}, the machine's speed {speed:.2f} times that of the profile"
        show(gpu, title, PREDICTION_COLUMNS, [_predicted(name, result) for result in found])
    rows = []
    for both, what in ((True, "with both devices"), (False, "on one of them")):
        raw, at_speed = zip(*errors[both], strict=True)
        figures = (statistics.median(raw), max(raw), statistics.median(at_speed), max(at_speed))
        rows.append((what, len(raw), *(f"{figure:.1%}" for figure in figures)))
    columns = ("plans", "count", "median error", "worst", "at the speed of the run", "worst")
    show(gpu, "3. Predicted against measured throughput; at most 8 % with both devices", columns, rows)
    return True


PREDICTION_COLUMNS = ("candidate", "predicted fps", "measured fps", "error", "spread", "1/max(stage) fps", "of bound")


def _predicted(name: str, result: Measured) -> tuple[str, ...]:
    of = row(name, result)
    rates = f"{of['predicted_fps']:.2f}", f"{of['measured_fps']:.2f}", f"{of['error']:+.1%}", f"{of['spread']:.1%}"
    return (of["candidate"], *rates, f"{of['bound_fps']:.2f}", f"{of['of_bound']:.3f}")


def _in_two(problem: Problem) -> Iterator[Plan]:
    """Yield plans of two stages, CPU first and GPU first: the best cut of the listed order, and that in the middle."""
    names = problem.graph.operator_names
    devices = [device.name for device in problem.platform.devices]
    for first, second in (devices, devices[::-1]):
        plans = [two_stages(problem, first, second, names, cut) for cut in range(1, len(names))]
        yield max(plans, key=lambda plan: plan.predicted.throughput_fps or 0.0)
        yield plans[len(plans) // 2]


# 5. Overhead


def overhead(gpu: Gpu, options: argparse.Namespace) -> bool:
    """Compare a stage, alone and in a pipeline, with its copies and kernel as the executor alone runs them."""
    rows = []
    for size in SIZES:
        _, model, platform = gpu.compiled(one_kernel(size // 4))
        device = platform.devices[-1]
        with ThreadPoolExecutor(1) as thread:  # bound as the worker of a stage is
            profiled_s, alone_s, stage_s = thread.submit(_stage_seconds, model, device).result()
        plan = Plan(
            model.graph.name,
            "by hand",
            "throughput",
            (Stage(("gpu",), tuple(model.graph.operator_names)),),
            Prediction(),
        )
        frame = {port.name: noise(port) for port in model.stage(model.graph.operator_names, device).inputs}
        rates = []
        for _ in range(5):
            with Pipeline(model, plan, platform) as pipeline:
                begin_s = time.perf_counter()
                for _ in pipeline.map(frame for _ in range(1000)):
                    pass
                rates.append((time.perf_counter() - begin_s) / 1000)
        seconds = profiled_s, alone_s, stage_s, statistics.median(rates)
        microseconds = [f"{1e6 * value:.0f}" for value in (*seconds, stage_s - alone_s, seconds[3] - alone_s)]
        rows.append((f"{size >> 10} KB in, as much out", *microseconds))
    columns = ("one kernel", "as profiled, us", "executor and copies", "stage", "pipeline, kept full")
    title = "5. A GPU stage beyond its kernel and copies, us a frame; at most 150"
    show(gpu, title, (*columns, "stage beyond", "pipeline beyond"), rows)
    return True


def _stage_seconds(model: RelayModel, device: Device) -> tuple[float, float, float]:
    """Return medians: kernel and copies as the profile has them; the same by the executor alone; the stage's `run`."""
    names = model.graph.operator_names
    stage = model.stage(names, device)
    stage.bind()
    inputs, outputs = [noise(port) for port in stage.inputs], [port.buffer() for port in stage.outputs]
    there = tvm.device(kind_of(device.target), index_of(device.target))
    library = model.libraries[compiler_target(device.target)]
    part = DeviceSlice(library, model.cut(names, device), DeviceParams(library.params, mirrors_on(there)))
    part.set_buffers(inputs, outputs)
    part.give_to_host()
    run = part.executor["run"]

    def alone() -> None:
        part.give_to_device()
        run()
        part.give_to_host()

    seconds: dict[Callable[[], object], list[float]] = {alone: [], lambda: stage.run(inputs, outputs): []}
    for _ in range(2000):  # in turns
        for call, times in seconds.items():
            begin_s = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin_s)
    kernel_s = float(np.median(model.time_operators(device, 200).sum(axis=1)))
    copies = model.time_transfers(device, [inputs[0].nbytes], 200)
    copies_s = sum(float(np.median(direction)) for direction in copies or ())
    return (kernel_s + copies_s, *(statistics.median(times) for times in seconds.values()))  # type: ignore[return-value]


# 9. Copies


def copies(gpu: Gpu, options: argparse.Namespace) -> bool:
    """Compare how long a device takes an array of the host: used in place, where it can, and copied."""
    _, platform = gpu.settled()
    target = platform.devices[-1].target
    ready_to_run(kind_of(target))
    there = tvm.device(kind_of(target), index_of(target))
    rows = []
    for size in COPIED_SIZES:
        array = aligned_empty((size,), "uint8")
        array.fill(0)
        in_place = mirrors_on(there).shared(array, kept=False)
        if in_place is None:
            CONSOLE.print(f"9. Copies were left out: {gpu.label} has memory of its own", highlight=False)
            return True
        copied = mirrors_on(there).copied(array, tvm.nd.empty((size,), "uint8", there))
        seconds: dict[Mirror, list[float]] = {in_place: [], copied: []}
        for turn in range(220):  # in turns
            for mirror, times in seconds.items():
                begin_s = time.perf_counter()
                mirror.begin(copied=True)
                mirror.end(copied=True)
                there.sync()
                if turn >= 20:
                    times.append(time.perf_counter() - begin_s)
        here, there_and_back = (f"{1e6 * statistics.median(times):.0f}" for times in seconds.values())
        ratios = sorted(b / a for a, b in zip(*seconds.values(), strict=True))
        quartiles = f"{ratios[len(ratios) // 4]:.1f}-{ratios[3 * len(ratios) // 4]:.1f}"
        rows.append((f"{size >> 10} KB", here, there_and_back, f"{statistics.median(ratios):.1f}", quartiles))
    columns = ("to the device and back", "in place, us", "copied, us", "ratio", "quartiles")
    show(gpu, "9. An array of the host, used in place and copied", columns, rows)
    return True


# 7. Speed


def speed(gpu: Gpu, options: argparse.Namespace) -> bool:
    if not gpu.is_real:
        CONSOLE.print(f"7. Speed was left out: {gpu.label} is software, and no real GPU is here", highlight=False)
        return True
    backend, platform = settle_platform(detect_platform())
    kinds = {device.name: "GPU" if device.backend == "gpu" else "CPU" for device in platform.devices}
    rows = []
    for name in options.models or MODELS:
        compiled = backend.compile(load(name), platform.devices)
        profile = profile_model(backend, compiled, platform)
        plans = {kind: _best_on(kind, Problem(compiled.graph, platform, profile), kinds) for kind in ("CPU", "GPU")}
        candidates = planning.plan(Problem(compiled.graph, platform, profile)).candidates
        both = [plan for plan in candidates if len({kinds[device] for device in plan.devices}) > 1]
        if both:
            plans["CPU+GPU"] = both[0]  # the best stands first
        found = dict(zip(plans, compare(compiled, platform, list(plans.values())), strict=True))
        cells = [f"{found[kind].throughput_fps:.1f}" if kind in found else "none" for kind in ("CPU", "GPU", "CPU+GPU")]
        best = max(found["CPU"].throughput_fps, found["GPU"].throughput_fps)
        rows.append((name, *cells, f"{found['CPU+GPU'].throughput_fps / best:.2f}" if both else ""))
    show(gpu, "7. Frames a second", ("network", "CPU", "GPU", "CPU+GPU", "over the better"), rows)
    return True


def _best_on(kind: str, problem: Problem, kinds: dict[str, str]) -> Plan:
    devices = tuple(device for device in problem.platform.devices if kinds[device.name] == kind)
    return planning.plan(Problem(problem.graph, Platform(kind, devices), problem.profile)).plan
