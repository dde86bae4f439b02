"""Kahn's algorithm and what follows from it, for directed graphs whose nodes are indices.

A graph is given by `before`, for each node the nodes that it needs, and `after`, for each node the nodes that need it.
These functions run in the inner loops of the planner on graphs of up to 50 000 operators, so they work on plain lists
and not on networkx. Next: `graph.py`, whose `OperatorGraph.edges` has `before` and `after` of a model.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

Neighbours = Sequence[Sequence[int]]


def successors(before: Sequence[Iterable[int]]) -> list[list[int]]:
    """Return for each node the nodes that need it, in ascending order.

    Examples:
        >>> successors([[], [0], [0, 1]])
        [[1, 2], [2], []]
    """
    after: list[list[int]] = [[] for _ in before]
    for node, sources in enumerate(before):
        for source in sources:
            after[source].append(node)
    return after


def topological_order(
    before: Sequence[Sequence[int] | set[int]], after: Neighbours, choose: Literal["least", "first", "last"] = "least"
) -> list[int]:
    """Return an order in which every node comes after those it needs (Kahn, Communications of the ACM 5(11), 1962).

    Nodes of a cycle, and those behind one, are left out: the order is then shorter than the graph (see `find_cycle`).

    Args:
        choose: which of the ready nodes comes next: the one of least index, the one that became ready first, or the
            one that became ready last (which follows a branch to its end).

    Examples:
        >>> before = [[], [], [0], [1, 2]]
        >>> topological_order(before, successors(before))
        [0, 1, 2, 3]
        >>> topological_order(before, successors(before), "last")
        [1, 0, 2, 3]
    """
    count = _InDegrees(before, after)
    order: list[int] = []
    if choose == "least":
        heap = count.ready  # ascending, so it is a heap already
        while heap:
            order.append(heapq.heappop(heap))
            for node in count.take(order[-1]):
                heapq.heappush(heap, node)
        return order
    queue = deque(count.ready)
    while queue:
        order.append(queue.popleft() if choose == "first" else queue.pop())
        queue.extend(count.take(order[-1]))
    return order


def separators(before: Neighbours, after: Neighbours) -> set[int]:
    """Return the nodes that are comparable to all others: a path leads from or to each of them.

    The nodes must be listed in a topological order.

    Examples:
        >>> before = [[], [0], [0], [1, 2], [3]]  # 0 splits into two branches, which join at 3
        >>> sorted(separators(before, successors(before)))
        [0, 3, 4]
    """
    order = range(len(before))
    return _alone_ready(order, before, after) & _alone_ready(reversed(order), after, before)


def find_cycle(before: Sequence[Sequence[int] | set[int]], order: Iterable[int]) -> list[int]:
    """Return the nodes of a cycle, in the direction of the edges.

    Args:
        order: the result of `topological_order` for the graph; it must be shorter than the graph.

    Examples:
        >>> before = [[], [0, 2], [1]]
        >>> find_cycle(before, topological_order(before, successors(before)))
        [2, 1]
    """
    left = set(range(len(before))).difference(order)
    # Every node that is left needs another one that is left, so the path backwards comes to a node twice.
    node = min(left)
    step: dict[int, int] = {}
    while node not in step:
        step[node] = next(source for source in before[node] if source in left)
        node = step[node]
    cycle = [node]
    while step[cycle[-1]] != node:
        cycle.append(step[cycle[-1]])
    return cycle[::-1]


class _InDegrees:
    """The count of unmet needs of each node, which is the state of Kahn's algorithm."""

    def __init__(self, before: Sequence[Sequence[int] | set[int]], after: Neighbours) -> None:
        self.after = after
        self.missing = [len(sources) for sources in before]
        self.ready = [node for node, count in enumerate(self.missing) if count == 0]

    def take(self, node: int) -> list[int]:
        """Return the nodes that become ready when `node` is done."""
        opened = []
        missing = self.missing
        for reader in self.after[node]:
            missing[reader] -= 1
            if missing[reader] == 0:
                opened.append(reader)
        return opened


def _alone_ready(order: Iterable[int], before: Neighbours, after: Neighbours) -> set[int]:
    """Return the nodes that are the only ready one at their turn in `order`: a path leads from each to all later ones.

    If a second node were ready at the same time, no path would join the two.
    """
    count = _InDegrees(before, after)
    ready = len(count.ready)
    alone = set()
    for node in order:
        if ready == 1:
            alone.add(node)
        ready += len(count.take(node)) - 1
    return alone
