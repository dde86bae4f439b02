"""Predicted against measured throughput, and the planner's choice against the best candidate.

    python benchmarks/prediction.py

For each model: compile, profile, plan; then run every candidate in turns (`runtime.comparison.compare`). Three
tables: the error of each prediction, the pipeline against its bound 1/max(stage), and what the choice lost.

The host of a virtual machine may slow its cores for minutes, or move them. Where the pace of a core, by the profile's
reference kernel, differs by more than 3 % between the profile and the end of the runs, or the distance of the cores by
half, the model is measured again, three times at most. The attempt in which they differ least counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

from core_distance import distance_ns
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Decision, Problem, detect_platform, frontends, planning, profile_model, settle_platform
from tvm_pipeline.backends.cores import made_on
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import describe
from tvm_pipeline.profiling.disturbance import ReferenceKernel
from tvm_pipeline.runtime.comparison import Measured, compare
from tvm_pipeline.runtime.verification import VERIFY_S
from tvm_pipeline.workflow.steps import REPEATS, Compiled, compile_source, decide, measured_profile

MOST_SLOWED, MOST_MOVED, ATTEMPTS = 0.03, 0.5, 3


def main() -> None:
    parser = rounds_parser(__doc__, "candidate", seconds=4.0, rounds=5)
    parser.add_argument("--json", type=Path)
    arguments = read_rounds(parser, short_s=0.1)

    console = Console(width=140)
    backend, platform = settle_platform(detect_platform())
    rows: list[tuple[str, Measured]] = []
    for name, model in models(arguments.models):
        compiled = backend.compile(model, platform.devices)
        attempts: list[tuple[float, list[Measured]]] = []
        while not attempts or (attempts[-1][0] > 1 and len(attempts) < ATTEMPTS):
            profile = profile_model(backend, compiled, platform, repeats=8 if arguments.short else 24)
            candidates = planning.plan(Problem(compiled.graph, platform, profile)).candidates
            for warning in profile.warnings:
                console.print(f"{name}: {warning}")
            before, before_ns = core_paces(), distance_ns()
            measured = compare(compiled, platform, candidates, seconds=arguments.seconds, rounds=arguments.rounds)
            after, after_ns = core_paces(), distance_ns()
            slowed = max(abs(late / early - 1) for early, late in zip(before, after, strict=True))
            moved = max(before_ns, after_ns) / max(min(before_ns, after_ns), 1.0) - 1
            attempts.append((max(slowed / MOST_SLOWED, moved / MOST_MOVED), measured))
            console.print(
                f"{name}: cores {before_ns:.0f} ns apart when it was profiled, {after_ns:.0f} ns at the end; the pace "
                f"of one differs by {slowed:.1%}",
                highlight=False,
            )
            show(console, name, measured)
        _, measured = min(attempts, key=lambda attempt: attempt[0])
        rows += [(name, result) for result in measured]
    summary = summarise(rows)
    console.print(summary)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({**summary, "rows": [row(name, result) for name, result in rows]}, indent=1)
        )


def core_paces() -> list[float]:
    """Return the seconds of the profile's reference kernel on each core."""

    def pace() -> float:
        kernel = ReferenceKernel()
        return statistics.median(kernel.seconds() for _ in range(200))

    return [made_on((core,), pace) for core in sorted(os.sched_getaffinity(0))]


def rounds_parser(about: str | None, each: str, *, seconds: float, rounds: int) -> argparse.ArgumentParser:
    """Return the options of a benchmark that runs several plans of each network alternately."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="files, or names that networks.py knows (with Relay alone)")
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of each {each} in each round")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--short", action="store_true", help="one small model, briefly: proves that it works")
    return parser


def read_rounds(parser: argparse.ArgumentParser, short_s: float) -> argparse.Namespace:
    """Return what the command line gives; with --short one round of one small model, of so many seconds."""
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.seconds, arguments.rounds = ["branching"], short_s, 1
    return arguments


def decided(model: Model, *, short: bool) -> tuple[Compiled, Problem, Decision]:
    """Compile, measure, plan and verify a model as `tvm-pipeline compile` does."""
    made = compile_source(model)
    profile = measured_profile(made, repeats=8 if short else REPEATS)
    problem = Problem(made.compiled.graph, made.platform, profile)
    decision, _ = decide(problem, compiled=made.compiled, verify_s=0.5 if short else VERIFY_S)
    return made, problem, decision


def models(names: list[str] | None) -> Iterator[tuple[str, Model]]:
    """Yield each network under its name; those of networks.py where none are named."""
    files = [name for name in names or () if Path(name).suffix]
    if names and len(files) == len(names):
        yield from ((Path(name).stem, frontends.load(name)) for name in names)
        return
    import networks

    for name in names or networks.MODELS:
        yield name, networks.load(name)


def show(console: Console, name: str, measured: list[Measured]) -> None:
    table = Table(
        "candidate", "predicted fps", "measured fps", "spread", "error", "1/max(stage) fps", "of bound", title=name
    )
    for result in measured:
        figures = row(name, result)
        table.add_row(
            figures["candidate"],
            f"{figures['predicted_fps']:.2f}",
            f"{figures['measured_fps']:.2f}",
            f"{figures['spread']:.1%}",
            f"{figures['error']:+.1%}",
            f"{figures['bound_fps']:.2f}",
            f"{figures['of_bound']:.3f}",
        )
    console.print(table)


def row(name: str, result: Measured) -> dict:
    """Return one candidate; the bound is that of the stages' own compute times in the same run."""
    by_stage: dict[int, float] = {}
    for stage in result.statistics.stages:
        by_stage[stage.stage] = by_stage.get(stage.stage, 0.0) + 1 / stage.compute_s
    bound = min(by_stage.values())
    return {
        "model": name,
        "candidate": describe(result.plan),
        "predicted_fps": result.plan.predicted.throughput_fps,
        "measured_fps": result.throughput_fps,
        "spread": result.spread,
        "error": result.prediction_error,
        "bound_fps": bound,
        "of_bound": (result.statistics.throughput_fps or 0.0) / bound,
    }


def summarise(rows: list[tuple[str, Measured]]) -> dict:
    """Return the figures that docs/figures.md quotes."""
    errors = [abs(result.prediction_error) for _, result in rows]
    lost = {}
    for name in dict.fromkeys(name for name, _ in rows):
        results = [result for other, result in rows if other == name]
        best = max(result.throughput_fps for result in results)
        lost[name] = 1 - results[0].throughput_fps / best  # the planner's choice stands first
    return {
        "prediction error, median": round(statistics.median(errors), 4),
        "prediction error, worst": round(max(errors), 4),
        "planner's choice below the best measured, worst": round(max(lost.values()), 4),
        "below by model": {name: round(share, 4) for name, share in lost.items()},
    }


if __name__ == "__main__":
    main()
