"""First plans for throughput, from minimum cuts: stages that reach as far as T seconds let them, for the least such T.

A stage begins at a cut D and may end at any cut E around it. Within T seconds,

    compute(E - D) + in X(D) + out X(E) <= T - call,

where X are the bytes that cross. Of those cuts the one is taken that leaves most to the stage behind it: the greatest
w(E) - in X(E), where w is the work in front of a cut. The cuts that are considered are minimum cuts in windows of work,
see `least_crossing.py`; there are too many others. T is found by bisection. `chain_bound.py` bounds the seconds of all
pipelines by the same idea without the condition that one cut holds the one before. So the two are often close.

A stage that takes all it can may leave nothing for the last ones; so it is tried with limits to its share of the work,
too. All devices count as the best device in each figure, and local search mends what is wrong about that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.problem import Problem
from tvm_pipeline.planning.local.cut_flow import FREE, INSIDE, OUTSIDE, Network
from tvm_pipeline.planning.local.least_load import LeastCosts, busy_scale, least_of
from tvm_pipeline.planning.search.cuts import Floats, Integers

# Minimum cuts of larger graphs take too long.
MOST_OPERATORS = 5000
# The shares of what a stage can reach at most from which on a cut is looked for: the windows.
FROM = (0.0, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.93, 0.96, 0.98, 0.99)
PRICES = 7  # tried in each window
# A stage takes at most so many times its even share of the work that is left.
SHARES = (math.inf, 2.0, 1.5, 1.2)
STEPS, CLOSE = 10, 1e-3  # of the bisection
# The weights of multiplications in the work, against fetches beyond a cache.
WEIGHTS = (1.0, 0.0, 0.5)


@dataclass(frozen=True, slots=True, eq=False)
class ReachGraph:
    """The graph of a problem, with what its cuts need; made once for all numbers of stages.

    Attributes:
        upstream, downstream: N, for the work by each weight; see `Network.with_needs`.
    """

    network: Network
    least: LeastCosts
    work: tuple[Floats, ...]
    upstream: tuple[Floats, ...]
    downstream: tuple[Floats, ...]

    @classmethod
    def of(cls, problem: Problem) -> ReachGraph | None:
        """Return what reaching stages need, for problems of throughput without a limit of the latency.

        None where it is another problem, the graph is too large, or its operators take no time.
        """
        limited = problem.objective != "throughput" or problem.max_latency_s is not None
        if limited or len(problem.graph) > MOST_OPERATORS:
            return None
        any_number = replace(problem, stages=None)
        least = least_of(any_number, busy_scale(any_number, len(problem.platform.devices)))
        network = Network(problem.graph, leaders=least.leaders)
        work = [least.mean_work(weight) for weight in (WEIGHTS if least.spills else (1.0,))]
        if not all(0 < figures.sum() < math.inf for figures in work):
            return None
        needs = [network.with_needs(figures) for figures in work]
        return cls(network, least, tuple(work), tuple(up for up, _ in needs), tuple(down for _, down in needs))

    def stages_of(self, stages: int, deadline: float = math.inf) -> Iterator[Integers]:
        """Yield the stage of each operator in plans of so many stages, two at least, the better plans later.

        Args:
            deadline: of `time.monotonic`, after which no further one is made.
        """
        shortest = math.inf
        for which in range(len(self.work) if stages > 1 else 0):
            for share in SHARES:
                low, high = float(self.work[which].sum()) / stages, shortest
                seconds = 0.98 * shortest if shortest < math.inf else 1.3 * low
                for _ in range(STEPS):
                    if time.monotonic() > deadline:
                        return
                    cuts = self._cuts(which, stages, seconds, share)
                    if cuts is not None:
                        high = seconds
                        if len(cuts) == stages - 1 and seconds < shortest:
                            shortest = seconds
                            yield stages - 1 - np.sum(cuts, axis=0, dtype=np.int64)
                    else:
                        low = seconds
                    if high - low < CLOSE * high:
                        break
                    seconds = (low + high) / 2 if high < math.inf else 1.25 * low

    def _cuts(self, which: int, stages: int, seconds: float, share: float) -> list[npt.NDArray[np.bool_]] | None:
        """Return the cuts between stages of at most so many seconds; fewer where fewer do; None where none do."""
        least, work = self.least, self.work[which]
        total = float(work.sum())
        fixed = least.receive[0] + least.send[0]
        cut, done, crossing = np.zeros(len(work), bool), 0.0, float(least.first_bytes)
        cuts: list[npt.NDArray[np.bool_]] = []
        for stage in range(stages):
            received = crossing * (least.receive[1] + (least.link[1] if stage else 0.0))
            most = seconds - fixed - received - (least.link[0] if stage else 0.0)
            if self._taken(~cut) + least.last_bytes * least.send[1] <= most:
                return cuts
            reach = min(done + most - least.call, done + share * (total - done) / (stages - stage))
            found = self._furthest(which, cut, most, reach) if stage < stages - 1 else None
            if found is None:
                return None
            cut, crossing = found
            done = float(work[cut].sum())
            cuts.append(cut)
        return None

    def _taken(self, operators: npt.NDArray[np.bool_]) -> float:
        """Return the seconds that a stage of these operators takes to be called and to compute."""
        least = self.least
        sums = (figures[operators].sum() for figures in (least.added, least.work, least.param_bytes))
        return float(least.computing(*sums))

    def _furthest(
        self, which: int, begin: npt.NDArray[np.bool_], most: float, reach: float
    ) -> tuple[npt.NDArray[np.bool_], float] | None:
        """Return the cut that leaves most to the next stage, with its bytes; None where no stage is short enough.

        Args:
            begin: the operators in front of the stage.
            most: the seconds in which the stage is called, computes and sends.
            reach: the work in front of its end, at most, unless fetches that a cache saves allow more.
        """
        least, work = self.least, self.work[which]
        done = float(work[begin].sum())
        receive, send = least.receive[1] + least.link[1], least.send[1]
        s_per_byte = receive + send
        best: tuple[npt.NDArray[np.bool_], float] | None = None
        best_value, windows = -math.inf, set()
        # Parameters that the cache holds are in the work by fetches, and cost nothing.
        reach += least.spill * least.most_cached if which else 0.0
        outside = ~begin & (self.upstream[which] > reach * (1 + 1e-9))
        for start in FROM:
            inside = begin | (float(work.sum()) - self.downstream[which] < done + start * (reach - done))
            size = int(inside.sum())
            if size in windows or size == len(work) or bool((inside & outside).any()):
                continue
            windows.add(size)
            state = np.where(inside, INSIDE, np.where(outside, OUTSIDE, FREE))
            low, high = (-1 / s_per_byte, 3 / s_per_byte) if s_per_byte else (0.0, 0.0)
            price = (low + high) / 2
            for _ in range(PRICES):
                value, end = self.network.least_cut(work, price, state)
                content = float(work[end].sum())
                crossing = max(0.0, value + price * content)
                if content <= reach * (1 + 1e-9) and self._taken(end & ~begin) + send * crossing <= most * (1 + 1e-9):
                    if content - receive * crossing > best_value and int(end.sum()) > int(begin.sum()):
                        best_value, best = content - receive * crossing, (end, crossing)
                    low = price
                else:
                    high = price
                price = (low + high) / 2
        return best
