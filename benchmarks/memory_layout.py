"""Compare arenas laid out greedily by size with the exact layout, for four orders of every network.

    python benchmarks/memory_layout.py
    python benchmarks/memory_layout.py --short   # the cells only, for CI

The result is a table. `alive` is the peak of the bytes alive in an order, a lower bound of every arena; CP-SAT runs
only if the greedy arena is larger. Every layout is checked tensor against tensor. The exit status is 1 if one overlaps,
or is larger than the greedy one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tvm_pipeline.memory import MemoryGraph, memory_graph, minimum_peak
from tvm_pipeline.memory.arena import check_layout, exact_layout, lifetimes, plan_arena
from tvm_pipeline.memory.orders import dfs_order, kahn_order, program_order

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.memory_networks import CELLS, NETWORKS

CONSOLE = Console(width=max(Console().width, 120))


def least_peak(graph: MemoryGraph) -> Sequence[int]:
    return minimum_peak(graph, time_limit_s=10).order


ORDERS: dict[str, Callable[[MemoryGraph], Sequence[int]]] = {
    "program": program_order,
    "Kahn": kahn_order,
    "depth first": dfs_order,
    "least peak": least_peak,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="the cells only, for CI")
    short = parser.parse_args().short
    table = Table(title="Arenas where greedy by size misses what is alive", title_justify="left")
    for column in ("network", "order", "alive", "greedy", "exact", "greedy / exact", "status", "seconds"):
        table.add_column(column, justify="left" if column in ("network", "order", "status") else "right")
    layouts = met = worse = 0
    for name, make in (CELLS if short else NETWORKS).items():
        graph = memory_graph(make(), in_place=True)
        for way, order_of in ORDERS.items():
            tensors, _ = lifetimes(graph, order_of(graph))
            _, greedy = plan_arena(tensors)
            begin = time.perf_counter()
            layout = exact_layout(tensors, time_limit_s=2 if short else 60)
            seconds = time.perf_counter() - begin
            check_layout(tensors, layout.offsets, layout.arena_bytes)
            layouts, worse = layouts + 1, worse + (layout.arena_bytes > greedy)
            if greedy == layout.bound_bytes:
                met += 1
                continue
            ratio = f"{greedy / layout.arena_bytes:.3f}"
            figures = (layout.bound_bytes, greedy, layout.arena_bytes, ratio, layout.status, f"{seconds:.2f}")
            table.add_row(name, way, *map(str, figures))
    CONSOLE.print(table)
    CONSOLE.print(f"{layouts} layouts, all checked; in {met} greedy by size takes no more than is alive")
    sys.exit(worse > 0)


if __name__ == "__main__":
    main()
