"""A bound of the seconds between frames of k stages on k devices that branching makes as tight as time allows.

As in `chain_bound.py`, stages of T seconds are chained: each reaches as far as it can, and that one cut holds the one
before is left out. There, the bytes that cross are bounded by minimum cuts in windows; here the search branches where
the windows leave too much, and only at the cuts that the furthest chain has. So T rises step by step: as long as the
chain of T seconds does not reach the end, no pipeline is that fast.

Each stage takes max(multiplications, fetches beyond the cache), of which any mean is a lower bound. Convolutions at the
start of a network multiply much, and layers at its end have most parameters; so the weight of the mean may change from
a stage to the next.

The cuts that were found are also plans: where each holds the one before, a chain of them is a pipeline, and often the
best one.

For a cut D let w(D) be the work in front of it by the weights of the stage that ends there, w'(D) by those of the next
stage, and X(D) the bytes that cross. A stage that may reach r leaves at most

    A(r) = max of w'(D) - in X(D)   over downsets D with w(D) + out X(D) <= r.

Write g(D) for the first sum and f(D) for the second one. For any multiplier m >= 0,

    A(r) <= m r + max of (g(D) - m f(D))   over all downsets D,

and that maximum is a minimum cut (`cut_flow.py`). Where no multiplier closes the gap, the downsets are parted: an
operator stands in front of the cut or behind it, with all that it needs or all that need it. So the downsets are
covered by the leaves of trees, each with lines (m, M) of which the least m r + M bounds A(r). Leaves are only worked on
where they are the furthest for some r, so that most of them are never looked at again.

The multipliers are found by the cutting planes of Kelley, "The cutting-plane method for solving convex programs",
Journal of the SIAM 8(4), 1960. Next: `large_graphs.py`, which uses the bound and the plans.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import lock_s
from tvm_pipeline.planning.local.cut_flow import FREE, INSIDE, OUTSIDE, Network
from tvm_pipeline.planning.local.least_load import LeastCosts, busy_scale, least_of
from tvm_pipeline.planning.search.cuts import Floats, Integers

Bits = npt.NDArray[np.bool_]

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
# Of the trees:
WINDOWS = 128  # of work, in which the trees have their roots
LINES = 16  # of a leaf, at most
PLANES = 12  # of the cutting planes
CANDIDATES = 6  # operators of which one is chosen to branch at
LEAST_MULTIPLIER, MOST_MULTIPLIER = 1e-3, 1000.0
CLOSE = 1e-8  # of all work: smaller gaps are left


class Cut(NamedTuple):
    """A downset, with its f (what a stage needs to reach it) and its g (what it leaves to the next stage)."""

    needed: float
    left: float
    inside: Bits


@dataclass(slots=True)
class _Leaf:
    """Fixed operators, the work in front of their cuts, and what was found of them."""

    state: npt.NDArray[np.int64]
    low: float
    high: float
    cuts: list[Cut] = field(default_factory=list)
    tried: set[float] = field(default_factory=set)


class FurthestTree:
    """Bounds of A(r) for all r, which `improve` tightens where it is asked.

    Args:
        ending, next_: N; the work of the operators by the weights of the stage that ends at the cut, and of the next.
        send, enter: seconds for each byte that crosses, of the stage that ends and of the next one.
    """

    def __init__(self, network: Network, ending: Floats, next_: Floats, send: float, enter: float) -> None:
        self.network, self.ending, self.next, self.send, self.enter = network, ending, next_, send, enter
        # A price for bytes is needed: without one to enter, that to be sent.
        self.least_multiplier = 0.0 if enter > 0 else LEAST_MULTIPLIER
        self.total = float(ending.sum())
        self.close = CLOSE * max(self.total, float(next_.sum()))
        self.leaves: list[_Leaf] = []
        self.lows = np.zeros(0)
        self.slopes, self.heights = np.zeros((0, LINES)), np.zeros((0, LINES))
        upstream, downstream = network.with_needs(ending)
        edges = np.linspace(0.0, self.total, min(WINDOWS, len(ending)) + 1)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            outside = upstream > high * (1 + 1e-9)
            inside = self.total - downstream < low * (1 - 1e-9)
            if not (inside & outside).any():
                state = np.where(inside, INSIDE, np.where(outside, OUTSIDE, FREE)).astype(np.int64)
                self._add(_Leaf(state, low * (1 - 1e-9), high * (1 + 1e-9)))

    def furthest(self, reach: float) -> tuple[int, float]:
        """Return the leaf that leaves most to the next stage, and that much: a bound of A(reach)."""
        found = self.slopes[: len(self.leaves)] * reach
        found += self.heights[: len(self.leaves)]
        most = found.min(axis=1)
        most[self.lows[: len(self.leaves)] > reach * (1 + 1e-12)] = -np.inf
        leaf = int(most.argmax())
        return leaf, float(most[leaf])

    def improve(self, leaf: int, reach: float) -> bool:
        """Tighten the bound of a leaf, by a better multiplier or else by branching; return whether it was not exact."""
        before = self._most(leaf, reach)
        if self._multiply(leaf, reach) < before - self.close:
            return True
        best = max((cut.left for cut in self.leaves[leaf].cuts if _reaches(cut, reach)), default=-math.inf)
        return best < self._most(leaf, reach) - self.close and self._branch(leaf, reach)

    def cuts(self) -> list[Cut]:
        """Return the cuts that were found."""
        return [cut for leaf in self.leaves for cut in leaf.cuts]

    def _most(self, leaf: int, reach: float) -> float:
        return float((self.slopes[leaf] * reach + self.heights[leaf]).min())

    def _multiply(self, leaf: int, reach: float) -> float:
        """Look for the best multiplier of a leaf, and return its bound."""
        here = self.leaves[leaf]
        for _ in range(PLANES):
            most = self._most(leaf, reach)
            near = [cut for cut in here.cuts if _reaches(cut, reach)]
            far = [cut for cut in here.cuts if not _reaches(cut, reach)]
            if near and max(cut.left for cut in near) >= most - self.close:
                break
            if near and far:
                multiplier = max(self.least_multiplier, _crossing(near, far, reach))
            elif near:
                multiplier = 0.05 if 0.05 not in here.tried else self.least_multiplier
            else:
                multiplier = 4 * max(here.tried) + 0.5 if here.tried else 1.0
            if multiplier > MOST_MULTIPLIER or any(abs(multiplier - other) < 1e-9 for other in here.tried):
                break
            here.tried.add(multiplier)
            height, cut = self._solve(here.state, multiplier)
            here.cuts.append(cut)
            self._draw(leaf, multiplier, height, reach)
        return self._most(leaf, reach)

    def _solve(self, state: npt.NDArray[np.int64], multiplier: float) -> tuple[float, Cut]:
        """Return the greatest g(D) - m f(D) of the downsets that a state allows, or a little more, and that D."""
        weights = self.next - multiplier * self.ending
        s_per_byte = self.enter + multiplier * self.send
        least, inside = self.network.least_cut(weights, 1 / s_per_byte, state)
        work = float(weights[inside].sum())
        crossing = max(0.0, least + work / s_per_byte)
        needed = float(self.ending[inside].sum()) + self.send * crossing
        return -s_per_byte * least, Cut(needed, float(self.next[inside].sum()) - self.enter * crossing, inside)

    def _branch(self, leaf: int, reach: float) -> bool:
        """Part the downsets of a leaf at an operator; return whether its bound is less where none is free."""
        here = self.leaves[leaf]
        free = here.state == FREE
        if not free.any():
            # One downset is left. It is too far; else its cut would be the best.
            self.lows[leaf] = max(here.low, min((cut.needed for cut in here.cuts), default=0.0) * (1 - 1e-9))
            return bool(self.lows[leaf] > reach * (1 + 1e-12))
        line = int((self.slopes[leaf] * reach + self.heights[leaf]).argmin())
        multiplier = min(max(float(self.slopes[leaf, line]), 0.01), 50.0)
        near = [cut for cut in here.cuts if _reaches(cut, reach)]
        far = [cut for cut in here.cuts if not _reaches(cut, reach)]
        # Both halves lose something where the operator stands between the best cut within reach and one beyond it.
        inner = max(near, key=lambda cut: cut.left).inside if near else here.state == INSIDE
        outer = min(far, key=lambda cut: cut.needed - cut.left).inside if far else here.state != OUTSIDE
        choice = np.flatnonzero(free & outer & ~inner)
        if not len(choice):
            choice = np.flatnonzero(free)
        work = self.ending + self.next
        every_needs, every_needed_by = self.network.closures
        needs, needed_by = (every_needs[choice] & free) @ work, (every_needed_by[choice] & free) @ work
        best = None
        for v in choice[np.argsort(-np.minimum(needs, needed_by), kind="stable")[:CANDIDATES]].tolist():
            front, behind = here.state.copy(), here.state.copy()
            front[every_needs[v]] = INSIDE
            behind[every_needed_by[v]] = OUTSIDE
            heights = [self._solve(state, multiplier)[0] for state in (front, behind)]
            if best is None or (max(heights), sum(heights)) < (max(best[1]), sum(best[1])):
                best = (front, behind), heights
        assert best is not None
        for number, (state, height) in enumerate(zip(*best, strict=True)):
            inside, outside = state == INSIDE, state == OUTSIDE
            cuts = [cut for cut in here.cuts if not (cut.inside & outside).any() and cut.inside[inside].all()]
            child = self._add(_Leaf(state, here.low, here.high, cuts), leaf, replaces=number == 1)
            self._draw(child, multiplier, height, reach)
        return True

    def _add(self, leaf: _Leaf, parent: int | None = None, *, replaces: bool = False) -> int:
        """Add a leaf, in the place of its parent or behind all others, and return its number."""
        inside, outside = leaf.state == INSIDE, leaf.state == OUTSIDE
        leaf.low = max(leaf.low, float(self.ending[inside].sum()) * (1 - 1e-9))
        number = parent if replaces and parent is not None else len(self.leaves)
        if number == len(self.leaves):
            self.leaves.append(leaf)
            if number >= len(self.slopes):
                more = max(64, number)
                self.slopes = np.concatenate((self.slopes, np.zeros((more, LINES))))
                self.heights = np.concatenate((self.heights, np.full((more, LINES), np.inf)))
                self.lows = np.concatenate((self.lows, np.zeros(more)))
            if parent is not None:
                self.slopes[number], self.heights[number] = self.slopes[parent], self.heights[parent]
        else:
            self.leaves[number] = leaf
        self.lows[number] = leaf.low
        # Without transfers, the lines of multiplier 0 and 1 are sums.
        rounding = 1e-12 * self.total
        gained = self.next - self.ending
        free = leaf.state == FREE
        self.slopes[number, :2] = 0.0, 1.0
        self.heights[number, 0] = float(self.next[~outside].sum()) + rounding
        self.heights[number, 1] = float(gained[inside].sum() + np.maximum(gained[free], 0.0).sum()) + rounding
        return number

    def _draw(self, leaf: int, slope: float, height: float, reach: float) -> None:
        """Add a line to a leaf, in the place of the one that says least for this reach."""
        values = self.slopes[leaf, 2:] * reach + self.heights[leaf, 2:]
        place = 2 + int(values.argmax())
        self.slopes[leaf, place], self.heights[leaf, place] = slope, height


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


def _reaches(cut: Cut, reach: float) -> bool:
    return cut.needed <= reach * (1 + 1e-9)


def _crossing(near: list[Cut], far: list[Cut], reach: float) -> float:
    """Return the multiplier with the least max of g + m (r - f), over cuts within reach and beyond it."""
    best, multiplier = -math.inf, 0.0
    for one in near:
        for other in far:
            slope = max(0.0, (other.left - one.left) / (other.needed - one.needed))
            value = one.left + slope * (reach - one.needed)
            if value > best:
                best, multiplier = value, slope
    return multiplier


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
