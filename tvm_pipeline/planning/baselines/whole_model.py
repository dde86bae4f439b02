"""The simplest plans: the whole model on one device, or on several devices that share the frames.

An ordered operator, such as the encoder of a video, takes all frames in order, so its stage has no replicas. What an
application does around its model stands in two stages of one device each, and their devices replicate the model as
well:

    read | prepare + model, on all devices | decode, draw, write
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, product

from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.plan import Plan, Stage, cost_key, objective_value
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.planning.search.space import MOST_REPLICATED
from tvm_pipeline.planning.stage_orders import fitting_orders

Operators = tuple[Operator, ...]


def singles(problem: Problem) -> list[Plan]:
    """Return one plan for each device that can run the whole model.

    Raises:
        InfeasibleError: no device can; the message gives each device's reason.
    """
    return _possible(problem, "single", _whole(problem, [(device.name,) for device in problem.platform.devices]))


def single(problem: Problem) -> Plan:
    """Return the plan of the whole model on the one device that is best for the objective."""
    return min(singles(problem), key=cost_key)


def replicas(problem: Problem) -> Plan:
    """Return the plan of the whole model on several devices, each of which takes the next frame when it is free.

    Every set of two or more devices that share no cores is tried, since fewer devices can be better than all: because
    of busy factors, or for latency. Of more than MOST_REPLICATED devices, only the fastest of each number are tried.
    Where the graph has ordered operators, these and what stands around them are in stages of one device each.

    Raises:
        InfeasibleError: the platform has no two such devices that can run and hold the whole model, or ordered
            operators leave nothing to replicate, or the plan has another number of stages than `problem.stages`.
    """
    plan = replicas_of_any_count(problem)
    if problem.stages not in (None, len(plan.stages)):
        raise InfeasibleError(
            f"`stages` {problem.stages}: replicas of {problem.graph.name} make {len(plan.stages)}; leave `stages` out, "
            "or use scheduler hybrid"
        )
    return plan


def replicas_of_any_count(problem: Problem) -> Plan:
    """Return the plan of `replicas`, whatever number of stages is required."""
    if any(operator.ordered for operator in problem.graph.operators):
        return _frame_parallel(problem)
    able = [device for device in problem.platform.devices if _takes_all(problem, device, problem.graph.operators)]
    widest = list(disjoint_sets(able))
    is_every = all(len(group) <= MOST_REPLICATED for group in widest)
    subsets = (subset for group in widest for subset in _subsets(problem, group))
    sets = list(dict.fromkeys(tuple(device.name for device in subset) for subset in subsets))
    if not sets:
        raise InfeasibleError(
            f"platform {problem.platform.name} has no two devices that share no cores and can run and hold the "
            "whole model"
        )
    best = min(_possible(problem, "replicas", _whole(problem, sets)), key=cost_key)
    return best if is_every else replace(best, status="feasible", bound=None)


def replicas_by_engine(problem: Problem) -> list[Plan]:
    """Return the plan of `replicas`, and that of each backend's devices alone where the platform has several backends.

    Raises what `replicas` raises where there is no plan at all.
    """
    found = [replicas_of_any_count(problem)]
    for alone in each_engine(problem):
        with suppress(InfeasibleError):
            found.append(replicas_of_any_count(alone))
    return list({plan.stages: plan for plan in found}.values())


def each_engine(problem: Problem) -> list[Problem]:
    """Return the problem with the devices of each backend alone; none where there is one backend."""
    platform, found = problem.platform, []
    backends = dict.fromkeys(device.backend for device in platform.devices)
    for backend in backends if len(backends) > 1 else ():
        devices = tuple(device for device in platform.devices if device.backend == backend)
        names = {device.name for device in devices}
        links = tuple(link for link in platform.links if {link.source, link.destination} <= names)
        found.append(replace(problem, platform=replace(platform, devices=devices, links=links)))
    return found


def _subsets(problem: Problem, group: tuple[Device, ...]) -> Iterator[tuple[Device, ...]]:
    """Yield every set of two or more devices; of more than MOST_REPLICATED devices, the fastest ones of each number."""
    if len(group) <= MOST_REPLICATED:
        for size in range(2, len(group) + 1):
            yield from combinations(group, size)
        return
    names = {plan.devices[0]: cost_key(plan) for plan in singles(problem)}
    fastest = sorted(group, key=lambda device: names.get(device.name, (math.inf,)))
    for size in range(2, len(group) + 1):
        chosen = {device.name for device in fastest[:size]}
        yield tuple(device for device in group if device.name in chosen)


def _whole(problem: Problem, device_sets: Sequence[tuple[str, ...]]) -> list[tuple[Stage, ...]]:
    operators = tuple(operator.name for operator in problem.graph.operators)
    return [(Stage(devices, operators),) for devices in device_sets]


def _possible(problem: Problem, name: str, candidates: Iterable[tuple[Stage, ...]], none: str = "") -> list[Plan]:
    """Return a plan for each of the candidates that is legal.

    Raises:
        InfeasibleError: there is none; the message gives each reason, or `none` where there are no candidates.
    """
    plans, reasons = [], []
    for candidate in dict.fromkeys(candidates):
        try:
            stages = fitting_orders(problem, candidate)
            predicted = evaluate(problem, stages).predicted
        except PlanError as error:
            reasons.append(str(error))
            continue
        bound = objective_value(predicted, problem.objective)
        plans.append(Plan(problem.graph.name, name, problem.objective, stages, predicted, "optimal", bound))
    if not plans:
        raise InfeasibleError("; ".join(dict.fromkeys(reasons)) or none)
    return plans


def _frame_parallel(problem: Problem) -> Plan:
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
    none = (
        f"platform {problem.platform.name} has no two devices that share no cores and can run and hold what is to be "
        f"replicated of {graph.name}, or none that can run what stands around it"
    )
    return min(_possible(problem, "replicas", _candidates(problem, ordered), none), key=cost_key)


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
            able = [device for device in group if _takes_all(problem, device, middle)]
            ends = [[d for d in group if _takes_all(problem, d, part)] if part else [None] for part in (before, after)]
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


def _takes_all(problem: Problem, device: Device, operators: Sequence[Operator]) -> bool:
    """Return whether a device can run these operators and hold their parameters."""
    param_bytes = sum(operator.param_bytes for operator in operators)
    fits = device.memory_bytes is None or param_bytes <= device.memory_bytes
    return fits and all(map(cost_of(problem, device).can_run, operators))
