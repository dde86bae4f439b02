"""A platform as the text of its TOML file. Next: platform.py, which reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.platform import Platform


def platform_toml(platform: Platform) -> str:
    """Return the platform as the text of a file that `read_platform` reads."""
    lines = [f"name = {_toml(platform.name)}"]
    if platform.idle_w is not None:
        lines.append(f"idle_w = {_toml(platform.idle_w)}")
    for table, entries in (
        ("device", platform.devices),
        ("link", platform.links),
        ("power_mode", platform.power_modes),
    ):
        for entry in entries:
            lines += ["", f"[[{table}]]"]
            fields = {key: getattr(entry, key) for key in entry.__slots__ if key != "stand_in"}
            lines += [f"{key} = {_toml(value)}" for key, value in fields.items() if value not in (None, "", (), {})]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, DeviceModel | KindFactor):
        fields = {key: getattr(value, key) for key in value.__slots__}
        return _toml({key: field for key, field in fields.items() if field != ()})
    if isinstance(value, tuple) and any(isinstance(entry, KindFactor) for entry in value):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(v)}" for key, v in value.items() if v is not None) + " }"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON's strings, finite numbers and flat lists are TOML's too.
    return msgspec.json.encode(value).decode()
