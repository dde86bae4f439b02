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

import difflib
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from tvm_pipeline.addresses import has_secret
from tvm_pipeline.documents import MOST_TOML_BYTES, read_toml
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import is_open_to_others, read_bytes
from tvm_pipeline_hosts.fleet.description import Alone, Camera, Fleet, Host

BEAT_S, LATE_S = 0.25, 1.5
# A host is lost only after several beats that did not come: a single one may be late.
FEWEST_BEATS = 3
LEAST_BEAT_S, MOST_LATE_S = 0.02, 3600.0
# Settings of `run` that belong to a model, with their types in the file; see tvm_pipeline_video/service/settings.py.
MODEL_SETTINGS: dict[str, type] = {
    "classes": str,
    "decoder": str,
    "input-shapes": str,
    "labels": str,
    "preprocessing": str,
    "threshold": float,
}
_TOP = {
    "spare": int,
    "beat": str | float,
    "late": str | float,
    "alone": str,
    "host": list[dict[str, Any]],
    "model": list[dict[str, Any]],
    "camera": list[dict[str, Any]],
}
_HOST = {
    "name": str,
    "platform": str,
    "profiles": dict[str, str],
    "bundles": dict[str, str],
    "fps": dict[str, float],
}
_MODEL = {"name": str, "file": str, **MODEL_SETTINGS}
_CAMERA = {"name": str, "source": str, "models": list[str], "hosts": list[str]}
_REQUIRED = {"host": ("name",), "model": ("name",), "camera": ("name", "source", "models")}
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
    """

    name: str
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_source(self) -> bool:
        """Return whether the file is a model, which is compiled for each kind of host."""
        return self.file is not None and self.file.suffix not in (".tar", ".json")


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
    return _Reader(path).read()


class _Reader:
    """Reads one fleet.toml; it keeps where each table and key stands, for the messages."""

    def __init__(self, path: Path) -> None:
        self._path = path
        content = read_bytes(path, OptionError, MOST_TOML_BYTES)
        try:
            self._tables = read_toml(content)
        except ValueError as error:
            line = re.search(r"line (\d+)", str(error))
            number = line[1] if line else content.count(b"\n") + 1
            raise OptionError(f"{path}, line {number}: it is no TOML: {error}") from error
        self._lines = dict(_lines(content.decode()))

    def read(self) -> FleetFile:
        top = self._typed(self._tables, _TOP, "", 0)
        spare = top.get("spare", 0)
        beat_s, late_s = self._duration(top, "beat", BEAT_S), self._duration(top, "late", LATE_S)
        models = [self._model(table, index) for index, table in enumerate(self._entries(top, "model"))]
        hosts = [
            self._host(table, index, [m.name for m in models]) for index, table in enumerate(self._entries(top, "host"))
        ]
        cameras = tuple(
            self._camera(table, index, [m.name for m in models], [h.name for h in hosts])
            for index, table in enumerate(self._entries(top, "camera"))
        )
        if not 0 <= spare < len(hosts):
            raise self._mistake(
                f"spare is {spare}, and the fleet has {len(hosts)} hosts: from 0 to {len(hosts) - 1} may be lost",
                "spare",
            )
        if not beat_s >= LEAST_BEAT_S or not FEWEST_BEATS * beat_s <= late_s <= MOST_LATE_S:
            raise self._mistake(
                f"beat is {beat_s:g} s and late {late_s:g} s; a beat takes at least {LEAST_BEAT_S:g} s, and late is "
                f"from {FEWEST_BEATS} beats to {MOST_LATE_S:g} s",
                "late" if "late" in top else "beat",
            )
        alone = top.get("alone", "keep")
        for known in get_args(Alone):
            if alone == known:
                return FleetFile(self._path, tuple(hosts), tuple(models), cameras, spare, beat_s, late_s, known)
        raise self._mistake(f"alone is {alone!r}; it is one of {', '.join(get_args(Alone))}", "alone")

    def _entries(self, top: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        """Return the tables of a kind, each with its keys checked and its name unique and one word."""
        kinds: dict[str, Any] = {"host": _HOST, "model": _MODEL, "camera": _CAMERA}
        if not top.get(kind):
            raise OptionError(f"{self._path}: it has no {kind}; a fleet needs at least one [[{kind}]]")
        entries: list[dict[str, Any]] = []
        names: dict[str, int] = {}
        for index, table in enumerate(top[kind]):
            entry = self._typed(table, kinds[kind], kind, index)
            for key in _REQUIRED[kind]:
                if key not in entry:
                    raise self._mistake(f"this {kind} has no {key}", "", kind, index)
            name = entry["name"]
            if name.split() != [name] or not name.isprintable() or "@" in name or "+" in name:
                raise self._mistake(
                    f"a {kind} is called {name!r}; its name must be one word without @ and +", "name", kind, index
                )
            if name in names:
                first = self._where("name", kind, names[name]).rpartition(", ")[2]
                raise self._mistake(f"two of kind {kind} are called {name}, the first at {first}", "name", kind, index)
            names[name] = index
            entries.append(entry)
        return entries

    def _host(self, table: dict[str, Any], index: int, models: list[str]) -> FleetHost:
        for key in ("profiles", "bundles", "fps"):
            for model in table.get(key, {}):
                self._known(model, "model", models, key, "host", index)
        for model, fps in table.get("fps", {}).items():
            if not 0 < fps < math.inf:
                raise self._mistake(f"fps of {model} is {fps:g}; it must be positive", "fps", "host", index)
        platform = table.get("platform")
        return FleetHost(
            table["name"],
            None if platform is None else self._path.parent / platform,
            {model: self._path.parent / file for model, file in table.get("profiles", {}).items()},
            {model: self._path.parent / file for model, file in table.get("bundles", {}).items()},
            table.get("fps", {}),
        )

    def _model(self, table: dict[str, Any], index: int) -> FleetModel:
        file, folder = table.get("file"), self._path.parent
        settings = {key: value for key, value in table.items() if key in MODEL_SETTINGS}
        for key in ("decoder", "labels", "preprocessing"):
            if key in settings and (".py:" in settings[key] or os.path.isfile(folder / settings[key])):
                settings[key] = str(folder / settings[key])
        return FleetModel(table["name"], None if file is None else folder / file, settings)

    def _camera(self, table: dict[str, Any], index: int, models: list[str], hosts: list[str]) -> Camera:
        rates: dict[str, float] = {}
        for text in table["models"]:
            model, at, rate = text.rpartition("@")
            try:
                rates_fps = float(rate)
            except ValueError:
                rates_fps = math.nan
            if not at or not 0 < rates_fps < math.inf:
                raise self._mistake(
                    f"models has {text!r}, which does not say a rate; write it as MODEL@FPS, such as {models[0]}@10",
                    "models",
                    "camera",
                    index,
                )
            self._known(model, "model", models, "models", "camera", index)
            if model in rates:
                raise self._mistake(f"models has {model} twice", "models", "camera", index)
            rates[model] = rates_fps
        if not rates:
            raise self._mistake("models is empty; write them as MODEL@FPS", "models", "camera", index)
        if not table["source"]:
            raise self._mistake("source is empty", "source", "camera", index)
        reach = table.get("hosts")
        if reach is not None and not reach:
            raise self._mistake("hosts is empty; leave it out if all reach the camera", "hosts", "camera", index)
        for name in reach or ():
            self._known(name, "host", hosts, "hosts", "camera", index)
        source = table["source"]
        if has_secret(source) and is_open_to_others(self._path):
            what = f"others can read this file, and source holds a secret: `chmod 600 {self._path}`"
            raise self._mistake(what, "source", "camera", index)
        beside = self._path.parent / source
        return Camera(
            table["name"], str(beside) if os.path.exists(beside) else source, rates, tuple(dict.fromkeys(reach or ()))
        )

    def _known(self, name: str, what: str, known: list[str], key: str, kind: str, index: int) -> None:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            advice = f"did you mean {near[0]}?" if near else f"there are {some}"
            raise self._mistake(f"{key} names {name}, and no {what} is called so; {advice}", key, kind, index)

    def _typed(self, table: dict[str, Any], kinds: Mapping[str, Any], kind: str, index: int) -> dict[str, Any]:
        """Return the values of a table, each of its type."""
        found = {}
        for key, value in table.items():
            if key not in kinds:
                near = difflib.get_close_matches(key, kinds, 1)
                advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(kinds)}"
                raise self._mistake(f"there is no key {key}; {advice}", key, kind, index)
            try:
                found[key] = msgspec.convert(value, kinds[key])
            except msgspec.ValidationError as error:
                raise self._mistake(f"{key}: {error}", key, kind, index) from error
        return found

    def _duration(self, top: dict[str, Any], key: str, usual_s: float) -> float:
        value = top.get(key, usual_s)
        if isinstance(value, (int, float)):
            return float(value)
        if match := _DURATION.fullmatch(value.strip()):
            return float(match[1]) * _UNITS_S[match[2]]
        raise self._mistake(f'{key} is {value!r}; write it as "250ms", "1.5s" or "1min"', key)

    def _mistake(self, what: str, key: str, kind: str = "", index: int = 0) -> OptionError:
        named = ""
        if kind:
            name = self._tables[kind][index].get("name")
            named = f"{kind} {name}: " if isinstance(name, str) else f"{kind} number {index + 1}: "
        return OptionError(f"{self._where(key, kind, index)}: {named}{what}")

    def _where(self, key: str, kind: str, index: int) -> str:
        """Return the file and the line of a key, or of the table where the key is written otherwise."""
        line = self._lines.get((kind, index, key)) or self._lines.get((kind, index, "")) or 1
        return f"{self._path}, line {line}"


def _lines(text: str) -> Iterator[tuple[tuple[str, int, str], int]]:
    """Yield (kind, index, key) of each key, and with an empty key of each table, with its line; the last first."""
    found: list[tuple[tuple[str, int, str], int]] = []
    counts: dict[str, int] = {}
    kind, index = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[\s*([\w-]+)\s*\]\]", line):
            kind = header[1]
            index = counts.get(kind, 0)
            counts[kind] = index + 1
            found.append(((kind, index, ""), number))
        elif key := re.match(r"""\s*\[?\s*(?:[\w-]+\s*\.\s*)?["']?([\w-]+)["']?\s*(?:[=\].])""", line):
            found.append(((kind, index, key[1]), number))
    yield from reversed(found)
