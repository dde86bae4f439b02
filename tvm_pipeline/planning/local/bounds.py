"""The bound of all plans: a value of the objective that no plan of a problem is better than.

It needs no search, so that every plan has a stated gap: for graphs of any size and for schedulers that prove nothing.
Next: `least_load.py`, `chain_bound.py` and `least_crossing.py`, from the simplest bound to the best one.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of, idle_w, lock_s
from tvm_pipeline.cost.whole_stages import least_ratio
from tvm_pipeline.planning.local.chain_bound import least_period_of_chains
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.local.least_crossing import least_crossing
from tvm_pipeline.planning.local.least_load import LeastCosts, busy_scale, least_of
from tvm_pipeline.planning.search.cost_tables import buses, least_bus_seconds
from tvm_pipeline.planning.search.work_bound import least_period_of_all


def lower_bound(problem: Problem, deadline: float = math.inf, *, again: bool = False) -> tuple[float, ...]:
    """Return a value of the objective that no plan is better than, one figure for each part of an objective of bytes.

    The plans are those of any stages, with or without replicas; limits of throughput, latency and memory are left out.

    Args:
        deadline: of `time.monotonic`; the bound is weaker where it ends the work. The simplest bound is always there.
        again: whether a device may serve several stages of a plan for throughput.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> problem = example_problem()  # a plan of it makes 50 frames a second
        >>> lower_bound(problem), lower_bound(replace(problem, objective="latency"))
        ((50.0,), (0.04,))
    """
    if problem.is_lexicographic:
        return tuple(_least_bytes(problem, part, deadline) for part in problem.objective.split(","))
    alone = replace(problem, profile=replace(problem.profile, segments=()))
    ratio = least_ratio(problem)
    if problem.objective == "throughput":
        return (1 / max(_least_period(alone, again, deadline) * ratio, lock_s(problem), 1e-12),)
    devices = problem.platform.devices
    if problem.objective == "latency":
        return (_least_sum(problem, least_of(alone, [1.0] * len(devices)), deadline) * ratio,)
    watts = [cost_of(alone, device).active_w or 0.0 for device in devices]
    active_j = _least_sum(problem, least_of(alone, watts, joules=True), deadline) * ratio
    if not idle_w(problem):
        return (active_j,)
    period_s = max(_least_period(alone, again, deadline) * ratio, lock_s(problem))
    return (active_j + idle_w(problem) * period_s,)


def better_bound(problem: Problem, one: tuple[float, ...] | None, other: tuple[float, ...]) -> tuple[float, ...]:
    """Return the bound that says more; both hold."""
    if one is None:
        return other
    return min(one, other) if problem.objective == "throughput" else max(one, other)


def _least_period(problem: Problem, again: bool, deadline: float) -> float:
    """Return a lower bound of the seconds between frames."""
    platform, stages = problem.platform, problem.stages
    least = least_of(problem, busy_scale(problem, 1 if again else stages or 1), shared=again, occupied=True)
    devices = least.devices
    spread = again or least.replicates
    mean_s = least.total(stages) / (devices if spread else min(stages or devices, devices))
    # Where stages are replicated, each other stage leaves a device less for the largest operator.
    largest_s = least.largest() / (devices if again else devices - (stages or 1) + 1 if spread else 1)
    carried_s = [
        max((least_bus_seconds(problem, group, bus, len(group)) for bus in buses(problem, group)), default=0.0)
        for group in disjoint_sets(platform.devices)
    ]
    period_s = max(mean_s, largest_s, least_period_of_all(problem), min(carried_s))
    if again or not math.isfinite(period_s):
        return period_s
    return least_period_of_chains(problem, least, period_s, deadline)


def _least_sum(problem: Problem, least: LeastCosts, deadline: float) -> float:
    """Return a lower bound of the sum over all stages."""
    hop = least.receive[1] + least.link[1] + least.send[1]
    if (problem.stages or 1) == 1 or not hop:
        return least.total(problem.stages)
    return least.total(problem.stages, _least_boundary(Network(problem.graph), deadline))


def _least_boundary(network: Network, deadline: float) -> float:
    """Return the least bytes that cross a boundary with operators on both sides."""
    operators = np.ones(len(network))
    crossing = least_crossing(network, operators, max(network.bytes, 1.0), deadline)
    between = (crossing.work[1:] >= 1) & (crossing.work[:-1] <= len(network) - 1)
    return max(0.0, float(crossing.least[between].min()))


def _least_bytes(problem: Problem, part: str, deadline: float) -> float:
    """Return a lower bound of one figure of an objective of bytes."""
    graph, devices = problem.graph, problem.platform.devices
    stages = problem.stages or max(map(len, disjoint_sets(devices)))
    sizes = [operator.param_bytes for operator in graph.operators]
    if part == "memory":
        return max(*sizes, -(-sum(sizes) // stages)) if len(sizes) > 1 else sizes[0]
    if part == "dram":
        caches = sorted((device.cache_bytes or 0 for device in devices), reverse=True)
        return max(0, sum(sizes) - sum(caches[:stages]))
    # What crosses the last boundary is read behind it: it counts as communication, by tensors and by edges.
    if (problem.stages or 1) == 1:
        return 0
    return math.floor(_least_boundary(Network(graph, handed_on=True), deadline))
