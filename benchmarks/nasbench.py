"""Networks like those of NASBench-101, of random cells, depth, width and picture, for predictors to learn from.

Ying et al., "NAS-Bench-101: Towards Reproducible Neural Architecture Search", ICML 2019. A cell is a DAG of at most 7
vertices and 9 edges; its inner vertices are 3x3 convolutions, 1x1 convolutions and 3x3 max-pools. A vertex adds what it
reads, each output of the cell's input through a 1x1 convolution of its own; the cell's output concatenates what it
reads, and adds the cell's input to that where it reads it, too. A network is a 3x3 convolution, stacks of equal cells
with a max-pool between them that halves the picture while the channels double, the mean of each channel and a dense
layer. Here as in a TFLite file of int8: a number is a byte, normalisation and activation are within the convolution.

One thing is simpler: the parts of a concatenation are equally wide. So the output of a cell may be up to 4 channels
wider than asked, where the original cuts tensors.

PredPar (Zou et al., MILCOM 2024) varies the cells, the number of stacks and that of cells a stack. Here the width and
the picture vary, too, so that networks of all sizes come about. Next: `predpar_data.py`, which measures their segments.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass

from profiling_partitioner import Int8Net

from tvm_pipeline.core.graph import OperatorGraph

MOST_VERTICES, MOST_EDGES = 7, 9
LAYERS = ("conv3x3", "conv1x1", "maxpool3x3")
SEGMENT_BYTES = 6_000_000  # of parameters, that an Edge TPU keeps, by the paper's own count
SEGMENTS = range(2, 9)
SHARES = (1, 1, 1, 1, 1, 1, 9)  # of the numbers of segments: three fifths of the paper's networks have 8

# What networks are drawn from.
STACKS, CELLS, WIDTHS, PICTURES = (2, 3, 4), range(1, 8), (64, 96, 128, 160, 192, 256), (32, 48, 64, 96, 128)
PARAM_BYTES, OPERATORS = (4_000_000, 80_000_000), range(16, 301)


@dataclass(frozen=True)
class Cell:
    """A cell: vertex 0 is its input, the last one its output.

    Attributes:
        layers: of the inner vertices, in their order.
        edges: (from, to), each to a later vertex.
    """

    layers: tuple[str, ...]
    edges: tuple[tuple[int, int], ...]

    @property
    def output(self) -> int:
        return len(self.layers) + 1

    def reads(self, vertex: int) -> tuple[int, ...]:
        return tuple(start for start, end in self.edges if end == vertex)


def random_cell(rng: random.Random) -> Cell:
    """Return a cell, as the original draws them: each edge with probability 1/2, and again until the cell is legal."""
    while True:
        count = rng.randint(3, MOST_VERTICES)
        edges = [edge for edge in itertools.combinations(range(count), 2) if rng.random() < 0.5]
        layers = [rng.choice(LAYERS) for _ in range(count - 2)]
        # A vertex that is not on a way from the input to the output is left out.
        reached, needed = {0}, {count - 1}
        for start, end in edges:  # they are sorted by their start
            reached |= {end} if start in reached else set()
        for start, end in reversed(edges):
            needed |= {start} if end in needed else set()
        kept = sorted(reached & needed)
        if not {0, count - 1} < set(kept):
            continue
        place = {vertex: index for index, vertex in enumerate(kept)}
        edges = [(place[start], place[end]) for start, end in edges if start in place and end in place]
        if len(edges) <= MOST_EDGES:
            return Cell(tuple(layers[vertex - 1] for vertex in kept[1:-1]), tuple(edges))


def nasbench(cell: Cell, stacks: int = 3, cells: int = 3, width: int = 128, picture: int = 32) -> OperatorGraph:
    """Return the network of `stacks` stacks, each of `cells` cells; the defaults are the original's."""
    net = Int8Net()
    x = net.conv(net.add("input", (), (picture, picture, 3)), width, 3)
    for stack in range(stacks):
        if stack:
            x = net.pool(x)
        for _ in range(cells):
            x = _with_cell(net, x, cell, width * 2**stack)
    net.classifier(x, 10)
    return net.graph("nasbench")


def _with_cell(net: Int8Net, x: int, cell: Cell, channels: int) -> int:
    """Add a cell that reads operator `x`, and return its output."""
    joined = [vertex for vertex in cell.reads(cell.output) if vertex]
    wide = math.ceil(channels / len(joined)) if joined else channels

    def summed(terms: list[int]) -> int:
        total = terms[0]
        for term in terms[1:]:
            total = net.add("add", (total, term), net.shapes[total])
        return total

    at: dict[int, int] = {}
    for vertex, layer in enumerate(cell.layers, 1):
        read = summed([at[other] if other else net.conv(x, wide) for other in cell.reads(vertex)])
        at[vertex] = net.pool(read, 1) if layer == "maxpool3x3" else net.conv(read, wide, 3 if "3x3" in layer else 1)
    outputs = [at[vertex] for vertex in joined]
    if len(outputs) > 1:
        size = net.shapes[outputs[0]][0]
        outputs = [net.add("concat", tuple(outputs), (size, size, wide * len(outputs)))]
    if 0 in cell.reads(cell.output):
        outputs.append(net.conv(x, wide * max(1, len(joined))))
    return summed(outputs)


def random_nasbench(rng: random.Random) -> OperatorGraph:
    """Return a network of PARAM_BYTES and OPERATORS; as many as SHARES says have so many segments."""
    [segments] = rng.choices(SEGMENTS, SHARES)
    while True:
        graph = nasbench(random_cell(rng), *map(rng.choice, (STACKS, CELLS, WIDTHS, PICTURES)))
        least, most = PARAM_BYTES
        if len(graph) in OPERATORS and least <= param_bytes(graph) <= most and segments_of(graph) == segments:
            return graph


def param_bytes(graph: OperatorGraph) -> int:
    return sum(operator.param_bytes for operator in graph.operators)


def segments_of(graph: OperatorGraph) -> int:
    """Return into how many segments the paper cuts a network: one for each 6 MB of parameters, 2 to 8."""
    return min(max(math.ceil(param_bytes(graph) / SEGMENT_BYTES), SEGMENTS[0]), SEGMENTS[-1])
