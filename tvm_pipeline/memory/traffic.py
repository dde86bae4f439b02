"""What an order moves between a small on-chip memory and the memory behind it.

Minimum peak is not minimum traffic: where not all fits, what counts is how soon a tensor is wanted again. Here an order
is judged with Belady's rule; next: `traffic_order.py`, which looks for the order that moves least.

The model, for a memory graph of buffers that are on chip as a whole or not at all:

- The graph's inputs begin off chip; pinned buffers (outputs) must be off chip at the end. Weights are counted where
  they are buffers of the graph: an input with one reader each.
- While an operator runs, all that it reads and writes is on chip, with its workspace. What is missing is loaded. A
  buffer that several operators write is loaded again like one that is read; nothing is written in place.
- To make room, buffers are evicted: one that is not off chip, too, is written there. One that no operator needs any
  more is dropped free, an output is written once.
- An operator that needs more than the whole chip streams: it takes all of it, so that everything else leaves; what
  it reads and was not on chip passes once, what it writes is written through, and the chip is empty afterwards. So
  every capacity above 0 can be judged; `Traffic.streamed` says which operators a capacity is too small for.
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
    """What `order` moves where the chip holds `capacity_bytes`, evicting what is wanted again last.

    Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966. With
    buffers of unequal sizes, of which some must be written back, his rule is no longer optimal: the benchmark
    `memory_traffic.py` says how often. Of buffers wanted at the same time, one that is off chip already goes first.

    Raises:
        GraphError: `order` is none that `check_order` takes.
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
        start: operator i uses the buffers `buffer[start[i] : start[i + 1]]`, those that it reads first.
        writes: whether it writes that buffer.
        size, users, given, kept: of each buffer: bytes, how many operators use it, whether it is an input, and
            whether it is pinned.
        need, workspace: bytes of all that an operator uses, and of its workspace alone.
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
    """Raises OptionError unless the capacity is positive."""
    if capacity_bytes <= 0:
        raise OptionError(f"an on-chip memory of {capacity_bytes} bytes holds nothing; give a capacity above 0")
    rows: list[list[tuple[bool, int]]] = [[] for _ in graph.operators]
    for place, buffer in enumerate(graph.buffers):
        for index in buffer.consumers:
            rows[index].append((False, place))
        for index in buffer.producers:
            rows[index].append((True, place))
    workspace = np.array(graph.workspace_bytes or [0] * len(graph), np.int64)
    flat = [use for row in rows for use in sorted(row)]
    return Uses(
        np.cumsum([0, *map(len, rows)]),
        np.array([place for _, place in flat], np.int64),
        np.array([write for write, _ in flat], np.bool_),
        np.array([buffer.bytes for buffer in graph.buffers], np.int64),
        np.array([len(buffer.producers) + len(buffer.consumers) for buffer in graph.buffers], np.int64),
        np.array([not buffer.producers for buffer in graph.buffers], np.bool_),
        np.array([buffer.pinned for buffer in graph.buffers], np.bool_),
        workspace + [sum(graph.buffers[place].bytes for _, place in row) for row in rows],
        workspace,
    )


@hot
def belady(order: Array, uses: Uses, capacity: int) -> tuple[int, int]:
    """Bytes loaded and stored by an order, which must be a legal one."""
    start, buffer, size = uses.start, uses.buffer, uses.size
    never = len(order)
    wanted = np.full(len(size), never)  # the step that uses a buffer next
    after = np.empty(len(buffer), np.int64)  # the same, as it is once this use is over
    for step in range(never - 1, -1, -1):
        for use in range(start[order[step]], start[order[step] + 1]):
            after[use] = wanted[buffer[use]]
            wanted[buffer[use]] = step
    begun, behind = uses.given.copy(), uses.given.copy()  # whether it was written, and whether it is off chip, too
    on_chip = np.zeros(len(size), np.bool_)
    held, loaded, stored = 0, 0, 0
    for step in range(never):
        index = order[step]
        streams = uses.need[index] > capacity
        missing = uses.workspace[index]
        for use in range(start[index], start[index + 1]):
            if not on_chip[buffer[use]]:
                missing += size[buffer[use]]
                if begun[buffer[use]]:
                    loaded += size[buffer[use]]
        while not streams and held + missing > capacity:
            gone = -1
            for place in range(len(size)):
                if on_chip[place] and wanted[place] > step:
                    later = gone < 0 or wanted[place] > wanted[gone]
                    if later or (wanted[place] == wanted[gone] and behind[place] and not behind[gone]):
                        gone = place
            if not behind[gone]:
                stored += size[gone]
            behind[gone], on_chip[gone] = True, False
            held -= size[gone]
        for use in range(start[index], start[index + 1]):
            place = buffer[use]
            wanted[place], begun[place] = after[use], True
            behind[place] = behind[place] and not uses.writes[use]
            if not on_chip[place]:
                held += size[place]
            on_chip[place] = True
        # What nobody wants any more leaves; all does, after an operator that took the whole chip.
        for other in range(len(size) if streams else start[index + 1] - start[index]):
            place = other if streams else buffer[start[index] + other]
            if on_chip[place] and (streams or wanted[place] == never):
                if not behind[place] and (uses.kept[place] or wanted[place] < never):
                    stored += size[place]
                    behind[place] = True
                on_chip[place] = False
                held -= size[place]
    return loaded, stored
