"""The settings of a model, from fleet.toml to the service on a host: they travel as JSON, small files as their text.

What a host is told to run is one name: the id of a bundle, and behind a `+` the sum of the settings where the model has
some. So other settings are another service and another epoch, as another bundle is. Next: messages.py, which carries
them, and service_files.py, which writes them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tvm_pipeline.documents import MOST_TOML_BYTES, read_toml
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes
from tvm_pipeline_hosts.fleet.messages import ModelSettings

if TYPE_CHECKING:  # which an agent does not need
    from tvm_pipeline_hosts.fleet.fleet_file import FleetModel

# The settings that may name a file, and what its text is called beside service.toml.
TEXTS = {"labels": "labels.txt", "preprocessing": "preprocessing.toml"}
_SHAPES = "input-shapes"
_SUM_LENGTH = 16


def read_settings(model: FleetModel, file: Path) -> ModelSettings:
    """Return the settings of a model, with the text of each file that they name, and of a MODEL.toml beside the model.

    Args:
        file: the fleet.toml, for messages.

    Raises:
        OptionError: a file cannot be read, or the decoder is a file, which hosts do not get.
    """
    values: dict[str, Any] = {}
    texts: dict[str, str] = {}
    where = f"{file}: model {model.name}"
    for key, value in model.settings.items():
        if key == "decoder" and ".py:" in value:
            raise OptionError(
                f"{where}: `decoder` {value} is a file of code, which hosts do not get; install it on each host as a "
                "package and name it as package.module:function"
            )
        if key == _SHAPES:
            if not model.is_source:
                raise OptionError(
                    f"{where}: `input-shapes` are of a model that is compiled, and a bundle has its own; leave them "
                    "out, or name the model as its `file`"
                )
        elif key in TEXTS and Path(value).is_file():
            texts[key] = _text(key, Path(value), where)
        else:
            values[key] = value
    beside = model.file.with_suffix(".toml") if model.file and model.is_source else None
    if "preprocessing" not in model.settings and beside and beside.is_file():
        texts["preprocessing"] = _text("preprocessing", beside, where)
    return ModelSettings(values, texts)


def named(bundle: str, settings: ModelSettings) -> str:
    """Return the name of what to run: a bundle by its id, with these settings.

    >>> named("0" * 64, ModelSettings()) == "0" * 64
    True
    """
    if settings == ModelSettings():
        return bundle
    sum = hashlib.sha256(msgspec.json.encode(settings, order="sorted")).hexdigest()
    return f"{bundle}+{sum[:_SUM_LENGTH]}"


def bundle_id(name: str) -> str:
    """Return the id of the bundle in a name that `named` gave.

    >>> bundle_id("0a1b+2c3d")
    '0a1b'
    """
    return name.partition("+")[0]


def _text(key: str, path: Path, where: str) -> str:
    content = read_bytes(path, OptionError, MOST_TOML_BYTES)
    try:
        text = content.decode()
        if key == "preprocessing":
            read_toml(content)
    except ValueError as error:  # also of TOML
        raise OptionError(f"{where}: `{key}` {path}: it cannot be read as text: {error}") from error
    if not text.strip():
        raise OptionError(f"{where}: `{key}` {path}: it is empty")
    return text
