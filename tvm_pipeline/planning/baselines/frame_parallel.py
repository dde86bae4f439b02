"""The model replicated on every device where some operators cannot be: a stage in front, replicas, a stage behind.

An ordered operator, such as the encoder of a video, takes all frames in order, so its stage has no replicas. What an
application does around its model stands in two stages of one device each, and their devices replicate the model as
well:

    read | prepare + model, on all devices | decode, draw, write

Next: `whole_model.py`, whose `replicas` is this plan where the graph has ordered operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.planning.stage_orders import fitting_orders

Operators = tuple[Operator, ...]


def frame_parallel(problem: Problem) -> Plan:
    """Return the plan whose replicated stage is as large as the ordered operators of the graph allow.

    The devices of the stages in front and behind are the best pair by `evaluate`. The replicas are all devices of a set
    that can work together, or all but these two. Where some devices of the set cannot run all that may be replicated,
    two plans are compared: the others replicate it, or all devices replicate what all of them can run.

    Raises:
        InfeasibleError: ordered operators leave nothing to replicate, or no two devices can run it.
    """
    graph = problem.graph
    ordered = {index for index, operator in enumerate(graph.operators) if operator.ordered}
    if len(ordered) == len(graph):
        raise InfeasibleError(
            f"nothing of {graph.name} can be replicated, because all its operators are ordered; use scheduler best"
        )
    plans, reasons = [], []
    for stages in dict.fromkeys(_candidates(problem, ordered)):
        try:
            fitting = fitting_orders(problem, stages)
            predicted = evaluate(problem, fitting).predicted
        except PlanError as error:
            reasons.append(str(error))
            continue
        plans.append(Plan(graph.name, "replicas", problem.objective, fitting, predicted, "optimal"))
    if not plans:
        raise InfeasibleError(
            "; ".join(dict.fromkeys(reasons))
            or f"platform {problem.platform.name} has no two devices that share no cores and can run and hold what is "
            f"to be replicated of {graph.name}, or none that can run what stands around it"
        )
    best = min(plans, key=cost_key)
    return replace(best, bound=best.value)


def _candidates(problem: Problem, ordered: set[int]) -> Iterator[tuple[Stage, ...]]:
    """Yield the stages of each plan, for each set of devices that can work together."""
    for group in disjoint_sets(problem.platform.devices):
        costs = [cost_of(problem, device) for device in group]
        unable = {
            index
            for index, operator in enumerate(problem.graph.operators)
            if not all(device.can_run(operator) for device in costs)
        }
        for fixed in (ordered, ordered | unable):
            before, middle, after = _divided(problem, sorted(fixed))
            if not middle:
                continue
            able = [device for device in group if takes_all(problem, device, middle)]
            ends = [[d for d in group if takes_all(problem, d, part)] if part else [None] for part in (before, after)]
            for outer in product(*ends):
                front, back = ((device.name,) if device is not None else () for device in outer)
                for members in (able, [device for device in able if device not in outer]):
                    placed = (front, before), (tuple(device.name for device in members), middle), (back, after)
                    if len(members) > 1:
                        yield tuple(Stage(names, tuple(o.name for o in part)) for names, part in placed if part)


def _divided(problem: Problem, fixed: Sequence[int]) -> tuple[Operators, Operators, Operators]:
    """Return the operators in front of the replicated stage, those in it, and those behind it.

    The first fixed operators, in the graph's order, stand in front with all that they need, the others behind with all
    that needs them. Of these divisions the one is returned whose replicated stage takes longest on the fastest devices.
    Every operator that is not fixed is in the replicated stage of one of them.

    Args:
        fixed: the indices of the operators that are not replicated, in ascending order.
    """
    graph, costs = problem.graph, [cost_of(problem, device) for device in problem.platform.devices]
    least_s = [min(device.alone_s(operator) for device in costs) for operator in graph.operators]
    fronts, backs = _closures(fixed, graph.edges.before), _closures(fixed[::-1], graph.edges.after)
    everything = set(range(len(graph)))
    divisions = [(front, everything - front - back, back) for front, back in zip(fronts, reversed(backs), strict=True)]
    front, middle, back = max(divisions, key=lambda parts: (sum(least_s[i] for i in parts[1]), len(parts[1])))
    before, between, after = (tuple(graph.operators[i] for i in sorted(part)) for part in (front, middle, back))
    return before, between, after


def _closures(seeds: Sequence[int], neighbours: Sequence[Sequence[int]]) -> list[set[int]]:
    """Return for the first 0, 1, 2, ... seeds the set of these and of all that can be reached from them."""
    found: list[set[int]] = [set()]
    for seed in seeds:
        reached, waiting = set(found[-1]), [seed]
        while waiting:
            index = waiting.pop()
            if index not in reached:
                reached.add(index)
                waiting += neighbours[index]
        found.append(reached)
    return found


def takes_all(problem: Problem, device: Device, operators: Sequence[Operator]) -> bool:
    """Return whether a device can run these operators and hold their parameters."""
    param_bytes = sum(operator.param_bytes for operator in operators)
    fits = device.memory_bytes is None or param_bytes <= device.memory_bytes
    return fits and all(map(cost_of(problem, device).can_run, operators))
