"""The names of settings outside Python: options on the command line, keys in a service's file.

A message of the library names a setting by its field in Python, in backticks: "`min_throughput_fps` -1: it must be
positive". The command line prints that as `--min-throughput -1: ...`, a service's file as `min-throughput -1: ...`.
This module holds the one table of names that both use. Read next: file.py and cli/output.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tvm_pipeline.errors import OptionError

# Fields whose long option has another name. The others below differ in their dashes alone.
OTHER_NAMES = {
    "max_latency_s": "max-latency",
    "memory_ordered": "memory-order",
    "min_throughput_fps": "min-throughput",
    "shapes": "input-shapes",
    "stall_s": "stall",
    "time_limit_s": "time-limit",
    "unhealthy_after_s": "unhealthy-after",
    "values": "input-values",
    "verify_s": "verify",
    "watchdog_s": "watchdog",
}
SAME_NAMES = frozenset(
    [
        "adapt",
        "allow_others",
        "allow_power_modes",
        "carry",
        "children_together",
        "classes",
        "config",
        "control",
        "decoder",
        "events",
        "folder",
        "fresh",
        "hardware_decoding",
        "input_shapes",
        "input_values",
        "isolate",
        "json",
        "labels",
        "limit",
        "listen",
        "max_latency",
        "memory_order",
        "memory_rewrite",
        "min_throughput",
        "objective",
        "output",
        "plan",
        "platform",
        "policy",
        "power",
        "power_sensor",
        "power_modes",
        "preprocessing",
        "profile",
        "rate",
        "remote",
        "results",
        "segment",
        "scheduler",
        "seconds",
        "source",
        "stages",
        "stages_to_measure",
        "stall",
        "status",
        "supervise",
        "tag",
        "threshold",
        "time_limit",
        "token",
        "unhealthy_after",
        "verify",
        "wait",
        "watch",
        "watchdog",
        "winograd",
    ]
)

_QUOTED = re.compile(r"`([a-z_]+)`")


def long_name(field: str) -> str | None:
    """Return the name of a field outside Python, such as `min-throughput`; None where it has no name there."""
    if field in SAME_NAMES:
        return field.replace("_", "-")
    return OTHER_NAMES.get(field)


def translated(text: str, form: Callable[[str], str]) -> str:
    """Return the text with `form(long name)` in place of each field that stands in backticks."""

    def named(found: re.Match[str]) -> str:
        name = long_name(found[1])
        return found[0] if name is None else form(name)

    return _QUOTED.sub(named, text)


def explained(error: Exception, form: Callable[[str], str]) -> str:
    """Return the message of an error, translated. An option that the message does not name is put before it."""
    text = str(error)
    if isinstance(error, OptionError) and error.option and error.value is not None:
        name = long_name(error.option)
        if name is not None and f"`{error.option}`" not in text:
            text = f"`{error.option}` {error.value}: {text}"
    return translated(text, form)
