"""Small memory graphs, and their least peak by trying every order: nothing here knows `tvm_pipeline.memory`'s ways."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tvm_pipeline.memory.memory_graph import Buffer, MemoryGraph


def random_memory_graph(rng: random.Random, most: int = 8) -> MemoryGraph:
    """Return a random DAG of 1 to `most` operators.

    At random, too: several producers of a buffer, workspace, operators in place, inputs, and what is pinned.
    """
    count = rng.randint(1, most)
    several, in_place, workspace = rng.random() < 0.4, rng.random() < 0.5, rng.random() < 0.3
    density, largest = rng.choice((0.2, 0.4, 0.7)), rng.choice((3, 9, 100))
    buffers: list[Buffer] = []
    for _ in range(rng.randint(0, 2)):
        readers = tuple(op for op in range(count) if rng.random() < density)
        buffers.append(Buffer(f"in{len(buffers)}", rng.randint(0, largest), (), readers, rng.random() < 0.3))
    free = list(range(count))
    while free:
        writers = [free.pop(0)]
        while several and free and rng.random() < 0.4:
            writers.append(free.pop(rng.randrange(min(2, len(free)))))
        readers = tuple(op for op in range(max(writers) + 1, count) if rng.random() < density)
        name, pinned = f"b{len(buffers)}", rng.random() < (0.2 if readers else 0.7)
        buffers.append(Buffer(name, rng.randint(0, largest), tuple(writers), readers, pinned))
    marks = tuple(
        tuple(i for i, buffer in enumerate(buffers) if op in buffer.consumers and rng.random() < 0.7)
        for op in range(count)
    )
    return MemoryGraph(
        "random",
        tuple(f"op{op}" for op in range(count)),
        tuple(buffers),
        tuple(rng.randint(0, largest) for _ in range(count)) if workspace else (),
        marks if in_place else (),
    )


def every_order(graph: MemoryGraph, begun: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
    """Yield every topological order that begins with these operators."""
    if len(begun) == len(graph.operators):
        yield begun
    for op in set(range(len(graph.operators))).difference(begun):
        reads = (buffer for buffer in graph.buffers if op in buffer.consumers)
        if all(writer in begun for buffer in reads for writer in buffer.producers):
            yield from every_order(graph, (*begun, op))


def simulated_peak(graph: MemoryGraph, order: Sequence[int]) -> int:
    """Return the peak of an order by the first and the last step of every buffer."""
    when = {op: step for step, op in enumerate(order)}
    spans = []
    for buffer in graph.buffers:
        steps = [when[op] for op in buffer.producers + buffer.consumers]
        first = min((when[op] for op in buffer.producers), default=0)
        last = len(order) - 1 if buffer.pinned else max(steps, default=-1)
        spans.append((first, last, buffer))
    peak = 0
    for step, op in enumerate(order):
        alive = sum(buffer.bytes for first, last, buffer in spans if first <= step <= last)
        alive += graph.workspace_bytes[op] if graph.workspace_bytes else 0
        new = [buffer for first, _, buffer in spans if first == step and op in buffer.producers]
        for mark in graph.in_place[op] if graph.in_place else ():
            _, last, old = spans[mark]
            if new and last == step and not old.pinned and old.bytes >= new[0].bytes:
                alive -= new[0].bytes
                break
        peak = max(peak, alive)
    return peak


def least_peak(graph: MemoryGraph) -> int:
    """Return the least peak of all orders."""
    return min(simulated_peak(graph, order) for order in every_order(graph))
