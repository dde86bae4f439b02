"""Targets of engines: a device or a provider of the engine, and its properties as KEY=VALUE. Next: `contract.py`."""

from __future__ import annotations

from collections.abc import Collection

from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError, nearest


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
