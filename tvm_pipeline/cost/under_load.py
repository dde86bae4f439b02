"""The latency of frames under load: by the simulator, over the measured times of stages.

    plan = with_latencies(problem, plan, decision.times_s(plan), rate_fps=30.0)
    print(plan.predicted.latency_p99_s)

A stage takes the seconds that its frames were measured to take where its plan ran for a decision; else its seconds vary
by the spread of the profile. Frames come at a rate, and their latency counts from when they come. Without a rate the
source is never waited for, and the latency counts from a frame's slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tvm_pipeline.core.plan import Decision, Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.simulate import MOST_JITTER, SATURATED, fixed_rate, simulate

FRAMES = 1000  # that are simulated, to tell the latencies of a plan
QUARTILES = 1.349  # standard deviations between the quartiles of a normal distribution

Times = Sequence[Sequence[float]]  # as `Measured.times_s`; empty where a plan did not run


def under_load(problem: Problem, decision: Decision, rate_fps: float | None = None) -> Decision:
    """Return the decision whose chosen and measured plans state quantiles of their latency, see `with_latencies`."""
    ran = {decision.plan.stages, *(found.plan.stages for found in decision.measured)}
    candidates = tuple(
        with_latencies(problem, plan, decision.times_s(plan), rate_fps) if plan.stages in ran else plan
        for plan in decision.candidates
    )
    chosen = candidates[decision.candidates.index(decision.plan)]
    return replace(decision, plan=chosen, candidates=candidates)


def with_latencies(problem: Problem, plan: Plan, times_s: Times, rate_fps: float | None = None) -> Plan:
    """Return the plan with p50, p90 and p99 of its latency under load; as it is where nothing tells how that varies.

    Args:
        rate_fps: frames a second that come; None for as many as the plan takes, which more keep as full.
    """
    if plan.predicted.throughput_fps is None or not (times_s or rate_fps or spread(problem, plan)):
        return plan
    if rate_fps and rate_fps >= plan.predicted.throughput_fps:
        rate_fps = None
    found = simulated_latencies(problem, plan, times_s, rate_fps)
    p50, p90, p99 = (float(quantile) for quantile in np.quantile(found, [0.5, 0.9, 0.99]))
    predicted = replace(plan.predicted, latency_p50_s=p50, latency_p90_s=p90, latency_p99_s=p99)
    return replace(plan, predicted=predicted)


def simulated_latencies(
    problem: Problem, plan: Plan, times_s: Times, rate_fps: float | None, frames: int = FRAMES
) -> list[float]:
    """Return the seconds of each of so many frames, without those that fill the pipeline."""
    inside = plan.frames_inside
    run = simulate(
        replace(problem, min_throughput_fps=None, max_latency_s=None),  # a measured plan may keep what none should
        plan.stages,
        frames + inside,
        SATURATED if rate_fps is None else fixed_rate(rate_fps),
        in_flight=inside,
        jitter=spread(problem, plan),
        times_s=times_s,
    )
    return [p.done_s - (p.entered_s if rate_fps is None else p.arrived_s) for p in run.passages[inside:]]


def spread(problem: Problem, plan: Plan) -> float:
    """Return the standard deviation over mean of a stage's seconds, by the operators of the device that varies most."""
    profiles = (problem.profile.devices.get(name) for name in plan.devices)
    most = max((profile.mean_spread for profile in profiles if profile), default=0.0)
    return min(most / QUARTILES, MOST_JITTER)
