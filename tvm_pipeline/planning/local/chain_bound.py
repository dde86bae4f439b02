"""A bound of the seconds between frames of pipelines cut anywhere: how far stages of T seconds reach at most.

Let a stage lie between the cuts D and E, with work w(E) - w(D) and with X(D) bytes that come in and X(E) that go out.
Within T seconds, w(E) + out X(E) <= T - call + w(D) - in X(D). So the stages reach the further the more w(D) - in X(D)
the cut before leaves them. If it leaves them at most g, then the next cut leaves at most

    max of w(E) - in X(E)   over cuts E with w(E) + out X(E) <= T - call + g,

where `least_crossing.py` bounds X by w. That one cut holds the one before is left out, which makes it a bound. A stage
on n replicas has n T seconds. The least T with which the last stage reaches the end is found by bisection.

Of an Edge TPU's max(multiplications, fetches beyond its cache), any mean of the two is a lower bound; the best of some
weights is taken. On unequal devices every figure is that of the best device for it, and the bound is weak; then that of
`least_load.py` is stronger. Next: `bounds.py`.
"""

from __future__ import annotations

import math
import time

import numpy as np

from tvm_pipeline.core.problem import Problem
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.local.least_crossing import Crossing, least_crossing
from tvm_pipeline.planning.local.least_load import LeastCosts

# The weights of multiplications that are tried first, against fetches; then those near the best of them.
WEIGHTS = (1.0, 0.5, 0.0)
REFINED = 3
STEPS = 40  # of the bisection


def least_period_of_chains(problem: Problem, least: LeastCosts, at_least: float, deadline: float = math.inf) -> float:
    """Return a lower bound, at least `at_least`, of the seconds between frames of every pipeline.

    Each device serves one stage, or takes part in one replicated stage.

    Args:
        least: the least figures over the devices.
        deadline: of `time.monotonic`; the bound is weaker where it ends the work.
    """
    network = Network(problem.graph, leaders=least.leaders)
    best = at_least
    tried: dict[float, float] = {}

    def attempt(weight: float) -> None:
        nonlocal best
        if weight not in tried and time.monotonic() <= deadline:
            tried[weight] = _with_weight(problem, network, least, weight, at_least, deadline)
            best = max(best, tried[weight])

    for weight in WEIGHTS if least.spills else WEIGHTS[:1]:
        attempt(weight)
    step = 0.25
    for _ in range(REFINED if least.spills and tried else 0):
        top = max(tried, key=tried.__getitem__)
        for weight in (top - step, top + step):
            if 0 <= weight <= 1:
                attempt(weight)
        step /= 2
    return best


def _with_weight(
    problem: Problem, network: Network, least: LeastCosts, weight: float, at_least: float, deadline: float
) -> float:
    """Return the bound where multiplications count with this weight, and fetches with the rest."""
    work = least.mean_work(weight)
    saved_s = (1 - weight) * least.spill * least.most_cached
    crossing = least_crossing(network, work, least.most_price, deadline)
    return _Chains(least, float(work.sum()), crossing, saved_s).period(problem.stages, at_least)


class _Chains:
    """The relaxed chains, for one weight of the multiplications."""

    def __init__(self, least: LeastCosts, total: float, crossing: Crossing, saved_s: float) -> None:
        self.least = least
        enters = [one + two for one, two in zip(least.receive, least.link, strict=True)]
        possible = np.isfinite(crossing.least)
        size = crossing.least[possible]
        needed = crossing.work[:-1][possible] + least.send[0] + least.send[1] * size
        left = crossing.work[1:][possible] - enters[0] - enters[1] * size
        order = np.argsort(needed, kind="stable")
        self.needed, self.left = needed[order], np.maximum.accumulate(left[order])
        self.first = -(least.receive[0] + least.receive[1] * least.first_bytes)
        self.last = total + least.send[0] + least.send[1] * least.last_bytes
        self.fixed_s = least.call - saved_s

    def period(self, stages: int | None, at_least: float) -> float:
        """Return the least seconds of the slowest stage, to a relative 1e-6, or `at_least` if that is more."""
        low, high = at_least, 2 * max(at_least, self.last - self.first + max(self.fixed_s, 0.0), 1e-12)
        if self.reaches(low, stages):
            return at_least
        for _ in range(STEPS):
            middle = (low + high) / 2
            if self.reaches(middle, stages):
                high = middle
            else:
                low = middle
            if high - low <= 1e-6 * high:
                break
        return low

    def reaches(self, seconds: float, stages: int | None) -> bool:
        """Return whether stages of at most so many seconds reach the end, in the relaxation."""
        devices = self.least.devices
        # What the cut behind the last stage so far leaves at most, by the number of devices that are used.
        left = [self.first, *[-math.inf] * devices]
        for stage in range(stages or devices):
            later = 0 if stages is None else stages - 1 - stage
            after = [-math.inf] * (devices + 1)
            for used, before in enumerate(left):
                most = devices - used - later if self.least.replicates else min(1, devices - used)
                for count in range(1, most + 1):
                    reached = count * seconds - self.fixed_s + before
                    if later == 0 and reached >= self.last:
                        return True
                    after[used + count] = max(after[used + count], self._next(reached))
            left = after
        return False

    def _next(self, reached: float) -> float:
        """Return the most that a cut leaves which stages reach so far."""
        index = int(np.searchsorted(self.needed, reached, side="right"))
        return float(self.left[index - 1]) if index else -math.inf
