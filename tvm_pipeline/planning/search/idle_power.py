"""The least energy where the idle power of the machine counts for the seconds between frames.

The energy of a pipeline is the sum of its stages' active joules, and the idle power times the seconds of its slowest
stage. The search minimises a sum under a cap on the seconds of a stage, so `least_energy` calls it with several caps:
each call gives the least sum of all pipelines up to its cap, and so a bound of their energy.

Next: `pipelines.py`, which has the search under a cap; `dynamic_programming.py`, which calls this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from tvm_pipeline.planning.search.pipelines import FoundPipeline, Search

# Relative; periods closer than this are the same period, summed in another order.
SAME = 1e-11
# Relative; a search ends where its bound is this close to its value.
PROVEN = 1e-10


def least_energy(
    under: Callable[[float, float, float], tuple[Search, float]],
    idle_w: float,
    periods_s: tuple[float, float],
    at_most: float,
) -> Search:
    """Return the pipeline of least energy below `at_most`, with a lower bound of the energy of all below it.

    This is branch and bound over the seconds between frames. A range of them has a bound: its least seconds at idle
    power, and the least sum that is known for it. A search under its upper end finds a pipeline: those of the range
    that are slower cost no less than this one. What is left of the range is halved.

    Args:
        under: (cap, least, below) -> the pipeline of least sum whose stages take at most `cap` seconds, and the seconds
            of its slowest stage; no sum is less than `least`, and sums of `below` and more are of no use.
        idle_w: the idle power, above 0.
        periods_s: no pipeline has fewer seconds between frames than the first, none may have more than the second.
        at_most: only pipelines of less energy are of use.
    """
    best: FoundPipeline | None = None
    value = at_most
    shortest_s, longest_s = periods_s
    ranges = [(idle_w * shortest_s, shortest_s, longest_s, 0.0)]
    while ranges:
        bound, low_s, high_s, least_j = heappop(ranges)
        if bound >= value * (1 - PROVEN):
            break
        search, slowest_s = under(high_s, least_j, value - idle_w * low_s)
        found, period_s = search.found, max(slowest_s, shortest_s)
        if found is not None and found.value + idle_w * period_s < value:
            value = found.value + idle_w * period_s
            best = replace(found, value=value)
        if search.bound < (math.inf if found is None else found.value):  # the deadline passed
            return Search(best, min(bound, value))
        if found is None:
            continue
        below_s = min(period_s, high_s) * (1 - SAME)
        middle_s = (low_s + below_s) / 2
        if low_s < middle_s < below_s:
            heappush(ranges, (found.value + idle_w * middle_s, middle_s, below_s, found.value))
            below_s = middle_s
        if low_s < below_s:
            heappush(ranges, (found.value + idle_w * low_s, low_s, below_s, found.value))
    return Search(best, value)
