"""Send the results of a run to a file and to an MQTT broker that restarts meanwhile; count what is missing or twice.

    nice -n 5 python benchmarks/results.py    # 10 000 frames to a file, and 10 000 to a broker that restarts twice
    python benchmarks/results.py --short      # 200 frames each and one restart, for CI

Both are runs as `tvm-pipeline run` makes them, of a small network on small pictures. The broker is mosquitto, which
keeps what it has in a file; it is ended by SIGTERM after a third and after two thirds of the frames, and is away for a
second. The reader is mosquitto_sub, with QoS 2 and a session that outlives connections. Without mosquitto only
files are tried, which is said.

Required of both: each frame once, in order. The exit status is 1 if that does not hold.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support.mqtt import Broker
from tests.support.onnx_models import write_picture_net
from tests.support.parts import MOSQUITTO
from tests.support.waiting import until
from tvm_pipeline import Bundle, Problem, detect_platform, load, plan, profile_model, settle_platform, write_bundle
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings

CONSOLE = Console(width=150)


def make_bundle(folder: Path, repeats: int) -> Path:
    backend, platform = settle_platform(detect_platform())
    model = load(str(write_picture_net(folder / "net.onnx")))
    compiled = backend.compile(model, platform.devices)
    problem = Problem(compiled.graph, platform, profile_model(backend, compiled, platform, repeats))
    bundle = Bundle(compiled.graph, platform, problem.profile, plan(problem, "single").plan, compiled)
    write_bundle(folder / "net.tar", bundle)
    return folder / "net.tar"


def run(bundle: Path, results: str, frames: int) -> float:
    """Run so many frames, and return how many a second."""
    settings = Settings(
        bundle=[bundle], source=[f"synthetic:64x48@30:{frames}"], results=results, verify=0.0, adapt="off"
    )
    began_s = time.monotonic()
    Service(settings).run()
    return frames / (time.monotonic() - began_s)


@contextmanager
def restarted(broker: Broker, seen: Callable[[], int], moments: list[int], away_s: float) -> Iterator[None]:
    """Start the broker again each time that so many messages have come."""

    def restart() -> None:
        for moment in moments:
            until(lambda moment=moment: seen() >= moment, 600.0)
            broker.stop()
            time.sleep(away_s)
            broker.start()

    thread = threading.Thread(target=restart)
    thread.start()
    yield
    thread.join()


def over_mqtt(bundle: Path, folder: Path, frames: int, short: bool) -> tuple[list[int], float]:
    """Return the frames as a reader got them, and how many ran a second."""
    got = folder / "messages.jsonl"
    with Broker(folder) as broker, got.open("wb") as file:
        command = ["mosquitto_sub", "-h", "127.0.0.1", "-p", broker.port, "-t", "gate", "-q", 2, "-i", "reader", "-c"]
        reader = subprocess.Popen(list(map(str, command)), stdout=file)
        time.sleep(0.5)  # it does not say when it has subscribed
        try:
            moments = [frames // 3] if short else [frames // 3, 2 * frames // 3]
            with restarted(broker, lambda: count(got), moments, 0.2 if short else 1.0):
                rate_fps = run(bundle, broker.address("gate"), frames)
            until(lambda: count(got) >= frames)
        finally:
            reader.terminate()
            reader.wait()
    return frames_of(got), rate_fps


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def frames_of(path: Path) -> list[int]:
    return [json.loads(line)["frame"] for line in path.read_bytes().splitlines()]


def judge(where: str, found: list[int], frames: int, rate_fps: float) -> bool:
    """Print the findings; return whether each frame came once and in order."""
    missing, again = frames - len(set(found)), len(found) - len(set(found))
    order = "in order" if found == sorted(found) else "not in order"
    CONSOLE.print(
        f"{where}: {frames} frames, {missing} missing, {again} twice, {order}; {rate_fps:.0f} frames a second"
    )
    return found == list(range(frames))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--short", action="store_true", help="200 frames each and one restart, for CI")
    arguments = parser.parse_args()
    frames = 200 if arguments.short else arguments.frames
    logging.getLogger("tvm_pipeline").setLevel(logging.ERROR)  # it would say each time that the broker is gone
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bundle, lines = make_bundle(folder, 4 if arguments.short else 24), folder / "lines.jsonl"
        rate_fps = run(bundle, str(lines), frames)
        sound = judge("a file", frames_of(lines), frames, rate_fps)
        if MOSQUITTO is None or shutil.which("mosquitto_sub") is None:
            CONSOLE.print("MQTT: not tried; apt install mosquitto mosquitto-clients")
        else:
            found, rate_fps = over_mqtt(bundle, folder, frames, arguments.short)
            sound &= judge("a broker that restarts", found, frames, rate_fps)
    sys.exit(not sound)


if __name__ == "__main__":
    main()
