"""Measure the off-chip traffic of four orders of every cell, at 64 KB to 1 MB of on-chip memory.

    python benchmarks/memory_traffic.py
    python benchmarks/memory_traffic.py --short   # three cells at 256 KB, for CI

`tvm_pipeline/memory/traffic.py` describes the model; weights are left out, since every order moves them once. SERENITY
(MLSys 2020) reports 1.76x less at 256 KB than TensorFlow Lite's order, for other cells and without the copies that
concatenations make; the like of it here is `program`, the order in which the cells are written down. A ratio is a
geometric mean over the cells; the last column says how far the traffic-optimal orders may still be from the bound. Two
more figures: how often Belady's rule is not the best choice of evictions, on random graphs; and that the compiled loop
and the plain one agree, without which the run ends with 1, as where the traffic-optimal order moves more than another.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_pipeline.memory import Buffer, MemoryGraph, memory_graph, minimum_peak
from tvm_pipeline.memory.orders import kahn_order, program_order
from tvm_pipeline.memory.traffic import belady, traffic, uses_of
from tvm_pipeline.memory.traffic_order import traffic_order

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.memory_networks import CELLS

CONSOLE = Console(width=max(Console().width, 120))
KILOBYTES = (64, 128, 256, 384, 512, 768, 1024)
WAYS = ("program", "Kahn", "least peak", "least traffic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="three cells at 256 KB, for CI")
    short = parser.parse_args().short
    graphs = {name: memory_graph(make()) for name, make in CELLS.items()}
    if short:
        graphs = dict(list(graphs.items())[::4])
    rows = Table("cell", "KB", *(f"{way}, MB" for way in WAYS), "bound, MB", "streamed", "s", title="Traffic of cells")
    means = Table("KB", *(f"program / {way}" for way in WAYS[1:]), "Kahn / least traffic", "proven", "above bound")
    failed = False
    peaks = {name: minimum_peak(graph, time_limit_s=10).order for name, graph in graphs.items()}
    for kilobytes in (256,) if short else KILOBYTES:
        moved: list[Sequence[int]] = []
        for name, graph in graphs.items():
            capacity = kilobytes << 10
            begin = time.perf_counter()
            limits = {"exchanges": 2000, "most_states": 2000} if short else {}
            found = traffic_order(graph, capacity, [peaks[name]], **limits)
            seconds = time.perf_counter() - begin
            orders = (program_order(graph), kahn_order(graph), peaks[name], found.order)
            each = [traffic(graph, order, capacity) for order in orders]
            figures = [one.bytes for one in each]
            failed |= min(figures) < figures[-1] or figures[-1] < found.bound_bytes
            failed |= plain_differs(graph, found.order, capacity)
            moved.append((*figures, found.bound_bytes))
            cells = [f"{figure / 1e6:.2f}" for figure in moved[-1]]
            rows.add_row(name, str(kilobytes), *cells, f"{len(each[0].streamed)}/{len(graph)}", f"{seconds:.1f}")
        program, kahn, *others, bound = zip(*moved, strict=True)
        ratios = [mean(program, way) for way in (kahn, *others)]
        proven = sum(a == b for a, b in zip(others[-1], bound, strict=True))
        tail = f"{mean(kahn, others[-1]):.2f}", f"{proven}/{len(moved)}", f"{mean(others[-1], bound):.2f}x"
        means.add_row(str(kilobytes), *(f"{ratio:.2f}" for ratio in ratios), *tail)
    CONSOLE.print(rows)
    CONSOLE.print(means)
    not_best(200 if short else 3000)
    sys.exit(failed)


def mean(above: Sequence[int], below: Sequence[int]) -> float:
    """Return the geometric mean of the ratios."""
    return math.exp(sum(math.log(a / b) for a, b in zip(above, below, strict=True)) / len(above))


def plain_differs(graph: MemoryGraph, order: Sequence[int], capacity: int) -> bool:
    arguments = np.array(order, np.int64), uses_of(graph, capacity), capacity
    return tuple(belady(*arguments)) != tuple(belady.__wrapped__(*arguments))


def not_best(count: int) -> None:
    """Return how often the rule moves more than the best evictions, for one order of random chains with skips."""
    rng, more, excess = random.Random(0), 0, []
    for _ in range(count):
        length = rng.randint(8, 14)
        readers = [[] for _ in range(length + 1)]
        for step in range(length):
            for read in rng.sample(range(step + 1), min(step + 1, 2)) if step else [0]:
                readers[read].append(step)
            # One order alone: each operator also reads what the one before it wrote.
            if step not in readers[step]:
                readers[step].append(step)
        buffers = tuple(
            Buffer(
                f"b{index}",
                rng.choice((1, 2, 3, 5)),
                (index - 1,) if index else (),
                tuple(sorted(set(found))),
                not found,
            )
            for index, found in enumerate(readers)
        )
        graph = MemoryGraph("chain", tuple(map(str, range(length))), buffers)
        capacity = rng.randint(12, 18)
        found = traffic_order(graph, capacity, exchanges=0, most_states=1 << 20)
        if found.traffic_bytes > found.bound_bytes:
            more += 1
            excess.append(found.traffic_bytes / found.bound_bytes - 1)
    most = f", at most by {max(excess):.0%}" if excess else ""
    CONSOLE.print(f"Belady's rule moves more than the best evictions in {more} of {count} random graphs{most}")


if __name__ == "__main__":
    main()
