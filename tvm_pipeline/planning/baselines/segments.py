"""Consecutive segments of the graph's own order, one for each device: what the baselines share.

A segment is the operators `start` to `end - 1`. What it takes is asked of a function, so that it may be anything: the
judge's model, or a compilation and a measurement on an Edge TPU whose parameter cache makes costs not additive.
`research/fewest_bottleneck.py` is exact where a longer segment never takes less.

Next: `even.py`, `greedy.py` and `coral.py`, which cut by rules; `exact.py`, which is exact on the costs of `costs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import known_cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.planning.search.cost_tables import StageCosts, stage_seconds
from tvm_pipeline.planning.search.cuts import Floats, prefixes
from tvm_pipeline.planning.stage_orders import fitting_orders

# (device, start, end) -> seconds of that segment there; infinite where the device cannot run or hold it.
Seconds = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Partition:
    """A chain cut into segments, and what the search knows of it.

    Attributes:
        cuts: position of the first operator of every segment but the first.
        seconds: of each segment; 0.0 for an empty one.
        evaluations: how many different segments the search asked about: compilations and measurements, on hardware.
        found: False where the search found nothing, and this is the partition it began with.
        bound_s: the bottleneck of no partition is shorter; None where the search proves nothing.
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
    """What `evaluate` will say of the segments of a pipeline over `devices`, in this order and busy all at once.

    Compute and transfers; what leads to the first device is free, to another the link from the one before it.
    Infinite where the device cannot run or hold the segment. `evaluate` stays the judge: it knows buses, too.
    Where transfers weigh much, a longer segment can take less, as it may end where less is handed on; the exact
    search for these figures is `exact.chain`.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    costs, held = chain_costs(problem, devices)

    def seconds(device: int, start: int, end: int) -> float:
        room = devices[device].memory_bytes
        if room is not None and held[end] - held[start] > room:
            return math.inf
        source = device - 1 if device else len(devices)
        taken = float(costs.stage(held, device, source, start, end))
        return taken if taken < costs.impossible else math.inf

    return seconds


def chain_costs(problem: Problem, devices: Sequence[Device]) -> tuple[StageCosts, Floats]:
    """The costs over the prefixes of the graph's own order, all devices busy, and the parameter bytes of each prefix.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    for device in devices:
        known_cost_of(problem, device)
    cuts = prefixes(problem.graph)
    return stage_seconds(problem, cuts, devices, len(devices)), cuts.param_bytes.astype(np.float64)


def best_pipeline(problem: Problem, name: str, cuts_for: Callable[[tuple[Device, ...]], Sequence[int]]) -> Plan:
    """The plan of a baseline `name` that knows where to cut for devices b = 0, 1, ..., each with one segment.

    Devices come in the platform's order, out of the first largest set of them that can work at the same time; a
    baseline tries no other order. With `problem.stages` that many of them are used, else as many as is best by the
    objective.

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
    places = zip(devices, pairwise((0, *cuts, len(operators))), strict=True)
    stages = tuple(Stage((device.name,), operators[start:end]) for device, (start, end) in places)
    stages = fitting_orders(problem, stages)
    return Plan(problem.graph.name, name, problem.objective, stages, evaluate(problem, stages).predicted)
