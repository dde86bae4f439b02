"""The simplest plans: the whole model on one device, or on several devices that share the frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from tvm_pipeline.core.plan import Plan, Stage, cost_key, objective_value
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.planning.baselines.frame_parallel import frame_parallel, takes_all
from tvm_pipeline.planning.search.space import MOST_REPLICATED
from tvm_pipeline.planning.stage_orders import fitting_orders


def singles(problem: Problem) -> list[Plan]:
    """Return one plan for each device that can run the whole model.

    Raises:
        InfeasibleError: no device can; the message gives each device's reason.
    """
    return _possible(problem, "single", [(device.name,) for device in problem.platform.devices])


def single(problem: Problem) -> Plan:
    """Return the plan of the whole model on the one device that is best for the objective."""
    return min(singles(problem), key=cost_key)


def replicas(problem: Problem) -> Plan:
    """Return the plan of the whole model on several devices, each of which takes the next frame when it is free.

    Every set of two or more devices that share no cores is tried, since fewer devices can be better than all: because
    of busy factors, or for latency. Of more than MOST_REPLICATED devices, only the fastest of each number are tried.
    Where the graph has ordered operators, these and what stands around them are in stages of one device each, see
    `frame_parallel`.

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
        return frame_parallel(problem)
    able = [device for device in problem.platform.devices if takes_all(problem, device, problem.graph.operators)]
    widest = list(disjoint_sets(able))
    is_every = all(len(group) <= MOST_REPLICATED for group in widest)
    subsets = (subset for group in widest for subset in _subsets(problem, group))
    sets = list(dict.fromkeys(tuple(device.name for device in subset) for subset in subsets))
    if not sets:
        raise InfeasibleError(
            f"platform {problem.platform.name} has no two devices that share no cores and can run and hold the "
            "whole model"
        )
    best = min(_possible(problem, "replicas", sets), key=cost_key)
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


def _possible(problem: Problem, name: str, device_sets: list[tuple[str, ...]]) -> list[Plan]:
    plans, reasons = [], []
    operators = tuple(operator.name for operator in problem.graph.operators)
    for devices in device_sets:
        try:
            stages = fitting_orders(problem, (Stage(devices, operators),))
            predicted = evaluate(problem, stages).predicted
        except PlanError as error:
            reasons.append(str(error))
            continue
        bound = objective_value(predicted, problem.objective)
        plans.append(Plan(problem.graph.name, name, problem.objective, stages, predicted, "optimal", bound))
    if not plans:
        raise InfeasibleError("; ".join(dict.fromkeys(reasons)))
    return plans
