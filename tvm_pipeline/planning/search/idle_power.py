"""The least energy where the idle power of the machine counts for the seconds between frames.

The energy of a pipeline is the sum of its stages' active joules, and the idle power times the seconds of its slowest
stage. The searches minimise a sum under a cap on the seconds of a stage, so `least_energy` calls them with several
caps: each call gives the least sum of all pipelines up to its cap, and so a bound of their energy.

Next: `pipelines.py`, which has the search under a cap; `dynamic_programming.py` and `with_activations.py` call this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

# Relative; periods closer than this are the same period, summed in another order.
SAME = 1e-11
# Relative; a search ends where its bound is this close to its value.
PROVEN = 1e-10

PlanT = TypeVar("PlanT")


@dataclass(frozen=True, slots=True)
class CappedResult(Generic[PlanT]):
    """The result of one search under a cap.

    Attributes:
        active_j: the least sum of active joules under the cap; infinite where no pipeline is less than the search was
            asked for.
        period_s: the seconds between frames of the pipeline that was found.
        plan: the pipeline; None where there is none.
        ended: whether the search ended before it could prove this.
    """

    active_j: float
    period_s: float
    plan: PlanT | None
    ended: bool = False


@dataclass(frozen=True, slots=True)
class EnergyResult(Generic[PlanT]):
    """The result of `least_energy`.

    Attributes:
        plan: the pipeline of least energy; None where none is less than was asked for.
        value: its energy, else what was asked for.
        bound: no pipeline has less energy; infinite where there is no pipeline at all.
        ended: whether a search ended before it could prove this.
    """

    plan: PlanT | None
    value: float
    bound: float
    ended: bool = False


def least_energy(
    under: Callable[[float, float, float], CappedResult[PlanT]],
    idle_w: float,
    periods_s: tuple[float, float],
    at_most: float,
) -> EnergyResult[PlanT]:
    """Return the pipeline of least energy below `at_most`, with a lower bound of the energy of all.

    This is branch and bound over the seconds between frames. A range of them has a bound: its least seconds at idle
    power, and the least sum that is known for it. A search under its upper end finds a pipeline: those of the range
    that are slower cost no less than this one. What is left of the range is halved.

    Args:
        under: (cap, least, below) -> the pipeline of least sum whose stages take at most `cap` seconds; no sum is less
            than `least`, and sums of `below` and more are of no use.
        idle_w: the idle power, above 0.
        periods_s: no pipeline has fewer seconds between frames than the first, none may have more than the second.
        at_most: only pipelines of less energy are of use.
    """
    best: PlanT | None = None
    value = at_most
    shortest_s, longest_s = periods_s
    ranges = [(idle_w * shortest_s, shortest_s, longest_s, 0.0)]
    while ranges:
        bound, low_s, high_s, least_j = heappop(ranges)
        if bound >= value * (1 - PROVEN):
            break
        found = under(high_s, least_j, value - idle_w * low_s)
        period_s = max(found.period_s, shortest_s)
        if found.plan is not None and found.active_j + idle_w * period_s < value:
            best, value = found.plan, found.active_j + idle_w * period_s
        if found.ended:
            return EnergyResult(best, value, min(bound, value), ended=True)
        if found.plan is None:
            continue
        below_s = min(period_s, high_s) * (1 - SAME)
        middle_s = (low_s + below_s) / 2
        if low_s < middle_s < below_s:
            heappush(ranges, (found.active_j + idle_w * middle_s, middle_s, below_s, found.active_j))
            below_s = middle_s
        if low_s < below_s:
            heappush(ranges, (found.active_j + idle_w * low_s, low_s, below_s, found.active_j))
    return EnergyResult(best, value, value)
