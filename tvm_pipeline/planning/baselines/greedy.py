"""First-fit greedy: the stages are filled in turn to an equal share of the time. A baseline to compare with."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, known_cost_of
from tvm_pipeline.planning.baselines.segments import best_pipeline, segment_seconds


def greedy(problem: Problem) -> Plan:
    """Fills stage b until one more operator would pass its target; the last stage takes the rest.

    The target of a stage is what its device would take for the whole model, divided by the number of stages. Devices
    come in the platform's order. Later stages keep at least one operator each.

    Raises:
        InfeasibleError: there are too few devices, or they cannot run or hold what came to them.
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
