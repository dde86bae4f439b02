"""Compare the search that measures segments with libcoral's: its successes, its measurements and its results.

    python benchmarks/profiling_partitioner.py           # 100 random networks in 2 to 8 segments, ten seconds
    python benchmarks/profiling_partitioner.py --short   # a few of them, for CI

Required: `corrected_partition` succeeds with all of them; else the exit status is 1.

The device is simulated: the calibrated model of an Edge TPU on PCIe, with what that model does not know hidden in it.
Each operator is slower or faster by a factor of its own; the cache keeps whole operators, first come, first kept, so
that a segment's parameters do not spill byte by byte, and a longer segment can take less; a measurement has noise. The
searches measure segments of the same device. Their results are judged without the noise, beside the
best of all partitions on the hidden device.

An evaluation is a segment that was compiled and measured, each counted once. libcoral does not keep them, and compiles
every segment of a candidate to learn about one: its own count is several times what is shown.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from planner import coral, show
from rich.progress import track

from tvm_pipeline.core.graph import OperatorGraph, readers_of
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline.planning.baselines.segments import Partition, even_cuts
from tvm_pipeline.planning.corrected import cheapest_segments, corrected_partition, model_seconds
from tvm_pipeline.planning.search.cuts import Floats, prefixes
from tvm_pipeline_papers.coral import profiling_partition

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.generators import Net

FACTOR_SIGMA = 0.3
NOISE = 0.015
OPERATORS = range(50, 301)
PARAMETERS_MB = (10, 60)
EVALUATIONS, GAP = "evaluations", "gap"

# Random networks


class Int8Net(Net):
    """Layers as a TFLite file has them: normalisation and activation within the convolution, an int32 bias."""

    def conv(self, x: int, filters: int, kernel: int = 1, stride: int = 1) -> int:
        size, _, channels = self.shapes[x]
        size, weights = math.ceil(size / stride), kernel * kernel * channels * filters
        return self.add("conv", (x,), (size, size, filters), weights + 4 * filters, size * size * weights)

    def pool(self, x: int, stride: int = 2) -> int:
        size, _, channels = self.shapes[x]
        size = math.ceil(size / stride)
        return self.add("pool", (x,), (size, size, channels), macs=9 * size * size * channels)

    def classifier(self, x: int, classes: int = 1000) -> None:
        channels = self.shapes[x][-1]
        mean = self.add("mean", (x,), (channels,), macs=math.prod(self.shapes[x]))
        self.add("dense", (mean,), (classes,), (channels + 4) * classes, channels * classes)


def resnet(rng: random.Random) -> OperatorGraph:
    """Return bottleneck blocks as in He et al., CVPR 2016, of random width and depth."""
    net, width = Int8Net(), rng.choice((48, 64, 80, 96))
    x = net.pool(net.conv(net.add("input", (), (224, 224, 3)), 64, 7, 2))
    for stage, deepest in enumerate((4, 8, 24, 4)):
        filters = width * 2**stage
        for block in range(rng.randint(2, deepest)):
            stride = 2 if stage and not block else 1
            y = net.conv(net.conv(net.conv(x, filters, 1, stride), filters, 3), 4 * filters)
            shortcut = x if block else net.conv(x, 4 * filters, 1, stride)
            x = net.add("add", (shortcut, y), net.shapes[y])
    net.classifier(x)
    return net.graph("resnet")


def inception(rng: random.Random) -> OperatorGraph:
    """Return modules of four branches as in Szegedy et al., CVPR 2016, of random width and depth."""
    net, width = Int8Net(), rng.choice((64, 96, 128))
    x = net.conv(net.conv(net.conv(net.add("input", (), (299, 299, 3)), 32, 3, 2), 32, 3), 64, 3)
    x = net.pool(net.conv(net.conv(net.pool(x), 80), 192, 3))
    for stage, deepest in enumerate((4, 9, 5)):
        filters = width * (stage + 1)
        for block in range(rng.randint(2, deepest)):
            stride = 2 if stage and not block else 1
            branches = (
                net.conv(x, filters, 1, stride),
                net.conv(net.conv(x, filters * 3 // 4), filters, rng.choice((3, 3, 5)), stride),
                net.conv(net.conv(net.conv(x, filters * 3 // 4), filters, 3), filters, 3, stride),
                net.conv(net.pool(x, stride), filters // 2),
            )
            size = net.shapes[branches[0]][0]
            x = net.add("concat", branches, (size, size, sum(net.shapes[branch][-1] for branch in branches)))
    net.classifier(x)
    return net.graph("inception")


def network(rng: random.Random) -> OperatorGraph:
    make = rng.choice((resnet, inception))
    while True:
        graph = make(rng)
        size_mb = sum(operator.param_bytes for operator in graph.operators) / 1e6
        if len(graph) in OPERATORS and PARAMETERS_MB[0] <= size_mb <= PARAMETERS_MB[1]:
            return graph


# The device


def hidden_seconds(problem: Problem, chance: np.random.Generator) -> Floats:
    """Return (n+1) x (n+1) seconds of each segment on the simulated device; infinite if it is empty."""
    model, operators = problem.platform.devices[0].model, problem.graph.operators
    if model is None or model.cached_bytes is None:
        raise SystemExit("the simulated device is made from a model with a cache; coral-pcie-8.toml has none")
    factors = chance.lognormal(0.0, FACTOR_SIGMA, len(operators))
    crossing = prefixes(problem.graph).crossing_bytes
    taken_s = np.full((len(operators) + 1, len(operators) + 1), math.inf)
    # For each start, what the segment from there up to the operator at hand comes to.
    fixed_s, work_s, refill_s, kept = np.zeros((4, len(operators)))
    for last, (operator, factor) in enumerate(zip(operators, factors, strict=True)):
        here = slice(last + 1)
        fits = kept[here] + operator.param_bytes <= model.cached_bytes
        kept[here] += fits * operator.param_bytes
        refill_s[here] += ~fits * operator.param_bytes * model.spill_s_per_byte * factor
        fixed_s[here] += model.operator_s * factor
        work_s[here] += (model.seconds(0, operator.macs, 0) - model.call_s) * factor
        transfer_s = crossing[here] * model.transfer_s(1, 0) + model.transfer_s(0, int(crossing[last + 1]))
        taken_s[here, last + 1] = model.call_s + fixed_s[here] + np.maximum(work_s, refill_s)[here] + transfer_s
    return taken_s


@dataclass(frozen=True)
class Case:
    """A network on the simulated device, and what its searches may ask; tables are n+1 x n+1, in seconds."""

    graph: OperatorGraph
    segments: int
    model_s: Floats
    measured_s: Floats

    def measure(self, start: int, end: int) -> float:
        return float(self.measured_s[start, end])

    def coral(self, *, original: bool = False, threshold_s: float = 1e-3) -> Partition:
        readers = readers_of(self.graph)
        unread = next(index for index, operator in enumerate(self.graph.operators) if not readers[operator.name])
        return profiling_partition(
            len(self.graph),
            self.segments,
            self.measure,
            threshold_s=threshold_s,
            original=original,
            initial=even_cuts(self.graph, self.segments),
            tail=len(self.graph) - unread,
        )

    def corrected(self) -> Partition:
        return corrected_partition(self.model_s, self.segments, self.measure)

    def model_alone(self) -> Partition:
        chosen = cheapest_segments(self.model_s, self.segments, np.maximum)
        return Partition(tuple(start for start, _ in chosen[1:]), tuple(self.model_s[segment] for segment in chosen), 0)


OURS = "corrected"
SEARCHES: dict[str, Callable[[Case], Partition]] = {
    OURS: Case.corrected,
    "the model alone": Case.model_alone,
    "libcoral, mended": Case.coral,
    "libcoral, mended, 50 us": functools.partial(Case.coral, threshold_s=5e-5),
    "libcoral, original": functools.partial(Case.coral, original=True),
}


# Figures


def compared(seeds: Iterable[int], counts: Iterable[int]) -> dict[tuple[int, str], dict[str, list[float]]]:
    """Return, for each number of segments and search, the successes, the evaluations and the gap to the best."""
    figures: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seed in seeds:
        graph = network(random.Random(seed))
        problem = Problem(graph, coral(1), unmeasured(graph))
        chance = np.random.default_rng(seed)
        hidden_s = hidden_seconds(problem, chance)
        measured_s = hidden_s * chance.normal(1.0, NOISE, hidden_s.shape)
        model_s = model_seconds(problem, problem.platform.devices)
        for segments in counts:
            case = Case(graph, segments, model_s, measured_s)
            best_s = max(hidden_s[segment] for segment in cheapest_segments(hidden_s, segments, np.maximum))
            for name, search in SEARCHES.items():
                figure = figures[segments, name]
                try:
                    found = search(case)
                except NoPlanError:
                    continue
                parts = itertools.pairwise((0, *found.cuts, len(graph)))
                figure[EVALUATIONS].append(found.evaluations)
                figure[GAP].append(max(hidden_s[segment] for segment in parts) / best_s)
    return figures


def spread(values: list[float], form: str) -> tuple[str, str]:
    if not values:
        return "", ""
    return format(statistics.median(values), form), format(max(values), form)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100, help="how many")
    parser.add_argument("--short", action="store_true", help="8 networks in 2, 5 and 8 segments, for CI")
    args = parser.parse_args()
    networks, counts = (8, (2, 5, 8)) if args.short else (args.networks, range(2, 9))
    figures = compared(track(range(networks), "networks", transient=True), counts)
    rows = []
    for (segments, name), figure in figures.items():
        done = len(figure[EVALUATIONS])
        row = (f"{done / networks:.0%}", *spread(figure[EVALUATIONS], ".0f"), *spread(figure[GAP], ".2f"))
        rows.append((segments if name == OURS else "", name, *row))
    columns = ("segments", "search", "succeeds", "evaluations, median", "most", "bottleneck / best, median", "worst")
    show(f"{networks} random networks, measured on a simulated Edge TPU", columns, rows)
    short_of = [segments for segments in counts if len(figures[segments, OURS][EVALUATIONS]) < networks]
    if short_of:
        raise SystemExit(f"corrected_partition does not succeed with all networks in {short_of} segments")


if __name__ == "__main__":
    main()
