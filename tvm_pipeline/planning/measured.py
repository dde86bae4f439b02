"""Schedulers that propose stages and let a device measure them, such as `measured`.

They are for devices on which the times of operators do not add up to that of a stage, such as Edge TPUs, and on which
it takes seconds to compile a stage. A prediction chooses the order of the operators. `corrected.py` searches the cuts
of `measured`, where the measurements correct the device's model.

Next: `profiling/stage_timer.py`, which compiles and times a stage.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm_pipeline.core.plan import Decision, Plan, Stage
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.baselines.segments import Partition
from tvm_pipeline.planning.corrected import corrected_partition, model_seconds
from tvm_pipeline.planning.search.cuts import reordered
from tvm_pipeline.planning.search.dynamic_programming import chain, ideals

_log = logging.getLogger(__name__)

# A function that times these operators as a stage on a device.
SegmentTimer = Callable[[Sequence[str], Device], SegmentProfile]
# (problem, equal devices, seconds) -> a segment of the graph's order for each device; `seconds(start, end)` compiles
# and measures the operators `start` to `end - 1` as a stage.
Cut = Callable[[Problem, Sequence[Device], Callable[[int, int], float]], Partition]


def corrected(problem: Problem, devices: Sequence[Device], timed: Callable[[int, int], float]) -> Partition:
    return corrected_partition(model_seconds(problem, devices), len(devices), timed)


def measured_plan(
    problem: Problem, scheduler: str, run: Callable[[Problem], Plan], cut: Cut, measure: SegmentTimer | None
) -> Decision:
    """Return the best pipeline over the platform's equal devices, by stages that were compiled and measured.

    The order of operators and the number of stages are those of the plan that `run` makes by predictions. The first
    device measures the stages of all.

    Args:
        scheduler: the name of the scheduler, for messages and for the plan.
        run, cut: those of the scheduler.

    Returns:
        The plan, and the measured figures of its stages: a profile with them predicts the plan.

    Raises:
        InfeasibleError: the devices are too few, or refuse a stage of every pipeline.
        OptionError: nothing times stages.
        ProfileError: the devices have neither measurements nor a model.
    """
    if measure is None:
        raise OptionError(
            f"scheduler {scheduler} compiles and measures stages; give a model, not a graph alone",
            option="scheduler",
            value=scheduler,
        )
    devices = _alike(problem.platform.devices)
    if problem.stages is not None and problem.stages > len(devices):
        raise InfeasibleError(
            f"scheduler {scheduler}: {problem.stages} stages need as many equal devices, platform "
            f"{problem.platform.name} has {len(devices)} that can work at once: {', '.join(d.name for d in devices)}"
        )
    proposed = run(replace(problem, platform=replace(problem.platform, devices=devices, links=())))
    order = [name for stage in proposed.stages for name in stage.operators]
    segments: dict[tuple[int, int], SegmentProfile] = {}

    def timed(start: int, end: int) -> float:
        _log.info(f"stage {len(segments) + 1}: operators {order[start]} to {order[end - 1]} on {devices[0].name}")
        segments[start, end] = measure(order[start:end], devices[0])
        return segments[start, end].seconds

    count = len(proposed.stages)
    found = cut(_in_order(problem, order), devices[:count], timed)
    ends = [*found.cuts, len(order)]
    stages, measured = [], []
    for device, start, end in zip(devices, (0, *found.cuts), ends, strict=False):
        stages.append(Stage((device.name,), tuple(order[start:end])))
        measured.append(replace(segments[start, end], device=device.name))
    plan = Plan(problem.graph.name, scheduler, problem.objective, tuple(stages), proposed.predicted)
    with_segments = replace(problem, profile=replace(problem.profile, segments=tuple(measured)))
    _log.info(f"{found.evaluations} stages compiled and measured")
    plan = judged(with_segments, plan)
    why = f"each of its {len(plan.stages)} stages was compiled and measured"
    return Decision(plan, (plan,), why, segments=tuple(measured), asked=True)


def _alike(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Return the largest set of devices that differ in their names and cores alone and can work at the same time."""

    def kind(device: Device) -> Device:
        return replace(device, name="any", target="", cores=(), stand_in="yes" if device.stand_in else "")

    sets = [
        tuple(device for device in group if kind(device) == kind(first))
        for group in disjoint_sets(devices)
        for first in group
    ]
    # Of two kinds with as many devices, take the kind whose operators cannot be timed one by one.
    return max(sets, key=lambda group: (len(group), not can_time_operators(replace(group[0], stand_in=""))))


def by_predictions(problem: Problem) -> Plan:
    """Return the best pipeline by the devices' models, over all cuts where they can be listed."""
    try:
        return ideals(problem)
    except OptionError:
        return chain(problem)


def _in_order(problem: Problem, order: Sequence[str]) -> Problem:
    """Return the problem with its operators in another legal order."""
    graph = reordered(problem.graph, [problem.graph.edges.index[name] for name in order])
    return replace(problem, graph=graph, profile=replace(problem.profile, segments=()), stages=None)
