"""Operator graphs made to measure: the shapes on which planners of real networks differ, at any size.

Chains are the least that a planner must do; random DAGs, RandWire and NASNet cells are wide, and have more downsets
than a network of layers; transformers are narrow and, at 50 000 operators, long. Next: `tests/test_generators.py`,
which holds them against the figures that the papers publish.

A parameter and an element of a tensor are a byte each. What is random comes from the `random.Random` that is given, so
that a seed makes one graph.
"""

from __future__ import annotations

import math
import random

import networkx

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import Node, graph_of_nodes


class Net:
    """The nodes of a graph as they are added, each named after what it computes and after those that it reads."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.shapes: list[tuple[int, ...]] = []
        self.edges: list[tuple[int, int]] = []

    def add(self, op: str, reads: tuple[int, ...], shape: tuple[int, ...], params: int = 0, macs: int = 0) -> int:
        """Add a node and return its index; without `macs` it does one operation for each element that it writes."""
        index = len(self.nodes)
        self.nodes.append(Node(f"{op}_{index}", op, params, None, macs or math.prod(shape), shape))
        self.shapes.append(shape)
        self.edges += ((read, index) for read in reads)
        return index

    def graph(self, name: str) -> OperatorGraph:
        return graph_of_nodes(name, self.nodes, self.edges)


def chain(rng: random.Random, operators: int) -> OperatorGraph:
    """Return operators in a row, the graph that Velasco-Montero et al. (IEEE Access 2023) cut."""
    return random_dag(rng, operators, most_reads=1, reach=1)


def random_dag(rng: random.Random, operators: int, most_reads: int = 3, reach: int = 8) -> OperatorGraph:
    """Return a DAG whose operators read one to `most_reads` of the `reach` before them, which bounds its width.

    The random predecessors are those of Tobita and Kasahara, "A standard task graph set for fair evaluation of
    multiprocessor scheduling algorithms", Journal of Scheduling 5, 2002. All but the last `reach` operators are read.
    Half of the operators have parameters; sizes span three orders of magnitude.
    """
    net = Net()
    unread: set[int] = set()
    for index in range(operators):
        near = range(max(0, index - reach), index)
        reads = rng.sample(near, min(len(near), rng.randint(1, most_reads)))
        if near and near[0] == index - reach and near[0] in unread.difference(reads):
            reads[0] = near[0]
        unread = unread.difference(reads) | {index}
        params = int(10 ** rng.uniform(3, 6)) if rng.random() < 0.5 else 0
        size, macs = int(10 ** rng.uniform(3, 6)), int(10 ** rng.uniform(5, 8))
        net.add("conv" if params else "relu", tuple(reads), (size,), params, macs)
    return net.graph(f"{'dag' if reach > 1 else 'chain'}{operators}")


def randwire(rng: random.Random, nodes: int = 32, k: int = 4, p: float = 0.75, stages: int = 1) -> OperatorGraph:
    """Return randomly wired stages of the small regime: `stages` times `nodes + 1` operators, and one for the input.

    Xie et al., "Exploring Randomly Wired Neural Networks for Image Recognition", ICCV 2019, section 3 and table 1: a
    Watts-Strogatz graph WS(k, p) directed from lower to higher index. A node sums what it reads, each input with a
    weight of its own, then ReLU, a separable 3x3 convolution and batch normalisation, here one operator. Nodes that
    read no other read the stage's input, at stride 2, and the stage's output is the mean of those that no other reads.
    Channels double from stage to stage, from 78; the paper's networks have 3 such stages.
    """
    net = Net()
    size, channels = 28, 78
    weights = 9 * (channels // 2) * channels
    entry = net.add("conv", (), (2 * size, 2 * size, channels), weights, 4 * size * size * weights)
    for _ in range(stages):
        wiring = networkx.watts_strogatz_graph(nodes, k, p, seed=rng)
        shape = (size, size, channels)
        at: list[int] = []
        for node in range(nodes):
            reads = tuple(at[other] for other in sorted(wiring[node]) if other < node)
            wide = channels if reads else net.shapes[entry][-1]
            summands = len(reads) if len(reads) > 1 else 0
            params = summands + wide * (9 + channels) + 2 * channels
            at.append(net.add("sepconv", reads or (entry,), shape, params, size * size * wide * (9 + channels)))
        ends = tuple(at[node] for node in range(nodes) if max(wiring[node], default=node) <= node)
        entry = net.add("mean", ends, shape)
        size, channels = size // 2, 2 * channels
    return net.graph(f"randwire{nodes}x{stages}")


def transformer(
    layers: int, hidden: int = 768, heads: int = 12, tokens: int = 128, *, shared_mask: bool = False
) -> OperatorGraph:
    """Return the encoder of BERT: LAYER_OPERATORS for each layer, FIXED_OPERATORS around them.

    Vaswani et al., "Attention Is All You Need", NeurIPS 2017; the default sizes are those of BERT-base, Devlin et al.,
    NAACL 2019. With `shared_mask` one operator makes the attention mask that every layer adds: an operator more, and
    one more in each layer.
    """
    net = Net()
    flat, split = (tokens, hidden), (heads, tokens, hidden // heads)
    scores = (heads, tokens, tokens)

    def matmul(x: int, width: int) -> int:
        """Add a product with a matrix of weights, and a bias."""
        *rows, inner = net.shapes[x]
        shape = (*rows, width)
        product = net.add("matmul", (x,), shape, inner * width, math.prod(shape) * inner)
        return net.add("add", (product,), shape, width)

    def split_heads(x: int) -> int:
        reshaped = net.add("reshape", (matmul(x, hidden),), (tokens, heads, hidden // heads))
        return net.add("transpose", (reshaped,), split)

    def add_and_norm(x: int, y: int) -> int:
        return net.add("layer_norm", (net.add("add", (x, y), flat),), flat, 2 * hidden)

    ids = net.add("input", (), (tokens,))
    mask = (net.add("mask", (ids,), (1, tokens, tokens)),) if shared_mask else ()
    # 30522 word pieces, 512 positions, 2 types.
    words = net.add("gather", (ids,), flat, 30522 * hidden)
    x = net.add("layer_norm", (net.add("add", (words,), flat, 514 * hidden),), flat, 2 * hidden)
    for _ in range(layers):
        query, key, value = split_heads(x), split_heads(x), split_heads(x)
        product = net.add("matmul", (query, key), scores, macs=math.prod(scores) * hidden // heads)
        scaled = net.add("divide", (product,), scores)
        if mask:
            scaled = net.add("add", (scaled, *mask), scores)
        weights = net.add("softmax", (scaled,), scores)
        context = net.add("matmul", (weights, value), split, macs=math.prod(split) * tokens)
        joined = net.add("transpose", (context,), (tokens, heads, hidden // heads))
        x = add_and_norm(x, matmul(net.add("reshape", (joined,), flat), hidden))
        x = add_and_norm(x, matmul(net.add("gelu", (matmul(x, 4 * hidden),), (tokens, 4 * hidden)), hidden))
    net.add("tanh", (matmul(net.add("take", (x,), (hidden,)), hidden),), (hidden,))
    return net.graph(f"transformer{layers}{'-masked' if shared_mask else ''}")


LAYER_OPERATORS = 29
FIXED_OPERATORS = 8


def transformer_of(operators: int) -> OperatorGraph:
    """Return the transformer whose number of operators is nearest to `operators`, with at least one layer."""
    return transformer(max(1, round((operators - FIXED_OPERATORS) / LAYER_OPERATORS)))


def nasnet(cells: int = 4, filters: int = 44, *, fused: bool = False) -> OperatorGraph:
    """Return NASNet-A: two reduction cells, then thrice `cells` normal cells, with reduction cells between them.

    Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", CVPR 2018, figure 4 and appendix
    A.4, at 224x224 with the layers of `keras.applications`; the defaults are NASNet-A (4 @ 1056), its NASNetMobile.
    `fused` makes one operator of each pair of separable convolutions, with their activations and normalisations, and of
    each other convolution with its own, as a compiler does.
    """
    net = _Nasnet(fused)
    x = net.normalised(net.conv(net.add("input", (), (224, 224, 3)), 32, 3, 111))
    previous, x = x, net.reduction(x, x, filters // 4)
    previous, x = x, net.reduction(previous, x, filters // 2)
    for scale in (1, 2, 4):
        if scale > 1:
            previous, x = x, net.reduction(previous, x, scale * filters)
        for _ in range(cells):
            previous, x = x, net.normal(previous, x, scale * filters)
    channels = net.shapes[x][-1]
    pooled = net.add("mean", (net.relu(x),), (channels,), macs=math.prod(net.shapes[x]))
    net.add("dense", (pooled,), (1000,), channels * 1000 + 1000, channels * 1000)
    return net.graph(f"nasnet{cells}{'-fused' if fused else ''}")


class _Nasnet(Net):
    """The cells of NASNet-A."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def normal(self, previous: int, x: int, filters: int) -> int:
        p, h = self.adjusted(previous, x, filters), self.projected(x, filters)
        blocks = (
            self.sum(self.separable(h, filters, 5), self.separable(p, filters, 3)),
            self.sum(self.separable(p, filters, 5), self.separable(p, filters, 3)),
            self.sum(self.pool("avg_pool", h), p),
            self.sum(self.pool("avg_pool", p), self.pool("avg_pool", p)),
            self.sum(self.separable(h, filters, 3), h),
        )
        return self.concat(p, *blocks)

    def reduction(self, previous: int, x: int, filters: int) -> int:
        p, h = self.adjusted(previous, x, filters), self.projected(x, filters)
        padded, half = self.padded(h, 3), math.ceil(self.shapes[h][0] / 2)
        first = self.sum(self.separable(h, filters, 5, 2), self.separable(p, filters, 7, 2))
        second = self.sum(self.pool("max_pool", padded, half), self.separable(p, filters, 7, 2))
        third = self.sum(self.pool("avg_pool", padded, half), self.separable(p, filters, 5, 2))
        fourth = self.sum(self.pool("avg_pool", first), second)
        fifth = self.sum(self.separable(first, filters, 3), self.pool("max_pool", padded, half))
        return self.concat(second, third, fourth, fifth)

    def adjusted(self, previous: int, x: int, filters: int) -> int:
        """Return the output of the cell before the last, with the size of the last one's and `filters` channels."""
        size, _, channels = self.shapes[previous]
        half = self.shapes[x][0]
        if previous == x:
            return previous
        if size == half:
            return previous if channels == filters else self.projected(previous, filters)
        rectified = self.relu(previous)
        even = self.conv(self.pool("avg_pool", rectified, half), filters // 2, 1, half)
        shifted = rectified
        if not self.fused:
            # Shifted by one, so that the pixels between those are seen, too.
            shifted = self.add("pad", (rectified,), (size + 1, size + 1, channels))
            shifted = self.add("crop", (shifted,), (size, size, channels))
        odd = self.conv(self.pool("avg_pool", shifted, half), filters // 2, 1, half)
        return self.normalised(self.concat(even, odd))

    def projected(self, x: int, filters: int) -> int:
        return self.normalised(self.conv(self.relu(x), filters, 1, self.shapes[x][0]))

    def separable(self, x: int, filters: int, kernel: int, stride: int = 1) -> int:
        """Add two separable convolutions, the first of them with the stride."""
        size, _, channels = self.shapes[x]
        size = math.ceil(size / stride)
        weights = [wide * (kernel * kernel + filters) for wide in (channels, filters)]
        shape = (size, size, filters)
        if self.fused:
            return self.add("sepconv", (x,), shape, sum(weights) + 2 * filters, size * size * sum(weights))
        for step, count in enumerate(weights):
            x = self.relu(x)
            if stride > 1 and step == 0:
                x = self.padded(x, kernel)
            x = self.normalised(self.add("sepconv", (x,), shape, count, size * size * count))
        return x

    def conv(self, x: int, filters: int, kernel: int, size: int) -> int:
        weights = kernel * kernel * self.shapes[x][-1] * filters
        bias = filters if self.fused else 0
        return self.add("conv", (x,), (size, size, filters), weights + bias, size * size * weights)

    def relu(self, x: int) -> int:
        return x if self.fused else self.add("relu", (x,), self.shapes[x])

    def normalised(self, x: int) -> int:
        return x if self.fused else self.add("batch_norm", (x,), self.shapes[x], 4 * self.shapes[x][-1])

    def padded(self, x: int, kernel: int) -> int:
        size, _, channels = self.shapes[x]
        size += 2 * (kernel // 2) - 1 + size % 2
        return x if self.fused else self.add("pad", (x,), (size, size, channels))

    def pool(self, op: str, x: int, size: int | None = None) -> int:
        size = size or self.shapes[x][0]
        return self.add(op, (x,), (size, size, self.shapes[x][-1]), macs=9 * size * size * self.shapes[x][-1])

    def sum(self, x: int, y: int) -> int:
        return self.add("add", (x, y), self.shapes[x])

    def concat(self, *parts: int) -> int:
        size, _, _ = self.shapes[parts[0]]
        return self.add("concat", parts, (size, size, sum(self.shapes[part][-1] for part in parts)))
