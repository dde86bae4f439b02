"""Does a run refuse the camera that would break its deadline, and no other?

    python benchmarks/admission.py            # the street detector of examples/, about four minutes
    python benchmarks/admission.py --short    # a tiny network, briefly: proves that it works

Cameras of 5 frames a second come one by one to `run --wait --deadline`, until one is refused or let go. Then as many
come to a run without a deadline, two fewer to one more, and the share of frames that take longer is measured, from when
a frame was decoded until its line is written. Both times each begins when the one before runs, so that their frames do
not come all at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.onnx_models import write_picture_net
from tvm_pipeline.core.plan import describe
from tvm_pipeline_video.service.file import SettingsReader
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import opened_model
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.running_model import plan_alone
from tvm_pipeline_video.service.settings import Settings

STREET = Path(__file__).parents[1] / "examples/street/detector.tflite"
CAMERA_FPS, MISS = 5.0, 0.01
MOST = 40  # cameras
FACTOR = 4.0  # the deadline over the latency of one frame alone
SETTLE_S = 8.0  # between two cameras


class Run:
    """A run whose cameras are changed, in another thread."""

    def __init__(self, folder: Path, model: Path, deadline_s: float | None) -> None:
        self.folder, self.model, self.deadline_s = folder, model, deadline_s
        self.write(0)
        reader = SettingsReader(folder / "run.toml")
        self.service = Service(reader.read(), reader=reader)
        self.thread = threading.Thread(target=self.service.run)

    def write(self, cameras: int) -> None:
        deadline = f'deadline = "{self.deadline_s:.9f}s"\nmiss = {MISS}\n' if self.deadline_s else ""
        sources = json.dumps([f"synthetic:320x240@{CAMERA_FPS}"] * cameras)
        (self.folder / "run.toml").write_text(
            f'bundle = "{self.model}"\nwait = true\nresults = "lines.jsonl"\nstatus = "status.json"\nadapt = "off"\n'
            f"source = {sources}\ntag = {json.dumps([f'c{number}' for number in range(cameras)])}\n"
            f'policy = "fps={CAMERA_FPS}"\n{deadline}'
        )

    def change(self, cameras: int) -> dict[str, dict]:
        """Have so many cameras, and return the status of each, once all are open or refused."""
        self.write(cameras)
        self.service.reread()
        while True:
            found = self.status["tags"]
            if len(found) == cameras and all(one["opened"] or one.get("refused") for one in found.values()):
                return found
            time.sleep(0.05)

    @property
    def status(self) -> dict:
        return json.loads((self.folder / "status.json").read_text())


@contextmanager
def running(model: Path, deadline_s: float | None = None) -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), model, deadline_s)
        run.thread.start()
        while not ((run.folder / "status.json").exists() and run.status["ready"]):
            time.sleep(0.05)
        try:
            yield run
        finally:
            run.service.stop()
            run.thread.join()


def first_refused(model: Path, deadline_s: float, settle_s: float) -> int:
    """Return which camera is the first that is refused, or let go within some seconds."""
    with running(model, deadline_s) as run:
        for count in range(1, MOST):
            run.change(count)
            until_s = time.monotonic() + settle_s
            while time.monotonic() < until_s:
                if any(one.get("refused") for one in run.status["tags"].values()):
                    return count
                time.sleep(0.2)
    return MOST


def late_share(model: Path, cameras: int, deadline_s: float, seconds: float) -> float:
    """Return the share of frames that take longer, with so many cameras that nothing refuses."""
    with running(model) as run:
        for count in range(1, cameras + 1):
            run.change(count)
        time.sleep(2.0)
        before = (run.folder / "lines.jsonl").read_bytes().count(b"\n")
        time.sleep(seconds)
        lines = (run.folder / "lines.jsonl").read_text().splitlines()[before:-1]
    taken_s = [json.loads(line)["age_s"] for line in lines]
    return sum(one > deadline_s for one in taken_s) / len(taken_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=STREET)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each forced run")
    parser.add_argument("--short", action="store_true", help="one camera that no deadline allows")
    options = parser.parse_args()
    console = Console(width=150)
    with ExitStack() as stack:
        if options.short:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            options.model, options.seconds = write_picture_net(folder / "net.onnx"), 0.5
        settings = Settings([options.model])
        path, bundle = stack.enter_context(opened_model(options.model, settings, Listener()))
        plan = plan_alone(settings, bundle).plan
    deadline_s = (0.1 if options.short else FACTOR) * (plan.predicted.latency_s or 0.0)
    console.print(f"{bundle.graph.name}, plan: {describe(plan)}, {plan.predicted.throughput_fps:.1f} fps predicted")
    refused = first_refused(path, deadline_s, SETTLE_S)
    console.print(f"deadline {1e3 * deadline_s:.1f} ms for all but {MISS:.0%}: camera {refused} is refused")
    shares = {
        count: late_share(path, count, deadline_s, options.seconds) for count in range(max(1, refused - 2), refused + 2)
    }
    for count, share in shares.items():
        console.print(f"{count} cameras, forced: {share:.2%} of the frames take longer")
    breaks = next((count for count, share in shares.items() if share > MISS), None)
    console.print(f"the first that breaks it when forced: {breaks or 'none of these'}")


if __name__ == "__main__":
    main()
