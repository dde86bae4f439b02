"""The order that moves the fewest bytes between a small on-chip memory and the memory behind it.

Two searches share the work. The first exchanges runs of operators in the best order known, and judges thousands of
orders by Belady's rule. The second is an exact best-first search; a state is the operators that have run, the buffers
on chip and the buffers with a copy off chip. If it ends in time, the answer is proven; else it gives a lower bound.
Next: `traffic.py`, which describes the model.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Literal, TypeAlias

import numpy as np

from tvm_pipeline.memory.memory_graph import MemoryGraph, check_order, predecessors
from tvm_pipeline.memory.orders import dfs_order, kahn_order, program_order
from tvm_pipeline.memory.traffic import Uses, belady, uses_of

# A state as bits: the operators that have run, the buffers on chip, and the buffers with a valid copy off chip.
State: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class TrafficOrder:
    """An order of a memory graph's operators, and what is proven of it.

    Attributes:
        order: indices of operators, first to run first.
        traffic_bytes: the bytes that it moves by Belady's rule.
        bound_bytes: a lower bound of the bytes that any order moves by any evictions.
        status: `optimal` if the two are equal.
    """

    order: tuple[int, ...]
    traffic_bytes: int
    bound_bytes: int

    @property
    def status(self) -> Literal["optimal", "feasible"]:
        return "optimal" if self.traffic_bytes == self.bound_bytes else "feasible"


def traffic_order(
    graph: MemoryGraph,
    capacity_bytes: int,
    known: Iterable[Sequence[int]] = (),
    *,
    exchanges: int = 20_000,
    most_states: int = 20_000,
) -> TrafficOrder:
    """Return the best order found for a chip of `capacity_bytes`; the answer is the same at every call.

    Args:
        known: orders to start from, such as that of least peak. The answer moves no more than any of them, nor than
            program order, Kahn's order or the depth-first order.
        exchanges: how many changed orders are judged.
        most_states: how many states the exact search may reach before it leaves the answer unproven.

    Raises:
        GraphError: `check_order` refuses an order of `known`.
        OptionError: `capacity_bytes` is not positive.
    """
    uses = uses_of(graph, capacity_bytes)
    orders = [*map(tuple, known), program_order(graph), kahn_order(graph), dfs_order(graph)]
    for order in orders:
        check_order(graph, order)
    best = min(orders, key=lambda order: _moved(order, uses, capacity_bytes))
    bound = least_traffic(graph, capacity_bytes)
    if _moved(best, uses, capacity_bytes) > bound:
        best = _exchanged(graph, uses, best, capacity_bytes, exchanges)
    if _moved(best, uses, capacity_bytes) > bound:
        found, bound = _Exact(graph, capacity_bytes).search(_moved(best, uses, capacity_bytes), most_states)
        if found is not None:
            best = min(best, found, key=lambda order: _moved(order, uses, capacity_bytes))
    return TrafficOrder(best, _moved(best, uses, capacity_bytes), bound)


def least_traffic(graph: MemoryGraph, capacity_bytes: int) -> int:
    """Return a lower bound of the bytes that any order moves: each input and output once, and what streams."""
    exact = _Exact(graph, capacity_bytes)
    return exact.to_come(exact.start, exact.every)


def _moved(order: Sequence[int], uses: Uses, capacity: int) -> int:
    """Return the bytes that an order moves by Belady's rule."""
    return int(sum(belady(np.array(order, np.int64), uses, capacity)))


# Exchanges


def _exchanged(graph: MemoryGraph, uses: Uses, order: tuple[int, ...], capacity: int, count: int) -> tuple[int, ...]:
    """Exchange neighbouring runs of an order `count` times, and return the best order met.

    An exchange is kept if it moves at most a threshold more; the threshold falls to 0 (Dueck and Scheuer, "Threshold
    accepting", Journal of Computational Physics 90, 1990).
    """
    before = predecessors(graph)
    rng = random.Random(0)
    now = least = _moved(order, uses, capacity)
    best, threshold = order, max(buffer.bytes for buffer in graph.buffers) / 2
    for turn in range(count):
        first = rng.randrange(len(order))
        # Runs are mostly short: one operator, or a branch of a few.
        middle = first + 1 + int(8 * rng.random() ** 3)
        last = middle + 1 + int(8 * rng.random() ** 3)
        left, right = order[first:middle], order[middle:last]
        if last > len(order) or any(not before[index].isdisjoint(left) for index in right):
            continue
        changed = (*order[:first], *right, *left, *order[last:])
        then = _moved(changed, uses, capacity)
        if then <= now + threshold * (1 - turn / count):
            order, now = changed, then
            if now < least:
                best, least = order, now
    return best


# Best first


class _Exact:
    """Best-first search (A*) for the cheapest way from nothing run to everything run."""

    def __init__(self, graph: MemoryGraph, capacity: int) -> None:
        self.graph, self.capacity = graph, capacity
        self.size = [buffer.bytes for buffer in graph.buffers]
        self.reads = [0] * len(graph)
        self.writes = [0] * len(graph)
        self.producers = [_bits(buffer.producers) for buffer in graph.buffers]
        self.users = [_bits((*buffer.producers, *buffer.consumers)) for buffer in graph.buffers]
        self.kept = _bits(position for position, buffer in enumerate(graph.buffers) if buffer.pinned)
        for position, buffer in enumerate(graph.buffers):
            for index in buffer.consumers:
                self.reads[index] |= 1 << position
            for index in buffer.producers:
                self.writes[index] |= 1 << position
        self.before = [_bits(found) for found in predecessors(graph)]
        self.workspace = graph.workspace_bytes or (0,) * len(graph)
        self.streams = 0
        for index in range(len(graph)):
            if self.bytes(self.reads[index] | self.writes[index]) + self.workspace[index] > capacity:
                self.streams |= 1 << index
        self.all = (1 << len(graph)) - 1
        self.every = (1 << len(graph.buffers)) - 1
        self.consumers = [_bits(buffer.consumers) for buffer in graph.buffers]
        self.start: State = (
            0,
            0,
            _bits(position for position, buffer in enumerate(graph.buffers) if not buffer.producers),
        )

    def bytes(self, positions: int) -> int:
        """Return the bytes of the buffers at these positions, which are bits."""
        return sum(self.size[position] for position in _positions(positions))

    def search(self, incumbent: int, most_states: int) -> tuple[tuple[int, ...] | None, int]:
        """Return the order of a cheapest way if it moves less than `incumbent` and is found in time, and a bound."""
        ahead = {self.start: self.to_come(self.start, self.every)}
        heap = [(ahead[self.start], 0, 0, self.start)]
        paid: dict[State, int] = {self.start: 0}
        came: dict[State, tuple[State, int]] = {}
        done: set[State] = set()
        while heap:
            total, _, _, state = heapq.heappop(heap)
            if state in done:
                continue
            if total >= incumbent or len(paid) >= most_states:
                return None, min(total, incumbent)
            if state[0] == self.all:
                return _way(came, state), total
            done.add(state)
            for index in self.ready(state):
                changed = state[1] | self.reads[index] | self.writes[index]
                others = ahead[state] - self.to_come(state, changed)
                for then, cost in self.run(state, index):
                    moved = paid[state] + cost
                    if moved < paid.get(then, moved + 1):
                        paid[then], came[then] = moved, (state, index)
                        ahead[then] = others + self.to_come(then, changed)
                        heapq.heappush(heap, (moved + ahead[then], -then[0].bit_count(), len(paid), then))
        return None, incumbent

    def ready(self, state: State) -> list[int]:
        """Return the operators to try next: all that can run, or one alone that is safe to run first."""
        ran, chip, behind = state
        found = []
        for index in _positions(self.all & ~ran):
            if self.before[index] & ~ran:
                continue
            # It is safe if it moves nothing, and writes at most as many bytes as each buffer that it ends has, where
            # none of these buffers could be evicted at no cost.
            ends = [b for b in _positions(self.reads[index]) if not self.users[b] & ~ran & ~(1 << index)]
            writes = self.bytes(self.writes[index] & ~chip)
            if (
                not self.reads[index] & ~chip
                and ends
                and not any(behind >> b & 1 or self.kept >> b & 1 for b in ends)
                and self.bytes(chip) + writes + self.workspace[index] <= self.capacity
                and writes <= min(self.size[b] for b in ends)
                and all(self.producers[b] == 1 << index for b in _positions(self.writes[index]))
            ):
                return [index]
            found.append(index)
        return found

    def run(self, state: State, index: int) -> Iterator[tuple[State, int]]:
        """Yield the states after operator `index`, one for each minimal set of buffers to evict, with their costs."""
        ran, chip, behind = state
        touched = self.reads[index] | self.writes[index]
        begun = _bits(b for b in _positions(touched & ~chip) if self.producers[b] & ran or not self.producers[b])
        loads = self.bytes(begun)
        ran |= 1 << index
        over = self.bytes(chip | touched) + self.workspace[index] - self.capacity
        streams = self.streams >> index & 1
        for leaving in [0] if streams else self.smallest(chip & ~touched, over):
            stores = self.bytes(leaving & ~behind)
            there = (chip & ~leaving) | touched
            same = (behind | leaving) & ~self.writes[index]
            live = _bits(b for b in _positions(there) if self.users[b] & ~ran)
            out = there & ~same & (self.kept & ~live | (live if streams else 0))
            # A dropped buffer needs no copy off chip, so states that differ in this are made equal.
            same = (same | out) & ~(there & ~live & ~self.kept)
            yield (ran, 0 if streams else live, same), loads + stores + self.bytes(out)

    def smallest(self, positions: int, over: int) -> list[int]:
        """Return the minimal sets of buffers that free `over` bytes: no buffer of a set can be left out."""
        if over <= 0:
            return [0]
        found: list[int] = []
        members = sorted((b for b in _positions(positions) if self.size[b]), key=lambda b: self.size[b])
        # If even so many of the smallest buffers free enough, no minimal set is larger than that.
        enough = next(
            count for count, freed in enumerate(accumulate(self.size[b] for b in members), 1) if freed >= over
        )
        for count in range(1, enough + 1):
            for choice in combinations(members, count):
                freed = sum(self.size[b] for b in choice)
                if freed >= over > freed - self.size[choice[0]]:
                    found.append(_bits(choice))
        return found

    def to_come(self, state: State, positions: int) -> int:
        """Return a lower bound of the bytes of these buffers that every way to the end still moves; 0 at the end.

        A buffer that is only off chip is loaded if it is read again. An output is written once. A buffer that a
        streaming operator writes and another operator reads is written and loaded. A buffer that several streaming
        operators read is loaded for each of them but the first.
        """
        ran, chip, behind = state
        total = 0
        for position in _positions(positions):
            to_read, to_write = self.consumers[position] & ~ran, self.producers[position] & ~ran
            on_chip, kept = chip >> position & 1, self.kept >> position & 1
            returns = 0
            if to_read:
                streamed = to_write and not to_write & ~self.streams
                returns = max((to_read & self.streams).bit_count() - 1, 0) + bool(streamed)
                total += self.size[position] * (returns + (not on_chip and not to_write))
            stale = to_write or not behind >> position & 1
            if stale and (returns or (kept and (to_write or on_chip))):
                total += self.size[position]
        return total


def _way(came: dict[State, tuple[State, int]], state: State) -> tuple[int, ...]:
    """Return the operators on the way to a state."""
    order = []
    while state in came:
        state, index = came[state]
        order.append(index)
    return tuple(reversed(order))


def _bits(positions: Iterable[int]) -> int:
    bits = 0
    for position in positions:
        bits |= 1 << position
    return bits


def _positions(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
