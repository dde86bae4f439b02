"""Fail the power of a disk at random moments, and count the lines of results that are missing afterwards.

    sudo nice -n 5 python benchmarks/power_failure.py
    sudo python benchmarks/power_failure.py --short    # one failure of each kind, soon, for CI

The power failure is emulated: an ext4 in a file (a loop device) is shut down by the kernel without writing its journal
(EXT4_IOC_SHUTDOWN), the processes that write there are killed, and it is mounted again. What was not synced is lost as
in a real power failure; that a device may lose what it has confirmed is not emulated. Mounting needs root.

run: `tvm-pipeline run` of a tiny model writes a line and a picture for each of 30 frames a second, in turns as Matroska
and MP4, half of them in segments. Required: whole lines in order, of which at most the last second is missing, and no
segment that was closed is shorter. How many pictures of the last video are missing is shown.

fleet: a coordinator with its collector, in a process of its own, has its file on the disk; two hosts with the code of
the agent read what services write, 30 lines a second for each of 8 cameras. After the failure another coordinator
begins with what is left. Required: no line is missing that a host need not keep any more, by the cursor of the host;
and in the end each line stands in the file once, in order.

The exit status is 1 if one does not hold. Without root the script measures nothing, and says so.
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
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

import av
import msgspec
from av.error import FFmpegError
from rich.console import Console

from tests.plugins.hosts.fleet.plans import plan_of
from tests.plugins.hosts.fleet_host import install, write_service_bundle
from tests.support.power_failure import ShutDownDisk, shut_down_disk
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.host_results import CURSOR, RESULTS, HostResults, Position
from tvm_pipeline_hosts.fleet.messages import HostOrder, HostReport, RunningDuty
from tvm_pipeline_hosts.fleet.ray_actors import CoordinatorActor
from tvm_pipeline_video.service.log_files import segment_numbers, segment_path

FPS, SEGMENT_S = 30, 2
CAMERAS = tuple(f"camera{index}" for index in range(8))
HOSTS = ("attic", "barn")
BEAT_S = 0.25
CONSOLE = Console(width=150)


def whole_lines(path: Path) -> list[dict]:
    """Return the lines of JSON in a file, without a last one that is cut off and without zeros at the end."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def write_decoder(folder: Path) -> Path:
    """Write a decoder that takes the time of a frame, so that frames come as those of a camera."""
    path = folder / "slow.py"
    path.write_text(
        "import time\nfrom tvm_pipeline_video import Annotation\n"
        f"def decode(outputs, transform):\n    time.sleep({1 / FPS})\n    return [Annotation('thing')]\n"
    )
    return path


def pictures(path: Path) -> int:
    """Return how many pictures of a video can be decoded."""
    count = 0
    with suppress(FFmpegError, OSError), av.open(str(path)) as container:
        for _ in container.decode(video=0):
            count += 1
    return count


def run_once(disk: ShutDownDisk, bundle: Path, environment: dict[str, str], index: int, after_s: float) -> str:
    """Fail the power under a run; return what is wrong, "" if nothing is."""
    folder = Path(tempfile.mkdtemp(dir=disk.folder))
    os.sync()  # the folder is there; the run has to see to all else
    segmented, base, film = index % 2 == 1, folder / "lines.jsonl", folder / ("out.mp4" if index % 4 > 1 else "out.mkv")
    command = [sys.executable, "-m", "tvm_pipeline.cli", "run", bundle, "--source", f"synthetic:64x48@{FPS}"]
    command += ["--decoder", f"{write_decoder(bundle.parent)}:decode", "--results", base, "--output", film]
    command += ["--segment", SEGMENT_S] if segmented else []
    run = subprocess.Popen(
        [str(word) for word in command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )

    def files() -> list[Path]:
        return [segment_path(base, number) for number in segment_numbers(base)] if segmented else [base]

    while not any(path.exists() and path.stat().st_size for path in files()):
        if run.poll() is not None:
            raise SystemExit(f"the run ended before its first line: {(run.communicate()[1] or b'').decode()}")
        time.sleep(0.01)
    time.sleep(after_s)
    written = {path.name: len(whole_lines(path)) for path in files()}
    disk.fail()
    run.kill()
    run.communicate()
    disk.come_back()
    found = {name: whole_lines(folder / name) for name in written}
    frames = [line["frame"] for lines in found.values() for line in lines]
    missing = sum(written.values()) - len(frames)
    closed = list(written)[:-1]
    wrong = [f"{name} is shorter" for name in closed if len(found[name]) != written[name]]
    wrong += ["frames are not in order"] if frames != sorted(set(frames)) else []
    wrong += [f"{missing} lines are missing"] if missing > FPS else []
    last = segment_path(film, len(written)) if segmented else film
    dark = max(0, [*written.values()][-1] - pictures(last))
    CONSOLE.print(
        f"run, {film.suffix}{', in segments' if segmented else ''}: {sum(written.values())} lines written, the last "
        f"{max(0, missing)} missing after the failure ({max(0, missing) / FPS:.2f} s), and {dark} pictures "
        f"({dark / FPS:.2f} s)"
    )
    return "; ".join(wrong)


class Head(CoordinatorActor):
    """The actor of the head without Ray: the same threads and the same lock."""

    def __init__(self, folder: Path) -> None:
        self._coordinator = Coordinator(time.monotonic, folder / "coordinator.json", Collector())
        self._lock = threading.Lock()
        self._begin_ticks()


def head(folder: str, socket: str) -> None:
    """Be the head; answer beats over a socket."""
    actor, listener = Head(Path(folder)), Listener(socket, "AF_UNIX")

    def answer(wire: Connection) -> None:
        while True:
            try:
                wire.send_bytes(actor.beat(wire.recv_bytes()))
            except (EOFError, OSError):
                return

    plan = plan_of(
        {name: HOSTS[index % 2] for index, name in enumerate(CAMERAS)},
        HOSTS,
        work_s=dict.fromkeys(HOSTS, 0.001),
        results=str(Path(folder, "all.jsonl")),
    )
    if actor._coordinator.plan is None:
        actor._coordinator.follow(plan)
    while True:
        threading.Thread(target=answer, args=(listener.accept(),), daemon=True).start()


class Host:
    """A host: services that write lines, and the agent's code that brings them."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.folder, self.made = name, folder, dict.fromkeys(CAMERAS, 0)
        self.path = folder / "service" / RESULTS
        self.path.parent.mkdir(parents=True)
        self.results = HostResults(folder, {"service": "faces"})
        self.results.recall()
        self.order = HostOrder(-1)
        self.wire: Connection | None = None

    def work(self) -> None:
        """Write a line of each camera that is ordered."""
        with segment_path(self.path, 1).open("ab") as file:
            for duty in self.order.duties:
                frame = self.made[duty.camera]
                file.write(b'{"frame":%d,"tag":"%b@%d"}\n' % (frame, duty.camera.encode(), duty.epoch))
                self.made[duty.camera] += 1

    def beat(self, socket: str) -> None:
        batch = self.results.batch()
        running = tuple(RunningDuty(d.camera, d.model, d.bundle, d.epoch, opened=True) for d in self.order.duties)
        report = HostReport(
            self.name, f"{self.name}-1", self.order.version, running,
            lines=batch.lines, since=batch.since, upto=batch.upto,
        )  # fmt: skip
        try:
            self.wire = self.wire or Client(socket, "AF_UNIX")
            self.wire.send_bytes(msgspec.json.encode(report))
            answer = msgspec.json.decode(self.wire.recv_bytes())
            if answer["error"]:
                return  # it has no plan yet
            self.order = msgspec.convert(answer["value"], HostOrder)
        except (EOFError, OSError):
            self.wire = None
            return
        self.results.acknowledge(self.order.taken, self.order.safe)
        self.results.save()

    def forgotten(self) -> int:
        """Return how many lines the host need not keep, by its cursor."""
        try:
            found = msgspec.json.decode((self.folder / CURSOR).read_bytes(), type=dict[str, Position])
        except FileNotFoundError:
            return 0
        at = found.get("service", Position())
        return segment_path(self.path, 1).read_bytes()[: at.offset].count(b"\n") if at.segment else 0


@contextmanager
def living(folder: Path, socket: str) -> Iterator[subprocess.Popen[bytes]]:
    """Have a head live while the block lasts; it is killed then."""
    Path(socket).unlink(missing_ok=True)
    code = f"import sys; sys.path[:0] = {sys.path[:1]!r} + {[str(Path(__file__).parent)]!r}\n"
    code += f"from power_failure import head; head({str(folder)!r}, {socket!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def fleet_once(disk: ShutDownDisk, scratch: Path, after_s: float, again_s: float) -> str:
    """Fail the power of a head; return what is wrong, "" if nothing is."""
    folder = Path(tempfile.mkdtemp(dir=disk.folder))
    os.sync()
    scratch, socket, path = Path(tempfile.mkdtemp(dir=scratch)), f"{scratch}/socket", folder / "all.jsonl"
    hosts = [Host(scratch / name, name) for name in HOSTS]

    def live(until_s: float, works: bool = True) -> None:
        while time.monotonic() < until_s:
            for step in range(round(BEAT_S * FPS)):
                for host in hosts:
                    if works:
                        host.work()
                    if step == 0:
                        host.beat(socket)
                time.sleep(1 / FPS)

    def lines() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {name: [] for name in CAMERAS}
        for line in whole_lines(path):
            found[line["camera"]].append(line["frame"])
        return found

    with living(folder, socket):
        until_s = time.monotonic() + 60
        while not all(host.order.duties for host in hosts) and time.monotonic() < until_s:
            live(time.monotonic() + BEAT_S)
        live(time.monotonic() + after_s)
        written = sum(map(len, lines().values()))
        disk.fail()
    disk.come_back()
    kept, forgotten = raw_count(path), sum(host.forgotten() for host in hosts)
    with living(folder, socket):
        live(time.monotonic() + again_s)
        until_s = time.monotonic() + 60
        while any(host.results.batch().lines for host in hosts) and time.monotonic() < until_s:
            live(time.monotonic() + BEAT_S, works=False)
        end = lines()
    wrong = [
        f"{name} has {len(found)} lines of {sum(host.made[name] for host in hosts)}, or not in order"
        for name, found in end.items()
        if found != list(range(sum(host.made[name] for host in hosts)))
    ]
    if kept < forgotten:
        wrong.append(f"{forgotten - kept} lines were acknowledged as safe and are missing")
    CONSOLE.print(
        f"fleet: {written} lines written at the head, {kept} after the failure; {forgotten} were acknowledged, "
        f"{max(0, forgotten - kept)} of them missing; in the end {sum(map(len, end.values()))} of "
        f"{sum(sum(host.made.values()) for host in hosts)} made"
    )
    return "; ".join(wrong)


def raw_count(path: Path) -> int:
    """Return how many whole lines stand before the first zero that a file system left."""
    content = path.read_bytes() if path.exists() else b""
    return content.partition(b"\0")[0].count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="one failure of each kind, soon, for CI")
    short = parser.parse_args().short
    count, run_s, fleet_s, again_s = (1, (0.5, 1.0), (0.5, 1.0), 1.0) if short else (10, (2.0, 8.0), (2.0, 6.0), 8.0)
    chance, wrong = random.Random(1), []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        try:
            disk = stack.enter_context(shut_down_disk(folder))
        except OSError as error:
            CONSOLE.print(f"nothing is measured, since no disk can be made to fail: {error}; mounting needs root")
            return
        write_service_bundle(folder / "means.tar", "1")
        environment = {**install(folder / "installed"), "TVM_PIPELINE_CACHE": str(folder / "cache")}
        CONSOLE.print("power failures, emulated: an ext4 that the kernel shuts down without its journal")
        for index in range(count):
            wrong.append(run_once(disk, folder / "means.tar", environment, index, chance.uniform(*run_s)))
        for _ in range(count):
            wrong.append(fleet_once(disk, folder, chance.uniform(*fleet_s), again_s))
    for text in filter(None, wrong):
        CONSOLE.print(f"wrong: {text}")
    sys.exit(any(wrong))


if __name__ == "__main__":
    main()
