"""Certificates: a problem in full, its plan and the bound, for a checker that trusts no line of this package.

`tools/check_certificate.py` defines what the fields mean, and proves the bound again from them. Plans that it cannot
list have a bound of all plans in place of it, which `tools/check_bound.py` proves.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.cost.device_costs import busy_factor, cost_of, lock_s
from tvm_pipeline.errors import OptionError
from tvm_pipeline.planning.search.cost_tables import buses
from tvm_pipeline.planning.search.work_bound import least_seconds, spread

# Values and bounds are sums of doubles, and hold up to this part of them.
TOLERANCE = 1e-9
CUTS = {"ideals": "all", "cp-sat": "all", "chain": "order"}


def certificate_of(problem: Problem, plan: Plan, scheduler: str) -> str:
    """Return the certificate of a plan by the scheduler of this name: of its bound, or of a bound of all plans.

    Raises:
        OptionError: there are no certificates of such plans.
    """
    return certificate(problem, plan) if scheduler in CUTS else bound_certificate(problem)


def certificate(problem: Problem, plan: Plan) -> str:
    """Return the certificate of the plan's value and bound, as JSON.

    Raises:
        OptionError: there are no certificates of such plans.
    """
    _check_listed(problem, plan.scheduler)
    graph, platform = problem.graph, problem.platform
    in_use = [device for device in platform.devices if not problem.is_lexicographic or device.name in plan.devices]
    links = [(a.name, b.name, problem.link(a.name, b.name).transfer) for a in in_use for b in in_use if a != b]
    stated = {
        "certificate": 1,
        "graph": graph.name,
        "objective": problem.objective,
        "cuts": CUTS[plan.scheduler],
        "together": problem.children_together,
        "stages": len(plan.stages) if problem.is_lexicographic else problem.stages,
        "tolerance": TOLERANCE,
        "inputs": {tensor.name: tensor.bytes for tensor in graph.inputs},
        "outputs": graph.outputs,
        "operators": [
            {
                "name": operator.name,
                "reads": operator.inputs,
                "writes": {tensor.name: tensor.bytes for tensor in operator.outputs},
                "param_bytes": operator.param_bytes,
                "macs": operator.macs,
            }
            for operator in graph.operators
        ],
        "devices": [_of_bytes(d) if problem.is_lexicographic else _of_seconds(problem, d) for d in in_use],
        "links": [
            {"source": source, "destination": destination, "cost": [hop.latency_s, hop.s_per_byte]}
            for source, destination, hop in links
            if hop.latency_s or hop.s_per_byte
        ],
        "plan": [{"device": stage.devices[0], "operators": stage.operators} for stage in plan.stages],
        "value": plan.value,
        "bound": plan.bound,
    }
    return json.dumps(stated, indent=1) + "\n"


def bound_certificate(problem: Problem) -> str:
    """Return the certificate of a throughput that no plan exceeds, whatever its stages and replicas, as JSON."""
    _check_bounded(problem)
    graph, devices = problem.graph, problem.platform.devices
    ordered, seconds = [operator.ordered for operator in graph.operators], least_seconds(problem, devices)
    sets, periods = [], []
    for chosen in disjoint_sets(devices):
        rows = seconds[[devices.index(device) for device in chosen]]
        runs = bool(np.isfinite(rows.min(axis=0)).all())
        period_s, weights = spread(rows) if runs else (math.inf, np.ones(len(chosen)))
        periods.append(max(period_s, float(rows.min(axis=0)[ordered].max(initial=0.0))))
        sets.append({"devices": [device.name for device in chosen], "weights": weights.tolist()})
    if not 0 < min(periods) < math.inf:
        raise OptionError("no certificate: the operators take no time, or no devices run all of them")
    stated = {
        "certificate": 1,
        "graph": graph.name,
        "operators": [operator.name for operator in graph.operators],
        "ordered": [operator.name for operator in graph.operators if operator.ordered],
        "devices": [
            {"name": device.name, "cores": device.cores, "seconds": [s if math.isfinite(s) else None for s in row]}
            for device, row in zip(devices, seconds.tolist(), strict=True)
        ],
        "sets": sets,
        "bound_fps": (1 + TOLERANCE) / min(periods),
    }
    return json.dumps(stated, indent=1) + "\n"


def check_certifiable(problem: Problem, scheduler: str) -> None:
    """Raise OptionError where there are no certificates of plans by the scheduler of this name."""
    if scheduler in CUTS or problem.objective != "throughput":
        _check_listed(problem, scheduler)
    else:
        _check_bounded(problem)


def _check_bounded(problem: Problem) -> None:
    obstacles = {
        "a call computes several frames": problem.graph.batch > 1,
        "stages were measured as a whole": problem.profile.segments,
        "nothing is known of a device": not all(cost_of(problem, d).is_known for d in problem.platform.devices),
    }
    if found := [obstacle for obstacle, holds in obstacles.items() if holds]:
        raise OptionError(f"no certificate: {found[0]}; there are bounds of throughput by the times of operators")


def _check_listed(problem: Problem, scheduler: str) -> None:
    devices, objective = problem.platform.devices, problem.objective
    timed = () if problem.is_lexicographic else devices
    obstacles = {
        f"the scheduler is {scheduler}": scheduler not in CUTS,
        f"the objective is {objective}": objective == "energy" or counts_edges(objective),
        "a call computes several frames": problem.graph.batch > 1,
        "there is a limit of throughput or latency": problem.min_throughput_fps or problem.max_latency_s,
        "activations may not fit into a device": problem.counts_activations,
        "stages were measured as a whole": problem.profile.segments,
        "devices share a bus": objective == "throughput" and buses(problem, devices),
        "operators hold the lock of the interpreter": lock_s(problem),
        "a device states how many stages it serves": any((device.most_stages or 1) > 1 for device in timed),
        "nothing is known of a device": not all(cost_of(problem, device).is_known for device in timed),
    }
    for obstacle, holds in obstacles.items():
        if holds:
            raise OptionError(
                f"no certificate: {obstacle}; there are certificates of plans by `scheduler` ideals, cp-sat and chain, "
                "for objectives throughput, latency and bytes (communication by tensors), without limits and buses, "
                "and bounds of throughput for all others"
            )


def _of_bytes(device: Device) -> dict[str, Any]:
    return {"name": device.name, "cores": device.cores, "cache_bytes": device.cache_bytes}


def _of_seconds(problem: Problem, device: Device) -> dict[str, Any]:
    costs, operators = cost_of(problem, device), problem.graph.operators
    in_use = range(1, len(problem.platform.devices) + 1)
    counts_others = problem.objective == "throughput"
    return {
        "name": device.name,
        "cores": device.cores,
        "once": counts_others or costs.serves_once,
        "seconds": [None if math.isnan(s) else s for s in costs.every_added_s(operators).tolist()],
        "call_s": costs.call_s,
        "s_per_mac": float(costs.every_work_s(np.ones(1))[0]),
        "s_per_spilled_byte": costs.spill_s_per_byte,
        "cached_bytes": costs.cached_bytes if math.isfinite(costs.cached_bytes) else None,
        "receive": [costs.receive.latency_s, costs.receive.s_per_byte],
        "send": [costs.send.latency_s, costs.send.s_per_byte],
        "busy": [busy_factor(problem, device, count) if counts_others else 1.0 for count in in_use],
    }
