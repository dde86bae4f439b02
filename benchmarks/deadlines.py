"""Do the predicted latencies come true? p50 and p99 under load, and deadlines, predicted against measured.

    python benchmarks/deadlines.py

For each network: compile, profile, plan and verify as `tvm-pipeline compile` does. Frames then come to the chosen plan
at 50, 80 and 95 % of its measured rate, interleaved. A frame's latency counts from when the frame was due. From the
same runs, two deadlines of each are decided: one below and one above the predicted latency that 99 % of the frames
keep. The planner decided rightly if the measured share of late frames is on the side of `--miss 0.01` that it told.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from prediction import decided, models, read_rounds, rounds_parser
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Decision, Pipeline, Plan, Problem
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.plan import describe
from tvm_pipeline.cost.under_load import FrameDeadline, in_time, with_latencies
from tvm_pipeline.errors import LimitMissedError
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.workflow.steps import Compiled

SHARES = (0.5, 0.8, 0.95)  # of the rate that the plan was measured to have
FACTORS = (0.7, 1.4)  # of the predicted p99, for deadlines to decide
MISS = 0.01
WARM_UP = 20  # frames that do not count


def main() -> None:
    arguments = read_rounds(rounds_parser(__doc__, "rate", seconds=10.0, rounds=3), short_s=0.05)
    shares, factors = (SHARES[:1], FACTORS[1:]) if arguments.short else (SHARES, FACTORS)
    quantiles = (column for name in ("p50", "p99") for column in (name, "measured", "error"))
    table = Table("network", "plan", "share", "fps", *quantiles, "deadlines")
    p50s, p99s, right = [], [], []
    for name, model in models(arguments.models):
        made, problem, decision = decided(model, short=arguments.short)
        plan, found = decision.plan, {result.plan.stages: result.throughput_fps for result in decision.measured}
        capacity_fps = found.get(plan.stages) or plan.predicted.throughput_fps or 0.0
        measured_s: dict[float, list[float]] = {share: [] for share in shares}
        for _ in range(arguments.rounds):
            for share, latencies_s in measured_s.items():
                latencies_s += paced(made, plan, share * capacity_fps, arguments.seconds)
        for share, latencies_s in measured_s.items():
            rate_fps = share * capacity_fps
            told = with_latencies(problem, plan, decision.times_s(plan), rate_fps).predicted
            row = [name, describe(plan), f"{share:.0%}", f"{rate_fps:.1f}"]
            for predicted_s, quantile, errors in ((told.latency_p50_s, 0.5, p50s), (told.latency_p99_s, 0.99, p99s)):
                came_s = float(np.quantile(latencies_s, quantile))
                errors.append((predicted_s or 0.0) / came_s - 1)
                row += [f"{1e3 * (predicted_s or 0.0):.1f} ms", f"{1e3 * came_s:.1f} ms", f"{errors[-1]:+.0%}"]
            cases = []
            for factor in factors:
                deadline = FrameDeadline(factor * (told.latency_p99_s or 0.0), MISS, rate_fps)
                late = statistics.mean(seconds > deadline.seconds for seconds in latencies_s)
                cases.append(keeps(problem, decision, deadline) == (late <= MISS))
            right += cases
            table.add_row(*row, f"{sum(cases)} of {len(cases)}")
    console = Console(width=160)
    console.print(table)
    for name, errors in (("p50", p50s), ("p99", p99s)):
        sizes = list(map(abs, errors))
        console.print(f"{name}: median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    console.print(f"deadlines decided rightly: {sum(right)} of {len(right)}")


def paced(made: Compiled, plan: Plan, rate_fps: float, seconds: float) -> list[float]:
    """Return the latencies of frames that come by the clock, each from when it was due."""
    frame, count = frame_of_noise(made.compiled.graph), WARM_UP + round(rate_fps * seconds)
    latencies_s = []

    def frames() -> Iterator[Tagged]:
        began_s = time.perf_counter()
        for index in range(count):
            due_s = began_s + index / rate_fps
            time.sleep(max(0.0, due_s - time.perf_counter()))
            yield Tagged(frame, due_s)

    with Pipeline(made.compiled, plan, made.platform) as pipeline:
        for result in pipeline.map(frames()):
            latencies_s.append(time.perf_counter() - result.tag)
    return latencies_s[WARM_UP:]


def keeps(problem: Problem, decision: Decision, deadline: FrameDeadline) -> bool:
    """Return whether the planner tells that the chosen plan keeps a deadline."""
    try:
        in_time(problem, replace(decision, candidates=(decision.plan,)), deadline)
    except LimitMissedError:
        return False
    return True


if __name__ == "__main__":
    main()
