"""A plan whose stages were measured: the planner proposes, the device measures, the model is corrected, and so on.

For devices whose times do not add up, such as Edge TPUs: an operator alone says little of a stage there, and to compile
a stage takes seconds. The search is `scheduling/corrected.py`; here are the order in which it cuts, and the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel, Progress, noise
from tvm_pipeline.core.plan import Plan, Problem, Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning import SCHEDULERS
from tvm_pipeline.planning.corrected import corrected_partition, model_seconds
from tvm_pipeline.profiling.bound import in_bound_thread

NAME = "measured"
REPEATS = 30


def measured_plan(
    compiled: CompiledModel, problem: Problem, progress: Progress = lambda _: None
) -> tuple[Plan, tuple[SegmentProfile, ...]]:
    """The best pipeline over the platform's equal devices, by stages that were compiled and measured.

    The order of operators is that of the planner's own best plan, cuts and all; the first device measures for all.

    Returns:
        The plan, and what was measured of its stages: a profile with these predicts the plan.

    Raises:
        InfeasibleError: no pipeline can be had, on the model's word or the device's.
        OptionError: the objective is another than throughput.
        ProfileError: nothing says how fast the devices are.
    """
    if problem.objective != "throughput":
        raise OptionError(f"--scheduler {NAME} plans for throughput; --objective {problem.objective} is for others")
    devices = _alike(problem.platform.devices)
    if problem.stages is not None and problem.stages > len(devices):
        raise InfeasibleError(
            f"--scheduler {NAME}: {problem.stages} stages need as many equal devices, platform "
            f"{problem.platform.name} has {len(devices)} that can work at once: {', '.join(d.name for d in devices)}"
        )
    proposed = _proposal(replace(problem, platform=replace(problem.platform, devices=devices, links=())))
    order = [name for stage in proposed.stages for name in stage.operators]
    segments: dict[tuple[int, int], SegmentProfile] = {}

    def measure(start: int, end: int) -> float:
        progress(f"stage {len(segments) + 1}: operators {order[start]} to {order[end - 1]} on {devices[0].name}")
        segments[start, end] = _measured(compiled, order[start:end], devices[0])
        return segments[start, end].seconds

    count = len(proposed.stages)
    found = corrected_partition(model_seconds(_in_order(problem, order), devices[:count]), count, measure)
    ends = [*found.cuts, len(order)]
    stages, known = [], []
    for device, start, end in zip(devices, (0, *found.cuts), ends, strict=False):
        stages.append(Stage((device.name,), tuple(order[start:end])))
        known.append(replace(segments[start, end], device=device.name))
    plan = Plan(problem.graph.name, NAME, problem.objective, tuple(stages), proposed.predicted)
    told = replace(problem, profile=replace(problem.profile, segments=tuple(known)))
    progress(f"{found.evaluations} stages compiled and measured")
    return judged(told, plan), tuple(known)


def _alike(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The largest set of devices that differ in nothing but their names and places, and can work at the same time."""

    def kind(device: Device) -> Device:
        return replace(device, name="any", target="", cores=(), stand_in="yes" if device.stand_in else "")

    sets = [
        tuple(device for device in group if kind(device) == kind(first))
        for group in disjoint_sets(devices)
        for first in group
    ]
    # Of two kinds with as many devices, take the one whose operators cannot be timed one by one.
    return max(sets, key=lambda group: (len(group), not can_time_operators(replace(group[0], stand_in=""))))


def _proposal(problem: Problem) -> Plan:
    """The best pipeline on the model's word, over all cuts where they can be listed."""
    try:
        return SCHEDULERS["ideals"](problem)
    except OptionError:
        return SCHEDULERS["chain"](problem)


def _in_order(problem: Problem, order: Sequence[str]) -> Problem:
    """The problem with its operators in another legal order."""
    by_name = {operator.name: operator for operator in problem.graph.operators}
    graph = replace(problem.graph, operators=tuple(by_name[name] for name in order))
    return replace(problem, graph=graph, profile=replace(problem.profile, segments=()), stages=None)


def _measured(compiled: CompiledModel, operators: Sequence[str], device: Device) -> SegmentProfile:
    """Median seconds of the operators as a stage; raises what the backend does where they cannot be one."""
    runner = compiled.stage(operators, device)
    inputs = [noise(port) for port in runner.inputs]
    outputs = [port.buffer() for port in runner.outputs]

    def clocked() -> list[float]:
        runner.run(inputs, outputs)
        samples = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            runner.run(inputs, outputs)
            samples.append(time.perf_counter() - begin)
        return samples

    samples = in_bound_thread(runner, clocked)
    low, high = np.quantile(samples, [0.25, 0.75])
    middle = median(samples)
    return SegmentProfile(device.name, tuple(operators), middle, float(high - low) / middle)
