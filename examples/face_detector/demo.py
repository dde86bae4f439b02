"""The quick start: CenterFace on a street video, through a pipeline that was measured and planned on this machine.

    python examples/face_detector/demo.py --output out

writes into out/: faces.mp4 (the faces drawn), faces.jsonl (one line a frame), gantt.png, graph.png, centerface.tar
(the bundle, for `tvm-pipeline run`), and report.md (predicted beside measured, for the plan and every other candidate).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from assets import MODEL, VIDEO, fetch
from centerface import decode
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
from tvm_pipeline.report import candidates_table, draw_gantt, draw_graph, first_frames, statistics_table, write_report
from tvm_pipeline.runtime.comparison import compare
from tvm_pipeline.video import JsonLines, VideoFile, draw, open_source, preprocessing_for, stream

HERE = Path(__file__).parent


def main() -> None:
    parser = argparse.ArgumentParser(description="CenterFace on bikes.mp4 through a planned pipeline")
    parser.add_argument("--output", type=Path, default=Path("out"), help="folder for everything that is written")
    parser.add_argument("--frames", type=int, help="stop after so many frames (the video has 250)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each candidate is measured")
    arguments = parser.parse_args()
    out, console = arguments.output, Console(stderr=True)
    out.mkdir(parents=True, exist_ok=True)

    with console.status("downloading the model and the video") as status:
        model_file, video_file = fetch(MODEL), fetch(VIDEO)
        tell = status.update
        # The file declares 10x3x32x32; any multiple of 32 will do, and 640x288 holds a frame of the video.
        model = load(model_file, {"input.1": (1, 3, 288, 640)})
        backend, platform = settle_platform(detect_platform(model))
        compiled = backend.compile(model, platform.devices, tell)
        profile = profile_model(backend, compiled, platform, progress=tell)
        problem = Problem(compiled.graph, platform, profile)
        decision = planning.plan(problem)
        settings = preprocessing_for(compiled.graph, HERE / "centerface.toml")
        bundle = Bundle(compiled.graph, platform, profile, decision.plan, compiled, settings.to_dict())
        write_bundle(out / "centerface.tar", bundle)
        measured = compare(compiled, platform, decision.candidates, seconds=arguments.seconds, progress=tell)
    for warning in profile.warnings:
        console.print(f"warning: {warning}", style="yellow")
    console.print(candidates_table(decision), decision.why)

    faces = 0
    with (
        open_source(str(video_file), limit=arguments.frames) as source,
        Pipeline(compiled, decision.plan, platform) as pipeline,
        VideoFile(out / "faces.mp4", source.fps or 25.0) as video,
        JsonLines(out / "faces.jsonl") as lines,
        console.status(f"finding faces in {video_file.name}"),
    ):
        for seen in stream(pipeline, source, settings, decode):
            faces += len(seen.annotations)
            video.write(draw(seen.frame.image, seen.annotations))
            found = [asdict(annotation) for annotation in seen.annotations]
            lines.write({"frame": seen.frame.index, "latency_s": seen.result.latency_s, "faces": found})
        statistics = pipeline.statistics()
    console.print(statistics_table(decision.plan.predicted, statistics))

    evaluation = evaluate(problem, decision.plan.stages)
    draw_gantt(evaluation, decision.plan, first_frames(problem, decision.plan.stages), out / "gantt.png")
    draw_graph(compiled.graph, decision.plan, out / "graph.png")
    write_report(
        out / "report.md",
        model="CenterFace (centerface.onnx, 640 x 288)",
        decision=decision,
        evaluation=evaluation,
        profile=profile,
        statistics=statistics,
        comparison=measured,
        pictures={"Gantt chart": out / "gantt.png", "Operators by stage": out / "graph.png"},
        command=["python", *sys.argv],
    )
    written = ", ".join(sorted(path.name for path in out.iterdir()))
    console.print(f"{statistics.frames} frames, {faces} faces; written to {out}/: {written}")


if __name__ == "__main__":
    main()
