"""What PredPar's predictor learns from: networks, their segments, and the seconds of these on a device that is hidden.

Zou et al., MILCOM 2024: 600 networks like those of NASBench-101, each cut at random 32 times, evenly by parameters, and
at its pools; 6:2:2 of the networks for training, choice and test; a label is the mean of 10 runs. Here a third of the
networks is of other kinds, random in width and depth: residual, Inception, dense and depthwise ones, for a user's
network has more kinds of operators than convolutions and pools. The device is `hidden_device.HiddenDevice`, one board;
what was learned holds for that board alone.

Next: `train_predpar.py`, which trains, and `predpar.py`, which partitions the test networks.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from edgetpu_model import as_tflite
from hidden_device import HiddenDevice
from nasbench import SEGMENTS, random_nasbench, segments_of
from planner import OTHERS, PUBLISHED, coral, keras
from profiling_partitioner import Int8Net, inception, resnet

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.planning.baselines.segments import even_cuts
from tvm_pipeline.planning.search.cuts import Floats

SEED, BOARD = 0, 1  # of the networks, and of the board
RUNS = 10  # whose mean is a label
PARTITIONS = 32  # at random, of each network, in its own number of segments
OTHER_PARTITIONS = 2  # at random, in each other number
LEARNED, CHOSEN, TESTED = "learned", "chosen", "tested"


def shipped_model() -> DeviceModel:
    """Return the model of an Edge TPU on PCIe that the package ships."""
    model = coral(1).devices[0].model
    if model is None:
        raise SystemExit("coral-pcie-8.toml has no model")
    return model


def board() -> HiddenDevice:
    return HiddenDevice.drawn(shipped_model(), BOARD, other_board=0.15)


# Networks


def depthwise(rng: random.Random) -> OperatorGraph:
    """Return inverted residuals as in Sandler et al., CVPR 2018, or separable ones as in Chollet, CVPR 2017."""
    net, width, xception = Int8Net(), rng.choice((32, 48, 64, 96)), rng.random() < 0.5
    x = net.conv(net.add("input", (), (rng.choice((160, 224)),) * 2 + (3,)), 32, 3, 2)

    def separable(x: int, filters: int, stride: int) -> int:
        size, _, channels = net.shapes[x]
        size, weights = math.ceil(size / stride), channels * (9 + filters)
        return net.add("sepconv", (x,), (size, size, filters), weights + 4 * filters, size * size * weights)

    def inverted(x: int, filters: int, stride: int) -> int:
        x = net.conv(x, 6 * net.shapes[x][-1])
        size, _, channels = net.shapes[x]
        if stride > 1:
            x = net.add("pad", (x,), (size + 1, size + 1, channels))
        size = math.ceil(size / stride)
        x = net.add("depthwise", (x,), (size, size, channels), 13 * channels, 9 * size * size * channels)
        return net.conv(x, filters)

    for stage in range(5):
        filters = width * (2**stage if xception else stage + 1)
        for block in range(rng.randint(2, 5)):
            stride = 1 if block else 2
            y = (
                net.pool(separable(separable(x, filters, 1), filters, 1), stride)
                if xception
                else inverted(x, filters, stride)
            )
            x = net.add("add", (x, y), net.shapes[y]) if block else y
    net.classifier(net.conv(x, 1280))
    return net.graph("xception" if xception else "mobilenet")


def dense(rng: random.Random) -> OperatorGraph:
    """Return dense blocks as in Huang et al., CVPR 2017; a normalisation multiplies and adds."""
    net, growth = Int8Net(), rng.choice((24, 32, 48, 64))
    x = net.pool(net.conv(net.add("input", (), (224, 224, 3)), 2 * growth, 7, 2))

    def normalised(x: int) -> int:
        channels = net.shapes[x][-1]
        product = net.add("mul", (x,), net.shapes[x], 2 * channels)
        return net.add("add", (product,), net.shapes[x], 2 * channels)

    for stage, deepest in enumerate((6, 12, 24, 16)):
        if stage:
            x = net.pool(net.conv(normalised(x), net.shapes[x][-1] // 2))
        for _ in range(rng.randint(3, deepest)):
            y = net.conv(net.conv(normalised(x), 4 * growth), growth, 3)
            size, _, channels = net.shapes[x]
            x = net.add("concat", (x, y), (size, size, channels + growth))
    net.classifier(normalised(x))
    return net.graph("dense")


MAKERS: tuple[Callable[[random.Random], OperatorGraph], ...] = (resnet, inception, depthwise, dense)


def networks(count: int, seed: int = SEED) -> Iterator[OperatorGraph]:
    """Yield networks, no two alike, every third of another kind; the first ones are the same for every `count`."""
    rng, seen = random.Random(seed), set[str]()
    while len(seen) < count:
        index = len(seen)
        graph = (MAKERS[index // 3 % len(MAKERS)] if index % 3 == 2 else random_nasbench)(rng)
        if graph.fingerprint not in seen:
            seen.add(graph.fingerprint)
            yield graph


def role(index: int) -> str:
    """Return what the network of this index is for: three of five are learned, one is for choices, one for tests."""
    return (LEARNED, LEARNED, LEARNED, CHOSEN, TESTED)[index % 5]


def keras_networks() -> list[OperatorGraph]:
    """Return the 13 networks of `profiles/keras`, as TFLite has them; none was learned."""
    return [as_tflite(keras(name)) for name in (*PUBLISHED, *OTHERS)]


# Segments and their labels


@dataclass(frozen=True)
class Labelled:
    """Segments of a network, without duplicates, and their seconds on the board as measured."""

    graph: OperatorGraph
    segments: list[tuple[int, int]]
    seconds: Floats

    def up_to(self, longest: int) -> Labelled:
        """Return the segments of so many operators at most."""
        kept = [index for index, (start, end) in enumerate(self.segments) if end - start <= longest]
        return Labelled(self.graph, [self.segments[index] for index in kept], self.seconds[kept])


def labelled(graph: OperatorGraph, device: HiddenDevice, index: int, most: int | None = None) -> Labelled:
    """Cut a network and measure its segments, RUNS times each.

    Args:
        index: of the network; it decides on the cuts and the noise.
        most: the number of segments that are kept, at random; None keeps all.
    """
    chance = np.random.default_rng((BOARD, index))
    segments = sorted(
        {part for cuts in partitions(graph, chance) for part in itertools.pairwise((0, *cuts, len(graph)))}
    )
    if most is not None and most < len(segments):
        segments = [segments[index] for index in sorted(chance.choice(len(segments), most, replace=False))]
    starts, ends = np.array(segments).T
    runs = np.repeat(device.seconds(graph)[starts, ends][None], RUNS, axis=0)
    return Labelled(graph, segments, device.measured(runs, chance).mean(axis=0))


def partitions(graph: OperatorGraph, chance: np.random.Generator) -> Iterable[tuple[int, ...]]:
    """Yield the cuts of partitions: at random, evenly by parameters in each number of segments, and at pools."""
    own, places = segments_of(graph), len(graph) - 1
    for segments in SEGMENTS:
        for _ in range(PARTITIONS if segments == own else OTHER_PARTITIONS):
            yield tuple(sorted(1 + int(cut) for cut in chance.choice(places, segments - 1, replace=False)))
        yield even_cuts(graph, segments)
    pools = [index for index, operator in enumerate(graph.operators) if "pool" in operator.kind and index]
    for segments in SEGMENTS:
        if len(pools) >= segments - 1:
            yield tuple(sorted(int(cut) for cut in chance.choice(pools, segments - 1, replace=False)))
