"""The settings of a model, from fleet.toml to the lines of a service: what travels, and what other settings change."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from tests.plugins.hosts.fleet_host import install, write_service_bundle
from tvm_pipeline.errors import OptionError
from tvm_pipeline_hosts.fleet.agent import Agent
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_hosts.fleet.host_processes import processes_of
from tvm_pipeline_hosts.fleet.messages import Duty, FleetPlan, HostOrder, HostReport, ModelSettings
from tvm_pipeline_hosts.fleet.model_settings import bundle_id, named
from tvm_pipeline_hosts.fleet.rollout import settings_of
from tvm_pipeline_hosts.remote.parcels import Parcels, manifest_of, parts_of

FLEET = """
[[host]]
name = "attic"

[[model]]
name = "m"
file = "m.tar"
SETTINGS

[[camera]]
name = "gate"
source = "synthetic:32x32@20"
models = ["m@20"]
"""
CLASSIFIED = 'decoder = "classification"\nthreshold = 0.001\nlabels = "names.txt"\npreprocessing = "pixels.toml"'


def settings(folder: Path, text: str) -> ModelSettings:
    """Read the settings of the model from a fleet.toml."""
    (folder / "fleet.toml").write_text(FLEET.replace("SETTINGS", text))
    return settings_of(read_fleet(folder / "fleet.toml"))["m"]


class Fleet:
    """A coordinator and one host with real services, whose beats are calls."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment, self.parcels = folder, environment, Parcels(folder / "host" / "parcels")
        write_service_bundle(folder / "m.tar", "1")
        manifest = manifest_of(folder / "m.tar")
        for part in parts_of(folder / "m.tar", self.parcels.missing(manifest)):
            self.parcels.put(*part)
        self.bundle = self.parcels.assemble(manifest)
        self.coordinator = Coordinator(time.monotonic, folder / "coordinator.json", Collector())
        self.agent = self.another()

    def another(self) -> Agent:
        return Agent("attic", self.folder / "host", self.coordinator.beat, self.parcels, environment=self.environment)

    def follow(self, wanted: ModelSettings) -> None:
        plan = FleetPlan(
            {"gate": ("synthetic:32x32@20", {"m": 20.0})},
            {"gate": "attic"},
            {"gate": ("attic",)},
            {"attic": {"m": 0.001}},
            {"attic": {"m": named(self.bundle, wanted)}},
            results=str(self.folder / "all.jsonl"),
            settings={"m": wanted} if wanted != ModelSettings() else {},
        )
        self.coordinator.follow(msgspec.json.decode(msgspec.json.encode(plan), type=FleetPlan))

    def lines(self) -> list[dict]:
        path = self.folder / "all.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def until(self, true: Callable[[list[dict]], bool]) -> list[dict]:
        until_s = time.monotonic() + 60.0
        while not true(self.lines()):
            self.agent.step()
            self.coordinator.tick()
            assert time.monotonic() < until_s, self.coordinator.status()
            time.sleep(0.02)
        return self.lines()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, install(tmp_path / "site"))
    try:
        yield made
    finally:
        made.agent.close()
        for _, process in processes_of(tmp_path):
            process.send(signal.SIGKILL)


@pytest.mark.thorough
def test_other_settings_are_another_service_and_another_epoch(fleet: Fleet, tmp_path: Path) -> None:
    """Labels and preprocessing travel as text; lines say what made them, and an agent that comes back keeps it so."""
    (tmp_path / "names.txt").write_text("colour of 0\ncolour of 1\ncolour of 2\n")
    (tmp_path / "pixels.toml").write_text("scale = 0.5\n")
    fleet.follow(settings(tmp_path, CLASSIFIED))
    (tmp_path / "names.txt").unlink()
    first = fleet.until(lambda lines: len(lines) > 2)[-1]
    (service,) = processes_of(tmp_path)
    assert "colour of" in json.dumps(first)
    (config,) = (tmp_path / "host").glob("services/*/preprocessing.toml")
    assert config.read_text() == "scale = 0.5\n"

    fleet.agent.close()
    fleet.agent = fleet.another()
    count = len(fleet.lines())
    lines = fleet.until(lambda lines: len(lines) > count + 5)
    assert {line["epoch"] for line in lines} == {first["epoch"]}
    assert [process for _, process in processes_of(tmp_path)] == [service[1]]

    fleet.follow(settings(tmp_path, 'decoder = "classification"\nthreshold = 0.001'))
    lines = fleet.until(lambda lines: lines[-1]["epoch"] > first["epoch"])
    for line in lines:
        assert ("colour of" in json.dumps(line)) == (line["epoch"] == first["epoch"])
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)


def test_settings_that_did_not_come_start_nothing(fleet: Fleet) -> None:
    """A service never runs under a name that is not that of its settings."""
    fleet.follow(ModelSettings({"threshold": 0.5}))
    plan = fleet.coordinator.plan
    assert plan is not None
    fleet.coordinator.follow(msgspec.structs.replace(plan, settings={"m": ModelSettings({"threshold": 0.6})}))
    fleet.until(
        lambda _: any("did not come with the order" in one.problem for one in fleet.coordinator.status().duties)
    )
    assert not list(processes_of(fleet.folder))


@pytest.mark.thorough
def test_a_service_keeps_the_settings_of_its_name(fleet: Fleet) -> None:
    """A coordinator that was just begun leaves to a host what runs, and may know other settings already."""
    old, new = (ModelSettings({"decoder": "classification", "threshold": value}) for value in (0.25, 0.75))
    name, opened = named(fleet.bundle, old), set[str]()
    gate, hall = (Duty(camera, "synthetic:32x32@20", "m", name, 1, 20.0) for camera in ("gate", "hall"))
    orders = [HostOrder(1, (gate,), settings={"m": old})]

    def beat(report: HostReport) -> HostOrder:
        opened.update(one.camera for one in report.running if one.opened)
        return msgspec.structs.replace(orders[-1], taken=report.upto, safe=report.upto)

    fleet.coordinator.beat = beat
    for camera in ("gate", "hall"):
        fleet.agent.close()
        fleet.agent = fleet.another()
        fleet.until(lambda _, camera=camera: camera in opened)
        orders.append(HostOrder(2, (gate, hall), settings={"m": new}))
    (config,) = (fleet.folder / "host").glob("services/*/service.toml")
    assert "threshold = 0.25" in config.read_text()
    assert "hall@1" in config.read_text()


def test_the_name_is_that_of_the_bundle_and_the_settings() -> None:
    """Without settings it is the id; the order of keys does not matter, and every value does."""
    some = ModelSettings({"decoder": "yolov8", "threshold": 0.5}, {"labels": "cat"})
    assert named("id", ModelSettings()) == "id"
    assert bundle_id(named("id", some)) == "id"
    again = ModelSettings({"threshold": 0.5, "decoder": "yolov8"}, {"labels": "cat"})
    assert named("id", again) == named("id", some)
    others = [msgspec.structs.replace(some, values={"threshold": 0.5}), msgspec.structs.replace(some, texts={})]
    assert len({named("id", one) for one in (*others, some)}) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('decoder = "mine.py:decode"', r"model m: `decoder` .*mine\.py:decode is a file of code.* as a package"),
        ('labels = "empty.txt"', r"model m: `labels` .*empty\.txt: it is empty"),
        ('preprocessing = "wrong.toml"', r"model m: `preprocessing` .*wrong\.toml: it cannot be read as text"),
        ('input-shapes = "x:1,3,32,32"', r"model m: `input-shapes` are of a model that is compiled"),
    ],
)
def test_what_does_not_travel_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """Each with the model, the setting, and what to do."""
    (tmp_path / "mine.py").write_text("")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "wrong.toml").write_text("scale = = 1")
    with pytest.raises(OptionError, match=said):
        settings(tmp_path, text)


def test_a_file_beside_a_model_tells_its_preprocessing(tmp_path: Path) -> None:
    """As for `run` of a model file; what fleet.toml says counts more, and a bundle has its own."""
    (tmp_path / "m.toml").write_text("scale = 0.5\n")
    assert settings(tmp_path, "") == ModelSettings()
    text = FLEET.replace("m.tar", "m.onnx")
    for given, expected in (("", {"preprocessing": "scale = 0.5\n"}), ('preprocessing = "yolo"', {})):
        (tmp_path / "fleet.toml").write_text(text.replace("SETTINGS", f'{given}\ninput-shapes = "x:1,3,32,32"'))
        found = settings_of(read_fleet(tmp_path / "fleet.toml"))["m"]
        assert found.texts == expected
        assert "input-shapes" not in found.values


def test_names_that_are_no_files_travel_as_they_are(tmp_path: Path) -> None:
    """Sets of labels, presets, and a decoder of a package."""
    text = 'labels = "coco"\npreprocessing = "yolo"\ndecoder = "package.module:decode"\nclasses = "cat,dog"'
    found = settings(tmp_path, text)
    assert found.texts == {}
    assert found.values == {
        "labels": "coco",
        "preprocessing": "yolo",
        "decoder": "package.module:decode",
        "classes": "cat,dog",
    }
