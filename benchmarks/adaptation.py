"""A pipeline under loads that come while it runs: does re-planning reach what the best plan for the load would?

The setting is Table 5 of Velasco-Montero et al., IEEE Access 2023, on this machine: nothing; a program that computes,
pinned to one core; one that streams memory; a video being decoded; a load that comes and goes. For each load: the best
single device and the best pipeline as planned on the idle machine, the pipeline that re-plans (begun with the idle
machine's plan, before the load), and the oracle, the best of all candidate plans measured under the load. They take
turns, several rounds. Asked: re-planning reaches 0.95 of the oracle, within a second of the onset.

    python benchmarks/adaptation.py           # about six minutes
    python benchmarks/adaptation.py --short
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat, takewhile

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Problem, detect_platform, load, profile_model, settle_platform, solve
from tvm_pipeline.backend import CompiledModel, Port, noise
from tvm_pipeline.runtime import Adaptation, LivePipeline, Pipeline
from tvm_pipeline.runtime.stream import FrameStream
from tvm_pipeline.scheduling import describe

QUIET_S = 0.5  # before the load


def compute(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        sum(range(10_000))


def stream_memory(core: int) -> None:
    os.sched_setaffinity(0, {core})
    data = np.zeros(1 << 26, np.uint8)
    while True:
        data += 1


def come_and_go(core: int) -> None:
    os.sched_setaffinity(0, {core})
    while True:
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            sum(range(10_000))
        time.sleep(2.0)


def decode_video(core: int) -> None:
    """A video of noise, encoded once and decoded again and again."""
    import av

    os.sched_setaffinity(0, {core})
    encoder = av.CodecContext.create("mpeg4", "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = 1280, 720, "yuv420p", "1/25"
    rng = np.random.default_rng(0)
    frames = [av.VideoFrame.from_ndarray(rng.integers(0, 255, (720, 1280, 3), np.uint8), "rgb24") for _ in range(12)]
    packets = [packet for frame in frames for packet in encoder.encode(frame.reformat(format="yuv420p"))]
    while True:
        decoder = av.CodecContext.create("mpeg4", "r")
        for packet in packets:
            decoder.decode(packet)


LOADS: dict[str, Callable[[int], None] | None] = {
    "nothing": None,
    "computing": compute,
    "memory": stream_memory,
    "video": decode_video,
    "comes and goes": come_and_go,
}


@dataclass(frozen=True, slots=True)
class Run:
    """Frames a second under the load, and seconds from its onset to the first change of plan."""

    fps: float
    changed_s: float | None


def run(pipeline: FrameStream, frame: dict, what: Callable[[int], None] | None, core: int, arguments) -> Run:
    """A saturated pipeline: a second of nothing, then the load; what comes out once that has settled counts."""
    begin, seconds = time.perf_counter(), arguments.seconds
    end = begin + QUIET_S + arguments.settling + seconds
    process = multiprocessing.get_context("fork").Process(target=what, args=(core,), daemon=True) if what else None
    done: list[float] = []
    onset_s = None
    with pipeline:
        for _ in pipeline.map(takewhile(lambda _: time.perf_counter() < end, repeat(frame))):
            done.append(time.perf_counter())
            if onset_s is None and done[-1] > begin + QUIET_S:
                onset_s = done[-1]
                if process:
                    process.start()
        if process:
            process.kill()
            process.join()
    counted = [t for t in done if end - seconds <= t <= end]
    changes = [e.time_s + begin for e in getattr(pipeline, "events", ()) if e.kind == "switch"]
    after = [t - onset_s for t in changes if onset_s and t > onset_s]
    return Run(len(counted) / seconds, after[0] if after else None)


def measured(compiled: CompiledModel, problem: Problem, frame: dict, core: int, what, arguments) -> list[str]:
    """One row: every candidate of the idle machine, and re-planning, in turns."""
    decision = solve(problem)
    plans = {plan.stages: plan for plan in decision.candidates}
    makers: dict[object, Callable[[], FrameStream]] = {
        stages: lambda plan=plan: Pipeline(compiled, plan, problem.platform) for stages, plan in plans.items()
    }
    makers["replan"] = lambda: LivePipeline(compiled, problem, decision.plan, adaptation=Adaptation())
    runs: dict[object, list[Run]] = {key: [] for key in makers}
    for round_ in range(arguments.rounds):
        keys = list(makers)
        for key in keys[round_ % len(keys) :] + keys[: round_ % len(keys)]:
            runs[key].append(run(makers[key](), frame, what, core, arguments))
    fps = {key: statistics.median(r.fps for r in rows) for key, rows in runs.items()}
    single = max(fps[stages] for stages in plans if len(stages) == 1 and len(stages[0].devices) == 1)
    oracle = max(plans, key=lambda stages: fps[stages])
    changes = [r.changed_s for r in runs["replan"] if r.changed_s is not None]
    return [
        f"{single:.1f}",
        f"{fps[decision.plan.stages]:.1f}",
        f"{fps['replan']:.1f}",
        f"{fps[oracle]:.1f}",
        f"{fps['replan'] / fps[oracle]:.3f}",
        f"{statistics.median(changes):.2f} s" if changes else "no change",
        describe(plans[oracle]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each plan in each round")
    parser.add_argument("--settling", type=float, default=2.0, help="from the onset until throughput counts")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--short", action="store_true", help="one load, briefly: proves that it works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.loads, arguments.seconds, arguments.settling, arguments.rounds = ["computing"], 0.5, 0.3, 1

    console = Console(width=150)
    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(arguments.model), platform.devices, lambda _: None)
    profile = profile_model(backend, compiled, platform)
    for warning in profile.warnings:
        console.print(f"warning: {warning}")
    problem = Problem(compiled.graph, platform, profile)
    frame = {t.name: noise(Port(t.name, t.shape, t.dtype)) for t in compiled.graph.inputs}
    core = max(core for device in platform.devices for core in device.cores)
    table = Table(
        "load", "best single", "static plan", "replan", "oracle", "replan / oracle", "new plan after", "oracle's plan"
    )
    for name in arguments.loads:
        table.add_row(name, *measured(compiled, problem, frame, core, LOADS[name], arguments))
        console.print(table)
    console.print(f"load average {os.getloadavg()[0]:.1f}; frames a second, medians of {arguments.rounds} rounds")


if __name__ == "__main__":
    main()
