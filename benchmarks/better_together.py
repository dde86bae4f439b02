"""Predict the pipelines that BetterTogether measured on a Pixel 7a, and find the best schedule with its proof.

    python benchmarks/better_together.py                    # ../shared/suites/better-together, where that exists
    python benchmarks/better_together.py --folder FOLDER    # of a clone: a table *.raw, and BM_best_raw_stage_*.txt
    python benchmarks/better_together.py --short            # a board made here, for CI

The files are those of https://github.com/ucsc-redwood/better-together. "Theirs" is the value of a schedule in their
model: the largest sum of times that were measured while all processors were busy. "Ours" corrects these times as the
runtime does while a pipeline runs: by the median of measured over predicted seconds of each processor in the *other*
logs of as many processors. So no schedule is predicted from its own log. The best schedule is proven for the table,
and for the times that all logs correct. Seconds are CPU seconds. The exit status is 1 if a schedule that was measured
is better in the table than the proven one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.better_together import write_board
from tvm_pipeline import Problem, plan
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.errors import NoPlanError
from tvm_pipeline_papers.better_together import LOGS, TABLES, Log, corrected, matched, read_log, read_table, stages_s

CONSOLE = Console(width=max(Console().width, 140))
SUITE = Path(__file__).parents[2] / "shared/suites/better-together"


def shown(stages: Sequence[Stage]) -> str:
    """Return a schedule with the number of stages of each processor, such as `Big 1 | GPU 3 | Medium 5`."""
    return " | ".join(f"{stage.devices[0]} {len(stage.operators)}" for stage in stages)


def best_of(problems: dict[int, Problem]) -> tuple[Plan, float]:
    """Return the best plan of all problems, and the CPU seconds; the key of a problem is the number of stages."""
    begin, found = time.process_time(), []
    for working, problem in problems.items():
        try:
            found.append(plan(replace(problem, stages=working), "ideals").plan)
        except NoPlanError:  # fewer stages than processors
            continue
    return max(found, key=lambda one: one.predicted.throughput_fps or 0.0), time.process_time() - begin


def errors(predicted: Sequence[float], measured: Sequence[float]) -> str:
    off = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    related = statistics.correlation(predicted, measured)
    return f"mean error {statistics.mean(off):.1%}, worst {max(off):.1%}, correlation {related:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=SUITE, help="with a table and the logs of its schedules")
    parser.add_argument("--short", action="store_true", help="a board made here, for CI")
    args = parser.parse_args()
    temporary = tempfile.TemporaryDirectory()
    folder = write_board(Path(temporary.name)) if args.short else args.folder
    tables, files = sorted(folder.rglob(TABLES)), sorted(folder.rglob(LOGS), key=lambda path: (len(path.name), path))
    if len(tables) != 1 or not files:
        sys.exit(
            f"{folder} has {len(tables)} tables {TABLES} and {len(files)} logs {LOGS}: "
            "clone https://github.com/ucsc-redwood/better-together and give --folder"
        )
    problem, logs = read_table(tables[0]), [read_log(path) for path in files]
    runs: list[tuple[tuple[Stage, ...], Log]] = list(zip(matched(problem, logs), logs, strict=True))
    table = Table("log", "stages of each processor", "measured, ms", "theirs, ms", "ours, ms")
    theirs, ours, measured = [], [], [log.period_s for log in logs]
    for number, (stages, log) in enumerate(runs):
        others = runs[:number] + runs[number + 1 :]
        theirs.append(max(stages_s(problem, stages)))
        ours.append(max(stages_s(corrected(problem, others, len(stages)), stages)))
        figures = (f"{1e3 * seconds:.2f}" for seconds in (log.period_s, theirs[-1], ours[-1]))
        table.add_row(files[number].stem, shown(stages), *figures)
    CONSOLE.print(table)
    CONSOLE.print(f"theirs: {errors(theirs, measured)}")
    CONSOLE.print(f"ours: {errors(ours, measured)}")
    counts = range(1, len(problem.platform.devices) + 1)
    best_of(dict.fromkeys(counts, problem))  # compiles the loops
    for name, problems in (
        ("table", dict.fromkeys(counts, problem)),
        ("table, corrected by all logs", {count: corrected(problem, runs, count) for count in counts}),
    ):
        found, took_s = best_of(problems)
        period_ms = 1e3 / (found.predicted.throughput_fps or 1.0)
        of_log = [f"{1e3 * log.period_s:.2f}" for stages, log in runs if shown(stages) == shown(found.stages)]
        CONSOLE.print(
            f"best of the {name}: {shown(found.stages)}, {period_ms:.2f} ms, {found.status}, {took_s:.3f} s; "
            f"measured: {of_log[0] if of_log else 'not'}"
        )
        if name == "table" and period_ms > 1e3 * min(theirs) * (1 + 1e-9):
            sys.exit(f"a schedule of {1e3 * min(theirs):.2f} ms is better")


if __name__ == "__main__":
    main()
