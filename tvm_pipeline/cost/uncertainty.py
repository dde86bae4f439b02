"""How far a prediction may be off, from the confidence intervals of the profile, or the errors of calibrated models.

What disturbs a measurement, such as the temperature or another program, disturbs all operators of a device alike. So
their errors are taken to add up, which is the cautious reading: of independent errors most would cancel out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from tvm_pipeline.core.graph import Operator
from tvm_pipeline.cost.device_costs import DeviceCosts


def uncertainty(
    work: Sequence[tuple[DeviceCosts, Sequence[Operator], float]], bottleneck: Mapping[str, float]
) -> float | None:
    """Return the relative half-width of the 95 % confidence interval of a plan's throughput and latency.

    That of some operators is the mean of their uncertainties, weighted with their seconds. The throughput is as
    uncertain as the devices of the slowest stage with all that they do, the latency as all operators of the plan. The
    larger of the two is returned. Transfers are left out, as if they were as uncertain as the operators.

    Args:
        work: for each stage on each device the costs, the operators, and the share of the frames that it takes.
        bottleneck: the devices of the slowest stage that take frames, each with its weight, the rate at which it takes
            them while it does nothing else: by so much a second that it saves shortens the time between frames.

    Returns:
        None where neither the profile nor a calibrated model says it for a device of the plan.
    """
    taken_s: dict[str, float] = defaultdict(float)
    uncertain_s: dict[str, float] = defaultdict(float)
    for costs, operators, share in work:
        for operator in operators:
            half_width_s = costs.uncertain_s(operator)
            if half_width_s is None:
                return None
            taken_s[costs.device.name] += (costs.added_s(operator) + costs.work_s(operator)) * share
            uncertain_s[costs.device.name] += half_width_s * share
    slowest = {
        name: rate * _ratio(uncertain_s[name], taken_s[name]) for name, rate in bottleneck.items() if taken_s[name]
    }
    of_bottleneck = _ratio(sum(slowest.values()), sum(bottleneck[name] for name in slowest))
    return max(of_bottleneck, _ratio(sum(uncertain_s.values()), sum(taken_s.values())))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
