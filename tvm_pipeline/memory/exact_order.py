"""The order of operators with the least peak, proven; or the best order found in time, with a lower bound.

The operators that have run are a downset of the graph, and the bytes alive are a function of this downset. So an order
with a peak of at most B is a path through the downsets by steps of at most B bytes. Bisection finds the least B: an
order that is found gives an upper bound, its peak. A search without success gives a lower bound, the least step above B
that it met. A search from the end to the start gives the same answers. It may be hundreds of times as fast, or as slow,
as the search from the start, so the two take turns.

A *safe commit* runs operators immediately, and the search tries no alternative to them. The bytes alive are submodular:
the more operators have run before, the fewer bytes another operator adds. Take a chain C of operators, each made ready
by the one before, that runs within B and ends with no more bytes alive than before it, for the first time at its end.
Then C can be moved to the front of every order of the operators left, and no step needs more bytes. This also holds
with operators in place and with buffers of several producers.

SERENITY (Ahn et al., "Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices",
MLSys 2020; `plugins/tvm_pipeline_papers/serenity.py`) posed the problem. Next: `order_search.py`, the loops;
`regions.py`, which makes the arrays of a graph.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.memory import order_search as loops
from tvm_pipeline.memory.memory_graph import MemoryGraph, footprint
from tvm_pipeline.memory.order_arrays import (
    BITS,
    ENTRY,
    STATE,
    TALLY,
    Limits,
    Region,
    Store,
)
from tvm_pipeline.memory.orders import Ordering, dfs_order, kahn_order, program_order
from tvm_pipeline.memory.regions import region_of, split

SLICE = 250  # expansions between two looks at the clock: some milliseconds
FIRST_BUDGET = 16 * SLICE
# The next limit between the bound and the best peak, in eighths. It is above the middle, since finding an order takes
# less time than proving that there is none. After a proof the highest limit is tried, since a second proof there would
# end the search.
_FIND, _PROVE = (6, 8, 4, 2, 1), (8, 6, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Pruning:
    """The ideas that keep the search small; with any of them switched off it finds an order of the same peak.

    Attributes:
        parts: operators that are comparable to all others divide the graph into regions, which are ordered one by one.
        known: the search starts from the best of three orders that cost no search, instead of program order alone.
        bound: the search tries no peak below what the largest operator needs by itself.
        backward: a search from the end to the start takes turns with the one from the start.
        beam: if the search takes long, a beam search, which keeps a few states of each depth, may find an order.
        commit: a safe chain of operators is run immediately, and no alternative to it is tried.
        near: after a step only chains that share a buffer or a reader with its operators are tested for safety.
        merge: two paths to the same set of operators lead to one state.
    """

    parts: bool = True
    known: bool = True
    bound: bool = True
    backward: bool = True
    beam: bool = True
    commit: bool = True
    near: bool = True
    merge: bool = True


def exact_order(graph: MemoryGraph, time_limit_s: float | None = None, pruning: Pruning | None = None) -> Ordering:
    """Return the order of least peak; see the text above.

    Args:
        time_limit_s: then the best order found is the answer, with a bound; None searches to the end.
        pruning: tests switch ideas off; by default all are on.
    """
    pruning = pruning or Pruning()
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    parts = split(graph) if pruning.parts else [range(len(graph))][: len(graph)]
    makers = (program_order, kahn_order, dfs_order) if pruning.known else (program_order,)
    known = [(order, footprint(graph, order)) for order in (make(graph) for make in makers)]
    best = [
        min((max(steps[part.start : part.stop]), order[part.start : part.stop]) for order, steps in known)
        for part in parts
    ]
    # A part of one operator has only one order, so its peak is a lower bound of the whole.
    single = [peak for part, (peak, _) in zip(parts, best, strict=True) if len(part) == 1]
    bound = max([largest_operator(graph), *single]) if pruning.bound else 0
    for index in sorted(range(len(parts)), key=lambda index: -best[index][0]):
        if best[index][0] > bound:
            peak, order, least = _Part(graph, parts[index], deadline, pruning).solve(*best[index], bound)
            best[index], bound = (peak, order), max(bound, least)
    return Ordering(tuple(op for _, order in best for op in order), max([bound, *(peak for peak, _ in best)]), bound)


def largest_operator(graph: MemoryGraph) -> int:
    """Return a lower bound of every order's peak: what an operator needs by itself, or what is alive all the time."""
    needed = list(graph.workspace_bytes) or [0] * len(graph)
    written = [0] * len(graph)
    for buffer in graph.buffers:
        for op in buffer.producers:
            written[op] += buffer.bytes
        for op in buffer.producers + buffer.consumers:
            needed[op] += buffer.bytes
    for op, marks in enumerate(graph.in_place):
        needed[op] -= written[op] if marks else 0
    kept = sum(buffer.bytes for buffer in graph.buffers if buffer.pinned and not buffer.producers)
    return max([kept, *needed])


class _Part:
    """The search for the best order of consecutive operators of a graph, while all others keep their positions."""

    def __init__(self, graph: MemoryGraph, inside: range, deadline: float, pruning: Pruning) -> None:
        self.graph, self.inside, self.deadline, self.pruning = graph, inside, deadline, pruning
        # The direction that was the first to answer goes first.
        directions = (False, True) if pruning.backward else (False,)
        self.regions = [(backward, region_of(graph, inside, backward=backward)) for backward in directions]

    def solve(self, peak: int, order: tuple[int, ...], bound: int) -> tuple[int, tuple[int, ...], int]:
        """Return the best peak, its order and a lower bound; the given peak and order if there is nothing better."""
        budget, shares = FIRST_BUDGET, _FIND
        unanswered: list[int] = []
        while bound < peak and time.monotonic() < self.deadline:
            limits = (bound + (peak - 1 - bound) * share // 8 for share in shares)
            # A limit between two limits that took too long is likely to take too long, too.
            open_limits = (limit for limit in limits if not unanswered or not unanswered[0] <= limit <= unanswered[-1])
            limit = next(open_limits, None)
            if limit is None:
                budget, unanswered = 4 * budget, []
                continue
            answer = self.order_within(limit, budget, find=limit == peak - 1)
            if answer is None:
                unanswered = sorted([*unanswered, limit])
            elif isinstance(answer, tuple):
                order, peak, shares = answer, self.peak_of(answer), _FIND
            else:
                bound, shares = min(answer, peak), _PROVE
        return peak, order, bound

    def peak_of(self, order: tuple[int, ...]) -> int:
        whole = (*range(self.inside.start), *order, *range(self.inside.stop, len(self.graph)))
        return max(footprint(self.graph, whole)[self.inside.start : self.inside.stop])

    def order_within(self, limit: int, budget: int, *, find: bool) -> tuple[int, ...] | int | None:
        """Return an order whose peak is at most `limit`, or a lower bound above `limit`; None if neither is found.

        Args:
            budget: how many states are expanded, at most, for an answer.
            find: whether a beam search then looks for an order.
        """
        searches = [(backward, _Search(region, limit, self.pruning)) for backward, region in self.regions]
        slices = SLICE
        while slices <= budget:
            for index, (backward, search) in enumerate(searches):
                answer = search.advance(slices // (4 if index else 1), self.deadline)
                if answer != loops.PAUSED:
                    self.regions.sort(key=lambda found: found[0] != backward)
                    return self.in_graph(search.order(), backward) if answer == loops.FOUND else search.cut
            if time.monotonic() >= self.deadline:
                return None
            slices *= 2
        for backward, region in self.regions if find and self.pruning.beam else ():
            beam = _Search(region, limit, self.pruning)
            if beam.advance(budget, self.deadline, beam=1 + budget // len(self.inside)) == loops.FOUND:
                return self.in_graph(beam.order(), backward)
        return None

    def in_graph(self, order: list[int], backward: bool) -> tuple[int, ...]:
        """Return the operators of the graph for those of a region; a backward region numbers them from the last."""
        if backward:
            return tuple(self.inside[-1 - op] for op in reversed(order))
        return tuple(self.inside[op] for op in order)


class _Search:
    """The states reached within a bound."""

    def __init__(self, region: Region, bound: int, pruning: Pruning) -> None:
        self.pruning, self.bound = pruning, bound
        # Searches of the same region take turns, so each has its own position.
        self.region = Region(region.links, region.operators.copy(), region.buffers.copy(), region.now.copy())
        count, states = len(region.operators) - 1, 1024
        self.store = Store(
            words=np.zeros((states, -(-count // BITS)), np.int64),
            states=np.zeros(states, STATE),
            path=np.zeros(8 * states + 64 * count, np.int64),
            table=np.full(4 * states, -1, np.int64),
            heap=np.zeros(states, ENTRY),
            tally=np.array([(1, 1, 0, 0, np.iinfo(np.int64).max)], TALLY),
        )
        self.store.states[0]["parent"] = -1
        self.store.table[0] = 0

    def advance(self, expansions: int, deadline: float, beam: int = 0) -> int:
        """Expand so many states, or until the deadline; return FOUND, NONE or PAUSED. NONE of a beam proves nothing."""
        limits = Limits(self.bound, beam, self.pruning.commit, self.pruning.near, self.pruning.merge)
        last = self.tally("expanded") + expansions
        while True:
            left = last - self.tally("expanded")
            if left <= 0 or time.monotonic() >= deadline:
                return loops.PAUSED
            answer = loops.advance(self.region, self.store, limits, min(left, SLICE))
            if answer == loops.FULL:
                self.grow()
            elif answer != loops.PAUSED:
                return answer

    def grow(self) -> None:
        """Double the space for states."""

        def larger(array: NDArray[Any]) -> NDArray[Any]:
            # The operating system provides zeros that are not written yet at no cost.
            grown = np.zeros((2 * len(array), *array.shape[1:]), array.dtype)
            grown[: len(array)] = array
            return grown

        words, states, path, table, heap, tally = self.store
        self.store = Store(larger(words), larger(states), larger(path), larger(table), larger(heap), tally)
        loops.refill(self.store)

    def tally(self, name: str) -> int:
        """Return an entry of the tally."""
        return int(self.store.tally[0][name])

    @property
    def cut(self) -> int:
        """Return the least bytes of a step above the bound."""
        return self.tally("cut")

    def order(self) -> list[int]:
        """Return the operators that led to the last state."""
        store = self.store
        steps: list[list[int]] = []
        state = self.tally("state_count") - 1
        while state >= 0:
            _, _, parent, start, end = store.states[state].tolist()
            steps.append(store.path[start:end].tolist())
            state = parent
        return [op for path in reversed(steps) for op in path]
