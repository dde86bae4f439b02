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
from tvm_pipeline.planning.search.work_bound import bound_of_all
from tvm_pipeline.planning.stage_orders import fitting_orders

Operators = tuple[Operator, ...]


def frame_parallel(problem: Problem) -> Plan:
    """Return the plan whose replicated stage is as large as the ordered operators of the graph allow.

    The devices of the stages in front and behind are the best pair by `evaluate`. The replicas are all devices of a set
    that can work together, or all but these two.

    Raises:
        InfeasibleError: ordered operators leave nothing to replicate, or no two devices can run it.
    """
    before, middle, after = parts(problem)
    plans, reasons = [], []
    for front, members, back in dict.fromkeys(_choices(problem, before, middle, after)):
        chosen = ((front, before), (members, middle), (back, after))
        stages = tuple(Stage(devices, tuple(o.name for o in part)) for devices, part in chosen if part)
        try:
            stages = fitting_orders(problem, stages)
            predicted = evaluate(problem, stages).predicted
        except PlanError as error:
            reasons.append(str(error))
            continue
        plans.append(Plan(problem.graph.name, "replicas", problem.objective, stages, predicted))
    if not plans:
        raise InfeasibleError(
            "; ".join(dict.fromkeys(reasons))
            or f"platform {problem.platform.name} has no two devices that share no cores and can run and hold the "
            f"operators {middle[0].name} to {middle[-1].name}, or none for the stages in front and behind"
        )
    return _with_bound(problem, min(plans, key=cost_key))


def parts(problem: Problem) -> tuple[Operators, Operators, Operators]:
    """Return the operators in front of the replicated stage, those in it, and those behind it.

    The first ordered operators, in the graph's order, stand in front with all that they need, the others behind with
    all that needs them. Of these divisions the one is returned whose replicated stage takes longest on the fastest
    devices.

    Raises:
        InfeasibleError: in all of them nothing is left to replicate.
    """
    graph, devices = problem.graph, problem.platform.devices
    ordered = [index for index, operator in enumerate(graph.operators) if operator.ordered]
    least_s = [min(cost_of(problem, device).alone_s(operator) for device in devices) for operator in graph.operators]
    everything = set(range(len(graph)))
    best: tuple[float, int] | None = None
    fronts, backs = _closures(ordered, graph.edges.before), _closures(ordered[::-1], graph.edges.after)
    for front, back in zip(fronts, reversed(backs), strict=True):
        middle = everything - front - back
        size = sum(least_s[index] for index in middle), len(middle)
        if middle and (best is None or size > best):
            best, chosen = size, (front, middle, back)
    if best is None:
        raise InfeasibleError(
            f"nothing of {graph.name} can be replicated: all its operators are ordered, or stand between ordered "
            f"operators such as {graph.operators[ordered[0]].name}; use scheduler best, or hybrid"
        )
    before, between, after = (tuple(graph.operators[index] for index in sorted(part)) for part in chosen)
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


def _choices(
    problem: Problem, before: Operators, middle: Operators, after: Operators
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]:
    """Yield the devices in front, the replicas, and the devices behind; a stage without operators has none."""
    for group in disjoint_sets(problem.platform.devices):
        able = [device for device in group if takes_all(problem, device, middle)]
        ends = [
            [device for device in group if takes_all(problem, device, part)] if part else [None]
            for part in (before, after)
        ]
        for front, back in product(*ends):
            outer = [device for device in (front, back) if device is not None]
            for members in (able, [device for device in able if device not in outer]):
                if len(members) > 1:
                    yield _names([front]), _names(members), _names([back])


def _names(devices: Sequence[Device | None]) -> tuple[str, ...]:
    return tuple(device.name for device in devices if device is not None)


def takes_all(problem: Problem, device: Device, operators: Sequence[Operator]) -> bool:
    """Return whether a device can run these operators and hold their parameters."""
    param_bytes = sum(operator.param_bytes for operator in operators)
    fits = device.memory_bytes is None or param_bytes <= device.memory_bytes
    return fits and all(map(cost_of(problem, device).can_run, operators))


def _with_bound(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with a bound of all plans in which replicas serve other stages, too.

    A single frame meets one replica of each stage, so that no plan of replicas is better for it than a pipeline of
    single devices, unless a throughput or a number of stages is required. Then the bound is that of this scheduler.
    """
    follow = problem.objective == "throughput" or problem.min_throughput_fps is not None
    shares = any(not cost_of(problem, device).serves_once for device in problem.platform.devices)
    if problem.is_lexicographic or not shares or not (follow or problem.stages) or plan.value is None:
        return replace(plan, status="optimal", bound=plan.value)
    bound, (value,) = bound_of_all(problem), plan.value
    best = value * (1 + 1e-9) >= bound if problem.objective == "throughput" else value <= bound * (1 + 1e-9)
    return replace(plan, status="optimal" if best else "feasible", bound=plan.value if best else (bound,))
