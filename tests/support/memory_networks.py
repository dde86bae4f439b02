"""The networks whose order of operators matters, in float32, each kernel an operator: what memory benchmarks order.

SERENITY ("Ordering Chaos", Ahn et al., MLSys 2020) measures cells of DARTS, of SwiftNet and of RandWire. SwiftNet, in
uint8, is in `profiles/swiftnet` and has a benchmark of its own, `serenity_tables.py`; cells of NASNet, PNASNet and
AmoebaNet are added here. Batch normalisation is folded into the convolution before it, and a ReLU that two operators
want is computed once, as compilers do. What is random comes from `seed`. SERENITY counts no memory of its own for a
concatenation; `memory_graph` counts a copy, as in TVM and TFLite (see `memory/concatenation.py`). Next: `NETWORKS`, all
of them by name, and `tests/memory/test_networks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias

import networkx

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.graph_files import read_graph

PROFILES = Path(__file__).parents[2] / "profiles"
Blocks: TypeAlias = tuple[tuple[str, int, str, int], ...]
Shape: TypeAlias = tuple[int, int, int]


class Net:
    """Operators as they are added; tensors bear the names of the operators that write them. Shapes are H x W x C."""

    def __init__(self) -> None:
        self.inputs: list[Tensor] = []
        self.operators: list[Operator] = []
        self.shapes: dict[str, Shape] = {}

    def input(self, *shape: int) -> str:
        name = f"input_{len(self.inputs)}"
        self.inputs.append(Tensor(name, shape))
        self.shapes[name] = shape
        return name

    def add(self, kind: str, reads: tuple[str, ...], shape: Shape, weights: int = 0) -> str:
        """Add an operator, and return the name of its output.

        Each weight is multiplied once for each pixel; an operator without weights works once for each element.
        """
        name = f"{kind}_{len(self.operators)}"
        macs = shape[0] * shape[1] * weights or math.prod(shape)
        self.operators.append(Operator(name, kind, reads, (Tensor(name, shape),), 4 * weights, macs))
        self.shapes[name] = shape
        return name

    def once(self, kind: str, x: str, size: int | None = None) -> str:
        """Return the operator without weights that several readers share: the existing one, or a new one."""
        shape = (size or self.shapes[x][0], size or self.shapes[x][1], self.shapes[x][-1])
        twins = (o.name for o in self.operators if (o.kind, o.inputs) == (kind, (x,)) and self.shapes[o.name] == shape)
        return next(twins, None) or self.add(kind, (x,), shape)

    def relu(self, x: str) -> str:
        return self.once("relu", x)

    def sum(self, *parts: str) -> str:
        return self.add("add", parts, self.shapes[parts[0]]) if len(parts) > 1 else parts[0]

    def concat(self, *parts: str) -> str:
        size, _, _ = self.shapes[parts[0]]
        return self.add("concat", parts, (size, size, sum(self.shapes[part][-1] for part in parts)))

    def conv(self, x: str, filters: int, area: int = 1, stride: int = 1, kind: str = "conv2d") -> str:
        """Add a convolution whose kernel has `area` pixels."""
        size, _, channels = self.shapes[x]
        size = math.ceil(size / stride)
        return self.add(kind, (x,), (size, size, filters), area * channels * filters)

    def separable(self, x: str, filters: int, kernel: int = 3, stride: int = 1, kind: str = "conv2d") -> str:
        """Add a depthwise convolution and one of 1 x 1, which is of that `kind`."""
        size, _, channels = self.shapes[x]
        size = math.ceil(size / stride)
        depthwise = self.add("depthwise_conv2d", (x,), (size, size, channels), kernel * kernel * channels)
        return self.conv(depthwise, filters, kind=kind)

    def classified(self, x: str, classes: int) -> str:
        channels = self.shapes[x][-1]
        pooled = self.add("mean", (x,), (1, 1, channels))
        return self.add("dense", (pooled,), (1, 1, classes), channels * classes)

    def graph(self, name: str) -> OperatorGraph:
        """Return the graph; every tensor that no operator reads is an output."""
        read = {tensor for operator in self.operators for tensor in operator.inputs}
        outputs = tuple(operator.name for operator in self.operators if operator.name not in read)
        return OperatorGraph(name, tuple(self.inputs), tuple(self.operators), outputs)


# RandWire


def randwire(
    nodes: int = 32,
    neighbours: int = 4,
    probability: float = 0.75,
    seed: int = 0,
    channels: int = 78,
    size: int = 16,
) -> OperatorGraph:
    """Return one randomly wired stage for pictures of twice `size`, after a convolution that halves them.

    Xie et al., "Exploring Randomly Wired Neural Networks for Image Recognition", ICCV 2019, section 3: a graph
    WS(`neighbours`, `probability`) of Watts and Strogatz, directed from lower to higher index. A node sums what it
    reads, then ReLU and a separable 3x3 convolution; the stage ends with the mean of the nodes that no other reads, and
    with the ReLU that its readers would begin with.
    """
    net = Net()
    _stage(
        net, net.conv(net.input(2 * size, 2 * size, 3), channels, 9, 2), channels, nodes, neighbours, probability, seed
    )
    return net.graph(f"randwire{nodes}-{seed}")


def randwire_network(seed: int = 0, classes: int = 10, channels: int = 78, nodes: int = 32) -> OperatorGraph:
    """Return the network for pictures of 32 x 32 (CIFAR): three stages, with channels doubled between them."""
    net = Net()
    x = net.conv(net.input(32, 32, 3), channels, 9, 2)
    for stage in range(3):
        x = _stage(net, x, channels << stage, nodes, 4, 0.75, seed + stage, stride=1 if stage == 0 else 2)
    net.classified(net.conv(x, 1280), classes)
    return net.graph(f"randwire-cifar{classes}-{seed}")


def _stage(
    net: Net, x: str, channels: int, nodes: int, neighbours: int, probability: float, seed: int, stride: int = 1
) -> str:
    wiring = networkx.connected_watts_strogatz_graph(nodes, neighbours, probability, seed=seed)
    at: list[str] = []
    for node in range(nodes):
        reads = tuple(at[other] for other in sorted(wiring[node]) if other < node)
        if reads:
            total = net.sum(*reads)
            at.append(net.separable(net.add("relu", (total,), net.shapes[total]), channels))
        else:
            at.append(net.separable(x, channels, stride=stride))
    ends = tuple(at[node] for node in range(nodes) if max(wiring[node]) < node)
    return net.relu(net.add("mean", ends, net.shapes[at[0]]) if len(ends) > 1 else ends[0])


# Networks of cells


@dataclass(frozen=True, slots=True)
class Genotype:
    """A normal and a reduction cell: blocks that sum two operators, each of the state of that number.

    States 0 and 1 are the outputs of the two cells before; blocks count from 2. The last two fields say which states
    the cell concatenates.
    """

    name: str
    normal: Blocks
    reduction: Blocks
    normal_concat: tuple[int, ...]
    reduction_concat: tuple[int, ...]


# Liu, Simonyan and Yang, "DARTS: Differentiable Architecture Search", ICLR 2019: DARTS_V2 of its genotypes.py.
DARTS = Genotype(
    "darts",
    (
        ("sep3", 0, "sep3", 1),
        ("sep3", 0, "sep3", 1),
        ("sep3", 1, "skip", 0),
        ("skip", 0, "dil3", 2),
    ),
    (
        ("max", 0, "max", 1),
        ("skip", 2, "max", 1),
        ("max", 0, "skip", 2),
        ("skip", 2, "max", 1),
    ),
    (2, 3, 4, 5),
    (2, 3, 4, 5),
)
# Zoph et al., "Learning Transferable Architectures for Scalable Image Recognition", CVPR 2018, figure 4.
NASNET = Genotype(
    "nasnet",
    (
        ("sep5", 1, "sep3", 0),
        ("sep5", 0, "sep3", 0),
        ("avg", 1, "skip", 0),
        ("avg", 0, "avg", 0),
        ("sep3", 1, "skip", 1),
    ),
    (
        ("sep5", 1, "sep7", 0),
        ("max", 1, "sep7", 0),
        ("avg", 1, "sep5", 0),
        ("avg", 2, "skip", 3),
        ("sep3", 2, "max", 1),
    ),
    (0, 2, 3, 4, 5, 6),
    (3, 4, 5, 6),
)
# Liu et al., "Progressive Neural Architecture Search", ECCV 2018, figure 1: both cells are one.
_PNASNET: Blocks = (
    ("sep5", 0, "max", 0),
    ("sep7", 1, "max", 1),
    ("sep5", 1, "sep3", 1),
    ("sep3", 4, "max", 1),
    ("sep3", 0, "skip", 1),
)
PNASNET = Genotype("pnasnet", _PNASNET, _PNASNET, (2, 3, 4, 5, 6), (2, 3, 4, 5, 6))
# Real et al., "Regularized Evolution for Image Classifier Architecture Search", AAAI 2019, as in DARTS's genotypes.py.
AMOEBANET = Genotype(
    "amoebanet",
    (
        ("avg", 0, "max", 1),
        ("sep3", 0, "sep5", 2),
        ("sep3", 0, "avg", 3),
        ("sep3", 1, "skip", 1),
        ("skip", 0, "avg", 1),
    ),
    (
        ("avg", 0, "sep3", 1),
        ("max", 0, "sep7", 2),
        ("sep7", 0, "avg", 1),
        ("max", 0, "max", 1),
        ("conv7", 0, "sep3", 5),
    ),
    (4, 5, 6),
    (3, 4, 6),
)


def cell(genotype: Genotype, filters: int, size: int, *, reduction: bool = False) -> OperatorGraph:
    """Return one cell, whose two inputs are outputs of normal cells of the same filters."""
    net = Net()
    channels = len(genotype.normal_concat) * filters // (2 if reduction else 1)
    add_cell(net, genotype, net.input(size, size, channels), net.input(size, size, channels), filters, reduction)
    return net.graph(f"{genotype.name}-{'reduction' if reduction else 'normal'}-cell")


def cell_network(
    genotype: Genotype,
    cells: tuple[int, int, int],
    filters: int,
    size: int = 224,
    stem: int = 32,
    *,
    reductions_first: bool = True,
) -> OperatorGraph:
    """Return the ImageNet network: so many normal cells of each size, with reduction cells between them.

    It begins with a convolution and two reduction cells, as NASNet's does, or with three convolutions, as DARTS's.
    """
    net = Net()
    x = net.conv(net.input(size, size, 3), stem, 9, 2)
    if reductions_first:
        previous, x = x, add_cell(net, genotype, x, x, filters // 4, True)
        previous, x = x, add_cell(net, genotype, previous, x, filters // 2, True)
    else:
        previous = net.conv(net.relu(x), filters, 9, 2)
        x = net.conv(net.relu(previous), filters, 9, 2)
    for scale, count in enumerate(cells):
        if scale:
            previous, x = x, add_cell(net, genotype, previous, x, filters << scale, True)
        for _ in range(count):
            previous, x = x, add_cell(net, genotype, previous, x, filters << scale, False)
    net.classified(net.relu(x), 1000)
    return net.graph(f"{genotype.name}-{filters}-{size}")


def add_cell(net: Net, genotype: Genotype, previous: str, x: str, filters: int, reduction: bool) -> str:
    shrink = net.shapes[previous][0] > net.shapes[x][0]
    first = _halved(net, previous, filters) if shrink else net.conv(net.relu(previous), filters)
    states = [first, net.conv(net.relu(x), filters)]
    for left, left_from, right, right_from in genotype.reduction if reduction else genotype.normal:
        parts = [
            _operation(net, kind, states[state], filters, 2 if reduction and state < 2 else 1)
            for kind, state in ((left, left_from), (right, right_from))
        ]
        states.append(net.sum(*parts))
    return net.concat(*(states[i] for i in (genotype.reduction_concat if reduction else genotype.normal_concat)))


def _operation(net: Net, kind: str, x: str, filters: int, stride: int) -> str:
    if kind == "skip":
        return x if stride == 1 else _halved(net, x, filters)
    if kind in ("max", "avg"):
        return net.once(f"{kind}_pool", x, math.ceil(net.shapes[x][0] / stride))
    form, kernel = kind[:-1], int(kind[-1])
    x = net.relu(x)
    if form == "conv":
        # A row of the kernel and then a column; that each of them strides one way alone is left out.
        return net.conv(net.conv(x, filters, kernel, stride), filters, kernel)
    if form == "dil":
        return net.separable(x, filters, kernel, stride)
    return net.separable(net.separable(x, filters, kernel, stride, "conv2d+relu"), filters, kernel)


def _halved(net: Net, x: str, filters: int) -> str:
    """Return half the channels from even pixels and half from odd ones (`FactorizedReduce`)."""
    x = net.relu(x)
    size, _, channels = net.shapes[x]
    odd = net.add("slice", (x,), (size - 1, size - 1, channels))
    # Of one pixel less in each direction, as many remain at stride 2 as of all.
    even = net.conv(x, filters // 2, stride=2)
    return net.concat(even, net.conv(odd, filters - filters // 2, stride=2))


# All of them


def transformer(layers: int = 4, hidden: int = 768, heads: int = 12, tokens: int = 128) -> OperatorGraph:
    """Return encoder layers of BERT-base, Devlin et al., NAACL 2019; splitting and joining heads moves nothing."""
    net = Net()
    flat, scores = (1, tokens, hidden), (heads, tokens, tokens)
    x = net.input(*flat)
    for _ in range(layers):
        query, key, value = (net.add("dense", (x,), flat, hidden * hidden) for _ in range(3))
        weights = net.add("softmax", (net.add("matmul", (query, key), scores),), scores)
        context = net.add("dense", (net.add("matmul", (weights, value), flat),), flat, hidden * hidden)
        x = net.add("layer_norm", (net.sum(x, context),), flat)
        inner = net.add("dense", (x,), (1, tokens, 4 * hidden), 4 * hidden * hidden)
        inner = net.add("gelu", (inner,), (1, tokens, 4 * hidden))
        x = net.add("layer_norm", (net.sum(x, net.add("dense", (inner,), flat, 4 * hidden * hidden)),), flat)
    return net.graph(f"transformer{layers}")


def float32(graph: OperatorGraph) -> OperatorGraph:
    """Return a graph of one-byte elements and parameters with four bytes each; the input operator is an input."""
    wide = [
        replace(
            operator,
            outputs=tuple(replace(tensor, dtype="float32") for tensor in operator.outputs),
            param_bytes=4 * operator.param_bytes,
        )
        for operator in graph.operators
    ]
    brings = [operator for operator in wide if operator.kind in ("input", "InputLayer")]
    inputs = tuple(tensor for operator in brings for tensor in operator.outputs)
    return replace(graph, inputs=inputs, operators=tuple(operator for operator in wide if operator not in brings))


def keras(name: str) -> OperatorGraph:
    return float32(read_graph(PROFILES / "keras" / f"{name}.json"))


# The cells are those that geometric means are taken over.
CELLS: dict[str, Callable[[], OperatorGraph]] = {
    "DARTS normal": partial(cell, DARTS, 48, 28),
    "DARTS reduction": partial(cell, DARTS, 96, 28, reduction=True),
    "NASNet-A normal": partial(cell, NASNET, 44, 28),
    "NASNet-A reduction": partial(cell, NASNET, 88, 28, reduction=True),
    "PNASNet normal": partial(cell, PNASNET, 54, 28),
    "AmoebaNet-A normal": partial(cell, AMOEBANET, 50, 28),
    "RandWire CIFAR10 A": partial(randwire, seed=0),
    "RandWire CIFAR10 B": partial(randwire, seed=1, channels=156, size=8),
    "RandWire CIFAR100 A": partial(randwire, seed=2),
    "RandWire CIFAR100 B": partial(randwire, seed=3, channels=156, size=8),
    "RandWire CIFAR100 C": partial(randwire, seed=4, channels=312, size=4),
}
NETWORKS: dict[str, Callable[[], OperatorGraph]] = {
    **CELLS,
    "DARTS": partial(cell_network, DARTS, (4, 4, 4), 48, stem=24, reductions_first=False),
    "NASNetMobile": partial(cell_network, NASNET, (4, 4, 4), 44),
    "NASNetLarge": partial(cell_network, NASNET, (6, 6, 6), 168, 331, 96),
    "PNASNet": partial(cell_network, PNASNET, (3, 2, 2), 54),
    "AmoebaNet-A": partial(cell_network, AMOEBANET, (4, 4, 4), 50),
    "RandWire CIFAR10": randwire_network,
    "RandWire CIFAR100": partial(randwire_network, 3, 100),
    "transformer": transformer,
    "DenseNet121": partial(keras, "DenseNet121"),
    "InceptionResNetV2": partial(keras, "InceptionResNetV2"),
    "NASNetMobile.tflite": partial(read_graph, PROFILES / "tflite/NASNetMobile.json"),
    "NASNetLarge.tflite": partial(read_graph, PROFILES / "tflite/NASNetLarge.json"),
}
