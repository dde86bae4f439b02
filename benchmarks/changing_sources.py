"""Add and remove sources of a run with `wait`: how long to the first line, and do those that stay lose frames?

    nice -n 5 python benchmarks/changing_sources.py
    python benchmarks/changing_sources.py --short     # one change, for CI

One `tvm-pipeline run --config` with `wait = true`, in a process of its own, of a tiny network on synthetic pictures of
320x240 at 10 frames a second, read by the clock. Some sources stay from begin to end. Others come and go: at each turn
the file of settings names one more, a SIGHUP is sent, and the seconds to the first line of that source are taken; then
it goes again. The run's process also loads its model once, which is told as the seconds to `ready`.

Required: the frames of each source that stays count from 0 without a gap, and no line comes twice. The exit status is 1
if that does not hold.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from tvm_pipeline import Bundle, Problem, detect_platform, load, plan, profile_model, settle_platform, write_bundle

SOURCE = "synthetic:320x240@10"
PATIENCE_S = 60.0
CONSOLE = Console(width=120)


def make_bundle(folder: Path, repeats: int) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.support.onnx_models import write_picture_net

    backend, platform = settle_platform(detect_platform())
    compiled = backend.compile(load(write_picture_net(folder / "net.onnx")), platform.devices)
    problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform, repeats))
    bundle = Bundle(compiled.graph, platform, problem.profile, plan(problem, "single").plan, compiled)
    write_bundle(folder / "net.tar", bundle)


class Run:
    """The process, its file of settings, and its lines by tag."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._tags = folder, list[str]()
        self.frames: defaultdict[str, list[int]] = defaultdict(list)
        self._write()
        self._lines = (folder / "lines.jsonl").open("w+")
        command = [sys.executable, "-m", "tvm_pipeline.cli", "run", "--config", folder / "run.toml"]
        with (folder / "log").open("w") as log:
            self._process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)

    def _write(self) -> None:
        (self._folder / "run.toml").write_text(
            'bundle = "net.tar"\nwait = true\nresults = "lines.jsonl"\nstatus = "status.json"\n'
            f"source = {json.dumps([SOURCE] * len(self._tags))}\ntag = {json.dumps(self._tags)}\n"
        )

    def until(self, true: Callable[[], object]) -> float:
        """Return the seconds until it is true, while lines are read."""
        began_s = time.perf_counter()
        while not true():
            if self._process.poll() is not None or time.perf_counter() - began_s > PATIENCE_S:
                self.end()
                raise SystemExit(f"it came to nothing: {(self._folder / 'log').read_text()}")
            time.sleep(0.002)
            self.read()
        return time.perf_counter() - began_s

    def read(self) -> None:
        while (line := self._lines.readline()).endswith("\n"):
            row = json.loads(line)
            self.frames[row["tag"]].append(row["frame"])
        self._lines.seek(self._lines.tell() - len(line))

    def is_ready(self) -> bool:
        path = self._folder / "status.json"
        return path.exists() and json.loads(path.read_text())["ready"]

    def change(self, tags: list[str]) -> None:
        self._tags = tags
        self._write()
        self._process.send_signal(signal.SIGHUP)

    def end(self) -> int:
        self._process.terminate()
        status = self._process.wait(PATIENCE_S)
        self.read()
        return status


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one that stays and one change, for CI")
    arguments = parser.parse_args()
    stay, changes = (1, 1) if arguments.short else (8, 20)
    staying = [f"stays{number}" for number in range(stay)]
    with tempfile.TemporaryDirectory() as name:
        make_bundle(Path(name), 4 if arguments.short else 24)
        run = Run(Path(name))
        ready_s = run.until(run.is_ready)
        run.change(staying)
        run.until(lambda: all(len(run.frames[tag]) > 5 for tag in staying))
        seconds = []
        for number in range(changes):
            run.change([*staying, tag := f"comes{number}"])
            seconds.append(run.until(lambda: run.frames[tag]))
            seen = len(run.frames[staying[0]])
            run.until(lambda: len(run.frames[staying[0]]) > seen + 3)  # noqa: B023
            run.change(staying)
            run.until(lambda: len(run.frames[staying[0]]) > seen + 6)  # noqa: B023
        status = run.end()
    lost = sum(max(run.frames[tag]) + 1 - len(set(run.frames[tag])) for tag in staying)
    twice = sum(len(frames) - len(set(frames)) for frames in run.frames.values())
    CONSOLE.print(f"ready, with the model loaded and warm, after {ready_s:.2f} s")
    CONSOLE.print(
        f"{changes} sources came to {len(staying)} that stay, and went: from SIGHUP to the first line "
        f"{statistics.median(seconds):.3f} s median, {max(seconds):.3f} s worst"
    )
    CONSOLE.print(
        f"frames lost of the {len(staying)} sources that stay: {lost} of "
        f"{sum(len(run.frames[tag]) for tag in staying)}; lines that came twice: {twice}; exit code {status}"
    )
    sys.exit(1 if lost or twice or status else 0)


if __name__ == "__main__":
    main()
