"""A service's file: the options of a run as TOML, each key named as the long option.

    bundle = "model.tar"            # paths are relative to this file's folder
    source = ["camera:0", "camera:1"]
    policy = "latest"               # a list, or one for all

A mistake is reported with its line. The command line wins over the file. Read next: settings.py (what the keys are),
option_names.py (how the fields of an error become keys), control.py (a second such file, read while it runs).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_origin

import msgspec

from tvm_pipeline.documents import MOST_TOML_BYTES, read_toml
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import is_open_to_others, read_bytes
from tvm_pipeline.option_names import explained, long_name
from tvm_pipeline_video.service.mqtt_results import is_broker
from tvm_pipeline_video.service.settings import KINDS, Settings, is_secret


@dataclass(frozen=True, slots=True)
class Keys:
    """A flat TOML file: its values by key, each of the right type, and the line that each stands in."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        return f"{self.path}, line {self.lines.get(key, 1)}"

    def located(self, error: OptionError, elsewhere: Container[str] = ()) -> OptionError:
        """Return the error with the line of its option, in the words of this file.

        An option that does not stand here, or is given `elsewhere` (by its key), leaves the error as it is.
        """
        key = (long_name(error.option) or error.option) if error.option else None
        if key is None or key not in self.values or key in elsewhere:
            return error
        return OptionError(f"{self.where(key)}: {explained(error, str)}", option=error.option, value=error.value)


def read_keys(path: Path, kinds: Mapping[str, Any]) -> Keys:
    """Read a flat TOML file whose keys have these types; a Path is relative to the file's folder.

    Raises OptionError, naming the line, where it is no TOML, has an unknown key or a value of another type.
    """
    content = read_bytes(path, OptionError, MOST_TOML_BYTES)
    try:
        table = read_toml(content)
    except ValueError as error:
        line = re.search(r"line (\d+)", str(error))  # else it is the end of the document
        number = line[1] if line else content.count(b"\n") + 1
        raise OptionError(f"{path}, line {number}: it is no TOML: {error}") from error
    lines: dict[str, int] = {}
    for number, written in enumerate(content.decode().splitlines(), 1):
        if key := re.match(r"""\s*\[*\s*["']?([\w-]+)["']?\s*[=.\]]""", written):
            lines.setdefault(key[1], number)
    keys = Keys(path, {}, lines)
    for name, value in table.items():
        if name not in kinds:
            near = difflib.get_close_matches(name, kinds, 1)
            advice = f"did you mean {near[0]}?" if near else f"it takes {', '.join(kinds)}"
            raise OptionError(f"{keys.where(name)}: there is no key {name}; {advice}")
        keys.values[name] = _typed(keys, name, value, kinds[name])
    return keys


def _typed(keys: Keys, name: str, value: Any, kind: Any) -> Any:
    if get_origin(kind) is list and not isinstance(value, list):
        value = [value]
    try:
        return msgspec.convert(value, kind, dec_hook=lambda _, part: _beside(keys.path, part))
    except msgspec.ValidationError as error:
        raise OptionError(f"{keys.where(name)}: {name}: {error}") from error


def _beside(file: Path, value: Any) -> Path:
    if not isinstance(value, str):
        raise TypeError(f"Expected a path as `str`, got `{type(value).__name__}`")
    return file.parent / value


def read_service(path: Path) -> Keys:
    """Read the file of a service, with each path completed by the file's folder.

    Raises OptionError, naming the line; also where others may read a token that stands in it.
    """
    keys = read_keys(path, KINDS)
    values, folder = keys.values, path.parent
    secret = next((key for key, value in values.items() if is_secret(key, value)), None)
    if secret and is_open_to_others(path):
        variable = ", or give it as the environment variable TVM_PIPELINE_TOKEN" if secret == "token" else ""
        raise OptionError(
            f"{keys.where(secret)}: others can read this file, and {secret} is or has a secret: `chmod 600 {path}`"
            f"{variable}"
        )
    if values.get("results", "-") != "-" and not is_broker(values["results"]):
        values["results"] = str(folder / values["results"])
    for key in ("source", "labels"):
        values[key] = [str(folder / s) if os.path.exists(folder / s) else s for s in values.get(key, [])]
    values["decoder"] = [str(folder / name) if ".py:" in name else name for name in values.get("decoder", [])]
    if os.path.isfile(folder / values.get("preprocessing", "")):
        values["preprocessing"] = str(folder / values["preprocessing"])
    if os.path.isfile(folder / values.get("power-sensor", "")):
        values["power-sensor"] = str(folder / values["power-sensor"])
    for name in ("source", "decoder", "labels"):
        if not values[name]:
            del values[name]
    return keys


class SettingsReader:
    """Reads the settings of a run from a service's file, as often as needed; the command line wins over the file.

    Args:
        path: the file.
        options: the options of the command line, or their defaults.
        given: the fields that the command line, or the environment, gave.
    """

    def __init__(self, path: Path, options: Settings | None = None, given: Container[str] = ()) -> None:
        self._path, self._options, self._given = path, options or Settings(), given
        self._keys: Keys | None = None

    def read(self) -> Settings:
        """Return the settings as the file has them now; raise OptionError with the line that is wrong."""
        keys = read_service(self._path)
        fields = {key.replace("-", "_"): value for key, value in keys.values.items()}
        settings = replace(self._options, **{k: value for k, value in fields.items() if k not in self._given})
        try:
            settings.check(self._path)
        except OptionError as error:
            raise self._located(keys, error) from error
        self._keys = keys
        return settings

    def located(self, error: OptionError) -> OptionError:
        """Return the error with its line in the file that was read last, where its option stands there."""
        return self._located(self._keys, error) if self._keys else error

    def _located(self, keys: Keys, error: OptionError) -> OptionError:
        return keys.located(error, [key for key in keys.values if key.replace("-", "_") in self._given])
