"""Check exact minimum-peak orders, time their proofs, and measure how much memory they save.

    python benchmarks/memory_order.py                   # all three parts, about six minutes
    python benchmarks/memory_order.py --only networks   # one of agreement, proofs, networks
    python benchmarks/memory_order.py --short           # a little of each, for CI

1. agreement: the exact search and SERENITY's scheduler against every order of 5000 random DAGs of up to 8 operators,
   with and without operators in place, buffers of several producers, workspace and pinned buffers. Required: no
   mismatch.
2. proofs: seconds of one processor to the proven optimum, with the loops compiled; an asterisk marks what is slower
   than required: 0.2 s for NASNetMobile, NASNetLarge and RandWire WS(32); 1 s for WS(48); 30 s for WS(64), or a bound
   within 3%. The published scheduler takes 40.6 s on average. `sums` has one buffer for each sum, which its parts are
   added to as they come: the hardest graphs here.
3. networks: the peak of the listing, of Kahn's order and of the exact one, and SERENITY's scheduler beside the exact
   search in turns. Their ratio is one of seconds: median and spread of some rounds, or how long it ran in vain.

The exit status is 1 where an order is not what it is said to be, or a proof disagrees with a brute force.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import compress, islice
from pathlib import Path

from planner import CONSOLE, run_parts, show

from tests.support.memory_networks import CELLS, NETWORKS, randwire
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.memory import Buffer, MemoryGraph, Ordering, memory_graph, minimum_peak, peak_bytes
from tvm_pipeline_papers.serenity import serenity_order

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.support.memory import least_peak, random_memory_graph

FAULTS: list[str] = []


def timed(graph: MemoryGraph, method: str = "exact", time_limit_s: float = 60.0) -> tuple[float, Ordering]:
    begin = time.process_time()
    found = serenity_order(graph, time_limit_s) if method == "serenity" else minimum_peak(graph, method, time_limit_s)
    seconds = time.process_time() - begin
    if peak_bytes(graph, found.order) != found.peak_bytes or found.bound_bytes > found.peak_bytes:
        FAULTS.append(f"{graph.name}: {method} says {found.peak_bytes} bytes of an order that needs others")
    return seconds, found


# 1. Agreement


def agreement(short: bool) -> None:
    count = 10 if short else 5000
    traits = {"in place": 0, "several producers": 0, "workspace": 0, "pinned inputs": 0, "Kahn's is worse": 0}
    wrong = 0
    for seed in range(count):
        graph = random_memory_graph(random.Random(seed))
        least = least_peak(graph)
        for method in ("exact", "serenity"):
            _, found = timed(graph, method)
            if found.peak_bytes != least or found.bound_bytes != least:
                wrong += 1
                FAULTS.append(f"seed {seed}: {method} proves {found.bound_bytes} bytes, the least is {least}")
        traits["in place"] += any(graph.in_place)
        traits["several producers"] += any(len(buffer.producers) > 1 for buffer in graph.buffers)
        traits["workspace"] += any(graph.workspace_bytes)
        traits["pinned inputs"] += any(buffer.pinned and not buffer.producers for buffer in graph.buffers)
        traits["Kahn's is worse"] += minimum_peak(graph, "kahn").peak_bytes > least
    show(f"1. Agreement with every order of {count} random DAGs", ("with", *traits), [("graphs", *traits.values())])
    CONSOLE.print(f"mismatches: {wrong} (required: 0)")


# 2. Proofs


def sums_apart(graph: OperatorGraph) -> MemoryGraph:
    """Return the graph with an operator for each part of a sum, which adds it to the buffer of the sum."""
    operators: list[str] = []
    producers: dict[str, list[int]] = {tensor.name: [] for tensor in graph.inputs}
    consumers: dict[str, list[int]] = {name: [] for name in graph.tensors}
    for part in graph.operators:
        apart = part.kind in ("add", "mean") and len(part.inputs) > 1
        for reads in [(read,) for read in part.inputs] if apart else [part.inputs]:
            for read in dict.fromkeys(reads):
                consumers[read].append(len(operators))
            for tensor in part.outputs:
                producers.setdefault(tensor.name, []).append(len(operators))
            operators.append(f"{part.name} {len(operators)}")
    buffers = (
        Buffer(name, graph.tensors[name].bytes, tuple(writers), tuple(consumers[name]), name in graph.outputs)
        for name, writers in producers.items()
    )
    return MemoryGraph(f"{graph.name} sums", tuple(operators), tuple(buffers))


def proofs(short: bool) -> None:
    seeds, limit_s = (1, 0.3) if short else (20, 30.0)
    few = 1 if short else 5
    groups: dict[str, tuple[list[MemoryGraph], float]] = {
        **{
            name: ([memory_graph(make())], 0.2)
            for name, make in NETWORKS.items()
            if name.startswith("NASNet") and " " not in name
        },
        "RandWire WS(32)": ([memory_graph(randwire(32, seed=seed)) for seed in range(seeds)], 0.2),
        "RandWire WS(48)": ([memory_graph(randwire(48, seed=seed)) for seed in range(seeds)], 1.0),
        "RandWire WS(64)": ([memory_graph(randwire(64, seed=seed)) for seed in range(seeds)], 30.0),
        "RandWire WS(32), in place": ([memory_graph(randwire(32, seed=s), in_place=True) for s in range(seeds)], 0.2),
        "RandWire WS(32), sums": ([sums_apart(randwire(32, seed=seed)) for seed in range(few)], math.inf),
        "RandWire WS(64), sums": ([sums_apart(randwire(64, seed=seed)) for seed in range(few)], math.inf),
    }
    timed(memory_graph(randwire(16)))  # compiles the loops, or loads them
    rows = []
    for name, (graphs, required_s) in groups.items():
        found = [timed(graph, "exact", limit_s) for graph in graphs]
        taken = [seconds for seconds, _ in found]
        proven = sum(ordering.status == "optimal" for _, ordering in found)
        gap = max(ordering.gap for _, ordering in found)
        missed = " *" if max(taken) > required_s or (gap > 0.03 and required_s < math.inf) else ""
        sizes = sorted(len(graph) for graph in graphs)
        worst = f"{max(taken):.3f} s{missed}"
        required = f"{required_s:g} s" if required_s < math.inf else ""
        operators = f"{sizes[0]}-{sizes[-1]}" if sizes[0] < sizes[-1] else sizes[0]
        median = f"{statistics.median(taken):.3f} s"
        rows.append((name, operators, f"{proven} of {len(graphs)}", f"{gap:.1%}", median, worst, required))
    columns = ("graphs", "operators", "proven", "widest gap", "median", "worst", "required, at most")
    show(f"2. The proven optimum, within {limit_s:g} s", columns, rows)


# 3. Networks


def networks(short: bool) -> None:
    rounds, limit_s, chosen = (1, 0.05, dict(islice(CELLS.items(), 3))) if short else (3, 10.0, NETWORKS)
    timed(memory_graph(randwire(16)))
    rows: list[Sequence[object]] = []
    against: dict[str, list[float]] = {"program order": [], "Kahn": [], "DFS": []}
    for name, make in chosen.items():
        graph, overwriting = memory_graph(make()), memory_graph(make(), in_place=True)
        free = [minimum_peak(graph, method).peak_bytes for method in ("program", "kahn", "dfs")]
        exact_s, exact = timed(graph)
        for ratios, peak in zip(against.values(), free, strict=True):
            ratios.append(peak / exact.peak_bytes)
        turns: list[tuple[tuple[float, Ordering], tuple[float, Ordering]]] = []
        # What was not proven once is not tried again.
        while len(turns) < rounds and all(theirs.status == "optimal" for (_, theirs), _ in turns):
            turns.append((timed(graph, "serenity", limit_s), timed(graph)))
        if any(theirs.status == "optimal" and theirs.peak_bytes != ours.peak_bytes for (_, theirs), (_, ours) in turns):
            FAULTS.append(f"{name}: SERENITY's scheduler and the exact search both prove an optimum, and they differ")
        ratio = f"> {limit_s:g} s"
        if all(theirs.status == "optimal" for (_, theirs), _ in turns):
            found = sorted(theirs_s / ours_s for (theirs_s, _), (ours_s, _) in turns)
            ratio = f"{statistics.median(found):.1f} ({found[0]:.1f} to {found[-1]:.1f})"
        least = f"{exact.peak_bytes}{'' if exact.status == 'optimal' else f' (gap {exact.gap:.1%})'}"
        in_place = timed(overwriting)[1].peak_bytes
        rows.append((name, len(graph), *free, least, in_place, f"{exact_s:.3f} s", ratio))
    columns = ("network", "operators", *against, "exact", "exact, in place", "proven in", "SERENITY / ours")
    show("3. Peaks in bytes", columns, rows)
    CONSOLE.print("SERENITY / ours: its seconds over ours, median and spread; or how long it searched for no proof.")
    cells = [name in CELLS for name in chosen]
    show(
        "Geometric means of peak / exact peak (the paper: 1.68 against TFLite's order)",
        ("over", *against),
        [
            ("all networks", *(f"{statistics.geometric_mean(ratios):.3f}" for ratios in against.values())),
            ("cells", *(f"{statistics.geometric_mean(compress(ratios, cells)):.3f}" for ratios in against.values())),
        ],
    )


PARTS = {"agreement": agreement, "proofs": proofs, "networks": networks}


def main() -> None:
    run_parts(__doc__, PARTS)
    for fault in FAULTS:
        CONSOLE.print(fault)
    sys.exit(bool(FAULTS))


if __name__ == "__main__":
    main()
