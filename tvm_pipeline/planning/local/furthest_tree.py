"""How far stages of T seconds reach at most: a branch and bound over the downsets behind a stage.

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
Journal of the SIAM 8(4), 1960. Next: `refined_chain.py`, which chains the stages.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline.planning.local.cut_flow import FREE, INSIDE, OUTSIDE, Network
from tvm_pipeline.planning.search.cuts import Floats

Bits = npt.NDArray[np.bool_]

WINDOWS = 128  # of work, in which the trees have their roots
LINES = 16  # of a leaf, at most
STEPS = 12  # of the cutting planes
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
        for _ in range(STEPS):
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
