"""Targets of engines: a device or a provider of the engine, and its properties as KEY=VALUE. Next: `contract.py`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

import msgspec

from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError, nearest


def parsed_target(target: str) -> tuple[str, dict[str, str]]:
    """Return the name and the properties of a target.

    >>> parsed_target("GPU.1 INFERENCE_PRECISION_HINT=f16")
    ('GPU.1', {'INFERENCE_PRECISION_HINT': 'f16'})
    """
    name, *properties = target.split() or [""]
    pairs = (text.partition("=") for text in properties)
    return name, {key: value for key, _, value in pairs}


def check_properties(device: Device, known: Collection[str]) -> None:
    """Raise PlatformError where a property of a device's target has no value, or is none of the known ones."""
    name, properties = parsed_target(device.target)
    for key, value in properties.items():
        if not value or key not in known:
            advice = nearest(key, [one for one in known if one != key], "properties are written KEY=VALUE")
            raise PlatformError(f"device {device.name}: {name} takes no property {key!r} = {value!r}; {advice}")


def set_options(options: Any, properties: Mapping[str, str]) -> None:
    """Set fields of an engine's dataclass, or of None, to properties of a target; a map is KEY=VALUE,KEY=VALUE.

    A field that is one of several values has their enumeration beside it, under the field's name in capitals.

    Raises:
        ModelError: it has no such field, or not this value.
    """
    kinds = {field.name: field.type for field in fields(options)} if options else {}
    for key, text in properties.items():
        if key not in kinds:
            raise ModelError(f"there is no property {key!r}; {nearest(key, kinds)}")
        value = dict(pair.partition("=")[::2] for pair in text.split(",")) if "=" in text else text
        choices: Any = getattr(options, key.upper(), None)
        try:
            setattr(
                options, key, choices[text.upper()] if choices else msgspec.convert(value, kinds[key], strict=False)
            )
        except (KeyError, msgspec.ValidationError) as error:
            advice = f"it is one of {', '.join(choices.__members__)}" if choices else str(error)
            raise ModelError(f"{key}={text}: {advice}") from error
