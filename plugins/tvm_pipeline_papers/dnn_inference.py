"""The instances of dnn-partitioning whose value is the latency of one sample: splits, judged, and sets of nodes.

The model is that of the ILP for latency of https://github.com/msr-fiddle/dnn-partitioning with one set of nodes for
each accelerator. CPUs have no limit. A node on a CPU begins when all that it reads is ready, and takes `cpuLatency`. An
accelerator begins when all tensors that enter its set are ready. It takes the sum of the `fpgaLatency` of its nodes and
of the cost of every tensor that enters or leaves its set, each once, and all its nodes are done at that end. So its set
is convex: no path leaves it and returns. The nodes of one colour class are on one accelerator, or all on CPUs.
Latency is the last end. All nodes on CPUs are a split, so that every instance has one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvm_pipeline.core.topology import successors, topological_order
from tvm_pipeline.errors import GraphError
from tvm_pipeline_papers.dnn_partitioning import read_file


@dataclass(frozen=True, slots=True)
class Inference:
    """An instance without a backward pass. Its nodes are indices; each follows those that it reads.

    Attributes:
        ids: of the nodes in the file.
        before, after: the nodes that a node reads, and those that read it.
        first: the first node of the colour class of each node.
        slow_ms, fast_ms: a node on a CPU, and on an accelerator: infinite if that cannot run it.
        cost_ms: what an accelerator takes to send or receive the tensor of a node.
        size_bytes: what a node takes of the memory of its accelerator.
        accelerators: how many there are.
        memory_bytes: of each.
    """

    ids: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    slow_ms: tuple[float, ...]
    fast_ms: tuple[float, ...]
    cost_ms: tuple[float, ...]
    size_bytes: tuple[float, ...]
    accelerators: int
    memory_bytes: float

    def latency_ms(self, held: Sequence[Iterable[int]]) -> float:
        """Return the latency where each accelerator holds the nodes with these ids; infinite if that is no split."""
        sets = [set(ids) for ids in held]
        where = {node: number for number, ids in enumerate(sets) for node in ids}
        if len(sets) > self.accelerators or len(where) < sum(map(len, sets)) or not where.keys() <= set(self.ids):
            return math.inf
        return self.judged_ms([where.get(node, -1) for node in self.ids])[0]

    def judged_ms(self, where: Sequence[int]) -> tuple[float, float]:
        """Return the same, and the sum of the ends of all nodes, from the accelerator of each node, or -1 on a CPU."""
        # The parts are the accelerators, and each node that is on a CPU.
        parts = [self.accelerators + node if number < 0 else number for node, number in enumerate(where)]
        count = self.accelerators + len(parts)
        busy_ms, held_bytes = [0.0] * count, [0.0] * self.accelerators
        before: list[set[int]] = [set() for _ in range(count)]
        for node, part in enumerate(parts):
            readers = {parts[reader] for reader in self.after[node]} - {part}
            for reader in readers:
                before[reader].add(part)
                if reader < self.accelerators:
                    busy_ms[reader] += self.cost_ms[node]
            if part < self.accelerators:
                busy_ms[part] += self.fast_ms[node] + (self.cost_ms[node] if readers else 0.0)
                held_bytes[part] += self.size_bytes[node]
            else:
                busy_ms[part] += self.slow_ms[node]
        order = topological_order(before, successors(before), "first")
        fits = max(held_bytes, default=0.0) <= self.memory_bytes
        if not fits or len(order) < count or any(where[node] != where[first] for node, first in enumerate(self.first)):
            return math.inf, math.inf
        ends_ms = [0.0] * count
        for part in order:
            ends_ms[part] = busy_ms[part] + max((ends_ms[source] for source in before[part]), default=0.0)
        return max(ends_ms, default=0.0), sum(ends_ms[part] for part in parts)


def read_inference(path: Path | str) -> Inference:
    """Read an instance.

    Raises:
        GraphError: the file is no such instance, or has a backward pass.
    """
    file = read_file(path)
    if any(node.is_backward_node for node in file.nodes):
        raise GraphError(f"{path} has a backward pass: latency is for inference")
    index = {node.id: position for position, node in enumerate(file.nodes)}
    before: list[set[int]] = [set() for _ in file.nodes]
    for edge in file.edges:
        before[index[edge.dest_id]].add(index[edge.source_id])
    order = topological_order(before, successors(before))
    if len(order) < len(file.nodes):
        raise GraphError(f"{path} is no instance of dnn-partitioning: its nodes have a cycle")
    nodes = [file.nodes[position] for position in order]
    place = {position: node for node, position in enumerate(order)}
    sources = [sorted(place[source] for source in before[position]) for position in order]
    cost_ms = {edge.source_id: edge.cost for edge in file.edges}
    first: dict[tuple[bool, int], int] = {}
    return Inference(
        ids=tuple(node.id for node in nodes),
        before=tuple(map(tuple, sources)),
        after=tuple(map(tuple, successors(sources))),
        first=tuple(
            first.setdefault((True, node.id) if node.color_class is None else (False, node.color_class), position)
            for position, node in enumerate(nodes)
        ),
        slow_ms=tuple(node.cpu_latency for node in nodes),
        fast_ms=tuple(node.fpga_latency if node.supported_on_fpga else math.inf for node in nodes),
        cost_ms=tuple(cost_ms.get(node.id, 0.0) for node in nodes),
        size_bytes=tuple(node.size for node in nodes),
        accelerators=file.accelerators,
        memory_bytes=file.memory_bytes,
    )


class NodeSets:
    """Sets of nodes as the bits of an integer.

    Attributes:
        instance: whose nodes they are.
        ancestors, descendants: of each node, with itself.
        family: the nodes of the colour class of each node.
        barred: the nodes that no accelerator can hold.
    """

    def __init__(self, instance: Inference) -> None:
        self.instance = instance
        nodes = range(len(instance.ids))
        self.ancestors = [1 << node for node in nodes]
        self.descendants = list(self.ancestors)
        whole = [0 for _ in nodes]
        for node in nodes:
            whole[instance.first[node]] |= 1 << node
            for source in instance.before[node]:
                self.ancestors[node] |= self.ancestors[source]
        for node in reversed(nodes):
            for reader in instance.after[node]:
                self.descendants[node] |= self.descendants[reader]
        self.family = [whole[first] for first in instance.first]
        self.barred = sum(1 << node for node in nodes if not self.fits(self.closed(1 << node)))

    def families(self, members: int) -> int:
        """Return the nodes of all colour classes of these nodes."""
        found = 0
        for node in bits(members):
            found |= self.family[node]
        return found

    def closed(self, members: int) -> int:
        """Return the least set with these nodes that is convex and has whole colour classes."""
        found = above = below = 0
        while members:
            members = self.families(members)
            found |= members
            for node in bits(members):
                above |= self.ancestors[node]
                below |= self.descendants[node]
            members = above & below & ~found
        return found

    def size_bytes(self, members: int) -> float:
        return sum(self.instance.size_bytes[node] for node in bits(members))

    def fits(self, members: int) -> bool:
        """Return whether an accelerator runs all these nodes and has the memory for them."""
        runs = all(self.instance.fast_ms[node] < math.inf for node in bits(members))
        return runs and self.size_bytes(members) <= self.instance.memory_bytes

    def load_ms(self, members: int) -> float:
        """Return how long an accelerator with these nodes takes."""
        instance, moved = self.instance, set()
        for node in bits(members):
            moved |= {source for source in instance.before[node] if not members >> source & 1}
            if any(not members >> reader & 1 for reader in instance.after[node]):
                moved.add(node)
        runs_ms = sum(instance.fast_ms[node] for node in bits(members))
        return runs_ms + sum(instance.cost_ms[node] for node in moved)


def bits(members: int) -> list[int]:
    """Return the nodes of a set in ascending order."""
    octets = np.frombuffer(members.to_bytes(members.bit_length() // 8 + 1, "little"), np.uint8)
    found: list[int] = np.flatnonzero(np.unpackbits(octets, bitorder="little")).tolist()
    return found
