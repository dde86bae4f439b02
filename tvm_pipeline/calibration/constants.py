"""The constants of a device's model by name: read, replaced, and how far they are thought to be from the shipped ones.

Names are those of the model's fields, and `factor of conv2d 1x1 float32` for a kind of a roofline. Next: `fit.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from tvm_pipeline.core.device_model import DeviceModel, KindFactor

# The standard deviation of the logarithm of a constant around the shipped value: 1 is a factor of 2.7 either way. On
# the hidden boards of benchmarks/calibration.py, widths from 0.7 to 1 differ by less than half a percent of error. What
# the chip keeps of its cache is known better, for all boards have the same chip.
WIDTHS = {
    "macs_per_s": 1.0,
    "bytes_per_s": 1.0,
    "call_s": 1.0,
    "operator_s": 1.0,
    "input_bytes_per_s": 1.0,
    "output_bytes_per_s": 1.0,
    "refill_bytes_per_s": 1.0,
    "cached_bytes": 0.15,
}
KIND_WIDTH = 0.4  # of a kind's factor, beside the speed that all kinds have in common
UNKNOWN_KIND_WIDTH = 1.5  # of a kind of which the shipped model says nothing
_FACTOR = "factor of "


def constants_of(model: DeviceModel, kinds: Iterable[str] = ()) -> dict[str, float]:
    """Return the constants that the model states, by name; those that are zero or None are none.

    Args:
        kinds: of the operators that were measured. A roofline has a factor for each, 1 where it states none.

    Examples:
        >>> constants_of(DeviceModel(macs_per_s=1e9, bytes_per_s=1e8, call_s=1e-4), ["copy float32"])
        {'macs_per_s': 1000000000.0, 'bytes_per_s': 100000000.0, 'call_s': 0.0001, 'factor of copy float32': 1.0}
    """
    found = {name: float(value) for name in WIDTHS if (value := getattr(model, name))}
    if model.is_roofline:
        stated = {kind.name: kind.factor for kind in model.kind}
        found |= {_FACTOR + kind: stated.get(kind, 1.0) for kind in sorted(set(kinds))}
    return found


def with_constants(model: DeviceModel, values: Mapping[str, float]) -> DeviceModel:
    """Return the model with other values of the named constants.

    Examples:
        >>> with_constants(DeviceModel(call_s=1e-4, bytes_per_s=1e8), {"call_s": 2e-4, "factor of dense int8": 3.0})
        DeviceModel(... call_s=0.0002, ... kind=(KindFactor(name='dense int8', factor=3.0),))
    """
    fields = {name: value for name, value in values.items() if not name.startswith(_FACTOR)}
    factors = {kind.name: kind.factor for kind in model.kind}
    factors |= {name.removeprefix(_FACTOR): value for name, value in values.items() if name.startswith(_FACTOR)}
    cached = round(fields["cached_bytes"]) if "cached_bytes" in fields else model.cached_bytes
    kinds = tuple(KindFactor(name, factor) for name, factor in factors.items())
    return replace(model, **(fields | {"cached_bytes": cached, "kind": kinds}))  # type: ignore[arg-type]


def width_of(model: DeviceModel, name: str) -> float:
    """Return the standard deviation of the logarithm of a constant around the value in the shipped model."""
    if name in WIDTHS:
        return WIDTHS[name]
    known = any(_FACTOR + kind.name == name for kind in model.kind)
    return KIND_WIDTH if known else UNKNOWN_KIND_WIDTH
