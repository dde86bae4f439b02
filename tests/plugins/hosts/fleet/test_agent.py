"""The agent of a host with real services: processes that run a tiny model on sources which give frames by the clock.

The coordinator is a function that orders what the test says, and a collector with the rule of the real one: each
(camera, model, epoch, frame) once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from tests.plugins.hosts.fleet_host import agent_command, answering, install, write_service_bundle
from tests.support.waiting import until
from tvm_pipeline.errors import RunError
from tvm_pipeline_hosts.fleet.agent import Agent
from tvm_pipeline_hosts.fleet.host_processes import HostProcess, processes_of
from tvm_pipeline_hosts.fleet.messages import Duty, HostOrder, HostReport, RunningDuty
from tvm_pipeline_hosts.fleet.service_files import folder_name
from tvm_pipeline_hosts.remote.parcels import Parcels, manifest_of, parts_of

SOURCE = "synthetic:32x32@20"


class Coordinator:
    """Orders what the test says, and takes lines."""

    def __init__(self) -> None:
        self.order = HostOrder(0, beat_s=0.05, late_s=1.0)
        self.reports: list[HostReport] = []
        self.lines: dict[tuple[str, str, int], list[int]] = {}
        self.twice = 0
        self.taken = ""
        self.deaf = threading.Event()  # no beat comes through
        self.hangs = threading.Event()  # a beat waits as long as this is set

    def beat(self, report: HostReport) -> HostOrder:
        if self.deaf.is_set():
            raise ConnectionError("the coordinator is away")
        while self.hangs.is_set():
            time.sleep(0.01)
        report = msgspec.json.decode(msgspec.json.encode(report), type=HostReport)
        self.reports.append(report)
        for line in report.lines:
            seen = self.lines.setdefault((line.camera, line.model, line.epoch), [])
            if seen and line.frame <= seen[-1]:
                self.twice += 1
            else:
                assert msgspec.json.decode(line.line)["frame"] == line.frame
                seen.append(line.frame)
        self.taken = report.upto
        return msgspec.structs.replace(self.order, taken=self.taken, safe=self.taken)

    def orders(self, *duties: Duty, warm: dict[str, str] | None = None, **others: object) -> None:
        self.order = msgspec.structs.replace(
            self.order, version=self.order.version + 1, duties=duties, warm=warm or {}, **others
        )

    def running(self, camera: str, epoch: int) -> RunningDuty | None:
        found = [one for one in self.reports[-1].running if (one.camera, one.epoch) == (camera, epoch)]
        return found[0] if found else None

    def count(self, camera: str, epoch: int) -> int:
        return len(self.lines.get((camera, "m", epoch), []))


class HostUnderTest:
    """A host's folder with two bundles, and the agent that has it now."""

    def __init__(self, folder: Path, bundles: list[Path], environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.parcels = Parcels(folder / "parcels")
        self.ids = [self.put(path) for path in bundles]
        self.coordinator = Coordinator()
        self.agent = self.another()

    def put(self, bundle: Path) -> str:
        manifest = manifest_of(bundle)
        for part in parts_of(bundle, self.parcels.missing(manifest)):
            self.parcels.put(*part)
        return self.parcels.assemble(manifest)

    def another(self, **options: float) -> Agent:
        return Agent("attic", self.folder, self.coordinator.beat, self.parcels, environment=self.environment, **options)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> float:
        """Take turns until the condition holds; return for how long."""
        began_s = time.monotonic()
        while True:
            self.agent.step()
            if self.coordinator.reports and condition():
                return time.monotonic() - began_s
            assert time.monotonic() - began_s < seconds, self.coordinator.reports[-1:]
            time.sleep(0.02)

    def duty(self, camera: str, epoch: int, bundle: int = 0, source: str = SOURCE) -> Duty:
        return Duty(camera, source, "m", self.ids[bundle], epoch, 20.0)

    def services(self) -> Path:
        return self.folder.resolve() / "services"

    def written(self) -> list[tuple[str, int]]:
        """The camera and the frame of each line in the files of the services; numbers that do not grow go on instead.

        A process that was started again may have dropped its first frames, so that its numbers grow of themselves.
        """
        found: list[tuple[str, int]] = []
        last: dict[str, int] = {}
        for path in sorted(self.services().glob("*/results-*.jsonl")):
            added: dict[str, int] = {}
            for text in path.read_bytes().splitlines(keepends=True):
                if text.endswith(b"\n"):
                    line = msgspec.json.decode(text)
                    before = last.get(line["tag"], -1)
                    if line["frame"] + added.get(line["tag"], 0) <= before:
                        added[line["tag"]] = before + 1
                    frame = line["frame"] + added.get(line["tag"], 0)
                    last[line["tag"]] = frame
                    found.append((line["tag"].partition("@")[0], frame))
        return found

    def frames(self, camera: str) -> list[int]:
        return [frame for name, frame in self.written() if name == camera]

    def source(self, tag: str) -> dict:
        """What the services say of a source."""
        tags: dict[str, dict] = {}
        for path in self.services().glob("*/status.json"):
            tags |= msgspec.json.decode(path.read_bytes())["tags"]
        return tags.get(tag, {})

    def process(self, bundle: int = 0) -> HostProcess:
        folder = self.services() / folder_name("m", self.ids[bundle])
        (process,) = [found for path, found in processes_of(folder)]
        return process


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    for revision in ("1", "2"):
        write_service_bundle(folder / f"{revision}.tar", revision)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory, bundles, environment) -> Iterator[HostUnderTest]:
    with hosting(tmp_path_factory.mktemp("shared") / "host", bundles, environment) as made:
        yield made


@pytest.fixture
def host(shared: HostUnderTest) -> HostUnderTest:
    """A host on which no camera runs; services of tests before may."""
    shared.coordinator.orders(alone="keep")
    shared.until(lambda: not shared.coordinator.reports[-1].running)
    shared.coordinator.twice = 0
    return shared


@contextmanager
def hosting(folder: Path, bundles: list[Path], environment: dict[str, str]) -> Iterator[HostUnderTest]:
    made = HostUnderTest(folder, bundles, environment)
    try:
        yield made
    finally:
        made.coordinator.hangs.clear()
        made.agent.close(leave_services=True)
        for _, process in processes_of(made.services()):
            process.send(signal.SIGKILL)


@pytest.mark.thorough
def test_a_camera_goes_through_a_service_a_death_of_it_and_another_bundle(host):
    """A service is started, dies and comes again; its bundle is exchanged without a gap; nothing comes twice."""
    coordinator, duty = host.coordinator, host.duty
    coordinator.orders(duty("gate", 1), duty("hall", 1, source="camera:77"), warm={"m": host.ids[0]})
    host.until(lambda: coordinator.count("gate", 1) > 5)
    host.until(lambda: "no camera /dev/video77" in coordinator.running("hall", 1).problem)
    host.until(lambda: coordinator.reports[-1].ready == {"m": host.ids[0]})
    host.until(lambda: coordinator.running("gate", 1).opened)
    assert coordinator.reports[-1].version == coordinator.order.version

    os.kill(host.process().pid, signal.SIGKILL)
    host.until(lambda: coordinator.reports[-1].problems)
    assert "was killed by SIGKILL and is started again at once" in coordinator.reports[-1].problems[0]
    before = coordinator.count("gate", 1)
    host.until(lambda: coordinator.count("gate", 1) > before + 5)
    host.until(lambda: not coordinator.reports[-1].problems)

    coordinator.orders(duty("gate", 2, bundle=1), warm={"m": host.ids[1]})
    host.until(lambda: coordinator.count("gate", 2) > 5)
    first = next(
        i
        for i, report in enumerate(coordinator.reports)
        for line in report.lines
        if (line.camera, line.epoch) == ("gate", 2)
    )
    behind = [
        line
        for report in coordinator.reports[first:]
        for line in report.lines
        if line.camera == "gate" and line.epoch == 1
    ]
    assert behind, "the old service ended before the first line of the new one"
    assert {one.epoch for one in coordinator.reports[first].running if one.camera == "gate"} == {1, 2}
    host.until(lambda: not any(coordinator.running(camera, 1) for camera in ("gate", "hall")))
    host.until(lambda: coordinator.reports[-1].ready == {"m": host.ids[1]})
    assert coordinator.twice == 0


@pytest.mark.thorough
def test_alone_a_host_goes_on_or_stops(host):
    """Nobody answers: services that die come again, and lines wait; with `stop` sources are closed until it hears."""
    coordinator = host.coordinator
    coordinator.orders(host.duty("yard", 1))
    host.until(lambda: coordinator.count("yard", 1) > 2)
    coordinator.hangs.set()
    process, came = host.process(), coordinator.count("yard", 1)
    process.send(signal.SIGKILL)
    host.until(lambda: len(host.frames("yard")) > came + 10)
    assert host.process() != process
    assert coordinator.count("yard", 1) <= came + 1
    coordinator.hangs.clear()
    host.until(lambda: coordinator.count("yard", 1) > came + 10)
    seen = sorted(coordinator.lines["yard", "m", 1])
    assert seen == host.frames("yard")[: len(seen)]  # more is written meanwhile

    coordinator.orders(host.duty("yard", 1), alone="stop")
    host.until(lambda: coordinator.reports[-1].version == coordinator.order.version)
    coordinator.deaf.set()
    host.until(lambda: host.source("yard@1").get("gone"))
    written = len(host.frames("yard"))
    coordinator.deaf.clear()
    host.until(lambda: len(host.frames("yard")) > written + 5)
    assert coordinator.twice == 0


@pytest.mark.thorough
def test_a_camera_that_can_be_opened_once_is_closed_before_the_new_bundle_opens_it(host, monkeypatch):
    # Here, too, the kind of source is known.
    monkeypatch.syspath_prepend(host.environment["PYTHONPATH"].rpartition(os.pathsep)[2])
    source = f"once:{host.folder / 'camera'}"
    coordinator = host.coordinator
    coordinator.orders(host.duty("door", 1, source=source))
    host.until(lambda: coordinator.count("door", 1) > 2)
    coordinator.orders(host.duty("door", 2, bundle=1, source=source))
    host.until(lambda: coordinator.count("door", 2) > 2)
    assert not (host.folder / "refused").exists()
    assert int((host.folder / "camera").read_text()) == host.process(1).pid


@pytest.mark.thorough
def test_an_agent_that_is_killed_is_followed_by_one_that_adopts(host):
    """Its services go on, every line that they write comes once, and a source that no order wants is closed."""
    coordinator = host.coordinator
    host.agent.close()
    coordinator.orders(host.duty("attic", 1), host.duty("cellar", 1))
    socket = host.folder / "socket"
    with answering(socket, coordinator.beat):
        first = subprocess.Popen(agent_command("attic", host.folder, socket), env=host.environment)
        try:
            assert until(lambda: coordinator.count("attic", 1) > 5 and coordinator.count("cellar", 1) > 5)
            with pytest.raises(RunError, match=f"the agent of process {first.pid} runs in .*host; end it"):
                host.another()
        finally:
            first.kill()
            first.wait()
    process, written = host.process(), host.written()
    assert until(lambda: len(host.written()) > len(written) + 10)
    begun = len(coordinator.reports)
    coordinator.orders(host.duty("attic", 1))
    host.agent = host.another(unused_s=0.2)
    host.until(lambda: coordinator.running("cellar", 1) is None)
    found = coordinator.reports[begun]
    assert {(one.camera, one.epoch) for one in found.running} == {("attic", 1), ("cellar", 1)}
    assert found.agent != coordinator.reports[begun - 1].agent
    assert host.process() == process
    coordinator.orders()
    host.until(lambda: not coordinator.reports[-1].running)
    host.until(lambda: coordinator.reports[-1].figures["services"] == [] or not process.state())
    assert sorted(host.written()) == sorted(
        (line[0], frame) for line, seen in coordinator.lines.items() for frame in seen
    )


@pytest.mark.thorough
def test_what_is_wrong_is_told_and_the_agent_goes_on(tmp_path, bundles, environment, monkeypatch):
    """A bundle that is not here, one that is none, and files of others in the folder; what is not needed goes."""
    with hosting(tmp_path / "host", bundles, environment) as host:
        _tells_what_is_wrong(host)
        monkeypatch.setattr("tvm_pipeline_hosts.fleet.agent.CLEAN_S", 0.0)
        host.agent.close()
        host.coordinator.orders()
        host.agent = host.another(unused_s=0.0, keep_s=0.0)
        host.until(lambda: [path.name for path in host.services().iterdir() if path.is_dir()] == ["stray"])


def _tells_what_is_wrong(host: HostUnderTest) -> None:
    missing, broken = "0" * 64, host.ids[0]
    host.parcels.bundle(broken).write_bytes(b"no bundle")
    stray = host.folder / "services" / "stray"
    stray.mkdir()
    (stray / "service.json").write_text("{}")
    host.agent.close()
    host.agent = host.another()
    coordinator = host.coordinator
    coordinator.orders(
        Duty("gate", SOURCE, "m", missing, 1),
        Duty("hall", SOURCE, "faces", broken, 1),
        Duty("door", "camera:0", "faces", broken, 1),
        Duty("back door", "camera:0", "faces", broken, 1),
        warm={"m": missing},
    )
    host.until(lambda: "died 2 times" in " ".join(coordinator.reports[-1].problems))
    said = coordinator.reports[-1].problems
    assert any("the bundle 000000000000 is not in" in one for one in said)
    assert any(re.search("model faces ended with status 1 .*bundle", one) for one in said)
    assert any("stray tells no service" in one for one in said)
    assert "000000000000" in coordinator.running("gate", 1).problem
    assert coordinator.running("hall", 1).problem
    assert coordinator.running("back door", 1).problem == "its source can be opened once only, and camera door has it"
    assert coordinator.reports[-1].ready == {}


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_told_and_costs_no_line_that_was_written(tmp_path, bundles, environment, monkeypatch):
    monkeypatch.setattr("tvm_pipeline_hosts.fleet.agent.LEAST_FREE_BYTES", 0)  # keeps the files, to compare with
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.decode().strip()}")
    try:
        with hosting(disk, bundles, environment) as host:
            _fills_its_disk(host)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fills_its_disk(host: HostUnderTest) -> None:
    coordinator = host.coordinator
    coordinator.orders(host.duty("gate", 1))
    host.until(lambda: coordinator.count("gate", 1) > 2)
    filler = host.folder / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))

    def told() -> str:  # in any report: what ends for want of space gives some back
        return " ".join(problem for report in coordinator.reports for problem in report.problems)

    host.until(lambda: "the agent cannot keep its cursor" in told())
    host.until(lambda: re.search("service of model m ended .*space (is )?left", told()))
    filler.unlink()
    before = coordinator.count("gate", 1)
    host.until(lambda: coordinator.count("gate", 1) > before + 5)
    host.until(lambda: sorted(coordinator.lines["gate", "m", 1]) == host.frames("gate"))
    assert coordinator.twice == 0


def test_another_process_that_got_the_number_is_left_alone():
    with subprocess.Popen(["sleep", "60"]) as other:
        process = HostProcess.of(other.pid)
        before = HostProcess(other.pid, process.began_ticks - 1)
        assert process.state()
        assert not before.state()
        before.send(signal.SIGKILL)
        assert before.usage() == (0.0, 0)
        assert other.poll() is None
        process.send(signal.SIGTERM)
        assert other.wait(10) == -signal.SIGTERM
        assert HostProcess.of(other.pid) is None
