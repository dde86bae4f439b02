"""A service's file: whatever `run` takes as TOML, the keys named as the long options.

    bundle = "model.tar"            # paths are relative to this file's folder
    source = ["camera:0", "camera:1"]
    policy = "latest"               # a list, or one for all

Whatever is wrong is said with its line. The command line wins over the file. Read next: settings.py (what the keys
are), control.py (a second such file, looked at while it runs).
"""

from __future__ import annotations

import difflib
import re
import stat
import sys
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import msgspec

from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.service.settings import Settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = {name.replace("_", "-"): kind for name, kind in get_type_hints(Settings).items()}


@dataclass(frozen=True, slots=True)
class Keys:
    """A flat TOML file: its values by key, each of the right type, and the line that each stands in."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]

    def where(self, key: str) -> str:
        return f"{self.path}, line {self.lines.get(key, 1)}"

    def located(self, error: OptionError, elsewhere: Container[str] = ()) -> OptionError:
        """The error with the line of the first option that it names, of those which stand here and not `elsewhere`."""
        for key in re.findall(r"--([a-z-]+)", str(error)):
            if key in self.values and key not in elsewhere:
                return OptionError(f"{self.where(key)}: {error}")
        return error


def read_keys(path: Path, kinds: Mapping[str, Any]) -> Keys:
    """Reads a flat TOML file whose keys have these types; a Path is relative to the file's folder.

    Raises OptionError, naming the line, where it is no TOML, has an unknown key or a value of another type.
    """
    content = read_bytes(path, OptionError)
    try:
        text = content.decode()
        table = tomllib.loads(text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        line = re.search(r"line (\d+)", str(error))  # else it is the end of the document
        number = line[1] if line else content.count(b"\n") + 1
        raise OptionError(f"{path}, line {number}: it is no TOML: {error}") from error
    lines: dict[str, int] = {}
    for number, written in enumerate(text.splitlines(), 1):
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
    """Reads the file of a service, with all its paths made whole.

    Raises OptionError, naming the line; also where others may read a token that stands in it.
    """
    keys = read_keys(path, KINDS)
    values, folder = keys.values, path.parent
    if "token" in values and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        raise OptionError(
            f"{keys.where('token')}: others can read this file, and the token is a secret: `chmod 600 {path}`, or give "
            "it as the environment variable TVM_PIPELINE_TOKEN"
        )
    if values.get("results", "-") != "-":
        values["results"] = str(folder / values["results"])
    values["source"] = [str(folder / s) if (folder / s).exists() else s for s in values.get("source", [])]
    values["decoder"] = [str(folder / name) if ".py:" in name else name for name in values.get("decoder", [])]
    for name in ("source", "decoder"):
        if not values[name]:
            del values[name]
    return keys


class Asked:
    """What the command line and a service's file ask for together.

    Args:
        options: every field of Settings, as the command line or its defaults have it.
        given: the names of those that the command line, or the environment, gave.
        config: the file, which says the others.
    """

    def __init__(self, options: Mapping[str, Any], given: Container[str], config: Path | None) -> None:
        self._options, self._given, self._config = options, given, config
        self._keys: Keys | None = None

    @property
    def may_change(self) -> bool:
        """Whether reading it again may say something else."""
        return self._config is not None

    def read(self) -> Settings:
        """The settings of now; raises OptionError with the line that is wrong."""
        if self._config is None:
            return Settings(**self._options)
        keys = read_service(self._config)
        said = {key.replace("-", "_"): value for key, value in keys.values.items()}
        try:
            settings = Settings(**{**self._options, **{k: v for k, v in said.items() if k not in self._given}})
        except OptionError as error:
            raise self._located(keys, error) from error
        self._keys = keys
        return settings

    def located(self, error: OptionError) -> OptionError:
        """The error with the line in the file, where what it speaks of stands there."""
        return self._located(self._keys, error) if self._keys else error

    def _located(self, keys: Keys, error: OptionError) -> OptionError:
        return keys.located(error, [key for key in keys.values if key.replace("-", "_") in self._given])
