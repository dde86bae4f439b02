"""What measuring the candidates brings: the chosen plan against the best of all, with and without verification.

    python benchmarks/verification.py                     # ten networks, alone
    python benchmarks/verification.py --video             # the same, each in an application: read, resize, draw, write
    python benchmarks/verification.py --disturbed         # profiled while a program loads one core half of the time

For each model: compile, profile, plan; choose by prediction, and by measuring for ten seconds
(`runtime.verification.verified`). Then every candidate runs for longer, in turns, and judges both choices. A ratio is
the median over the rounds of a plan's throughput over that of the best plan in the same round.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from application import App, measured
from assets import VIDEO, fetch
from disturbed_profile import LOADS, loaded
from networks import MODELS, load
from rich.console import Console

from tvm_pipeline import Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.report import TextTable, comparison_table
from tvm_pipeline.runtime.comparison import Run, Turn, compare, runner
from tvm_pipeline.runtime.verification import VERIFY_S, verified
from tvm_pipeline_video import preprocessing_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--video", action="store_true", help="plan and run each model within an application on a video")
    parser.add_argument("--disturbed", action="store_true", help="load one core while the model is profiled")
    parser.add_argument("--verify", type=float, default=VERIFY_S, help="seconds of measuring before the choice")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each candidate in each round afterwards")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="one small model, briefly: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.verify, arguments.seconds, arguments.rounds = ["branching"], 1.0, 0.1, 1

    console = Console(width=140)
    rows = [row(console, name, arguments) for name in arguments.models]
    columns = (
        "model",
        "by prediction",
        "of the best",
        "by measuring",
        "of the best",
        "decided",
        "candidates",
        "seconds",
    )
    cells = tuple(
        (
            found["model"],
            found["predicted_choice"],
            f"{found['predicted_of_best']:.3f}",
            found["verified_choice"],
            f"{found['verified_of_best']:.3f}",
            found["decided_by"],
            f"{found['measured']} of {found['candidates']}",
            f"{found['took_s']:.1f}",
        )
        for found in rows
    )
    console.print(TextTable("The choice over the best candidate measured afterwards", columns, cells))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


def row(console: Console, name: str, arguments: argparse.Namespace) -> dict:
    """Return both choices of one model, each with its throughput over that of the best candidate."""
    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(name), platform.devices)
    core = platform.devices[-1].cores[-1]
    with loaded(core, *LOADS["60 ms of 120"]) if arguments.disturbed else nullcontext():
        if arguments.video:
            source = "synthetic:640x360@30" if arguments.short else str(fetch(VIDEO))
            app = App(compiled, backend, platform, source, preprocessing_for(compiled.graph), None)
            rehearsal, problem = measured(app)
            run = rehearsal.runner(compiled, platform, None)
        else:
            repeats = 8 if arguments.short else 24
            problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform, repeats))
            run = runner(compiled, platform)
    predicted = planning.plan(problem)
    begin_s = time.perf_counter()
    decision = verified(problem, predicted, run, arguments.verify)
    took_s = time.perf_counter() - begin_s
    rates: dict[Plan, list[float]] = {plan: [] for plan in predicted.candidates}
    afterwards = compare(
        compiled,
        platform,
        predicted.candidates,
        seconds=arguments.seconds,
        rounds=arguments.rounds,
        run=kept(run, rates),
    )
    console.print(f"[bold]{name}[/]: {decision.why}", comparison_table(afterwards))
    relative = np.array(list(rates.values())) / np.mean(list(rates.values()), axis=0)
    best = max(rates, key=lambda plan: float(np.median(relative[list(rates).index(plan)])))

    def of_best(plan: Plan) -> float:
        return float(np.median(np.array(rates[plan]) / np.array(rates[best])))

    return {
        "model": name,
        "video": arguments.video,
        "disturbed": arguments.disturbed,
        "predicted_choice": predicted.plan.scheduler,
        "predicted_of_best": of_best(predicted.plan),
        "verified_choice": decision.plan.scheduler,
        "verified_of_best": of_best(next(plan for plan in rates if plan.stages == decision.plan.stages)),
        "decided_by": decision.decided_by,
        "measured": len(decision.measured),
        "candidates": len(predicted.candidates),
        "took_s": took_s,
    }


def kept(run: Run, rates: dict[Plan, list[float]]) -> Run:
    """Return a function that runs a plan for a turn and keeps its throughput."""

    def keeping(plan: Plan, seconds: float) -> Turn:
        found = run(plan, seconds)
        rates[plan].append(found.throughput_fps)
        return found

    return keeping


if __name__ == "__main__":
    main()
