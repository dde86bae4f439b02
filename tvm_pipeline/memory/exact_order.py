"""The order of operators that needs least memory, proven; where time runs out, the best found, and a bound.

What has run is a downset of the graph, and the bytes alive are a function of it alone. So "is there an order whose peak
is at most B?" is a search for a path through the downsets, by steps of at most B bytes. The least B is found by
bisection: an order that is found has a peak, a search without success knows the least step that was in its way, and no
order is below that. A search from the end to the start answers the same, often hundreds of times as fast or as slow
as the one from the start: they take turns.

A *safe commit* runs operators at once, with no other choice to come back to. The bytes alive are submodular: where more
has run before, operators add no more to them. If the operators of a chain C, each ready by the one before, run
within B and leave no more bytes alive than there were, for the first time at its end, then in any order to come C may
be moved to the front: nothing needs more. With operators in place and buffers of several producers this stays true.

SERENITY (Ahn et al., "Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices",
MLSys 2020; here `serenity.py`) posed the problem. Next: `search.py`, the loops; `regions.py`, the graph in arrays.
"""

from __future__ import annotations

import math
import time

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.memory import order_search as loops
from tvm_pipeline.memory.memory_graph import MemoryGraph, footprint
from tvm_pipeline.memory.order_search import Position, Region, Store
from tvm_pipeline.memory.orders import Ordering, dfs_order, kahn_order, program_order
from tvm_pipeline.memory.regions import region_of, split

SLICE = 250  # expansions between two looks at the clock: some milliseconds
FIRST_BUDGET = 16 * SLICE
# Where between the bound and the best order the next limit lies, in eighths: an order is found sooner than it is proven
# that there is none. Once one limit was proven, the highest is tried, which would end the search.
_FIND, _PROVE = (6, 8, 4, 2, 1), (8, 6, 4, 2, 1)


def exact_order(graph: MemoryGraph, time_limit_s: float | None = None) -> Ordering:
    """The order of least peak; see the text above.

    Args:
        time_limit_s: then the best order found is the answer, with a bound; None searches to the end.
    """
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    parts = split(graph)
    known = [
        (order, footprint(graph, order)) for order in (make(graph) for make in (program_order, kahn_order, dfs_order))
    ]
    best = [
        min((max(steps[part.start : part.stop]), order[part.start : part.stop]) for order, steps in known)
        for part in parts
    ]
    # A part of one operator has one order; so no order of the whole is below it.
    bound = max(
        [largest_operator(graph), *(peak for part, (peak, _) in zip(parts, best, strict=True) if len(part) == 1)]
    )
    for index in sorted(range(len(parts)), key=lambda index: -best[index][0]):
        if best[index][0] > bound:
            peak, order, least = _Part(graph, parts[index], deadline).solve(*best[index], bound)
            best[index], bound = (peak, order), max(bound, least)
    return Ordering(tuple(op for _, order in best for op in order), max([bound, *(peak for peak, _ in best)]), bound)


def largest_operator(graph: MemoryGraph) -> int:
    """Bytes that no order is below, since an operator needs them by itself, or they are alive all the time."""
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
    """The search for the best order of consecutive operators of a graph, between others that are in their place."""

    def __init__(self, graph: MemoryGraph, inside: range, deadline: float) -> None:
        self.graph, self.inside, self.deadline = graph, inside, deadline
        # The direction that was the first to answer goes first.
        self.regions = [(backward, region_of(graph, inside, backward=backward)) for backward in (False, True)]

    def solve(self, peak: int, order: tuple[int, ...], bound: int) -> tuple[int, tuple[int, ...], int]:
        """The best peak found, its order, and what no order is below; all three as given where nothing better is."""
        budget, shares = FIRST_BUDGET, _FIND
        unanswered: list[int] = []
        while bound < peak and time.monotonic() < self.deadline:
            limits = (bound + (peak - 1 - bound) * share // 8 for share in shares)
            # Between two limits that took too long the others will, too.
            ask = (limit for limit in limits if not unanswered or not unanswered[0] <= limit <= unanswered[-1])
            limit = next(ask, None)
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
        """An order whose peak is at most `limit`; or what no order is below, more than `limit`; or None: not known.

        Where it is not known in so many expansions, a beam search may `find` an order.
        """
        searches = [(backward, _Search(region, limit)) for backward, region in self.regions]
        slices = SLICE
        while slices <= budget:
            for place, (backward, search) in enumerate(searches):
                answer = search.advance(slices // (4 if place else 1), self.deadline)
                if answer != loops.PAUSED:
                    self.regions.sort(key=lambda found: found[0] != backward)
                    return self.as_given(search.order(), backward) if answer == loops.FOUND else search.cut
            if time.monotonic() >= self.deadline:
                return None
            slices *= 2
        for backward, region in self.regions if find else ():
            beam = _Search(region, limit)
            if beam.advance(budget, self.deadline, beam=1 + budget // len(self.inside)) == loops.FOUND:
                return self.as_given(beam.order(), backward)
        return None

    def as_given(self, order: list[int], backward: bool) -> tuple[int, ...]:
        """Operators of the graph for those of a region, which are numbered from the last if it is read backward."""
        if backward:
            return tuple(self.inside[-1 - op] for op in reversed(order))
        return tuple(self.inside[op] for op in order)


class _Search:
    """The states reached within a bound."""

    def __init__(self, region: Region, bound: int) -> None:
        self.region, self.bound = region, bound
        count, buffers = region.traits.shape[1], region.buffers.shape[1]
        self.at = Position(_zeros(7, count), _zeros(2, buffers), _zeros(3))
        states = 1024
        self.store = Store(
            words=_zeros(states, -(-count // loops.BITS)),
            states=_zeros(5, states),
            path=_zeros(8 * states + 64 * count),
            table=np.full(4 * states, -1, np.int64),
            heap=_zeros(states, 3),
            tally=np.array([1, 1, 0, 0, np.iinfo(np.int64).max]),
        )
        self.store.states[loops.PARENT, 0] = -1
        self.store.table[0] = 0

    def advance(self, expansions: int, deadline: float, beam: int = 0) -> int:
        """Makes so many expansions, or until the deadline; FOUND, NONE or PAUSED. With a beam, NONE proves nothing."""
        last = self.store.tally[loops.EXPANDED] + expansions
        while True:
            left = int(last - self.store.tally[loops.EXPANDED])
            if left <= 0 or time.monotonic() >= deadline:
                return loops.PAUSED
            answer = loops.advance(*self.region, *self.at, *self.store, self.bound, beam, min(left, SLICE))
            if answer == loops.FULL:
                self.grow()
            elif answer != loops.PAUSED:
                return answer

    def grow(self) -> None:
        def larger(array: NDArray[np.int64], axis: int = 0) -> NDArray[np.int64]:
            """Of twice the size; zeros that nobody has written take no time."""
            shape = [2 * size if place == axis else size for place, size in enumerate(array.shape)]
            grown = _zeros(*shape)
            grown[tuple(slice(size) for size in array.shape)] = array
            return grown

        words, states, path, table, heap, tally = self.store
        self.store = Store(larger(words), larger(states, 1), larger(path), larger(table), larger(heap), tally)
        loops.refill(self.store.table, self.store.states[loops.CODED], int(tally[loops.STATES]))

    @property
    def cut(self) -> int:
        """The least bytes of a step above the bound."""
        return int(self.store.tally[loops.CUT])

    def order(self) -> list[int]:
        """How the last state was reached."""
        store = self.store
        steps: list[list[int]] = []
        state = int(store.tally[loops.STATES]) - 1
        while state >= 0:
            _, _, parent, start, end = store.states[:, state].tolist()
            steps.append(store.path[start:end].tolist())
            state = parent
        return [op for path in reversed(steps) for op in path]


def _zeros(*shape: int) -> NDArray[np.int64]:
    return np.zeros(shape, np.int64)
