"""Consecutive segments of the graph's own order, one for each device: the baselines that cut by a rule.

A segment is the operators `start` to `end - 1`. A function returns its seconds, and may get them from predictions, or
from a compilation and a measurement on an Edge TPU, whose parameter cache makes the costs of operators not additive.

`even-parameters` makes segments of about the same bytes of parameters, as the Edge TPU compiler does, as far as its
documentation says: these are fast where the seconds of a segment are in proportion to its parameters. `greedy` is first
fit, which fills one stage after the other up to an equal share of the time.

Next: `search/dynamic_programming.py`, which is exact on the costs of `search/cost_tables.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, known_cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.planning.search.cost_tables import StageCosts, stage_seconds
from tvm_pipeline.planning.search.cuts import Floats, prefixes
from tvm_pipeline.planning.stage_orders import fitting_orders

# (device, start, end) -> seconds of that segment on the device; infinite where the device cannot take it.
Seconds = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Partition:
    """A chain cut into segments, and the figures of the search that found it.

    Attributes:
        cuts: position of the first operator of every segment but the first.
        seconds: seconds of each segment; 0.0 for an empty one.
        evaluations: the number of different segments that the search evaluated; on hardware, each of them is a
            compilation and a measurement.
        found: False where the search found nothing, and this is its initial partition.
        bound_s: no partition has a shorter bottleneck than this; None where the search proves nothing.
    """

    cuts: tuple[int, ...]
    seconds: tuple[float, ...]
    evaluations: int
    found: bool = True
    bound_s: float | None = None

    @property
    def bottleneck_s(self) -> float:
        return max(self.seconds)


def segment_seconds(problem: Problem, devices: Sequence[Device]) -> Seconds:
    """Return a function for the predicted seconds of a segment, in a pipeline over `devices` that are all busy.

    The seconds are those of computing and of transfers. The way to the first device is free; every other device
    receives over the link from the device before it. The seconds are infinite where the device cannot run the segment
    or has no memory for it. Plans are still judged by `evaluate`, which counts buses, too. A longer segment can take
    less where it ends with smaller tensors; `search.dynamic_programming.chain` is the exact search for these figures.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    costs, param_bytes = chain_costs(problem, devices)

    def seconds(device: int, start: int, end: int) -> float:
        capacity = devices[device].memory_bytes
        if capacity is not None and param_bytes[end] - param_bytes[start] > capacity:
            return math.inf
        source = device - 1 if device else len(devices)
        taken = float(costs.stage(param_bytes, device, source, start, end))
        return taken if taken < costs.impossible else math.inf

    return seconds


def chain_costs(problem: Problem, devices: Sequence[Device]) -> tuple[StageCosts, Floats]:
    """Return the costs over the prefixes of the graph's own order, with all devices busy, and each prefix's parameters.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    for device in devices:
        known_cost_of(problem, device)
    cuts = prefixes(problem.graph)
    return stage_seconds(problem, cuts, devices, len(devices)), cuts.param_bytes.astype(np.float64)


def even_parameters(problem: Problem) -> Plan:
    """Cut the graph's order into segments of equal parameter bytes, on the devices in the platform's order.

    `edgetpu_compiler --num_segments` makes segments with "roughly the same amount of parameter data"
    (https://coral.ai/docs/edgetpu/pipeline/); its source is not public.

    Raises:
        InfeasibleError: there are too few devices, or they cannot run their segments or have no memory for them.
    """
    return best_pipeline(problem, "even-parameters", lambda devices: even_cuts(problem.graph, len(devices)))


def even_cuts(graph: OperatorGraph, segments: int) -> tuple[int, ...]:
    """Return the cuts: cut b is where the first operators reach b/segments of all bytes. No segment is empty."""
    # Bytes are multiplied by `segments`, so that a share of the total is a whole number.
    reached = [0, *accumulate(operator.param_bytes * segments for operator in graph.operators)]
    cuts = [0]
    for index in range(1, segments):
        position = bisect_left(reached, reached[-1] // segments * index)
        cuts.append(min(max(position, cuts[-1] + 1), len(graph) - (segments - index)))
    return tuple(cuts[1:])


def greedy(problem: Problem) -> Plan:
    """Fill stage b until one more operator would exceed its target; the last stage takes the rest.

    The target of a stage is the seconds of the whole model on its device, divided by the number of stages. The stages
    take the devices in the platform's order. Every later stage gets at least one operator.

    Raises:
        InfeasibleError: there are too few devices, or they cannot run their stages or have no memory for them.
        ProfileError: a device has neither measurements nor a model.
    """
    return best_pipeline(problem, "greedy", lambda devices: _first_fit(problem, devices))


def _first_fit(problem: Problem, devices: Sequence[Device]) -> list[int]:
    seconds = segment_seconds(problem, devices)
    cuts = [0]
    for index, device in enumerate(devices[:-1]):
        whole_s = known_cost_of(problem, device).operators_s(problem.graph.operators)
        share_s = whole_s * busy_factor(problem, device.name, len(devices)) / len(devices)
        most = len(problem.graph) - (len(devices) - index - 1)
        end = cuts[-1] + 1
        while end < most and seconds(index, cuts[-1], end + 1) <= share_s:
            end += 1
        cuts.append(end)
    return cuts[1:]


def best_pipeline(problem: Problem, name: str, cuts_for: Callable[[tuple[Device, ...]], Sequence[int]]) -> Plan:
    """Return the plan of a baseline that cuts by a rule and gives each device one segment.

    The devices are the first of the largest sets that can work at the same time, in the platform's order; no other
    order is tried. `problem.stages` is the number of devices that are used; without it, the number that is best by the
    objective is used.

    Args:
        name: the name of the baseline.
        cuts_for: the rule: a function from the devices to the cuts.

    Raises:
        InfeasibleError: there are too few devices, or no plan is legal; the message gives each reason.
    """
    devices = max(disjoint_sets(problem.platform.devices), key=len)
    if problem.stages is not None and problem.stages > len(devices):
        raise InfeasibleError(
            f"{name} puts every stage on a device of its own: {problem.stages} stages are asked for, and "
            f"{len(devices)} devices of platform {problem.platform.name} can work at the same time"
        )
    most = min(len(devices), len(problem.graph))
    plans, reasons = [], []
    for count in range(1, most + 1) if problem.stages is None else [problem.stages]:
        try:
            plans.append(_judged(problem, name, devices[:count], cuts_for(devices[:count])))
        except PlanError as error:
            reasons.append(str(error))
    if not plans:
        raise LimitMissedError(f"{name} makes no plan: {'; '.join(dict.fromkeys(reasons))}")
    return min(plans, key=cost_key)


def _judged(problem: Problem, name: str, devices: tuple[Device, ...], cuts: Sequence[int]) -> Plan:
    operators = tuple(operator.name for operator in problem.graph.operators)
    segments = pairwise((0, *cuts, len(operators)))
    stages = tuple(
        Stage((device.name,), operators[start:end]) for device, (start, end) in zip(devices, segments, strict=True)
    )
    stages = fitting_orders(problem, stages)
    return Plan(problem.graph.name, name, problem.objective, stages, evaluate(problem, stages).predicted)
