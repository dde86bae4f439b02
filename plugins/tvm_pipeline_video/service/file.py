"""A service's file: the options of a run as TOML, each key named as the long option.

    bundle = "model.tar"            # paths are relative to this file's folder
    source = ["camera:0", "camera:1"]
    policy = "latest"               # a list, or one for all

A mistake is reported with its line. The command line wins over the file. Read next: settings.py (what the keys are),
control.py (a second such file, read while it runs).
"""

from __future__ import annotations

import os
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, get_origin

from tvm_pipeline.documents import TomlFile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import is_open_to_others
from tvm_pipeline_video.service.mqtt_results import is_broker
from tvm_pipeline_video.service.settings import KINDS, Settings, is_secret

_Service = TypedDict("_Service", KINDS, total=False)  # type: ignore[misc]


def read_service(path: Path) -> TomlFile:
    """Read the file of a service, with each path completed by the file's folder. One value does for a list of them.

    Raises OptionError, naming the line; also where others may read a token that stands in it.
    """
    file, folder = TomlFile(path, OptionError), path.parent
    for key, value in file.tables.items():
        if get_origin(KINDS.get(key)) is list and not isinstance(value, list):
            file.tables[key] = [value]
    values = file.tables = file.convert(_Service)
    secret = next((key for key, value in values.items() if is_secret(key, value)), None)
    if secret and is_open_to_others(path):
        variable = ", or give it as the environment variable TVM_PIPELINE_TOKEN" if secret == "token" else ""
        raise OptionError(
            f"{file.where(secret)}: others can read this file, and {secret} is or has a secret: `chmod 600 {path}`"
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
    return file


class SettingsReader:
    """Reads the settings of a run from a service's file, as often as needed; the command line wins over the file.

    Args:
        path: the file.
        options: the options of the command line, or their defaults.
        given: the fields that the command line, or the environment, gave.
    """

    def __init__(self, path: Path, options: Settings | None = None, given: Container[str] = ()) -> None:
        self._path, self._options, self._given = path, options or Settings(), given
        self._file: TomlFile | None = None

    def read(self) -> Settings:
        """Return the settings as the file has them now; raise OptionError with the line that is wrong."""
        file = read_service(self._path)
        fields = {key.replace("-", "_"): value for key, value in file.tables.items()}
        settings = replace(self._options, **{k: value for k, value in fields.items() if k not in self._given})
        try:
            settings.check(self._path)
        except OptionError as error:
            raise self._located(file, error) from error
        self._file = file
        return settings

    def located(self, error: OptionError) -> OptionError:
        """Return the error with its line in the file that was read last, where its option stands there."""
        return self._located(self._file, error) if self._file else error

    def _located(self, file: TomlFile, error: OptionError) -> OptionError:
        return file.located(error, [key for key in file.tables if key.replace("-", "_") in self._given])
