"""Repeat the tables and figures of SERENITY ("Ordering Chaos", Ahn et al., MLSys 2020) on its own network, SwiftNet.

    python benchmarks/serenity_tables.py                        # all five parts, some minutes, most of them Table 2
    python benchmarks/serenity_tables.py --only orders          # one of peaks, ablation, orders, curves, traffic
    python benchmarks/serenity_tables.py --only curves --draw swiftnet.svg
    python benchmarks/serenity_tables.py --short                # a little of each, for CI

1. peaks: the least peak of bytes alive, with concatenations as copies and as free (`memory/concatenation.py`), and with
   SERENITY's two rewritings (`memory/rewriting.py`): with copies and integer sums of 32 bits, as exactness needs;
   without copies and with sums of 8 bits, as the paper counts; and without copies and with sums of 32 bits, by the best
   of all choices of rewritings. Then what Figure 10 compares: the arena of 2019's TFLite
   (`tvm_pipeline_papers/tflite_arena.py`) for the listed order with copies, and those of the best orders without. The
   paper's text has figures of cell A alone, and two means.
2. ablation: Table 2, by `tvm_pipeline_papers/serenity.py` with its ideas left out; seconds of CPU time. N/A is what
   --limit seconds did not suffice for. The exact search beside it.
3. orders: Figure 3, exactly: how many of all topological orders of a cell have which peak, and arenas of orders drawn
   uniformly from all of them and from the best ones.
4. curves: Figure 12, bytes alive and the top of the arena at each operator of cell A; --draw makes the picture.
5. traffic: Figure 11, bytes to and from an on-chip memory by Belady's rule. The inputs and outputs of a cell always
   move; what moves in addition stands beside it, since the paper has cells where nothing does. The text does not say
   how wide the elements of DARTS and RandWire are: here four bytes or one. SwiftNet's have one byte.

1 KB is 1000 bytes in the paper's figures of peaks. The exit status is 1 if a peak of SwiftNet is not the published one,
or if two exact methods differ.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from memory_rewriting import int8
from planner import CONSOLE, s, show

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.memory import MemoryGraph, footprint, memory_graph, minimum_peak, peak_bytes
from tvm_pipeline.memory.arena import lifetimes
from tvm_pipeline.memory.concatenation import free_concatenations
from tvm_pipeline.memory.orders import Ordering, kahn_order, program_order
from tvm_pipeline.memory.rewriting import rewritable, rewrite, rewritten
from tvm_pipeline.memory.traffic import traffic
from tvm_pipeline.report.drawing import CUT, INK, PALE, check_picture, new_figure, save_figure
from tvm_pipeline_papers.peak_distribution import Orders
from tvm_pipeline_papers.serenity import cells, serenity_order
from tvm_pipeline_papers.tflite_arena import online_arena

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.memory_networks import CELLS, PROFILES

FAULTS: list[str] = []
LIMIT_S = 10.0  # of an exact search; all but some of RandWire's are proven in milliseconds
# Figure 12(b): cell A, sum of activations, with the scheduler and with rewriting.
PUBLISHED_BYTES = (200_700, 188_200)
# The nodes of Table 2: without concatenations, and each cell with the pooling before it.
FIRST, LAST = 4, 81


def swiftnet(part: str = "") -> OperatorGraph:
    return read_graph(PROFILES / "swiftnet" / f"swiftnet{part}.json")


def benchmark_cells(short: bool) -> dict[str, OperatorGraph]:
    """Return the cells that the paper measures: DARTS's, SwiftNet's, and stages of RandWire."""
    found = {f"SwiftNet {part.upper()}": swiftnet(f"-cell-{part}") for part in ("a" if short else "abc")}
    if short:
        return found
    others = {name: make() for name, make in CELLS.items() if name.startswith(("DARTS normal", "RandWire"))}
    return {**found, **others}


def partitioned(graph: OperatorGraph, memory: MemoryGraph) -> list[str]:
    """Return the concatenations that SERENITY's two patterns do in parts."""
    return [name for name, how in rewritable(graph, memory).items() if how == "partitioned"]


def free(graph: OperatorGraph, memory: MemoryGraph) -> MemoryGraph:
    return free_concatenations(graph, memory)


def in_parts(graph: OperatorGraph, memory: MemoryGraph) -> MemoryGraph:
    """Return the graph as SERENITY rewrites and counts it."""
    return free(graph, rewritten(graph, memory, partitioned(graph, memory), narrow_sums=True))


def best(graph: MemoryGraph) -> Ordering:
    return minimum_peak(graph, time_limit_s=LIMIT_S)


def arena(graph: MemoryGraph, order: Sequence[int]) -> int:
    return online_arena(lifetimes(graph, order)[0])[1]


def number(found: Ordering) -> str:
    return f"{found.peak_bytes:,}{'' if found.status == 'optimal' else '*'}"


# 1. Peaks


def peaks(options: argparse.Namespace) -> None:
    rows, arenas, ratios = [], [], []
    whole = swiftnet()
    for name, graph in {**benchmark_cells(options.short), "SwiftNet, whole": whole}.items():
        copied = memory_graph(graph)
        other, parts = free(graph, copied), in_parts(graph, copied)
        exact = rewrite(graph, copied, partitioned(graph, copied), time_limit_s=LIMIT_S).ordering
        known = [
            f"{peak_bytes(memory, order(memory)):,}"
            for memory in (copied, other)
            for order in (program_order, kahn_order)
        ]
        found = [best(memory) for memory in (copied, other, parts)]
        sums = f"{exact_sums(graph, copied, 8 if options.short else None):,}" if graph is not whole else ""
        rows.append((name, *known[:2], *map(number, (found[0], exact)), *known[2:], *map(number, found[1:]), sums))
        kept = memory_graph(graph, pin_inputs=True)
        sizes = [arena(kept, program_order(kept)), arena(other, found[1].order), arena(parts, found[2].order)]
        arenas.append((name, *(f"{size:,}" for size in sizes), *(f"{sizes[0] / size:.2f}" for size in sizes[1:])))
        if graph is not whole:
            ratios.append([sizes[0] / size for size in sizes[1:]])
        if name == "SwiftNet A":
            for published, ordering in zip(PUBLISHED_BYTES, found[1:], strict=True):
                if abs(ordering.peak_bytes - published) > 50:
                    FAULTS.append(f"cell A needs {ordering.peak_bytes} bytes, and the paper {published}")
            rows.append(("  the paper", *[""] * 6, "200.7 KB", "188.2 KB", ""))
            arenas.append(("  the paper", "551.0 KB", "250.9 KB", "225.8 KB", "2.20", "2.44"))
    copies = (f"copied: {what}" for what in ("listed", "Kahn", "exact", "rewritten"))
    frees = (f"free: {what}" for what in ("listed", "Kahn", "exact", "rewritten", "sums of 32 bits"))
    show("1. Least peaks, bytes (* not proven)", ("graph", *copies, *frees), rows)
    means = (f"{statistics.geometric_mean(row[index] for row in ratios):.2f}" for index in range(2))
    arenas.append((f"geometric mean of {len(ratios)} cells", "", "", "", *means))
    arenas.append(("  the paper's mean", "", "", "", "1.68", "1.86"))
    columns = ("graph", "copied, listed", "free, exact", "free, rewritten", "listed / exact", "listed / rewritten")
    show("Arenas of 2019, bytes; inputs are kept in the first", columns, arenas)


def exact_sums(graph: OperatorGraph, copied: MemoryGraph, most: int | None) -> int:
    """Return the least peak of all choices of rewritings if concatenations are free and integer sums have 32 bits.

    Args:
        most: the choices that are tried; None tries all.
    """
    names = partitioned(graph, copied)
    choices = itertools.chain.from_iterable(itertools.combinations(names, count) for count in range(len(names) + 1))
    return min(
        best(free(graph, rewritten(graph, copied, chosen))).peak_bytes for chosen in itertools.islice(choices, most)
    )


# 2. Ablation


def ablation(options: argparse.Namespace) -> None:
    whole = swiftnet()
    names = [operator.name for operator in whole.operators[FIRST : LAST + 1]]
    memory = memory_graph(whole, names)
    ideas = {"1": (False, False), "1+2": (True, False), "1+2+3": (True, True)}
    published = {"no": ("N/A", "56.5 s", "37.9 s"), "yes": ("N/A", "7.2 h", "111.9 s")}
    rows: list[tuple[str, ...]] = []
    for rewriting, graph in (("no", free(whole, memory)), ("yes", in_parts(whole, memory))):
        parts = f"{len(graph)} = " + "+".join(str(len(part)) for part in cells(graph))
        least, _ = timed(lambda graph=graph: best(graph))
        ours, ours_s = timed(lambda graph=graph: best(graph))  # the loops are compiled now
        for (label, (divide, budgeting)), paper in zip(ideas.items(), published[rewriting], strict=True):
            found, seconds = timed(
                lambda graph=graph, divide=divide, budgeting=budgeting: serenity_order(
                    graph, options.limit, divide=divide, budgeting=budgeting
                )
            )
            if found.status == "optimal" and found.peak_bytes != least.peak_bytes:
                FAULTS.append(f"Table 2, {label}: {found.peak_bytes} bytes, and {least.peak_bytes} by the exact search")
            done = found.status == "optimal"
            cost = (s(seconds), f"{seconds / ours_s:,.0f}") if done else (f"N/A in {options.limit:g} s", "")
            nodes = parts if divide else f"{len(graph)} = {len(graph)}"
            rows.append((f"{label}, rewriting: {rewriting}", nodes, *cost, number(found), paper))
        rows.append((f"exact search, rewriting: {rewriting}", str(len(graph)), s(ours_s), "1", number(ours), ""))
    columns = ("algorithm", "nodes and parts", "CPU time", "over the exact search", "peak, bytes", "the paper")
    show("2. Table 2: 1 dynamic programming, 2 divide and conquer, 3 soft budgets", columns, rows)
    CONSOLE.print(
        "The paper's nodes: 62 = {21, 19, 22} and 92 = {33, 28, 29}, of which the second sum is 90. Ours by cell, with "
        "the pooling before it: 62 = {21, 19, 22} and 101 = {38, 31, 32}; a cut node is a part of its own here."
    )


def timed(run: Callable[[], Ordering]) -> tuple[Ordering, float]:
    """Return what it finds, and its seconds of CPU time."""
    begin = time.process_time()
    found = run()
    return found, time.process_time() - begin


# 3. Orders


def orders(options: argparse.Namespace) -> None:
    rows, draws = [], 10 if options.short else 2000
    arenas: list[tuple[str, ...]] = []
    for part in "a" if options.short else "abc":
        graph = swiftnet(f"-cell-{part}")
        copied = memory_graph(graph)
        for kind, memory in (("free", free(graph, copied)), ("copied", copied)):
            name = f"cell {part.upper()}, {kind}"
            found = Orders(memory)
            least = min(found.peaks)
            if least != best(memory).peak_bytes:
                FAULTS.append(f"{name}: counting finds {least} bytes, the exact search {best(memory).peak_bytes}")
            shares = [f"{found.within(most) / found.count:.3%}" for most in (least, 250_000, 250 << 10)]
            rows.append(
                (name, f"{found.count:,}", f"{found.downsets:,}", f"{least:,}", *shares, f"{max(found.peaks):,}")
            )
            if part == "a":
                arenas.append((f"{name}: all orders", *drawn(found, memory, draws)))
                arenas.append((f"{name}: best orders", *drawn(Orders(memory, least), memory, draws)))
                running = 0
                steps = []
                for peak, count in found.peaks.items():
                    running += count
                    steps.append(f"{peak / 1000:.1f}: {running / found.count:.3%}")
                CONSOLE.print(f"{name}, share of orders up to a peak in KB (Figure 3): {', '.join(steps)}")
        if part == "a":
            parts = in_parts(graph, copied)
            least = best(parts).peak_bytes
            arenas.append(("cell A, rewritten: best orders", *drawn(Orders(parts, least), parts, draws)))
    rows.append(("the paper, cell A", "", "", "", "0.04%", "4.1% (250 KB)", "", ""))
    columns = ("orders of", "orders", "downsets", "least peak", "best", "<= 250 000", "<= 250 KiB", "largest peak")
    show("3. All topological orders", columns, rows)
    show(f"Arenas of 2019, {draws} orders drawn uniformly", ("orders", "least", "median", "share of each"), arenas)


def drawn(found: Orders, memory: MemoryGraph, draws: int) -> tuple[str, str, str]:
    rng = random.Random(0)
    sizes = sorted(arena(memory, found.draw(rng)) for _ in range(draws))
    common = Counter(sizes).most_common(5)
    shares = ", ".join(f"{size:,} {count / draws:.1%}" for size, count in sorted(common))
    return f"{sizes[0]:,}", f"{sizes[draws // 2]:,}", shares


# 4. Curves


def curves(options: argparse.Namespace) -> None:
    graph = swiftnet("-cell-a")
    copied = memory_graph(graph)
    lines: list[tuple[str, MemoryGraph, tuple[int, ...]]] = [("listed, copies (TFLite)", copied, program_order(copied))]
    other, parts = free(graph, copied), in_parts(graph, copied)
    lines.append(("scheduler, by SERENITY's method (`<=`)", other, serenity_order(other).order))
    lines.append(("scheduler, exact search", other, best(other).order))
    lines.append(("scheduler and rewriting, exact search", parts, best(parts).order))
    published = (("551.0 KB", ""), ("250.9 KB", "200.7 KB"), ("", "200.7 KB"), ("225.8 KB", "188.2 KB"))
    rows = []
    for (name, memory, order), (with_allocator, without) in zip(lines, published, strict=True):
        peak, top = peak_bytes(memory, order), max(tops(memory, order))
        rows.append((name, f"{top:,}", with_allocator, f"{peak:,}", without))
    kept = memory_graph(swiftnet(), pin_inputs=True)
    rows.insert(
        1, ("the whole file, listed, copies, image kept", f"{arena(kept, program_order(kept)):,}", "551.0 KB", "", "")
    )
    kept_first = serenity_order(other, keep_first=True).order
    arena_of_first, peak = f"{arena(other, kept_first):,}", f"{peak_bytes(other, kept_first):,}"
    rows.insert(3, ("the same, the first of equals kept (`<`)", arena_of_first, "250.9 KB", peak, "200.7 KB"))
    columns = ("cell A", "arena of 2019", "Figure 12(a)", "bytes alive", "Figure 12(b)")
    show("4. Figure 12", columns, rows)
    if options.draw:
        draw(lines, options.draw)
        CONSOLE.print(f"written: {options.draw}")


def tops(memory: MemoryGraph, order: Sequence[int]) -> list[int]:
    """Return how much of the arena of 2019 is in use at each step, up to the last tensor that is alive."""
    tensors = lifetimes(memory, order)[0]
    offsets, _ = online_arena(tensors)
    return [
        max(offset + t.bytes for t, offset in zip(tensors, offsets, strict=True) if t.first <= step <= t.last)
        for step in range(len(order))
    ]


def draw(lines: list[tuple[str, MemoryGraph, tuple[int, ...]]], path: Path) -> None:
    figure = new_figure(11, 6.4)
    figure.set_layout_engine("constrained")
    measures = {"with the allocator": tops, "without the allocator: bytes alive": footprint}
    for position, (title, measure) in enumerate(measures.items(), 1):
        axes = figure.add_subplot(2, 1, position)
        for (name, memory, order), colour in zip(lines, (PALE, "#5a8fc0", INK, CUT), strict=True):
            steps = [count / 1000 for count in measure(memory, order)]
            ends = [index / len(steps) for index in range(len(steps) + 1)]
            axes.stairs(steps, ends, color=colour, label=f"{name}: {max(steps):.1f} KB", linewidth=1.3)
        axes.set_title(f"SwiftNet cell A, {title}", loc="left", fontsize=10, color=INK)
        axes.set(xlim=(0, 1), ylim=(0, None), xlabel="share of the operators run", ylabel="KB")
        axes.legend(fontsize=8, frameon=False, ncols=2, loc="lower right")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


# 5. Traffic


def off_chip(options: argparse.Namespace) -> None:
    rows, means = [], []
    for width in (1,) if options.short else (4, 1):
        graphs = {name: int8(graph) if width == 1 else graph for name, graph in benchmark_cells(options.short).items()}
        for kilobytes in (256,) if options.short else (32, 64, 128, 256):
            found = {name: moved(graph, kilobytes << 10) for name, graph in graphs.items()}
            ratios = []
            for name, (ends, listed, *others) in found.items():
                if kilobytes == 256 and (width == 1 or "SwiftNet" not in name):
                    row = (f"{size:,} ({size - ends:,})" for size in (listed, *others))
                    rows.append((name, width, *row))
                if listed > ends:
                    ratios.append([listed / one for one in others])
            ratio = [f"{statistics.geometric_mean(row[i] for row in ratios):.2f}" if ratios else "-" for i in range(3)]
            ended = sum(listed > ends == last for ends, listed, *_, last in found.values())
            means.append(
                (kilobytes, width, *ratio, ended, len(found) - len(ratios), "1.76" if kilobytes == 256 else "")
            )
    ways = ("copied, listed", "free, listed", "free, exact", "free, rewritten")
    show("5. Off-chip traffic at 256 KiB, bytes (beyond inputs and outputs)", ("cell", "bytes each", *ways), rows)
    over = (f"listed / {way}" for way in ways[1:])
    columns = ("KiB", "bytes each", *over, "move nothing more when rewritten", "fit as listed", "the paper")
    show(
        "Traffic of the listed order with copies over others; geometric means of cells that do not fit", columns, means
    )


def moved(graph: OperatorGraph, capacity: int) -> list[int]:
    """Return the bytes of inputs and outputs, and what four orders move: see `ways` above."""
    copied = memory_graph(graph)
    other, parts = free(graph, copied), in_parts(graph, copied)
    ends = sum(b.bytes for b in copied.buffers if b.pinned or (not b.producers and b.consumers))
    orders_of = ((copied, program_order(copied)), (other, program_order(other)))
    best_of = ((memory, best(memory).order) for memory in (other, parts))
    return [ends, *(traffic(memory, order, capacity).bytes for memory, order in (*orders_of, *best_of))]


PARTS = {"peaks": peaks, "ablation": ablation, "orders": orders, "curves": curves, "traffic": off_chip}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--short", action="store_true", help="a little of each part, for CI")
    parser.add_argument("--draw", type=Path, help="write Figure 12 to this .svg or .png")
    parser.add_argument("--limit", type=float, help="seconds for each algorithm of Table 2 (900)")
    options = parser.parse_args()
    if options.draw:
        check_picture(options.draw)
    options.limit = options.limit or (0.2 if options.short else 900.0)
    for name, part in PARTS.items():
        if options.only in (None, name):
            part(options)
    for fault in FAULTS:
        CONSOLE.print(fault)
    sys.exit(bool(FAULTS))


if __name__ == "__main__":
    main()
