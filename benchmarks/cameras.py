"""Measure the rates, the ages and the drops of frames of eight cameras that share one pipeline.

    python benchmarks/cameras.py          # two minutes
    python benchmarks/cameras.py --short  # a second of a tiny network, for CI

The cameras film at 10 frames a second and start at different moments; the policy is `latest`, and squeezenet runs on
small pictures by the plan that is best for this machine. A second run has cameras that together film twice as much as
the plan promises. Required: the rates of the cameras are within 5 % of their mean, ages are bounded, and every frame of
a camera was delivered, was dropped for a reason, or waits. The exit status is 1 if a frame is not accounted for, or a
result is missing.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
from rich.console import Console
from rich.table import Table
from rig import Rig, make_rig, make_tiny_rig

from tvm_pipeline import planning
from tvm_pipeline.runtime import Adaptation, LivePipeline
from tvm_pipeline_video import LiveSource, Source, merge, open_source, parse_policy, preprocessing_for, stream
from tvm_pipeline_video.decoding import Picture

SIDE = 64
SOURCES = 8
FPS = 10.0
CONSOLE = Console(width=120)


def camera(fps: float, begin_s: float) -> Callable[[str], Source]:
    """Return a camera that films a few pictures again and again, each when it is due and no sooner."""
    with open_source("synthetic:160x120@30:30") as source:
        images = [frame.image for frame in source]

    def pictures() -> Iterator[Picture]:
        number = 0
        while True:
            due_s = number / fps
            time.sleep(max(0.0, begin_s + due_s - time.monotonic()))
            yield Picture(due_s, images[number % len(images)])
            number += 1

    return lambda spec: Source(spec, pictures(), fps=fps, frames=None, limit=None, live=True)


def watched(rig: Rig, fps: float, seconds: float) -> tuple[list[object], bool]:
    """Return one row: the figures of cameras of this rate, and whether every frame is accounted for."""
    plan = planning.plan(rig.problem).plan
    done: Counter[str] = Counter()
    ages: list[float] = []
    begin_s = time.monotonic()
    with ExitStack() as stack:
        live = stack.enter_context(LivePipeline(rig.compiled, rig.problem, plan, adaptation=Adaptation()))
        sources = [
            stack.enter_context(
                LiveSource(f"camera {index}", parse_policy("latest"), open=camera(fps, begin_s + index / fps / SOURCES))
            )
            for index in range(SOURCES)
        ]

        def close() -> None:
            for source in sources:
                source.close()

        ending = threading.Timer(seconds, close)
        ending.start()
        for seen in stream(live, merge(sources), preprocessing_for(rig.problem.graph)):
            done[seen.frame.source] += 1
            ages.append(seen.frame.age_s)
        ending.join()
        found = [source.statistics() for source in sources]
    right = all(
        books.read == books.delivered + books.waiting + sum(books.dropped.values())
        and done[source.name] == books.delivered
        for source, books in zip(sources, found, strict=True)
    )
    rates = np.array([done[source.name] / seconds for source in sources])
    unfair = float(np.abs(rates / rates.mean() - 1).max())
    dropped = sum((Counter(books.dropped) for books in found), Counter())
    read = sum(books.read for books in found)
    p50, p99, oldest = (f"{age * 1e3:.0f}" for age in np.quantile(ages, [0.5, 0.99, 1]))
    row = [
        f"{fps:.1f}",
        f"{plan.predicted.throughput_fps:.0f}",
        f"{rates.min():.2f} to {rates.max():.2f}",
        f"{unfair:.1%}",
        f"{p50} / {p99} / {oldest}",
        read,
        sum(done.values()),
        ", ".join(f"{count} {reason}" for reason, count in dropped.items()),
        "yes" if right else "NO",
    ]
    return row, right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each")
    parser.add_argument("--short", action="store_true", help="half a second of each with a tiny network, for CI")
    arguments = parser.parse_args()
    rig = make_tiny_rig() if arguments.short else make_rig(SIDE)
    promised_fps = planning.plan(rig.problem).plan.predicted.throughput_fps or 0.0
    table = Table(
        *("camera, fps", "plan, fps", "results of each, fps", "from the mean", "age, ms: p50 / p99 / max"),
        *("frames", "results", "dropped", "accounted for"),
        title=f"{SOURCES} cameras, frames a second and milliseconds since a frame was taken",
        title_justify="left",
    )
    rows = [watched(rig, fps, 0.5 if arguments.short else arguments.seconds) for fps in (FPS, overload(promised_fps))]
    for row, _ in rows:
        table.add_row(*map(str, row))
    CONSOLE.print(table)
    sys.exit(0 if all(right for _, right in rows) else 1)


def overload(promised_fps: float) -> float:
    """Return the rate of cameras that together film twice what the plan promises."""
    return 2 * promised_fps / SOURCES


if __name__ == "__main__":
    main()
