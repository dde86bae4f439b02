"""The quick start: CenterFace on a street video, through a pipeline that was measured and planned on this machine.

    python examples/face_detector/demo.py --output out

plans the whole application (read, resize, the model, find faces, draw, write), runs it, and runs the loop that one
would write first on the same video. It writes into out/: faces.mp4 (the faces drawn), faces.jsonl (one line a frame),
frame.png (where the time of a frame goes), gantt.png, graph.png, centerface.tar (the model's bundle, for `tvm-pipeline
run`), and report.md. The frame rate and the latency of the moment are drawn into the video.
"""

from __future__ import annotations

import argparse
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import numpy as np
from assets import MODEL, VIDEO, fetch
from centerface import decode
from naive import naive_fps
from numpy.typing import NDArray
from rich.console import Console

from tvm_pipeline import (
    Bundle,
    Pipeline,
    Problem,
    detect_platform,
    evaluate,
    load,
    planning,
    profile_model,
    settle_platform,
    write_bundle,
)
from tvm_pipeline.cli.output import logged, spinner
from tvm_pipeline.cost.frame_time import frame_time
from tvm_pipeline.profiling.speed import machine_speed
from tvm_pipeline.report import (
    candidates_table,
    draw_frame_time,
    draw_gantt,
    draw_graph,
    measured_frames,
    statistics_table,
    write_report,
)
from tvm_pipeline.runtime.verification import verified, with_fewest_inside
from tvm_pipeline_video import (
    Analysed,
    Annotation,
    Application,
    Frame,
    JsonLines,
    Rehearsal,
    VideoFile,
    draw,
    open_source,
    preprocessing_for,
    profile_host,
)
from tvm_pipeline_video.service.result_lines import result_line

HERE = Path(__file__).parent


@contextmanager
def faces_written(folder: Path, fps: float) -> Iterator[Callable[[Analysed[Frame], object], None]]:
    """Open faces.mp4 and faces.jsonl, and yield a function that writes a frame, its faces and the present figures."""
    times_s: deque[float] = deque(maxlen=26)  # when the last frames were written
    with VideoFile(folder / "faces.mp4", fps) as video, JsonLines(folder / "faces.jsonl") as lines:

        def write(seen: Analysed[Frame], picture: NDArray[np.uint8]) -> None:
            times_s.append(perf_counter())
            line = result_line(seen, decoded=True)
            rate = (len(times_s) - 1) / max(times_s[-1] - times_s[0], 1e-9)
            video.write(draw(picture, [Annotation(f"{rate:.0f} fps, {line.latency_s * 1e3:.0f} ms")]))
            lines.write(line)

        yield write


def main() -> None:
    parser = argparse.ArgumentParser(description="CenterFace on bikes.mp4 through a planned pipeline")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for everything that is written")
    parser.add_argument("--frames", type=int, help="stop after so many frames (the video has 250)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long candidates run side by side, in all")
    arguments = parser.parse_args()
    out, console = arguments.output, Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)

    with console.status("downloading the model and the video"):
        model_file, video_file = fetch(MODEL), fetch(VIDEO)
    with logged(), spinner():
        # The file declares 10x3x32x32; any multiple of 32 will do, and 640x288 holds a frame of the video.
        model = load(model_file, {"input.1": (1, 3, 288, 640)})
        backend, platform = settle_platform(detect_platform(model))
        compiled = backend.compile(model, platform.devices)
        of_model = profile_model(backend, compiled, platform)
        settings = preprocessing_for(compiled.graph, HERE / "centerface.toml")
        best = planning.plan(Problem(compiled.graph, platform, of_model))
        bundle = Bundle(compiled.graph, platform, of_model, best.plan, compiled, settings.to_dict(), best)
        write_bundle(out / "centerface.tar", bundle)

        # The application: the model, with what reads its frames and writes its results around it.
        rehearsal = Rehearsal(
            compiled.graph, str(video_file), settings, decode, video=".mp4", lines=True, scratch=faces_written
        )
        profile = profile_host(rehearsal, compiled, platform, of_model)
        problem = Problem(rehearsal.graph, platform, profile)
        run = rehearsal.runner(compiled, platform)
        decision = verified(problem, planning.plan(problem), run, arguments.seconds)
        decision = with_fewest_inside(problem, decision, run, arguments.seconds)
    for warning in profile.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(candidates_table(decision), decision.why)

    plan, fps = decision.plan, rehearsal.fps or 25.0
    with (
        console.status(f"finding faces in {video_file.name}"),
        open_source(str(video_file), limit=arguments.frames) as source,
        faces_written(out, fps) as write,
    ):
        application = Application(compiled.graph, rehearsal.graph, source, settings, decode, write)
        before = machine_speed(compiled, platform, profile)
        with Pipeline(compiled, plan, platform, host=application.host) as pipeline:
            faces = sum(len(seen.annotations) for seen in application.run(pipeline))
            statistics, bars = pipeline.statistics(), measured_frames(pipeline.records())
        after = machine_speed(compiled, platform, profile)
    console.print(statistics_table(plan.predicted, statistics, inside=plan.frames_inside))
    with console.status("the loop that one would write first"), rehearsal.host() as host:
        naive = naive_fps(compiled, platform, host, arguments.frames or 250)
    measured = statistics.throughput_fps or 0.0
    parts = frame_time(problem, plan.stages, measured)
    work_s = sum(sum(row.values()) - row["idle"] for row in parts.values())
    comparison = (
        f"The loop that one would write first (read, the model on all cores, draw, write, in turn) makes {naive:.1f} "
        f"frames a second: the pipeline is {measured / naive:.2f} times as fast. If its work were spread evenly over "
        f"the {len(parts)} devices it would make {len(parts) / work_s:.1f}."
    )
    predicted = (plan.predicted.throughput_fps or 0.0) * (before + after) / 2
    speed = (
        f"The speed of a shared machine moves by itself: just before the run this one ran the model at {before:.2f} "
        f"times the speed of its profile, just after it at {after:.2f} times. At the mean of these speeds "
        f"{predicted:.1f} frames a second are predicted ({predicted / measured - 1:+.1%} of the measured)."
    )
    console.print(speed, comparison, sep="\n")

    evaluation = evaluate(problem, plan.stages)
    draw_frame_time(parts, f"Where the time of a frame goes, at {measured:.1f} frames a second", out / "frame.png")
    draw_gantt(evaluation, plan, bars, out / "gantt.png", statistics)
    draw_graph(rehearsal.graph, plan, out / "graph.png")
    write_report(
        out / "report.md",
        model="CenterFace (centerface.onnx, 640 x 288)",
        decision=decision,
        evaluation=evaluation,
        profile=profile,
        statistics=statistics,
        remarks=(speed, comparison),
        pictures={
            "Where the time of a frame goes": out / "frame.png",
            "Gantt chart": out / "gantt.png",
            "Operators by stage": out / "graph.png",
        },
        command=["python", *sys.argv],
    )
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"{statistics.frames} frames, {faces} faces; written to {out}/: {written}")


if __name__ == "__main__":
    main()
