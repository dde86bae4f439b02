"""The published scheduler of SERENITY, to compare with.

Ahn et al., "Ordering Chaos: Memory-Aware Scheduling of Irregularly Wired Neural Networks for Edge Devices", MLSys 2020.
The graph is divided at its cut nodes (divide and conquer). Each part is ordered by dynamic programming over signatures,
the sets of operators that are ready (Algorithm 1). A budget limits the bytes, and falls and rises until a search is
both quick and successful (adaptive soft budgeting, Algorithm 2). The method is exact, but reaches far more states than
`memory/exact_order.py`, which is the method to use.
"""

from __future__ import annotations

import sys
import time
from itertools import accumulate
from typing import TypeAlias

from tvm_pipeline.core.topology import successors
from tvm_pipeline.memory import MemoryGraph, Ordering, footprint, kahn_order, predecessors
from tvm_pipeline.memory.regions import split

# The paper limits the seconds of a step, and does not name the limit. A number of schedules is the same on any machine.
STEP_LIMIT = 50_000


# A partial schedule: the operators that have run (bits), the bytes alive, the peak, and the order, last operator first.
_Steps: TypeAlias = "tuple[int, _Steps] | None"
_Partial: TypeAlias = "tuple[int, int, int, _Steps]"


def serenity_order(
    graph: MemoryGraph,
    time_limit_s: float | None = None,
    *,
    divide: bool = True,
    budgeting: bool = True,
    keep_first: bool = False,
) -> Ordering:
    """Return the optimal order that SERENITY's scheduler finds, with Kahn's order in the parts that take too long.

    Args:
        time_limit_s: for the whole graph.
        divide: whether the graph is divided at its cut nodes.
        budgeting: whether a budget limits the bytes. Without it a part is searched once, however many schedules a step
            has.
        keep_first: whether the first of several schedules with one signature and one peak is kept. The paper keeps the
            last (line 21 of Algorithm 1 compares with `<=`). The peaks are the same, and arenas may differ.
    """
    deadline = float("inf") if time_limit_s is None else time.monotonic() + time_limit_s
    kahn = kahn_order(graph)
    steps = footprint(graph, kahn)
    machine = Machine(graph)
    order: list[int] = []
    peaks, bound = [machine.start], machine.start
    for part in cells(graph) if divide else [range(len(graph))][: len(graph)]:
        hard = max(steps[part.start : part.stop])
        if budgeting:
            found = _soft_budgeting(machine, part, hard, deadline, keep_first)
        else:
            answer = _schedule(machine, part, sys.maxsize, deadline, sys.maxsize, keep_first)
            found = None if isinstance(answer, str) else answer
        order += found[1] if found else kahn[part.start : part.stop]
        peaks.append(found[0] if found else hard)
        bound = max(bound, found[0] if found else 0)
    peak = max(peaks)
    return Ordering(tuple(order), peak, bound)


def cells(graph: MemoryGraph) -> list[range]:
    """Return parts of the graph; each but the first begins with a cut node, which no other buffer passes by."""
    change = [0] * (len(graph) + 1)
    for buffer in graph.buffers:
        users = buffer.producers + buffer.consumers
        if users and min(users) + 1 < max(users):
            change[min(users) + 1] += 1
            change[max(users)] -= 1
    passing = list(accumulate(change))
    found: list[range] = []
    for part in split(graph):
        if found and passing[part.start]:
            found[-1] = range(found[-1].start, part.stop)
        else:
            found.append(part)
    return found


def _soft_budgeting(
    machine: Machine, part: range, hard: int, deadline: float, keep_first: bool
) -> tuple[int, list[int]] | None:
    """Return the peak and the order of a part by Algorithm 2; None if no budget is both quick and sufficient in time.

    In the printed algorithm, a second "no solution" in a row lowers the budget. This is the binary search that the text
    of the paper describes.
    """
    low, high, budget = 0, hard, hard
    while time.monotonic() < deadline:
        found = _schedule(machine, part, budget, deadline, STEP_LIMIT, keep_first)
        if isinstance(found, tuple):
            return found
        if found == "timeout":
            high, budget = budget, max(budget // 2, (low + budget) // 2)
        else:
            low, budget = budget, (budget + high + 1) // 2
        if budget in (low, high):
            return None
    return None


def _schedule(
    machine: Machine, part: range, budget: int, deadline: float, most: int, keep_first: bool
) -> tuple[int, list[int]] | str:
    """Return the peak and the order by Algorithm 1; "timeout" or "no solution" within the budget if there are none.

    The paper does not order the operators of a signature. They run in the graph's own order here.

    Args:
        most: how many schedules a step may have.
    """
    before = (1 << part.start) - 1
    ready = frozenset(op for op in part if machine.before[op] & ~before == 0)
    layer: dict[frozenset[int], _Partial] = {ready: (before, machine.alive(before), 0, None)}
    for _ in part:
        following: dict[frozenset[int], _Partial] = {}
        for signature, (done, alive, peak, order) in layer.items():
            for op in sorted(signature):
                needed, change = machine.step(done, alive, op)
                reached = max(peak, needed)
                if reached > budget:
                    continue
                then = done | 1 << op
                released = (o for o in machine.after[op] if o in part and machine.before[o] & ~then == 0)
                key = signature - {op} | set(released)
                known = following[key][2] if key in following else sys.maxsize
                if reached < known or (reached == known and not keep_first):
                    following[key] = (then, alive + change, reached, (op, order))
            if len(following) > most or time.monotonic() >= deadline:
                return "timeout"
        if not following:
            return "no solution"
        layer = following
    (_, _, peak, last) = next(iter(layer.values()))
    steps: list[int] = []
    while last is not None:
        op, last = last
        steps.append(op)
    return peak, steps[::-1]


class Machine:
    """The bytes alive as a function of the operators that have run, a set of bits."""

    def __init__(self, graph: MemoryGraph) -> None:
        self.graph = graph
        self.before = [sum(1 << other for other in found) for found in predecessors(graph)]
        self.after = successors(predecessors(graph))
        self.begins = [sum(1 << op for op in buffer.producers) for buffer in graph.buffers]
        self.users = [sum(1 << op for op in buffer.producers + buffer.consumers) for buffer in graph.buffers]
        self.touched: list[list[int]] = [[] for _ in graph.operators]
        for index, buffer in enumerate(graph.buffers):
            for op in buffer.producers + buffer.consumers:
                self.touched[op].append(index)
        self.start = self.alive(0)

    def is_live(self, buffer: int, done: int) -> bool:
        """Return whether the buffer is alive after the operators `done` have run."""
        begun = not self.begins[buffer] or self.begins[buffer] & done != 0
        return begun and (self.graph.buffers[buffer].pinned or self.users[buffer] & ~done != 0)

    def alive(self, done: int) -> int:
        """Return the bytes alive after the operators `done` have run."""
        return sum(buffer.bytes for index, buffer in enumerate(self.graph.buffers) if self.is_live(index, done))

    def step(self, done: int, alive: int, op: int) -> tuple[int, int]:
        """Return the bytes alive while an operator runs, and by how much they change from before it to after it."""
        then = done | 1 << op
        buffers = self.graph.buffers
        live = {index for index in self.touched[op] if self.is_live(index, done)}
        live_after = {index for index in self.touched[op] if self.is_live(index, then)}
        written = sum(buffers[i].bytes for i in self.touched[op] if i not in live and self.begins[i] >> op & 1)
        marks = self.graph.in_place[op] if self.graph.in_place else ()
        overwrites = any(i in live and i not in live_after and buffers[i].bytes >= written for i in marks)
        needed = alive + (0 if overwrites else written)
        needed += self.graph.workspace_bytes[op] if self.graph.workspace_bytes else 0
        return needed, sum(buffers[i].bytes for i in live_after) - sum(buffers[i].bytes for i in live)
