"""The judge of a deployment: the utilisation of every device and bus, and whether the models fit into memory together.

It searches nothing and knows nothing of the search. What a device holds at the same time is what the runtime allocates:
the parameters of all its stages, and for each stage the activations, since every stage of every model has an arena of
its own that is allocated when the stage is opened and kept from frame to frame (`_arena` of TVM's
`relay/executor.py`). So activations of different models are added up, though only one of them may run at a time.

Next: `fitted_together`, which looks for orders of operators that fit; `planning/deployment.py`, which calls both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from tvm_pipeline.core.graph import OperatorGraph, crossing_tensors
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem, most_bytes
from tvm_pipeline.cost.device_costs import INTERPRETER, DeviceCosts, busy_factor, cost_of, lock_s
from tvm_pipeline.cost.evaluate import check_stages_of, evaluate, param_bytes_of
from tvm_pipeline.errors import GraphError, PlanError
from tvm_pipeline.memory import stage_memory


@dataclass(frozen=True, slots=True)
class Demand:
    """A model that is to run at so many frames a second."""

    problem: Problem
    rate_fps: float


# The stages of each model, in the order of the demands.
Plans = Sequence[tuple[Stage, ...]]


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds on its device.

    Attributes:
        demand, stage: the indices of the demand and of the stage.
        param_bytes: of its operators.
        activation_bytes: the peak of its order; 0 where no stages of the device can need more than it has.
    """

    demand: int
    stage: int
    param_bytes: int
    activation_bytes: int


def judge_deployment(demands: Sequence[Demand], plans: Plans) -> dict[str, float]:
    """Return the utilisation of each device and each bus in use, computed from the profiles.

    Raises:
        PlanError: a plan does not fit its problem, or together they do not fit a device's memory or cores.
    """
    platform = demands[0].problem.platform
    for demand, stages in zip(demands, plans, strict=True):
        try:
            evaluate(demand.problem, stages)
        except PlanError as error:
            raise PlanError(f"{demand.problem.graph.name}: {error}") from error
    held = held_together(demands, plans)
    check_memory(demands, held)
    _check_cores(platform, list(held))
    for name, parts in held.items():
        check_stages_of(platform.device(name), len(parts))
    work: dict[str, float] = defaultdict(float)
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        problem, rate, busy = demand.problem, demand.rate_fps, busy_factors(demand.problem)
        if held_s := lock_s(problem):
            work[INTERPRETER] += rate * held_s
        boundaries = crossing_tensors(problem.graph, [stage.operators for stage in stages])
        crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
        for number, stage in enumerate(stages):
            name = stage.devices[0]
            costs = cost_of(problem, name)
            sizes = [sum(h.param_bytes for h in held[name] if h.demand == model) for model in range(len(demands))]
            seconds, spill_s = _stage_seconds(problem, costs, stage, sizes, index)
            if costs.whole_s(stage.operators) is None:
                seconds += costs.receive.seconds(crossing[number]) + costs.send.seconds(crossing[number + 1])
            if number:
                link = problem.link(stages[number - 1].devices[0], name)
                seconds += link.seconds(crossing[number])
                if link.bus:
                    work[link.bus] += rate * link.seconds(crossing[number])
            if costs.shared_bus:
                work[costs.shared_bus] += rate * spill_s
            work[name] += rate * busy[name] * seconds
    return dict(work)


def busy_factors(problem: Problem) -> dict[str, float]:
    """Return the busy factor of each device while all devices that can work at the same time do."""
    devices = problem.platform.devices
    return {device.name: busy_factor(problem, device.name, len(devices)) for device in devices}


def held_together(demands: Sequence[Demand], plans: Plans) -> dict[str, list[StageBytes]]:
    """Return what each stage holds on its device, by device, in the order of the models.

    Raises:
        PlanError: the operators of a stage cannot run in their order.
    """
    scarce = scarce_devices(demands)
    held: dict[str, list[StageBytes]] = {}
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        graph = demand.problem.graph
        for number, stage in enumerate(stages):
            name = stage.devices[0]
            peak = _order_peak(graph, number, stage) if name in scarce and demand.problem.activations else 0
            held.setdefault(name, []).append(StageBytes(index, number, param_bytes_of(graph, [stage]), peak))
    return held


def scarce_devices(demands: Sequence[Demand]) -> frozenset[str]:
    """Return the devices whose `memory_bytes` stages of all models can exceed; on others nothing need be counted."""
    most = sum(most_bytes(demand.problem.graph) for demand in demands)
    devices = demands[0].problem.platform.devices
    return frozenset(d.name for d in devices if d.memory_bytes is not None and most > d.memory_bytes)


def _order_peak(graph: OperatorGraph, number: int, stage: Stage) -> int:
    try:
        return stage_memory.order_peak(graph, stage.operators)
    except GraphError as error:
        raise PlanError(f"stage {number} of {graph.name} cannot run in its order: {error}") from error


def check_memory(demands: Sequence[Demand], held: dict[str, list[StageBytes]]) -> None:
    """Raise PlanError where the parameters and activations of all models are more than a device's memory."""
    for name, stages in held.items():
        capacity = demands[0].problem.platform.device(name).memory_bytes
        needed = sum(h.param_bytes + h.activation_bytes for h in stages)
        if capacity is None or needed <= capacity:
            continue
        parts = "; ".join(_described(demands, stages))
        raise PlanError(
            f"device {name} would hold {needed} bytes, {needed - capacity} more than its memory_bytes {capacity} "
            f"({parts}); put a stage on another device or make it smaller, give the device more memory_bytes, or use "
            "fewer models"
        )


def _described(demands: Sequence[Demand], stages: Sequence[StageBytes]) -> Iterator[str]:
    for h in stages:
        activations = f" and {h.activation_bytes} of activations" if h.activation_bytes else ""
        yield f"{demands[h.demand].problem.graph.name}: {h.param_bytes} of parameters{activations}"


def _check_cores(platform: Platform, used: Sequence[str]) -> None:
    """Raise PlanError where the models use devices that share cores."""
    for one, two in combinations(map(platform.device, used), 2):
        if one.overlaps(two):
            raise PlanError(f"devices {one.name} and {two.name} share cores, one deployment cannot use both")


def _stage_seconds(
    problem: Problem, costs: DeviceCosts, stage: Stage, param_bytes: list[int], index: int
) -> tuple[float, float]:
    """Return the seconds of computing a frame on an idle device, and the part of them that waits for parameters.

    The models share a cache in proportion to their parameters on the device.

    Args:
        param_bytes: the parameters of each model on the device.
        index: the index of the stage's model.
    """
    members = set(stage.operators)
    operators = [operator for operator in problem.graph.operators if operator.name in members]
    total = sum(param_bytes)
    spill_s = costs.spill_s(total) * param_bytes[index] / total if param_bytes[index] else 0.0
    whole_s = costs.whole_s(stage.operators)
    return costs.operators_s(operators, spill_s) if whole_s is None else whole_s, spill_s


def fitted_together(demands: Sequence[Demand], plans: Plans) -> list[tuple[Stage, ...]]:
    """Return the plans with orders of operators in which the models fit together.

    A stage keeps its order where all fit. On a device where they do not, stages get the order that needs the least
    memory, those with the most activations first, until all fit.

    Raises:
        PlanError: they do not fit in any order that was found.
    """
    fitted = [list(stages) for stages in plans]
    held = held_together(demands, plans)
    for name, stages in held.items():
        capacity = demands[0].problem.platform.device(name).memory_bytes
        for h in sorted(stages, key=lambda h: -h.activation_bytes):
            if capacity is None or sum(h.param_bytes + h.activation_bytes for h in held[name]) <= capacity:
                break
            graph, stage = demands[h.demand].problem.graph, fitted[h.demand][h.stage]
            best = stage_memory.least_peak(graph, stage.operators)
            if best.peak_bytes < h.activation_bytes:
                listed = stage_memory.stage_graph(graph, stage.operators).operators
                fitted[h.demand][h.stage] = replace(stage, operators=tuple(listed[position] for position in best.order))
                held[name] = [
                    replace(h, activation_bytes=best.peak_bytes) if other == h else other for other in held[name]
                ]
    check_memory(demands, held)
    return [tuple(stages) for stages in fitted]
