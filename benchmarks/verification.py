"""What measuring the candidates brings: the chosen plan against the best of all, with and without verification.

    python benchmarks/verification.py

For each model: compile, profile, plan; choose by prediction, and by measuring for ten seconds
(`runtime.verification.verified`). Then every candidate runs for longer, in turns, and judges both choices.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from networks import MODELS, load
from rich.console import Console

from tvm_pipeline import Problem, detect_platform, planning, profile_model, settle_platform
from tvm_pipeline.report import TextTable, comparison_table
from tvm_pipeline.runtime.comparison import compare, runner
from tvm_pipeline.runtime.verification import VERIFY_S, verified


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--verify", type=float, default=VERIFY_S, help="seconds of measuring before the choice")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each candidate in each round afterwards")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--short", action="store_true", help="one small model, briefly: proves that it works")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.models, arguments.verify, arguments.seconds, arguments.rounds = ["light_shufflenet"], 6.0, 0.3, 1

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
    compiled = backend.compile(load(name), platform.devices, lambda _: None)
    problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform))
    predicted = planning.plan(problem)
    begin_s = time.perf_counter()
    decision = verified(problem, predicted, runner(compiled, platform), arguments.verify)
    took_s = time.perf_counter() - begin_s
    afterwards = compare(compiled, platform, predicted.candidates, seconds=arguments.seconds, rounds=arguments.rounds)
    console.print(f"[bold]{name}[/]: {decision.why}", comparison_table(afterwards))
    rates = {found.plan.stages: found.throughput_fps for found in afterwards}
    best = max(rates.values())
    return {
        "model": name,
        "predicted_choice": predicted.plan.scheduler,
        "predicted_of_best": rates[predicted.plan.stages] / best,
        "verified_choice": decision.plan.scheduler,
        "verified_of_best": rates[decision.plan.stages] / best,
        "decided_by": decision.decided_by,
        "measured": len(decision.measured),
        "candidates": len(predicted.candidates),
        "took_s": took_s,
    }


if __name__ == "__main__":
    main()
