"""How many orders of a graph have which peak: exact counts over all topological orders, and orders drawn uniformly.

What is alive after some operators have run depends on which they are, a downset, and not on their order. So all orders
that begin with the same downset are counted together, by the peak of their beginning. Graphs of a cell have thousands
of downsets and up to 10^14 orders. Next: `memory/exact_order.py`, which finds one best order of large graphs.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate

from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory import MemoryGraph
from tvm_pipeline_papers.serenity import Machine

MOST_DOWNSETS = 200_000


class Orders:
    """The topological orders of a graph, counted.

    Args:
        most_bytes: count only the orders that need no more. There are fewer sets of operators to go through, so that
            the best orders of larger graphs can be counted.

    Attributes:
        peaks: for each peak in bytes how many orders have it, by rising peaks.
        downsets: how many sets of operators can have run.

    Raises OptionError if there are more than MOST_DOWNSETS of these sets, or if no order needs so little.

    Examples:
        >>> from tvm_pipeline.memory import Buffer, MemoryGraph
        >>> buffers = (Buffer("wide", 9, (0,), (2,)), Buffer("thin", 1, (1,), (3,)), Buffer("a", 1, (2,), (4,)))
        >>> graph = MemoryGraph("net", tuple("ijklm"), (*buffers, Buffer("b", 1, (3,), (4,)), Buffer("z", 1, (4,), ())))
        >>> Orders(graph).peaks
        {10: 1, 11: 5}
    """

    def __init__(self, graph: MemoryGraph, most_bytes: int | None = None) -> None:
        self.graph, self.machine = graph, Machine(graph)
        self.most = sys.maxsize if most_bytes is None else most_bytes
        self.layers: list[dict[int, Counter[int]]] = [{0: Counter({self.machine.start: 1})}]
        self.downsets = 1
        for _ in range(len(graph)):
            self.layers.append(self._next(self.layers[-1]))
        if not self.layers[-1] or self.machine.start > self.most:
            raise OptionError(f"no order of graph {graph.name} needs {most_bytes} bytes or less; give more bytes")
        (counts,) = self.layers[-1].values()
        self.peaks = dict(sorted(counts.items()))

    @property
    def count(self) -> int:
        """Return the number of orders."""
        return sum(self.peaks.values())

    def within(self, most_bytes: int) -> int:
        """Return how many orders need at most so many bytes."""
        return sum(count for peak, count in self.peaks.items() if peak <= most_bytes)

    def draw(self, rng: random.Random) -> tuple[int, ...]:
        """Return one of the orders, each with the same probability."""
        order: list[int] = []
        done = (1 << len(self.graph)) - 1
        for layer in reversed(self.layers[:-1]):
            # The last operator of a beginning, by how many beginnings end with it.
            counts = {op: layer[done ^ 1 << op].total() for op in self._last(layer, done)}
            at = rng.randrange(sum(counts.values()))
            op = next(op for op, total in zip(counts, accumulate(counts.values()), strict=True) if at < total)
            order.append(op)
            done ^= 1 << op
        return tuple(reversed(order))

    def _last(self, layer: dict[int, Counter[int]], done: int) -> Iterator[int]:
        for op in range(len(self.graph)):
            before = done ^ 1 << op
            if not done >> op & 1 or before not in layer:
                continue
            if self.machine.step(before, self.machine.alive(before), op)[0] <= self.most:
                yield op

    def _next(self, layer: dict[int, Counter[int]]) -> dict[int, Counter[int]]:
        machine = self.machine
        following: dict[int, Counter[int]] = {}
        for done, counts in layer.items():
            alive = machine.alive(done)
            for op, before in enumerate(machine.before):
                if done >> op & 1 or before & ~done:
                    continue
                needed, _ = machine.step(done, alive, op)
                if needed > self.most:
                    continue
                reached = following.setdefault(done | 1 << op, Counter())
                for peak, count in counts.items():
                    reached[max(peak, needed)] += count
            if self.downsets + len(following) > MOST_DOWNSETS:
                raise OptionError(
                    f"graph {self.graph.name} has more than {MOST_DOWNSETS} sets of operators that can have run, too "
                    "many to count its orders; give a part of it, such as a cell, or a limit of bytes"
                )
        self.downsets += len(following)
        return following
