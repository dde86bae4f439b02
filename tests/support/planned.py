"""The plans that the planner makes of a graph, by made-up seconds; tests and benchmarks make them real."""

from __future__ import annotations

from random import Random

from tvm_pipeline import planning
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile


def planned(graph: OperatorGraph, devices: int, seed: int = 0, time_limit_s: float = 1.0) -> list[Plan]:
    """Return all that the planner considers for so many devices, objectives throughput and latency.

    An operator takes longer the more it computes, and up to four times longer on one device than on another.
    """
    draw = Random(seed)
    platform = Platform("box", tuple(Device(f"cpu{index}", cores=(index,)) for index in range(devices)))
    measured = {
        device.name: DeviceProfile.in_order(
            graph, [(1e4 + o.macs) * 1e-9 * 4 ** draw.random() for o in graph.operators]
        )
        for device in platform.devices
    }
    profile = Profile(graph.name, graph.fingerprint, measured)
    problems = [
        Problem(graph, platform, profile, each, time_limit_s=time_limit_s) for each in ("throughput", "latency")
    ]
    decisions = map(planning.plan, problems)
    found = {plan.stages: plan for decision in decisions for plan in (decision.plan, *decision.candidates)}
    return list(found.values())
