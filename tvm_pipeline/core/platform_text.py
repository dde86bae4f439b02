"""A platform as the text of its TOML file. Next: platform.py, which reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Platform


def platform_toml(platform: Platform, comments: Sequence[str] = ()) -> str:
    """Return the platform as the text of a file that `read_platform` reads.

    Args:
        comments: lines that stand at its head, where people read where its figures are from.

    Examples:
        >>> from tvm_pipeline.core.platform import Device
        >>> box = Platform("box", (Device("cpu0", model=DeviceModel(2e9, bytes_per_s=8e9, error=0.1)),))
        >>> print(platform_toml(box, ["Made by hand."]))
        # Made by hand.
        <BLANKLINE>
        name = "box"
        <BLANKLINE>
        [[device]]
        name = "cpu0"
        backend = "host"
        [device.model]
        macs_per_s = 2000000000.0
        call_s = 0.0
        operator_s = 0.0
        bytes_per_s = 8000000000.0
        error = 0.1
        <BLANKLINE>
    """
    lines = [f"# {line}".rstrip() for comment in comments for line in comment.splitlines() or [""]]
    lines += [*([""] if lines else []), f"name = {_toml(platform.name)}"]
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
            model = fields.pop("model", None)
            said = {key: v for key, v in fields.items() if v is not False and v not in (None, "", (), {})}
            lines += [f"{key} = {_toml(value)}" for key, value in said.items()]
            lines += _model_lines(model) if isinstance(model, DeviceModel) else []
    return "\n".join(lines) + "\n"


def _model_lines(model: DeviceModel) -> Iterator[str]:
    """Yield the table of a device's model, with a line for each kind of operator."""
    yield "[device.model]"
    for key in model.__slots__:
        value = getattr(model, key)
        if isinstance(value, tuple):
            if value:
                yield f"{key} = ["
                yield from (f"    {{ name = {_toml(kind.name)}, factor = {_toml(kind.factor)} }}," for kind in value)
                yield "]"
        elif value is not None:
            yield f"{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml(key)} = {_toml(v)}" for key, v in value.items() if v is not None) + " }"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON's strings, finite numbers and flat lists are TOML's too.
    return msgspec.json.encode(value).decode()
