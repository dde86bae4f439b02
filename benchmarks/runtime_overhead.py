"""Measure what the pipeline itself costs per frame and stage, against the same runners in a plain loop in one thread.

    python benchmarks/runtime_overhead.py              # about ten seconds
    python benchmarks/runtime_overhead.py --short      # two seconds, for CI
    python benchmarks/runtime_overhead.py --json FILE  # the figures as well

Two stages only copy 64 bytes, so nearly all of a frame's time is the runtime's: `map`, which keeps the pipeline
full, and `submit` then `result`, one frame at a time, are each run beside the loop in every round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.runtime import Pipeline

STAGES = 2
TENSORS = [Tensor(f"t{index}", (16,), "float32") for index in range(STAGES + 1)]
GRAPH = OperatorGraph(
    "copies",
    (TENSORS[0],),
    tuple(Operator(f"copy{index}", "copy", (TENSORS[index].name,), (TENSORS[index + 1],)) for index in range(STAGES)),
    (TENSORS[-1].name,),
)
PLATFORM = Platform("no machine", tuple(Device(f"thread{index}") for index in range(STAGES)))
PLAN = Plan(
    "copies",
    "by hand",
    "throughput",
    tuple(Stage((f"thread{index}",), (f"copy{index}",)) for index in range(STAGES)),
    Prediction(1.0, 1.0),
)


class CopyRunner(StageRunner):
    """The least that a stage can do."""

    def __init__(self, index: int) -> None:
        source, target = TENSORS[index], TENSORS[index + 1]
        self.inputs = (Port.of(source),)
        self.outputs = (Port.of(target),)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        outputs[0][...] = inputs[0]


class CopyModel:
    graph = GRAPH

    def stage(self, operators: Sequence[str], device: Device) -> CopyRunner:
        return CopyRunner(GRAPH.operator_names.index(operators[0]))


def plain_loop(frame: Array, frames: int) -> float:
    """Return seconds a frame of the two runners one after the other, with the same copies in and out."""
    runners = [CopyRunner(index) for index in range(STAGES)]
    buffers = [[runner.inputs[0].buffer()] for runner in runners] + [[runners[-1].outputs[0].buffer()]]
    began = time.perf_counter()
    for _ in range(frames):
        np.copyto(buffers[0][0], frame)
        for index, runner in enumerate(runners):
            runner.run(buffers[index], buffers[index + 1])
        buffers[-1][0].copy()
    return (time.perf_counter() - began) / frames


def full_pipeline(frame: Array, frames: int) -> float:
    with Pipeline(CopyModel(), PLAN, PLATFORM) as pipeline:
        began = time.perf_counter()
        for _ in pipeline.map(repeat(frame, frames)):
            pass
        return (time.perf_counter() - began) / frames


def one_frame_at_a_time(frame: Array, frames: int) -> float:
    with Pipeline(CopyModel(), PLAN, PLATFORM) as pipeline:
        began = time.perf_counter()
        for _ in range(frames):
            pipeline.submit(frame)
            pipeline.result()
        return (time.perf_counter() - began) / frames


WAYS: dict[str, Callable[[Array, int], float]] = {
    "plain loop": plain_loop,
    "pipeline, kept full (map)": full_pipeline,
    "pipeline, one frame at a time": one_frame_at_a_time,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rounds, frames = (5, 2000) if options.short else (15, 5000)
    frame = np.ones(TENSORS[0].shape, TENSORS[0].dtype)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds):  # in turns, each way first once in a while
        for offset in range(len(WAYS)):
            name = list(WAYS)[(turn + offset) % len(WAYS)]
            seconds[name].append(WAYS[name](frame, frames))
    loop = seconds["plain loop"]
    table = Table(
        "way",
        "frame, us",
        "overhead a stage, us",
        "spread, us",
        title=f"{STAGES} stages that copy 64 bytes: median of {rounds} rounds of {frames} frames",
        caption=f"{platform.machine()}, Python {platform.python_version()}; spread: quartile to quartile",
    )
    figures: dict[str, dict[str, float]] = {}
    for name, values in seconds.items():
        overhead = [(own - plain) / STAGES * 1e6 for own, plain in zip(values, loop, strict=True)]
        low, middle, high = statistics.quantiles(overhead, n=4)
        frame_us = statistics.median(values) * 1e6
        figures[name] = {"frame_us": frame_us, "overhead_us": middle, "spread_us": high - low}
        table.add_row(
            name, f"{frame_us:.1f}", *([f"{middle:.1f}", f"{high - low:.1f}"] if values is not loop else "--")
        )
    Console(width=110).print(table)
    if options.json:
        figures_and_setting = {"stages": STAGES, "rounds": rounds, "frames": frames, "ways": figures}
        options.json.write_text(json.dumps(figures_and_setting, indent=2) + "\n")


if __name__ == "__main__":
    main()
