"""What the frames inside a pipeline are worth: the plan of `compile` against the same plan with the usual number.

    python benchmarks/latency.py

For each network: compile, profile, plan and verify as `tvm-pipeline compile` does, which looks for the fewest frames
inside that keep 99 % of the rate. Then two plans run alternately: that plan, and the same plan with the usual number of
frames, which is one in each worker and one that waits for it. The table has the frames inside, the ratio of both rates,
both latencies under load, and the error of the predicted one.
"""

from __future__ import annotations

import statistics
from dataclasses import replace

from prediction import decided, models, read_rounds, rounds_parser
from rich.console import Console
from rich.table import Table

from tvm_pipeline.core.plan import describe
from tvm_pipeline.runtime.comparison import Measured, compare


def main() -> None:
    arguments = read_rounds(rounds_parser(__doc__, "plan", seconds=1.5, rounds=7), short_s=0.1)
    table = Table(
        "network", "plan", "inside", "rate, few/many", "few p50", "few p99", "many p50", "many p99", "error p50"
    )
    ratios, errors = [], []
    for name, model in models(arguments.models):
        made, _, decision = decided(model, short=arguments.short)
        few = decision.plan
        many = replace(few, in_flight=None)
        plans = [few] if few.frames_inside == many.frames_inside else [few, many]
        run = compare(made.compiled, made.platform, plans, seconds=arguments.seconds, rounds=arguments.rounds)
        ratio, usual = "the same", ("", "")
        if len(run) > 1:
            ratios.append(run[0].throughput_fps / run[1].throughput_fps)
            ratio, usual = f"{ratios[-1]:.3f}", milliseconds(run[1])
        expected_s = few.predicted.loaded_latency_s(few.frames_inside) or 0.0
        errors.append(expected_s / (run[0].statistics.latency_p50_s or 1.0) - 1)
        inside = f"{few.frames_inside} of {many.frames_inside}"
        table.add_row(name, describe(few), inside, ratio, *milliseconds(run[0]), *usual, f"{errors[-1]:+.1%}")
    console = Console(width=160)
    console.print(table)
    console.print(
        f"{len(ratios)} of {len(errors)} networks need fewer frames inside; rate with the fewest over that with many: "
        f"median {statistics.median(ratios or [1.0]):.3f}, least {min(ratios, default=1.0):.3f}; latency under load, "
        "predicted against measured: median error "
        f"{statistics.median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}"
    )


def milliseconds(found: Measured) -> tuple[str, str]:
    """Return the median and the 99 % latency under load, of the turn in the middle."""
    figures_s = (found.statistics.latency_p50_s, found.statistics.latency_p99_s)
    p50, p99 = (f"{(figure_s or 0.0) * 1e3:.2f} ms" for figure_s in figures_s)
    return p50, p99


if __name__ == "__main__":
    main()
