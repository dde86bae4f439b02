"""Kill runs at random moments with SIGKILL, and check what stands in their results and their videos.

    nice -n 5 python benchmarks/killed.py
    python benchmarks/killed.py --short     # one kill of a tiny network, for CI

Each run is `tvm-pipeline run` in a process of its own, of squeezenet on small pictures, which writes a line and a
picture for each frame; in turns as MP4, Matroska, MPEG-TS and AVI, and with and without segments. It is killed at a
moment between its first line and its end, which includes finishing the video.

Required of each: every line is whole, and the lines' frames count from 0 without a gap; every video decodes without
an error, and has as many frames as its segment has lines. The video that was being written may lack those of its last
second, and the few that the encoder holds. The exit status is 1 if one does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

import av
from av.error import FFmpegError
from rich.console import Console

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Bundle, Problem, detect_platform, load, plan, profile_model, settle_platform, write_bundle
from tvm_pipeline_video.service.log_files import segment_numbers, segment_path

FPS = 30
FRAMES = 600
SEGMENT_S = 3
BEHIND = FPS + 3  # frames: a second that is not written yet, and what the encoder holds
KINDS = (".mp4", ".mkv", ".ts", ".avi")
CONSOLE = Console(width=150)


def make_bundle(path: Path, short: bool) -> None:
    backend, platform = settle_platform(detect_platform())
    tiny = write_picture_net(path.with_suffix(".onnx")) if short else None
    model = load(tiny) if tiny else load("squeezenet", {"data": (1, 3, 64, 64)})
    compiled = backend.compile(model, platform.devices)
    problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform, 4 if short else 24))
    write_bundle(path, Bundle(compiled.graph, platform, problem.profile, plan(problem, "single").plan, compiled))


def started(bundle: Path, folder: Path, kind: str, segmented: bool, frames: int, *more: str) -> subprocess.Popen:
    """Start a run with more options, and return when its first line is there."""
    lines = folder / "lines.jsonl"
    command = [sys.executable, "-m", "tvm_pipeline.cli", "run", bundle, "--source", f"synthetic:320x240@{FPS}:{frames}"]
    command += ["--results", lines, "--output", folder / f"out{kind}", *(["--segment", SEGMENT_S] if segmented else [])]
    command += more
    run = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    first = segment_path(lines, 1) if segmented else lines
    while not (first.exists() and first.stat().st_size):
        if run.poll() is not None:
            raise SystemExit(f"the run ended before its first line: {(run.communicate()[1] or b'').decode()}")
        time.sleep(0.005)
    return run


def mistakes(folder: Path, kind: str, segmented: bool) -> tuple[int, list[str]]:
    """Return how many lines there are, and all that is wrong."""
    lines, video = folder / "lines.jsonl", folder / f"out{kind}"
    numbers = segment_numbers(lines)
    pairs = [(segment_path(lines, n), segment_path(video, n)) for n in numbers] if segmented else [(lines, video)]
    wrong, frames = [], []
    for index, (text, film) in enumerate(pairs):
        content = text.read_bytes()
        if content and not content.endswith(b"\n"):
            wrong.append(f"{text.name} ends in the middle of a line")
        rows = content.splitlines()
        try:
            frames += [json.loads(row)["frame"] for row in rows]
        except ValueError as error:
            wrong.append(f"{text.name}: {error}")
        behind = BEHIND if index == len(pairs) - 1 else 0
        try:
            shown = decoded(film) if film.exists() and film.stat().st_size else 0
        except FFmpegError as error:
            shown = 0
            if len(rows) > BEHIND:
                wrong.append(f"{film.name}: {error}")
        if not len(rows) - behind <= shown <= len(rows):
            wrong.append(f"{film.name} has {shown} frames, {text.name} {len(rows)} lines")
    if frames != list(range(len(frames))):
        wrong.append("the lines' frames are not 0, 1, 2, ...")
    return len(frames), wrong


def decoded(path: Path) -> int:
    with av.open(str(path)) as container:
        return sum(1 for _ in container.decode(video=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one kill of a tiny network, for CI")
    arguments = parser.parse_args()
    kills, frames, more = 50, FRAMES, []
    if arguments.short:
        kills, frames, more = 1, FRAMES // 10, ["--verify", "0"]
    draw, sound, killed = random.Random(3 if arguments.short else 0), 0, 0  # 3 gives a moment well before the end
    with tempfile.TemporaryDirectory() as name:
        bundle = Path(name) / "net.tar"
        make_bundle(bundle, arguments.short)
        lasts_s = 0.0
        for number in range(-1, kills):  # the first is not killed, to know how long one lasts
            kind, segmented = KINDS[number // 2 % len(KINDS)], number % 2 == 1
            folder = Path(name) / f"run{number}"
            folder.mkdir()
            run, began_s = started(bundle, folder, kind, segmented, frames, *more), time.monotonic()
            if number < 0:
                run.communicate()
                lasts_s = time.monotonic() - began_s
            else:
                moment_s = draw.uniform(0, lasts_s)
                time.sleep(moment_s)
                os.kill(run.pid, signal.SIGKILL)
                run.communicate()
                killed += run.returncode == -signal.SIGKILL
            count, wrong = mistakes(folder, kind, segmented)
            if number < 0:
                CONSOLE.print(f"a run that is not killed: {count} lines in {lasts_s:.1f} s; {wrong or 'sound'}")
                continue
            sound += not wrong
            where = f"{kind[1:]}{' in segments' if segmented else ''} after {moment_s:.2f} s"
            CONSOLE.print(f"{where}: {count} lines, {'; '.join(wrong) or 'sound'}", highlight=False)
    CONSOLE.print(f"{killed} were killed, the others ended before; sound are {sound} of {kills}", highlight=False)
    sys.exit(sound != kills)


if __name__ == "__main__":
    main()
