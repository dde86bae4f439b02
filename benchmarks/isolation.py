"""Measure the cost of stages in processes of their own, against the same stages in threads of one process.

Three cases run in both forms, in turns: the stage that does least, one operator, where nearly all is overhead; the
whole network as one stage; and two halves as a pipeline that is kept full. Required: the same bits, and microseconds a
stage and frame, beside stages of milliseconds. It also prints how long a process takes to start.

    python benchmarks/isolation.py           # about a minute
    python benchmarks/isolation.py --short   # for CI
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import numpy as np
from networks import load
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Pipeline, Plan, Prediction, Stage, detect_platform, settle_platform
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.ports import frame_of_noise, noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.runtime.isolation import isolated

DEPTH = 3  # frames that wait or run in a pipeline of two stages, and the one that comes

# Seconds a frame of one form, and what came out.
Way = Callable[[int], tuple[float, list[Array]]]


@contextmanager
def stage_alone(compiled: CompiledModel, operators: Sequence[str], device: Device) -> Iterator[Way]:
    """Run a stage again and again in a thread of its own."""
    runner = compiled.stage(operators, device)
    inputs, outputs = [noise(port) for port in runner.inputs], [port.buffer() for port in runner.outputs]

    def run(frames: int) -> tuple[float, list[Array]]:
        began = time.perf_counter()
        for _ in range(frames):
            runner.run(inputs, outputs)
        return (time.perf_counter() - began) / frames, outputs

    with ThreadPoolExecutor(1) as thread, closing(runner):
        thread.submit(runner.bind).result()
        yield lambda frames: thread.submit(run, frames).result()


@contextmanager
def full_pipeline(compiled: CompiledModel, plan: Plan, platform: Platform) -> Iterator[Way]:
    """Run a plan, and keep its pipeline full."""
    frame = frame_of_noise(compiled.graph)

    def run(frames: int) -> tuple[float, list[Array]]:
        began = time.perf_counter()
        for number in range(frames):
            pipeline.submit(frame)
            if number >= DEPTH:
                pipeline.result()
        last = [pipeline.result() for _ in range(min(DEPTH, frames))][-1]
        return (time.perf_counter() - began) / frames, list(last.outputs.values())

    with Pipeline(compiled, plan, platform, in_flight=DEPTH + 1) as pipeline:
        yield run


def compared(threads: Way, processes: Way, rounds: int, frames: int) -> tuple[list[list[float]], bool]:
    """Return seconds a frame of both forms in each round, and whether both gave the same bits."""
    equal, seconds = True, []
    for way in (threads, processes):  # once, not counted: kernels and memory are touched for the first time
        way(DEPTH)
    for turn in range(rounds):
        order = (threads, processes) if turn % 2 else (processes, threads)
        made = {way: way(frames) for way in order}
        equal = equal and all(
            np.array_equal(one, other) for one, other in zip(made[threads][1], made[processes][1], strict=True)
        )
        seconds.append([made[threads][0], made[processes][0]])
    return seconds, equal


def row(name: str, frames: int, seconds: list[list[float]], stages: int) -> list[str]:
    over = statistics.quantiles([(own - plain) / stages * 1e6 for plain, own in seconds], n=4)
    ratio = statistics.quantiles([own / plain for plain, own in seconds], n=4)
    plain, own = (statistics.median(column) * 1e6 for column in zip(*seconds, strict=True))
    return [
        name,
        str(frames),
        f"{plain:.0f}",
        f"{own:.0f}",
        f"{over[1]:.0f} ({over[0]:.0f} to {over[2]:.0f})",
        f"{ratio[1]:.3f} ({ratio[0]:.3f} to {ratio[2]:.3f})",
    ]


def halves(graph: OperatorGraph, devices: Sequence[Device]) -> Plan:
    """Cut where half of the multiplications are done."""
    done = np.cumsum([operator.macs for operator in graph.operators])
    cut = int(np.searchsorted(done, done[-1] / 2)) + 1
    names = graph.operator_names
    stages = tuple(
        Stage((device.name,), tuple(part)) for device, part in zip(devices, (names[:cut], names[cut:]), strict=True)
    )
    return Plan(graph.name, "by hand", "throughput", stages, Prediction())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="squeezenet")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--frames", type=int, default=50, help="of the whole network in a round")
    parser.add_argument("--short", action="store_true", help="a small network, few rounds: proves that it works")
    arguments = parser.parse_args()
    if arguments.short:
        arguments.model, arguments.rounds, arguments.frames = "branching", 2, 4

    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(arguments.model), platform.devices)
    first, second, *_ = [device for device in platform.devices if device.name != "cpu"] * 2
    plan = halves(compiled.graph, (first, second)) if first is not second else None
    every = compiled.graph.operator_names
    tensors = compiled.graph.tensors
    least = min(compiled.graph.operators, key=lambda o: sum(tensors[name].bytes for name in o.inputs) + o.output_bytes)
    table = Table(
        *("what runs", "frames", "threads, us", "processes, us", "more a stage, us", "processes / threads"),
        title=f"{arguments.model}: a frame, median and quartiles of {arguments.rounds} rounds",
    )
    equal = True
    with isolated(compiled, platform, plan.stages if plan else ()) as apart:
        for name, operators, frames in (
            (f"one operator, {least.kind}", [least.name], 20 * arguments.frames),
            ("the whole network", every, arguments.frames),
        ):
            began = time.perf_counter()
            with stage_alone(apart, operators, first) as processes, stage_alone(compiled, operators, first) as threads:
                started_s = time.perf_counter() - began
                seconds, same = compared(threads, processes, arguments.rounds, frames)
            table.add_row(*row(name, frames, seconds, 1))
            equal = equal and same
        if plan:
            with full_pipeline(compiled, plan, platform) as threads, full_pipeline(apart, plan, platform) as processes:
                seconds, same = compared(threads, processes, arguments.rounds, arguments.frames)
            table.add_row(*row("two halves, a pipeline", arguments.frames, seconds, 2))
            equal = equal and same
    table.caption = f"a process is ready after {started_s:.1f} s; load average {os.getloadavg()[0]:.1f}"
    Console(width=130).print(table)
    if not equal:
        sys.exit("isolated stages gave other bits than those in threads")


if __name__ == "__main__":
    main()
