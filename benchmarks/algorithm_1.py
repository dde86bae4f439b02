"""What Algorithm 1 of Velasco-Montero et al. (IEEE Access 2023) loses as it is printed, by one judge for all plans.

    python benchmarks/algorithm_1.py
    python benchmarks/algorithm_1.py --short

Its plan is compared with the best plan of one stage or of two (`single`, `two-stage`), for which alone it looks, and
with `best`, which has more stages, other cuts and replicas. Three kinds of problems: the recorded graphs on two devices
whose times and links are drawn at random; the same graphs on two modelled Edge TPUs, whose caches the algorithm does
not know; networks that are measured now on two devices of this machine.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from networks import load
from planner import CONSOLE, coral, keras, show, unequal

from tvm_pipeline import Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.core.plan import describe
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline_papers.algorithm_1 import algorithm_1

RECORDED = sorted(path.stem for path in (Path(__file__).parents[1] / "profiles/keras").glob("*.json"))
MEASURED = ("mobilenet", "squeezenet", "resnet-18", "light_inception_v1", "light_shufflenet", "inception_v3")
EQUAL = 1e-9  # the rounding of sums

Row = tuple[str, float, float, str]


def compared(name: str, problem: Problem) -> Row:
    """Return its part of the frames a second of the best plan of one stage or two, and of `best`; the plans."""
    printed = algorithm_1(problem)
    fps = printed.predicted.throughput_fps or math.nan
    ours = []
    for scheduler in ("single", "two-stage"):
        try:
            ours.append(planning.plan(problem, scheduler).plan)
        except NoPlanError:
            continue
    cut = max(ours, key=lambda plan: plan.predicted.throughput_fps or 0.0)
    best = planning.plan(replace(problem, time_limit_s=10.0)).plan
    rates = [judged(problem, plan).predicted.throughput_fps or math.nan for plan in (cut, best)]
    return name, fps / rates[0], fps / rates[1], f"{describe(printed)}; {describe(cut)}; {describe(best)}"


def drawn(names: Iterable[str], seeds: int) -> list[Row]:
    return [
        compared(name, unequal(random.Random(f"{name}{seed}"), keras(name), 2))
        for name in names
        for seed in range(seeds)
    ]


def edge_tpus(names: Iterable[str]) -> list[Row]:
    return [compared(name, Problem(keras(name), coral(2), unmeasured(keras(name)))) for name in names]


def measured(names: Iterable[str]) -> list[Row]:
    rows: list[Row] = []
    found = detect_platform()
    pair = max(disjoint_sets(found.devices), key=len)[:2]
    if len(pair) < 2:
        CONSOLE.print("this machine has no two devices that share no cores: nothing is measured")
        return rows
    backend, platform = settle_platform(replace(found, devices=pair))
    for name in names:
        compiled = backend.compile(load(name), platform.devices)
        profile = profile_model(backend, compiled, platform)
        for warning in profile.warnings:
            CONSOLE.print(f"{name}: {warning}")
        rows.append(compared(name, Problem(compiled.graph, platform, profile)))
    return rows


def summary(what: str, rows: list[Row]) -> tuple[str, ...]:
    """Return a row: how many problems, how often it is as good, and the median and the worst of both shares."""
    cells = [what, str(len(rows))]
    for at in (1, 2):
        shares = [float(row[at]) for row in rows]
        equal = sum(share >= 1 - EQUAL for share in shares)
        cells += [f"{equal}", f"{statistics.median(shares):.4f}", f"{min(shares):.4f}"]
    return tuple(cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MEASURED), help="what is measured on this machine")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument(
        "--short", action="store_true", help="one recorded graph, nothing is measured: proves that it works"
    )
    arguments = parser.parse_args()
    names = RECORDED
    if arguments.short:
        names, arguments.models, arguments.seeds = ["MobileNetV2"], [], 1
    kinds = {
        "drawn times, two devices": drawn(names, arguments.seeds),
        "two Edge TPUs (model)": edge_tpus(names),
        "measured here": measured(arguments.models),
    }
    for what, rows in kinds.items():
        if what.startswith("drawn") or not rows:
            continue
        columns = ("network", "of the best in one or two", "of best", "algorithm-1; best in one or two; best")
        show(what, columns, [(name, f"{cut:.4f}", f"{best:.4f}", plans) for name, cut, best, plans in rows])
    columns = ("problems", "count", "as good", "median", "worst", "as good as best", "median", "worst")
    show(
        "frames a second by the judge: algorithm-1 over the best in one stage or two, and over best",
        columns,
        [summary(what, rows) for what, rows in kinds.items() if rows],
    )


if __name__ == "__main__":
    main()
