"""Do the latencies that `run` predicts come true? The demo's command in fresh runs, and a source of 30 frames a second.

    python benchmarks/demo.py

A fresh run compiles, measures and plans anew. The plan of its report then runs twice more: at a tenth of the rate, so
that each frame is alone, and with the usual number of frames inside, which may be faster. The table has the median
latency under load, predicted and measured; the 99 % latency over that of a frame alone; and the rate over that with
the usual number inside. The last row has a source of 30 frames a second, whose plan is made for this rate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from forked_command import command, forked
from rich.console import Console
from rich.table import Table

from tvm_pipeline import Plan
from tvm_pipeline.core.plan import describe

ROOT = Path(__file__).parents[1]
STREET = ROOT / "examples/street"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a small model, once, briefly: proves that it works")
    arguments = parser.parse_args()
    columns = "run", "plan", "fps", "p50 predicted", "measured", "error", "p99 / alone", "rate / most inside"
    table = Table(*columns, title="Latency under load")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options = short(folder) if arguments.short else street()
        for number in range(1 if arguments.short else 5):
            table.add_row(f"fresh {number + 1}", *fresh(folder, options, arguments.short))
        live, plan = run(folder, options, arguments.short, "--rate", "30")
        table.add_row("30 fps", describe(plan), *latencies(live), "", "")
    Console(width=140).print(table)


def street() -> list[str]:
    video = subprocess.run(
        [sys.executable, ROOT / "examples/face_detector/assets.py"], check=True, capture_output=True, text=True
    ).stdout.strip()
    labels = ["--labels", str(STREET / "labels.txt"), "--threshold", "0.3"]
    return [str(STREET / "detector.tflite"), "--source", video, *labels]


def short(folder: Path) -> list[str]:
    sys.path.insert(0, str(ROOT))
    from tests.support.onnx_models import write_picture_net

    net = str(write_picture_net(folder / "net.onnx"))
    return [net, "--source", "synthetic:160x96@30:24", "--verify", "0"]


def run(folder: Path, options: list[str], briefly: bool, *more: str) -> tuple[dict[str, Any], Plan]:
    """Run the command line, in a fork where it is brief; return its figures, and the plan that it ended with."""
    outputs = ["--output", str(folder / "out.mp4"), "--report", str(folder / "out"), "--adapt", "off", "--json"]
    words = ["run", *options, *more, *outputs]
    if briefly:
        said = folder / "said"
        if os.waitpid(forked(partial(command, *words), said, folder / "errors"), 0)[1]:
            raise SystemExit((folder / "errors").read_text())
        found = json.loads(said.read_bytes())
    else:
        process = [sys.executable, "-m", "tvm_pipeline.cli", *words]
        found = json.loads(subprocess.run(process, check=True, stdout=subprocess.PIPE).stdout)
    [plan] = [block for block in (folder / "out/report.md").read_text().split("```\n") if block.startswith("plan ")]
    return found, Plan.parse(plan)


def latencies(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the rate, and the median latency: predicted, measured, and by how much that differs."""
    predicted_s, came_s = found["predicted"]["latency_p50_s"], found["measured"]["latency_p50_s"]
    error = f"{predicted_s / came_s - 1:+.1%}"
    return f"{found['measured']['throughput_fps']:.1f}", f"{1e3 * predicted_s:.1f} ms", f"{1e3 * came_s:.1f} ms", error


def fresh(folder: Path, options: list[str], briefly: bool) -> tuple[str, ...]:
    """Return the figures of a fresh run, of its frames alone, and of the same plan with more frames inside."""
    first, plan = run(folder, options, briefly, "--fresh")
    fps = first["measured"]["throughput_fps"]
    most = replace(plan, in_flight=None)
    path = folder / "plan.txt"
    path.write_text(str(most))
    alone, _ = run(folder, options, briefly, "--plan", str(path), "--rate", f"{fps / 10:.3g}", "--limit", "40")
    full = first if most == plan else run(folder, options, briefly, "--plan", str(path))[0]
    slowdown = first["measured"]["latency_p99_s"] / alone["measured"]["latency_p50_s"]
    return describe(plan), *latencies(first), f"{slowdown:.2f}", f"{fps / full['measured']['throughput_fps']:.3f}"


if __name__ == "__main__":
    main()
