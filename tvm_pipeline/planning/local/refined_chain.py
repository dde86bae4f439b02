"""A bound of the seconds between frames of k stages on k devices that branching makes as tight as time allows.

As in `chain_bound.py`, stages of T seconds are chained: each reaches as far as it can, and that one cut holds the one
before is left out. There, the bytes that cross are bounded by minimum cuts in windows; here `furthest_tree.py` branches
where the windows leave too much, and only at the cuts that the furthest chain has. So T rises step by step: as long as
the chain of T seconds does not reach the end, no pipeline is that fast.

Each stage takes max(multiplications, fetches beyond the cache), of which any mean is a lower bound. Convolutions at the
start of a network multiply much, and layers at its end have most parameters; so the weight of the mean may change from
a stage to the next.

The cuts that were found are also plans: where each holds the one before, a chain of them is a pipeline, and often the
best one. Next: `candidates.py`, which uses both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import lock_s
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.local.furthest_tree import Cut, FurthestTree
from tvm_pipeline.planning.local.least_load import LeastCosts, busy_scale, least_of
from tvm_pipeline.planning.search.cuts import Floats, Integers

# Minimum cuts of larger graphs take too long.
MOST_OPERATORS = 5000
# T rises in such steps, the smaller ones where a larger one cannot be refuted.
RISES = (0.004, 0.001, 0.0002)
# The bound and the best plan count as one where they are so close.
EQUAL = 5e-10
# Of the time that is left a turn takes this part, and each of its chains so many seconds at least.
TURN, LEAST_S = 0.3, 0.05
# The weights of multiplications against fetches, of all stages, and of the last ones where the first multiply alone.
SINGLE_WEIGHTS, LAST_WEIGHTS = (1.0, 0.75, 0.5, 0.25, 0.0), (0.0, 0.5)
STEPS = 40  # of the bisection for a plan


class RefinedChain:
    """The bound of one problem of throughput, with what was found so far.

    Attributes:
        period_s: no pipeline has fewer seconds between frames.
        stage_of: N; the stage of each operator in the best pipeline that was found, or None.
        stages_s: the seconds of its slowest stage, on devices that are as good as the best one in each figure.
    """

    def __init__(self, problem: Problem, least: LeastCosts, stages: int, at_least_s: float) -> None:
        self.least, self.stages, self.period_s = least, stages, at_least_s
        self.lock_s = lock_s(problem)
        self.stages_s = math.inf
        self.stage_of: Integers | None = None
        self._at_least_s = at_least_s
        self._network = Network(problem.graph, leaders=least.leaders)
        self._trees: dict[tuple[float, float], FurthestTree] = {}
        self._chains = [_Chain(self, weights, at_least_s) for weights in self._sequences()]

    @classmethod
    def of(cls, problem: Problem, at_least_s: float) -> RefinedChain | None:
        """Return the bound, to be tightened; None where it does not apply or would say nothing.

        It applies where stages have no replicas and devices serve one stage each.

        Args:
            at_least_s: a lower bound of the seconds between frames.
        """
        if problem.objective != "throughput" or (problem.stages or 1) < 2 or len(problem.graph) > MOST_OPERATORS:
            return None
        alone = replace(problem, profile=replace(problem.profile, segments=()))
        assert problem.stages is not None
        least = least_of(alone, busy_scale(alone, problem.stages), occupied=True)
        costly = least.receive[1] + least.link[1] > 0 or least.send[1] > 0
        runs = math.isfinite(at_least_s) and math.isfinite(float((least.added + least.work).sum()))
        if least.replicates or not costly or not runs:
            return None
        return cls(problem, least, problem.stages, at_least_s)

    @property
    def is_closed(self) -> bool:
        """Whether nothing is left to find: the bound is reached, or no chain can be refuted any more."""
        return self._is_reached or all(chain.is_stuck for chain in self._chains)

    @property
    def _is_reached(self) -> bool:
        return self.period_s >= self.stages_s * (1 - EQUAL)

    def learn(self, stage_of: Integers) -> None:
        """Note a pipeline: its stage of each operator. The weights that fit it are tried first."""
        seconds, sums = self._seconds(stage_of)
        if seconds < self.stages_s:
            self.stages_s, self.stage_of = seconds, stage_of
        if not self.least.spills:
            return
        fetched = self.least.spill * np.maximum(0.0, sums[2] - self.least.most_cached)
        weights = tuple(np.where(sums[1] >= fetched, 1.0, 0.0).tolist())
        known = next((chain for chain in self._chains if chain.weights == weights), None)
        if known is not None:
            self._chains.remove(known)
        self._chains.insert(0, known or _Chain(self, weights, self._at_least_s))

    def tighten(self, deadline: float) -> None:
        """Raise the bound until `deadline` (of `time.monotonic`), and look for pipelines on the way.

        The time goes to several sequences of weights in turns, at last to the one with the best bound.
        """
        turn = 0
        while not self.is_closed:
            begun = time.monotonic()
            if begun >= deadline:
                break
            chains = [chain for chain in self._chains if not chain.is_stuck]
            chains = chains[: max(1, len(chains) >> turn)]
            for number, chain in enumerate(chains):
                now = time.monotonic()
                # The first one has as much time as all others.
                share = 0.5 * TURN if number == 0 else 0.5 * TURN / (len(chains) - 1)
                chain.raise_until(min(deadline, now + max(LEAST_S, share * (deadline - begun))))
                self.period_s = max(self.period_s, chain.low)
                if number == 0:
                    self._look(chain)
                if self._is_reached:
                    return
            self._chains.sort(key=lambda chain: -chain.low)
            turn += 1

    def tree(self, ending: float, next_: float) -> FurthestTree:
        """Return the tree of the cuts between two stages with these weights of the multiplications."""
        if (ending, next_) not in self._trees:
            least = self.least
            enter = least.receive[1] + least.link[1]
            self._trees[ending, next_] = FurthestTree(
                self._network, least.mean_work(ending), least.mean_work(next_), least.send[1], enter
            )
        return self._trees[ending, next_]

    def _sequences(self) -> Iterator[tuple[float, ...]]:
        """Yield the weights of the stages that are tried."""
        count = self.stages
        if not self.least.spills:
            yield (1.0,) * count
            return
        for weight in SINGLE_WEIGHTS:
            yield (weight,) * count
        for first in range(1, count):
            yield from ((1.0,) * first + (late,) * (count - first) for late in LAST_WEIGHTS)

    def _look(self, chain: _Chain) -> None:
        """Learn the best pipeline of the cuts that a chain found."""
        cuts = chain.best_cuts()
        if cuts is None:
            return
        # Each cut is made to hold the ones before.
        inside = np.logical_or.accumulate(np.array([cut.inside for cut in cuts]), axis=0)
        stage_of = _filled(len(cuts) - inside.sum(axis=0), self.stages)
        if self._seconds(stage_of)[0] < self.stages_s:
            self.learn(stage_of)

    def _seconds(self, stage_of: Integers) -> tuple[float, list[Floats]]:
        """Return the seconds of the slowest stage, infinite where a stage is empty; and sums over each stage.

        The sums are of what operators add, of their work, and of their bytes of parameters.
        """
        least, count = self.least, self.stages
        columns = (least.added, least.work, least.param_bytes)
        sums: list[Floats] = [np.bincount(stage_of, column, count).astype(np.float64) for column in columns]
        if np.bincount(stage_of, minlength=count).min() == 0:
            return math.inf, sums
        seconds = least.computing(*sums) + least.receive[0] + least.send[0]
        crossing = [float(least.first_bytes)]
        crossing += [self._network.crossing(stage_of < boundary) for boundary in range(1, count)]
        crossing.append(float(least.last_bytes))
        seconds += np.array(crossing[:-1]) * least.receive[1] + np.array(crossing[1:]) * least.send[1]
        seconds[1:] += least.link[0] + np.array(crossing[1:-1]) * least.link[1]
        return max(float(seconds.max()), self.lock_s), sums


class _Chain:
    """The stages one after another, with a weight of the multiplications for each.

    Attributes:
        low: no pipeline has fewer seconds between frames, by these weights.
        is_stuck: whether no T can be refuted any more.
    """

    def __init__(self, owner: RefinedChain, weights: tuple[float, ...], low: float) -> None:
        self.owner, self.weights, self.low, self.is_stuck = owner, weights, low, False
        self._rise = 0  # of RISES
        least = owner.least
        self._fixed = [least.call - (1 - weight) * least.spill * least.most_cached for weight in weights]
        self._first = -(least.receive[0] + least.receive[1] * least.first_bytes)
        self._last = float(least.mean_work(weights[-1]).sum()) + least.send[0] + least.send[1] * least.last_bytes

    def raise_until(self, deadline: float) -> None:
        """Raise `low` until the deadline."""
        while not self.is_stuck and time.monotonic() < deadline:
            # A pipeline that was found is the best one if a chain cannot be a little faster.
            seconds = min(self.low * (1 + RISES[self._rise]), self.owner.stages_s * (1 - EQUAL))
            asked = self._forward(seconds)
            if asked is None:
                self.low = seconds
                if seconds >= self.owner.stages_s * (1 - EQUAL):
                    break
                continue
            improved = False
            for tree, leaf, reach in asked:
                improved = tree.improve(leaf, reach) or improved
            if not improved:
                self._rise += 1
                self.is_stuck = self._rise == len(RISES)
                self._rise = min(self._rise, len(RISES) - 1)

    def best_cuts(self) -> list[Cut] | None:
        """Return the cuts of the fastest chain of those that were found, some of which may not hold the one before."""
        trees = [self._tree(stage) for stage in range(len(self.weights) - 1)]
        found = {id(tree): _Sorted(tree.cuts()) for tree in trees}
        low, high, best = self.low, 2 * self._last, None
        for _ in range(STEPS):
            middle = (low + high) / 2
            cuts = self._along(middle, [found[id(tree)] for tree in trees])
            if cuts is None:
                low = middle
            else:
                high, best = middle, cuts
            if high - low < 1e-9 * low:
                break
        return best

    def _tree(self, stage: int) -> FurthestTree:
        return self.owner.tree(self.weights[stage], self.weights[stage + 1])

    def _forward(self, seconds: float) -> list[tuple[FurthestTree, int, float]] | None:
        """Return the leaves that the furthest chain uses, and their reach; None where it does not reach the end."""
        least, left, asked = self.owner.least, self._first, []
        for stage in range(len(self.weights) - 1):
            reach = seconds - self._fixed[stage] + left - least.send[0]
            tree = self._tree(stage)
            leaf, most = tree.furthest(reach)
            if most == -math.inf:
                return None
            asked.append((tree, leaf, reach))
            left = most - least.receive[0] - least.link[0]
        return asked if seconds - self._fixed[-1] + left >= self._last * (1 - 1e-12) else None

    def _along(self, seconds: float, found: list[_Sorted]) -> list[Cut] | None:
        """Return the cuts, of those that were found, of a chain of stages of so many seconds; None where it ends."""
        least, left, cuts = self.owner.least, self._first, []
        for stage, of_stage in enumerate(found):
            cut = of_stage.furthest(seconds - self._fixed[stage] + left - least.send[0])
            if cut is None:
                return None
            cuts.append(cut)
            left = cut.left - least.receive[0] - least.link[0]
        return cuts if seconds - self._fixed[-1] + left >= self._last else None


class _Sorted:
    """Cuts by what a stage needs to reach them, with the best for every reach."""

    def __init__(self, cuts: list[Cut]) -> None:
        cuts.sort(key=lambda cut: cut.needed)
        self._cuts, self._needed = cuts, np.array([cut.needed for cut in cuts])
        left = np.array([cut.left for cut in cuts])
        is_best = left >= np.maximum.accumulate(left) if len(left) else np.zeros(0, bool)
        self._best = np.maximum.accumulate(np.where(is_best, np.arange(len(cuts)), 0)) if len(left) else is_best

    def furthest(self, reach: float) -> Cut | None:
        """Return the cut within reach that leaves most to the next stage; None where there is none."""
        place = int(np.searchsorted(self._needed, reach * (1 + 1e-9), side="right")) - 1
        return self._cuts[int(self._best[place])] if place >= 0 else None


def _filled(stage_of: Integers, stages: int) -> Integers:
    """Return the stages with operators moved into those that are empty, from the stages beside them."""
    order = np.argsort(stage_of, kind="stable")
    ends = np.cumsum(np.bincount(stage_of, minlength=stages))
    for stage in range(stages):
        ends[stage] = max(ends[stage], ends[stage - 1] + 1 if stage else 1)
    ends = np.minimum(ends, len(stage_of) - stages + 1 + np.arange(stages))
    found = np.empty_like(stage_of)
    found[order] = np.searchsorted(ends, np.arange(len(stage_of)), side="right")
    return found
