"""The bytes that an order moves between a small on-chip memory and the memory behind it.

The order with the least peak is not the order with the least traffic: if not everything fits, it matters how soon a
tensor is needed again. This module judges an order with Belady's rule. Next: `traffic_order.py`, which searches for the
order that moves the least.

The model, for a memory graph whose buffers are on chip as a whole or not at all:

- The graph's inputs start off chip; pinned buffers (outputs) must be off chip at the end. Weights count if they are
  buffers of the graph: inputs with one reader each.
- While an operator runs, everything that it reads and writes is on chip, with its workspace. Missing buffers are
  loaded. A buffer that several operators write is loaded again like one that is read; nothing is written in place.
- If the capacity does not suffice, buffers are evicted. A buffer without a copy off chip is written there first. A
  buffer that no operator needs any more is dropped at no cost; an output is written once.
- An operator that needs more than the whole chip streams. It takes the whole chip, so that everything else leaves. The
  buffers that it reads and that were not on chip pass once, those that it writes are written through, and the chip is
  empty afterwards. So every capacity above 0 can be judged; `Traffic.streamed` names the operators that stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory.memory_graph import MemoryGraph, check_order
from tvm_pipeline.solvers.hot import hot

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that an order moves.

    Attributes:
        streamed: names of the operators that need more than the whole on-chip memory.
    """

    loaded_bytes: int
    stored_bytes: int
    streamed: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return self.loaded_bytes + self.stored_bytes


def traffic(graph: MemoryGraph, order: Sequence[int], capacity_bytes: int) -> Traffic:
    """Return what `order` moves on a chip of `capacity_bytes` that evicts the buffer whose next use is the latest.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966. If buffers
    have different sizes and some must be written back, his rule is not optimal; the benchmark `memory_traffic.py`
    measures how often. If two buffers have the same next use, one with a copy off chip is evicted first.

    Raises:
        GraphError: `check_order` refuses `order`.
        OptionError: `capacity_bytes` is not positive.
    """
    check_order(graph, order)
    uses = uses_of(graph, capacity_bytes)
    loaded, stored = belady(np.array(order, np.int64), uses, capacity_bytes)
    streamed = tuple(name for name, need in zip(graph.operators, uses.need, strict=True) if need > capacity_bytes)
    return Traffic(int(loaded), int(stored), streamed)


class Uses(NamedTuple):
    """A memory graph as arrays, for the loops.

    Attributes:
        start: operator i uses the buffers `buffer[start[i] : start[i + 1]]`, first those that it reads.
        writes: for each of these uses, whether it writes the buffer.
        size, users, given, kept: for each buffer its bytes, how many operators use it, whether it is an input, and
            whether it is pinned.
        need, workspace: for each operator the bytes of all that it uses, and of its workspace alone.
    """

    start: Array
    buffer: Array
    writes: Array
    size: Array
    users: Array
    given: Array
    kept: Array
    need: Array
    workspace: Array


def uses_of(graph: MemoryGraph, capacity_bytes: int) -> Uses:
    """Return the graph as arrays; raise OptionError unless the capacity is positive."""
    if capacity_bytes <= 0:
        raise OptionError(f"an on-chip memory of {capacity_bytes} bytes holds nothing; give a capacity above 0")
    rows: list[list[tuple[bool, int]]] = [[] for _ in graph.operators]
    for position, buffer in enumerate(graph.buffers):
        for index in buffer.consumers:
            rows[index].append((False, position))
        for index in buffer.producers:
            rows[index].append((True, position))
    workspace = np.array(graph.workspace_bytes or [0] * len(graph), np.int64)
    flat = [use for row in rows for use in sorted(row)]
    return Uses(
        np.cumsum([0, *map(len, rows)]),
        np.array([position for _, position in flat], np.int64),
        np.array([write for write, _ in flat], np.bool_),
        np.array([buffer.bytes for buffer in graph.buffers], np.int64),
        np.array([len(buffer.producers) + len(buffer.consumers) for buffer in graph.buffers], np.int64),
        np.array([not buffer.producers for buffer in graph.buffers], np.bool_),
        np.array([buffer.pinned for buffer in graph.buffers], np.bool_),
        workspace + [sum(graph.buffers[position].bytes for _, position in row) for row in rows],
        workspace,
    )


@hot
def belady(order: Array, uses: Uses, capacity: int) -> tuple[int, int]:
    """Return the bytes that an order loads and stores; the order must be legal."""
    start, buffer, size = uses.start, uses.buffer, uses.size
    never = len(order)
    next_use = np.full(len(size), never)  # for each buffer the step that uses it next
    after = np.empty(len(buffer), np.int64)  # the same, for each use, after it
    for step in range(never - 1, -1, -1):
        for use in range(start[order[step]], start[order[step] + 1]):
            after[use] = next_use[buffer[use]]
            next_use[buffer[use]] = step
    begun, off_chip = uses.given.copy(), uses.given.copy()  # whether it was written; has a copy off chip
    on_chip = np.zeros(len(size), np.bool_)
    on_chip_bytes, loaded, stored = 0, 0, 0
    for step in range(never):
        index = order[step]
        streams = uses.need[index] > capacity
        missing = uses.workspace[index]
        for use in range(start[index], start[index + 1]):
            if not on_chip[buffer[use]]:
                missing += size[buffer[use]]
                if begun[buffer[use]]:
                    loaded += size[buffer[use]]
        while not streams and on_chip_bytes + missing > capacity:
            gone = -1
            for position in range(len(size)):
                if on_chip[position] and next_use[position] > step:
                    later = gone < 0 or next_use[position] > next_use[gone]
                    if later or (next_use[position] == next_use[gone] and off_chip[position] and not off_chip[gone]):
                        gone = position
            if not off_chip[gone]:
                stored += size[gone]
            off_chip[gone], on_chip[gone] = True, False
            on_chip_bytes -= size[gone]
        for use in range(start[index], start[index + 1]):
            position = buffer[use]
            next_use[position], begun[position] = after[use], True
            off_chip[position] = off_chip[position] and not uses.writes[use]
            if not on_chip[position]:
                on_chip_bytes += size[position]
            on_chip[position] = True
        # Buffers that are never used again leave; after an operator that took the whole chip, all buffers leave.
        for other in range(len(size) if streams else start[index + 1] - start[index]):
            position = other if streams else buffer[start[index] + other]
            if on_chip[position] and (streams or next_use[position] == never):
                if not off_chip[position] and (uses.kept[position] or next_use[position] < never):
                    stored += size[position]
                    off_chip[position] = True
                on_chip[position] = False
                on_chip_bytes -= size[position]
    return loaded, stored
