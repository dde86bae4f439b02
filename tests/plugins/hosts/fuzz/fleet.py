"""Damaged files and messages of a fleet: fleet.toml, service.toml, reports of hosts and lines that services wrote.

Each function makes one damaged input of a valid one, by the generator that is given, and reads it as the product does.
The package's own errors pass; anything else escapes.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tests.plugins.hosts.fleet.plans import plan_of
from tests.plugins.hosts.simulated_fleet import SimulatedHost
from tests.support.mutations import mutated
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import PipelineError
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_hosts.fleet.host_results import HostResults
from tvm_pipeline_hosts.fleet.messages import HostReport
from tvm_pipeline_video.service.file import SettingsReader
from tvm_pipeline_video.service.log_files import segment_path

FLEET = b"""
spare = 1
beat = "250ms"
late = 1.5
alone = "stop"

[[host]]
name = "attic"
fps = { faces = 90, plates = 40.5 }

[[host]]
name = "barn"
platform = "barn.toml"
bundles = { faces = "faces.tar" }

[[model]]
name = "faces"
file = "faces.onnx"
decoder = "yolo"
threshold = 0.4
labels = "names.txt"

[[model]]
name = "plates"

[[camera]]
name = "gate"
source = "rtsp://user:password@gate/1"
models = ["faces@10", "plates"]
hosts = ["attic", "barn"]
"""
SERVICE = b"""
bundle = ["faces.tar", "plates.tar"]
source = ["camera:0", "rtsp://user:password@gate/1"]
policy = ["latest", "fps=4"]
tag = ["gate", "hall"]
wait = true
decoder = "faces.py:decode"
classes = "person,car"
threshold = 0.4
results = "results.jsonl"
segment = 3600
events = "events.jsonl"
objective = "energy"
min-throughput = 10
watch = 9600
watchdog = 10
supervise = true
"""
LINES = b"".join(
    b'{"frame":%d,"time_s":%.1f,"source":"film","tag":"gate@%d","annotations":[{"label":"cat"}]}\n'
    % (n, n / 10, n // 4)
    for n in range(12)
)


def fleet_file(rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(PipelineError):
        path = Path(folder, "fleet.toml")
        path.write_bytes(mutated(path.name, FLEET, rng))
        read_fleet(path)


def service_file(rng: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(PipelineError):
        path = Path(folder, "service.toml")
        path.write_bytes(mutated(path.name, SERVICE, rng))
        path.chmod(0o600)
        SettingsReader(path).read()


def reports(rng: random.Random) -> None:
    """Two hosts live under a coordinator, and one of them sends damaged reports; then both go on as before."""
    now = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        coordinator = Coordinator(lambda: now[0], Path(folder, "memory.json"), Collector())
        attic, barn = hosts = SimulatedHost("attic"), SimulatedHost("barn")
        homes = {"gate": "attic", "yard": "barn"}
        coordinator.follow(plan_of(homes, ("attic", "barn"), results=str(Path(folder, "all.jsonl"))))

        def live(beats: int) -> None:
            for _ in range(beats):
                now[0] += 0.25
                for host in hosts:
                    host.work()
                    host.beat(coordinator.beat)
                coordinator.tick()
            coordinator.sync()

        live(4)
        for _ in range(4):
            content = mutated("report.json", msgspec.json.encode(attic.report()), rng)
            try:
                report = msgspec.json.decode(content, type=HostReport)
            except DAMAGED:  # the actor answers with it
                continue
            with suppress(PipelineError):
                msgspec.json.encode(coordinator.beat(report))
            coordinator.tick()
            msgspec.json.encode(coordinator.status())
        live(4)
        if not barn.cameras():
            raise AssertionError("a host that sent nothing wrong has lost its camera")
        coordinator.close()


def lines_of_services(rng: random.Random) -> None:
    """An agent reads what a service, or a bad disk, has left."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "one").mkdir()
        segment_path(folder / "one" / "results.jsonl", 1).write_bytes(mutated("results.jsonl", LINES, rng))
        cursor = b'{"one":{"segment":1,"offset":90,"frames":{"gate@0":[1,0]}}}'
        (folder / "cursor.json").write_bytes(mutated("cursor.json", cursor, rng))
        results = HostResults(folder, {"one": "faces"})
        results.recall()
        collector = Collector()
        collector.into(folder / "all.jsonl")
        while (batch := results.batch()).lines:
            collector.take("attic", batch.lines, batch.since, batch.upto)
            collector.sync()
            results.acknowledge(collector.taken["attic"], collector.safe["attic"])
        collector.close()
        Collector().into(folder / "all.jsonl")


FUZZERS: dict[str, Callable[[random.Random], None]] = {
    "fleet.toml": fleet_file,
    "service.toml": service_file,
    "reports of hosts": reports,
    "lines of services": lines_of_services,
}
