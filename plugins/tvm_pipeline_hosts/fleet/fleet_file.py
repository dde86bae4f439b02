"""fleet.toml: the hosts of a fleet, their models, and the cameras.

    spare = 1                                       # hosts that may be lost at the same time

    [[host]]
    name = "attic"
    platform = "attic.toml"                         # paths are relative to this file's folder
    profiles = { faces = "attic-faces.json" }       # or bundles = { faces = "faces.tar" }, or fps = { faces = 90 }

    [[model]]
    name = "faces"
    file = "faces.onnx"

    [[camera]]
    name = "gate"
    source = "rtsp://gate/1"
    models = ["faces@10"]                           # frames a second
    hosts = ["attic"]                               # those that reach it; without it, all do

A mistake is reported with its line. Next: host_works.py, which finds out how fast each host is; docs/fleet.md tells
every key.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from tvm_pipeline.addresses import has_secret
from tvm_pipeline.cost.under_load import FrameDeadline
from tvm_pipeline.documents import TomlFile
from tvm_pipeline.errors import OptionError, nearest
from tvm_pipeline.files import is_open_to_others
from tvm_pipeline_hosts.fleet.description import Alone, Camera, Fleet, Host
from tvm_pipeline_video.service.settings import MODEL_KINDS

BEAT_S, LATE_S = 0.25, 1.5
MISS_SHARE = 0.01
# A host is lost only after several beats that did not come: a single one may be late.
FEWEST_BEATS = 3
LEAST_BEAT_S, MOST_LATE_S = 0.02, 3600.0
_DURATION = re.compile(r"([0-9]*\.?[0-9]+) *(ms|s|min)")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True, slots=True)
class FleetHost:
    """A host, as the file tells it.

    Attributes:
        platform: the file of its devices and links; None where its bundles tell them.
        profiles: model -> the profile that was measured on this host.
        bundles: model -> the bundle that this host runs.
        fps: model -> the frames a second that this host makes of it, where they are known otherwise.
    """

    name: str
    platform: Path | None = None
    profiles: Mapping[str, Path] = field(default_factory=dict)
    bundles: Mapping[str, Path] = field(default_factory=dict)
    fps: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model, as the file tells it.

    Attributes:
        file: a model, an operator graph (.json), or a bundle that every host runs which names no other; None where
            all is told by the hosts.
        settings: of `run`, under their keys, with the paths completed.
        deadline_s, miss_share: seconds that a frame may take from when it comes, and the share of those that may take
            longer; None where no frame is late.
    """

    name: str
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    deadline_s: float | None = None
    miss_share: float = MISS_SHARE

    @property
    def is_source(self) -> bool:
        """Return whether the file is a model, which is compiled for each kind of host."""
        return self.file is not None and self.file.suffix not in (".tar", ".json")


class _CameraTable(msgspec.Struct):
    name: str
    source: str
    models: list[str]
    hosts: list[str] | None = None


_SETTINGS = [(key.replace("-", "_"), kind | None, None) for key, kind in MODEL_KINDS.items()]
_OWN: list[Any] = [
    ("name", str),
    ("file", Path | None, None),
    ("deadline", str | float | None, None),
    ("miss", float, MISS_SHARE),
]
_ModelTable = msgspec.defstruct("_ModelTable", [*_OWN, *_SETTINGS], rename="kebab")


class _FleetTable(msgspec.Struct):
    spare: int = 0
    beat: str | float = BEAT_S
    late: str | float = LATE_S
    alone: str = "keep"
    host: list[FleetHost] = []
    model: list[_ModelTable] = []  # type: ignore[valid-type]
    camera: list[_CameraTable] = []


@dataclass(frozen=True, slots=True)
class FleetFile:
    """A fleet.toml that was read. See `description.Fleet` for spare, beat_s, late_s and alone."""

    path: Path
    hosts: tuple[FleetHost, ...]
    models: tuple[FleetModel, ...]
    cameras: tuple[Camera, ...]
    spare: int = 0
    beat_s: float = BEAT_S
    late_s: float = LATE_S
    alone: Alone = "keep"

    def find_model(self, name: str) -> FleetModel:
        """Return the model of that name, which the file has."""
        return next(model for model in self.models if model.name == name)

    def bundle(self, host: FleetHost, model: str) -> Path | None:
        """Return the bundle of a model that a host runs: its own, or that of the model; None without one."""
        if model in host.bundles:
            return host.bundles[model]
        file = self.find_model(model).file
        return file if file and file.suffix == ".tar" else None

    def to_compile(self, hosts: Collection[str]) -> dict[str, list[str]]:
        """Return host -> the models to compile for it, of these hosts: model files that a camera in its reach wants."""
        found: dict[str, list[str]] = {}
        for host in self.hosts:
            reached = [camera for camera in self.cameras if not camera.hosts or host.name in camera.hosts]
            wanted = {model for camera in reached for model in camera.rates_fps}
            for model in self.models:
                is_wanted = host.name in hosts and model.name in wanted
                if is_wanted and model.is_source and self.bundle(host, model.name) is None:
                    found.setdefault(host.name, []).append(model.name)
        return found

    def fleet(self, works: Mapping[str, Mapping[str, float]]) -> Fleet:
        """Return the fleet to plan for.

        Args:
            works: host -> model -> seconds of its busiest device for a frame, see `description.Host`; a model that is
                missing cannot run there.
        """
        hosts = tuple(Host(host.name, dict(works.get(host.name, {}))) for host in self.hosts)
        return Fleet(hosts, self.cameras, self.spare, self.beat_s, self.late_s, self.alone)


def read_fleet(path: Path) -> FleetFile:
    """Read a fleet.toml.

    Raises:
        OptionError: the file cannot be read, or has a mistake; the message names the line.
    """
    file = TomlFile(path, OptionError)
    table: _FleetTable = file.convert(_FleetTable)
    beat_s, late_s = _seconds(file, table.beat, "beat"), _seconds(file, table.late, "late")
    names = {kind: _names(file, kind) for kind in ("host", "model", "camera")}
    for index, host in enumerate(table.host):
        for key in ("profiles", "bundles", "fps"):
            for model in getattr(host, key):
                _check_known(file, model, "model", names, "host", index, key)
        for model, fps in host.fps.items():
            if not 0 < fps < math.inf:
                raise file.mistake(f"fps of {model} is {fps:g}; it must be positive", "host", index, "fps")
    cameras = tuple(_camera(file, camera, index, names) for index, camera in enumerate(table.camera))
    if not 0 <= table.spare < len(table.host):
        hosts = len(table.host)
        what = f"spare is {table.spare}, and the fleet has {hosts} hosts: from 0 to {hosts - 1} may be lost"
        raise file.mistake(what, "spare")
    if not beat_s >= LEAST_BEAT_S or not FEWEST_BEATS * beat_s <= late_s <= MOST_LATE_S:
        raise file.mistake(
            f"beat is {beat_s:g} s and late {late_s:g} s; a beat takes at least {LEAST_BEAT_S:g} s, and late is "
            f"from {FEWEST_BEATS} beats to {MOST_LATE_S:g} s",
            "late" if "late" in file.tables else "beat",
        )
    if table.alone not in get_args(Alone):
        raise file.mistake(f"alone is {table.alone!r}; it is one of {', '.join(get_args(Alone))}", "alone")
    models = tuple(_model(file, msgspec.structs.asdict(model), index) for index, model in enumerate(table.model))
    alone = cast(Alone, table.alone)
    return FleetFile(path, tuple(table.host), models, cameras, table.spare, beat_s, late_s, alone)


def _names(file: TomlFile, kind: str) -> list[str]:
    """Return the names of the tables of a kind, each unique and one word."""
    tables = file.tables.get(kind)
    if not tables:
        raise file.mistake(f"it has no {kind}; a fleet needs at least one [[{kind}]]")
    names = [table["name"] for table in tables]
    for index, name in enumerate(names):
        if name.split() != [name] or not name.isprintable() or "@" in name or "+" in name:
            what = f"a {kind} is called {name!r}; its name must be one word without @ and +"
            raise file.mistake(what, kind, index, "name")
        if name in names[:index]:
            first = file.where(kind, names.index(name), "name").rpartition(", ")[2]
            raise file.mistake(f"two of kind {kind} are called {name}, the first at {first}", kind, index, "name")
    return names


def _model(toml: TomlFile, values: dict[str, Any], index: int) -> FleetModel:
    name, file, folder = values.pop("name"), values.pop("file"), toml.path.parent
    deadline, miss_share = values.pop("deadline"), values.pop("miss")
    deadline_s = None if deadline is None else _seconds(toml, deadline, "model", index, "deadline")
    if deadline_s is not None:
        try:
            FrameDeadline(deadline_s, miss_share, 1.0)
        except OptionError as error:
            raise toml.mistake(str(error).replace("`", ""), "model", index, str(error.option)) from error
    settings = {key.replace("_", "-"): value for key, value in values.items() if value is not None}
    for key in ("decoder", "labels", "preprocessing"):
        if key in settings and (".py:" in settings[key] or os.path.isfile(folder / settings[key])):
            settings[key] = str(folder / settings[key])
    return FleetModel(name, file, settings, deadline_s, miss_share)


def _camera(file: TomlFile, camera: _CameraTable, index: int, names: Mapping[str, list[str]]) -> Camera:
    place = ("camera", index)
    rates: dict[str, float] = {}
    for text in camera.models:
        model, at, rate = text.rpartition("@")
        try:
            rates_fps = float(rate)
        except ValueError:
            rates_fps = math.nan
        if not at or not 0 < rates_fps < math.inf:
            example = f"{names['model'][0]}@10"
            what = f"models has {text!r}, which does not say a rate; write it as MODEL@FPS, such as {example}"
            raise file.mistake(what, *place, "models")
        _check_known(file, model, "model", names, *place, "models")
        if model in rates:
            raise file.mistake(f"models has {model} twice", *place, "models")
        rates[model] = rates_fps
    if not rates:
        raise file.mistake("models is empty; write them as MODEL@FPS", *place, "models")
    if not camera.source:
        raise file.mistake("source is empty", *place, "source")
    if camera.hosts is not None and not camera.hosts:
        raise file.mistake("hosts is empty; leave it out if all reach the camera", *place, "hosts")
    for host in camera.hosts or ():
        _check_known(file, host, "host", names, *place, "hosts")
    if has_secret(camera.source) and is_open_to_others(file.path):
        what = f"others can read this file, and source holds a secret: `chmod 600 {file.path}`"
        raise file.mistake(what, *place, "source")
    beside = file.path.parent / camera.source
    source = str(beside) if os.path.exists(beside) else camera.source
    return Camera(camera.name, source, rates, tuple(dict.fromkeys(camera.hosts or ())))


def _check_known(
    file: TomlFile, name: str, what: str, names: Mapping[str, list[str]], kind: str, index: int, key: str
) -> None:
    """Raise OptionError where a key names a host or a model that is not there."""
    if name not in names[what]:
        known = names[what]
        advice = nearest(name, known, f"there are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}")
        raise file.mistake(f"{key} names {name}, and no {what} is called so; {advice}", kind, index, key)


def _seconds(file: TomlFile, value: str | float, *where: str | int) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    if match := _DURATION.fullmatch(value.strip()):
        return float(match[1]) * _UNITS_S[match[2]]
    raise file.mistake(f'{where[-1]} is {value!r}; write it as "250ms", "1.5s" or "1min"', *where)
