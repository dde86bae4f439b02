"""Compare arenas laid out greedily by size with the exact layout; lay out minimalloc's challenging instances.

    python benchmarks/memory_layout.py
    python benchmarks/memory_layout.py --only minimalloc --folder FOLDER   # `benchmarks/challenging` of a clone
    python benchmarks/memory_layout.py --short   # two cells and a part of one instance, for CI

1. Four orders of every network. `alive` is the peak of the bytes alive in an order, a lower bound of every arena;
   `exact_layout` searches only if the greedy arena is larger. Every layout is checked tensor against tensor. The exit
   status is 1 if one overlaps, or is larger than the greedy one.
2. The instances of https://github.com/google/minimalloc, whose arena is 1 048 576 bytes. They are hard because that is
   all, or nearly all, that is alive. `fitting_offsets` searches each for a minute. Seconds are CPU seconds, without
   compiling the loops. The exit status is 1 if none is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tvm_pipeline.memory import MemoryGraph, memory_graph, minimum_peak
from tvm_pipeline.memory.arena import check_layout, exact_layout, lifetimes, most_alive, plan_arena
from tvm_pipeline.memory.fitting import fitting_offsets
from tvm_pipeline.memory.orders import dfs_order, kahn_order, program_order
from tvm_pipeline_papers.minimalloc import read_minimalloc

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.memory_networks import CELLS, NETWORKS

CONSOLE = Console(width=max(Console().width, 120))
SUITE = Path(__file__).parents[2] / "shared/suites/minimalloc"
ARENA_BYTES = 1_048_576
FEW = 60  # tensors of the instance in the short form


def least_peak(graph: MemoryGraph) -> Sequence[int]:
    return minimum_peak(graph, time_limit_s=10).order


ORDERS: dict[str, Callable[[MemoryGraph], Sequence[int]]] = {
    "program": program_order,
    "Kahn": kahn_order,
    "depth first": dfs_order,
    "least peak": least_peak,
}


def networks(short: bool) -> bool:
    """Print the greedy and the exact arenas of networks; return whether an exact one is larger."""
    table = Table(title="Arenas where greedy by size misses what is alive", title_justify="left")
    for column in ("network", "order", "alive", "greedy", "exact", "greedy / exact", "status", "seconds"):
        table.add_column(column, justify="left" if column in ("network", "order", "status") else "right")
    layouts = met = worse = 0
    for name, make in (dict(islice(CELLS.items(), 2)) if short else NETWORKS).items():
        graph = memory_graph(make(), in_place=True)
        for way, order_of in ORDERS.items():
            tensors, _ = lifetimes(graph, order_of(graph))
            _, greedy = plan_arena(tensors)
            begin = time.perf_counter()
            layout = exact_layout(tensors, time_limit_s=0.5 if short else 60)
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
    return worse > 0


def challenging(folder: Path, short: bool) -> bool:
    """Print what layouts of minimalloc's instances were found; return whether one was not."""
    files = sorted(folder.glob(f"*.{ARENA_BYTES}.csv"))
    if not files:
        CONSOLE.print(f"no instances in {folder}: clone https://github.com/google/minimalloc and give --folder")
        return False
    table = Table(title=f"minimalloc's instances in {ARENA_BYTES} bytes", title_justify="left")
    for column in ("instance", "tensors", "alive", "greedy", "found", "CPU seconds"):
        table.add_column(column, justify="right")
    fitting_offsets([(0, 0)], [1], 1, time.monotonic() + 60)  # compiles the loops
    missing = 0
    for path in files[:1] if short else files:
        tensors, _ = read_minimalloc(path)
        tensors = tensors[:FEW] if short else tensors
        begin = time.process_time()
        spans, sizes = [(tensor.first, tensor.last) for tensor in tensors], [tensor.bytes for tensor in tensors]
        offsets = fitting_offsets(spans, sizes, ARENA_BYTES, time.monotonic() + 60)
        seconds = time.process_time() - begin
        if offsets is not None:
            check_layout(tensors, offsets, ARENA_BYTES)
        missing += offsets is None
        figures = (len(tensors), most_alive(tensors, 1), plan_arena(tensors, 1)[1], "no" if offsets is None else "yes")
        table.add_row(path.name.split(".")[0], *map(str, figures), f"{seconds:.2f}")
    CONSOLE.print(table)
    return missing > 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("networks", "minimalloc"), help="one of the two parts")
    parser.add_argument("--folder", type=Path, default=SUITE, help="instances of minimalloc, as CSV")
    parser.add_argument("--short", action="store_true", help="two cells and a part of one instance, for CI")
    args = parser.parse_args()
    failed = args.only != "minimalloc" and networks(args.short)
    failed |= args.only != "networks" and challenging(args.folder, args.short)
    sys.exit(failed)


if __name__ == "__main__":
    main()
