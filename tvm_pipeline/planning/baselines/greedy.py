"""The baseline `greedy`: first fit, which fills one stage after the other up to an equal share of the time."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, known_cost_of
from tvm_pipeline.planning.baselines.segments import best_pipeline, segment_seconds


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
