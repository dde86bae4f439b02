"""Measure how good the plans of local search are, in a time that is set.

    python benchmarks/local_search.py                # both parts
    python benchmarks/local_search.py --only optima  # one of optima, nasnets
    python benchmarks/local_search.py --short        # a little of each, for CI

1. optima: 13 networks of `profiles/keras` on 4, 6 and 8 modelled Edge TPUs over PCIe, one stage each, 0.5 s: the gap to
   the proven optimum of `ideals`; and the same on devices of unequal speed and caches.
2. nasnets: NASNet-A fused and fine-grained, NASNetMobile and NASNetLarge, whose downsets are too many to list, 5 s:
   the slowest stage against that of `chain` and CP-SAT from it in the same time, which is what `best` did before it
   had local search, and its gap by the bound of all pipelines.

The loops are compiled before. Where several seeds are tried, the median and the worst count. The seconds are of one
core; on a machine with other work a figure is worse.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for benchmarks.planner and tests.support

from benchmarks.planner import FIGURES, ROOT, coral, figure, keras, run_parts, show
from tests.support import generators
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.planning.local.bounds import lower_bound
from tvm_pipeline.planning.local.local_search import local_search
from tvm_pipeline.planning.sat.cp_sat import cp_sat
from tvm_pipeline.planning.search.dynamic_programming import chain, ideals

KERAS = sorted(path.stem for path in (ROOT / "profiles/keras").glob("*.json"))
COUNTS = (4, 6, 8)


def unequal(count: int) -> Platform:
    """Return the first `count` devices, each second of them with half the speed and half the cache."""
    platform = coral(count)
    devices = []
    for index, device in enumerate(platform.devices):
        model = device.model
        if index % 2 and model and model.macs_per_s and model.cached_bytes:
            slower = replace(model, macs_per_s=model.macs_per_s / 2, cached_bytes=model.cached_bytes // 2)
            device = replace(device, model=slower)
        devices.append(device)
    return replace(platform, devices=tuple(devices))


def fastest(graph: OperatorGraph, platform: Platform, time_limit_s: float | None = None) -> Problem:
    return Problem(graph, platform, unmeasured(graph), "throughput", len(platform.devices), time_limit_s=time_limit_s)


def percent(part: float) -> str:
    return f"{part:.2%}"


def fps(found: tuple[float, ...] | None) -> float:
    assert found is not None
    return found[0]


def searched(problem: Problem, seeds: int) -> list[float]:
    """Return the frames a second that the seeds reach, the worst first."""
    return sorted(fps(local_search(problem, seed=seed).value) for seed in range(seeds))


def optima(short: bool) -> None:
    names, counts, seeds, seconds = (("ResNet50",), (4,), 1, 0.1) if short else (KERAS, COUNTS, 3, 0.5)
    rows, columns = [], ["equal devices"] if short else ["equal devices", "unequal devices"]
    for what in columns:
        gaps, worst, where = [], 0.0, ""
        for name in names:
            graph = keras(name)
            # Each exact search of unequal devices takes their permutations; those of 8 would take minutes.
            for count in counts if what == "equal devices" else counts[:1]:
                platform = coral(count) if what == "equal devices" else unequal(count)
                best = fps(ideals(fastest(graph, platform)).value)
                found = [best / got - 1 for got in searched(fastest(graph, platform, seconds), seeds)]
                gaps.append(statistics.median(found))
                if max(found) > worst:
                    worst, where = max(found), f"{name}, {count} stages"
        title = f"{len(gaps)} instances on {what}, {seconds:g} s"
        rows.append(figure(f"{title}: mean gap of the medians of {seeds} seeds", statistics.mean(gaps), percent, 0.002))
        rows.append(figure(f"  worst of all{f', {where}' if where else ''}", worst, percent, 0.02))
    show("Local search against proven optima", FIGURES, rows)


def nasnets(short: bool) -> None:
    tflite = ROOT / "profiles/tflite"
    graphs = {"NASNet-A, one cell, fused": generators.nasnet(1, fused=True)}
    if not short:
        graphs = {
            "NASNet-A fused": generators.nasnet(fused=True),
            "NASNet-A fine": generators.nasnet(),
            "NASNetMobile": read_graph(tflite / "NASNetMobile.json"),
            "NASNetLarge": read_graph(tflite / "NASNetLarge.json"),
        }
    counts, seeds, seconds = ((4,), 1, 0.2) if short else (COUNTS, 3, 5.0)
    rows = []
    for name, graph in graphs.items():
        for count in counts:
            problem = fastest(graph, coral(count), seconds)
            begun = time.monotonic()
            guess = chain(problem)
            left_s = max(0.0, seconds - (time.monotonic() - begun))
            before = fps(cp_sat(replace(problem, time_limit_s=left_s), guess.stages).value)
            found = searched(problem, seeds)
            middle = statistics.median(found)
            rows.append(
                (
                    f"{name}, {len(graph)} operators",
                    count,
                    f"{1e3 / fps(guess.value):.3f}",
                    f"{1e3 / before:.3f}",
                    f"{1e3 / middle:.3f}",
                    f"{before / middle - 1:+.1%}",
                    f"{before / found[0] - 1:+.1%}",
                    f"{1 - middle / fps(lower_bound(problem)):.1%}",
                )
            )
    title = f"The slowest stage in ms, {seconds:g} s; median and worst of {seeds} seeds"
    show(
        title,
        ("network", "stages", "chain", "chain, cp-sat", "local search", "change", "worst", "gap"),
        rows,
    )


PARTS = {"optima": optima, "nasnets": nasnets}


def compile_loops(_: bool) -> None:
    local_search(fastest(generators.nasnet(1, fused=True), unequal(2)), moves=1000)


if __name__ == "__main__":
    run_parts(__doc__, PARTS, compile_loops)
