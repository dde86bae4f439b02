"""A whole application, predicted against measured: read, resize, the model, decode, draw, write.

    python benchmarks/application.py                      # CenterFace on a street video, five fresh runs; then live
    python benchmarks/application.py --only live
    python benchmarks/application.py --short              # a small network on a synthetic video, for CI

`fresh`: each run profiles the model and the host work, plans, verifies, runs the whole video, and runs the loop that
one would write first on the same video, once before and once after it. The speed of a shared machine moves by itself:
the speed before and after the run is measured (`tests/support/speed.py`), and the error is also given for that speed.

`live`: the video as a source of 30 frames a second, whose frames are dropped where they wait for more than a second.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "face_detector"))

from assets import MODEL, VIDEO, fetch
from centerface import decode
from naive import naive_fps

from tests.support.onnx_models import write_picture_net
from tests.support.speed import machine_speed
from tvm_pipeline import Pipeline, Problem, detect_platform, load, planning, profile_model, settle_platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.plan import Decision, describe
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.cost.frame_time import frame_time
from tvm_pipeline.runtime.verification import verified
from tvm_pipeline_video import (
    Application,
    JsonLines,
    LiveSource,
    Preprocessing,
    Rehearsal,
    Source,
    VideoFile,
    open_source,
    parse_policy,
    preprocessing_for,
    profile_host,
)
from tvm_pipeline_video.service.host_planning import RATE_MARGIN, decided_at_rate

CONSOLE = Console(width=150)
RATE_FPS = 30.0


@dataclass(frozen=True)
class App:
    """An application: a compiled model, the source, what decodes its outputs; `repeats` and `host_s` of the profile."""

    compiled: CompiledModel
    backend: Any
    platform: Platform
    spec: str
    settings: Preprocessing
    decode: Callable[..., Any] | None
    repeats: int = 24
    host_s: float = 3.0

    def rehearsal(self) -> Rehearsal:
        return Rehearsal(
            self.compiled.graph, self.spec, self.settings, self.decode, video=".mp4", lines=True, scratch=writing
        )


@contextmanager
def writing(folder: Path, fps: float) -> Iterator[Callable[..., None]]:
    """Open a video and lines, and yield what writes a frame to them."""
    with VideoFile(folder / "out.mp4", fps) as video, JsonLines(folder / "out.jsonl") as lines:

        def write(seen: Any, picture: Any) -> None:
            video.write(picture)
            lines.write({"frame": seen.frame.index, "found": len(seen.annotations)})

        yield write


def app_of(short: bool) -> App:
    backend, platform = settle_platform(detect_platform())
    if short:
        with tempfile.TemporaryDirectory() as folder:
            compiled = backend.compile(load(write_picture_net(Path(folder) / "net.onnx")), platform.devices)
        return App(compiled, backend, platform, "synthetic:320x240@30", preprocessing_for(compiled.graph), None, 4, 0.0)
    compiled = backend.compile(load(fetch(MODEL), {"input.1": (1, 3, 288, 640)}), platform.devices)
    toml = Path(__file__).parents[1] / "examples" / "face_detector" / "centerface.toml"
    return App(compiled, backend, platform, str(fetch(VIDEO)), preprocessing_for(compiled.graph, toml), decode)


def measured(app: App) -> tuple[Rehearsal, Problem]:
    """Profile the model and the host work."""
    rehearsal = app.rehearsal()
    profile = profile_model(app.backend, app.compiled, app.platform, app.repeats)
    profile = profile_host(rehearsal, app.compiled, app.platform, profile, seconds=app.host_s)
    return rehearsal, Problem(rehearsal.graph, app.platform, profile)


def decided(app: App, verify_s: float, rate_fps: float | None = None) -> tuple[Rehearsal, Problem, Decision]:
    """Measure, plan and verify the application."""
    rehearsal, problem = measured(app)
    if rate_fps is not None:
        problem = replace(problem, objective="latency", min_throughput_fps=rate_fps * (1 + RATE_MARGIN))
    run = rehearsal.runner(app.compiled, app.platform, rate_fps)
    decision = planning.plan(problem)
    if rate_fps is not None:
        decision = decided_at_rate(problem, decision, rate_fps)
    return rehearsal, problem, verified(problem, decision, run, verify_s)


def whole_run(app: App, rehearsal: Rehearsal, decision: Decision, frames: int | None) -> Any:
    """Run the whole video by the plan; return the statistics."""
    with (
        tempfile.TemporaryDirectory() as folder,
        open_source(app.spec, limit=frames) as source,
        writing(Path(folder), rehearsal.fps or RATE_FPS) as write,
    ):
        application = Application(app.compiled.graph, rehearsal.graph, source, app.settings, app.decode, write)
        with Pipeline(app.compiled, decision.plan, app.platform, host=application.host) as pipeline:
            for _ in application.run(pipeline):
                pass
            return pipeline.statistics()


def naive(app: App, rehearsal: Rehearsal, frames: int) -> float:
    with rehearsal.host() as host:
        return naive_fps(app.compiled, app.platform, host, frames)


def fresh(app: App, runs: int, verify_s: float, frames: int | None) -> None:
    table = Table(
        "plan", "predicted", "measured", "error", "speed then", "error at it", "pipeline / bound", "naive", "ratio",
        "bound of ratio", "decided by", title=f"fresh runs of {app.compiled.graph.name}, frames a second",
    )  # fmt: skip
    errors, at_speed, ratios, of_bounds = [], [], [], []
    for _ in range(runs):
        rehearsal, problem, decision = decided(app, verify_s)
        speed_of = partial(machine_speed, app.compiled, app.platform, problem.profile)
        before_fps, before = naive(app, rehearsal, (frames or 250) // 2), speed_of()
        found = whole_run(app, rehearsal, decision, frames)
        after, after_fps = speed_of(), naive(app, rehearsal, (frames or 250) // 2)
        predicted, measured = decision.plan.predicted.throughput_fps or 0.0, found.throughput_fps
        speed = statistics.mean([before, after])
        first = 2 / (1 / before_fps + 1 / after_fps)
        of_bound = _of_bound(app, rehearsal, decision, frames)
        parts = frame_time(problem, decision.plan.stages, measured)
        work_s = sum(sum(row.values()) - row["idle"] for row in parts.values())
        even = len(parts) / work_s * speed / first
        errors.append(predicted / measured - 1)
        at_speed.append(predicted * speed / measured - 1)
        ratios.append(measured / first)
        of_bounds.append(of_bound)
        table.add_row(
            describe(decision.plan), f"{predicted:.1f}", f"{measured:.1f}", f"{errors[-1]:+.1%}", f"{speed:.2f}",
            f"{at_speed[-1]:+.1%}", f"{of_bound:.3f}", f"{first:.1f}", f"{ratios[-1]:.2f}", f"{even:.2f}",
            decision.decided_by,
        )  # fmt: skip
    CONSOLE.print(table)
    for name, row in (("error", errors), ("error at the speed of the run", at_speed)):
        sizes = [abs(value) for value in row]
        CONSOLE.print(f"{name}: median {statistics.median(sizes):.1%}, worst {max(sizes):.1%}")
    CONSOLE.print(f"against the first loop: {min(ratios):.2f} to {max(ratios):.2f} times")
    CONSOLE.print(f"the plain pipeline over its bound 1/max(stage): {min(of_bounds):.3f} to {max(of_bounds):.3f}")


def _of_bound(app: App, rehearsal: Rehearsal, decision: Decision, frames: int | None) -> float:
    """Return the throughput of the best plain pipeline over 1 / its slowest stage, both as measured in one run.

    In a plain pipeline each device serves one stage, so that a stage's seconds are those of its own work.
    """
    plain = [p for p in decision.candidates if len(p.stages) == len(p.devices) > 1]
    plain = [p for p in plain if all(len(stage.devices) == 1 for stage in p.stages)]
    if not plain:
        return math.nan
    found = whole_run(app, rehearsal, replace(decision, plan=plain[0]), frames)
    return found.throughput_fps * max(stage.compute_s + stage.transfer_s for stage in found.stages)


def live(app: App, seconds: float, verify_s: float, rate_fps: float) -> None:
    """Run the video as a live source, and print what was lost and how late frames were."""
    rehearsal, _, decision = decided(app, verify_s, rate_fps)
    count = round(seconds * rate_fps)
    with (
        tempfile.TemporaryDirectory() as folder,
        LiveSource(app.spec, parse_policy("max-age=1"), open=partial(_filmed, count, rate_fps)) as source,
        writing(Path(folder), rate_fps) as write,
    ):
        application = Application(
            app.compiled.graph,
            rehearsal.graph,
            source,
            app.settings,
            app.decode,
            write,
            place=lambda device: source.place(device.cores),
        )
        with Pipeline(app.compiled, decision.plan, app.platform, host=application.host) as pipeline:
            kept = sum(1 for _ in application.run(pipeline))
            found = pipeline.statistics()
        dropped = source.statistics().dropped
    predicted_s = decision.plan.predicted.latency_s or 0.0
    p50_s, p99_s = found.latency_p50_s or 0.0, found.latency_p99_s or 0.0
    CONSOLE.print(
        f"live at {rate_fps:g} fps, {describe(decision.plan)}: {kept} of {count} frames kept, dropped "
        f"{dict(dropped)}; latency predicted {1e3 * predicted_s:.1f} ms, p50 {1e3 * p50_s:.1f} "
        f"({p50_s / predicted_s - 1:+.1%}), p99 {1e3 * p99_s:.1f} ({p99_s / predicted_s - 1:+.1%})"
    )


def _filmed(count: int, rate_fps: float, spec: str) -> Source:
    """Open a source whose frames come at a rate, as those of a camera do; it begins again where it ends."""

    def pictures() -> Iterator[Any]:
        begin_s, number = time.monotonic(), 0
        while number < count:
            with open_source(spec) as source:
                for frame in source:
                    if number == count:
                        return
                    wait_s = begin_s + number / rate_fps - time.monotonic()
                    if wait_s > 0:
                        time.sleep(wait_s)
                    yield Picture(number / rate_fps, frame.image)
                    number += 1

    from tvm_pipeline_video import Picture

    return Source(spec, pictures(), fps=rate_fps, frames=count, limit=None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["fresh", "live"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--verify", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the live source")
    parser.add_argument("--short", action="store_true", help="a small network, briefly: proves that it works")
    arguments = parser.parse_args()
    frames, rate_fps = None, RATE_FPS
    if arguments.short:  # at a rate that a busy machine keeps, too
        arguments.runs, arguments.verify, arguments.seconds = 1, 0.05, 1.0
        frames, rate_fps = 12, 4.0
    app = app_of(arguments.short)
    if arguments.only in (None, "fresh"):
        fresh(app, arguments.runs, arguments.verify, frames)
    if arguments.only in (None, "live"):
        live(app, arguments.seconds, arguments.verify, rate_fps)


if __name__ == "__main__":
    main()
