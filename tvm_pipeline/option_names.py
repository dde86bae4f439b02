"""The names of settings outside Python: options on the command line, keys in a service's file.

A message of the library names a setting by its field in Python, in backticks: "`min_throughput_fps` -1: it must be
positive". The command line prints that as `--min-throughput -1: ...`, a service's file as `min-throughput -1: ...`.
This module holds the one table of names that both use. Read next: cli/output.py, and documents.py, which reads files.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tvm_pipeline.errors import OptionError

# Fields whose long option has another name.
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
# Fields whose long option differs in its dashes alone. The settings of `run` join them, see `Settings` of the plug-in.
SAME_NAMES = {
    *("allow_others", "allow_power_modes", "batch", "carry", "children_together", "classes", "deadline", "decoder"),
    *("device", "engines", "frigate", "grpc", "http", "late", "miss"),
    *("folder", "input_shapes", "input_values", "inputs", "json", "labels", "listen", "max_latency"),
    *("memory_order", "memory_rewrite", "min_throughput", "objective", "output", "outputs", "plan", "platform"),
    *("power", "power_modes", "power_sensor", "preprocessing", "profile", "rate", "remote", "results"),
    *("scheduler", "seconds", "source", "stages", "stages_to_measure", "threshold", "time_limit", "token"),
    *("tolerance", "verify", "video", "watch", "watchdog", "weights"),
}
# What the help of several commands says.
HELP = {
    "classes": "List only these classes, as labels or numbers: person,car.",
    "deadline": "Seconds that a frame may take from when it comes, such as 50ms; the plan keeps them at `rate`.",
    "decoder": "What reads the outputs: classification, yolo, ssd, centernet, mediapipe, picodet, segmentation, text, "
    "keypoints, or one of their forms (docs/decoders.md); your function as file.py:function; none. Without it "
    "one is recognised, if the outputs and the file's metadata tell.",
    "input_shapes": 'Shapes of inputs that the file leaves open: "data:[1,3,224,224]".',
    "json": "Print one JSON object on standard output, and nothing else there.",
    "labels": "Names of the classes: a file with one a line, or coco; without it, those of the model's file.",
    "max_latency": "Seconds a frame may take under load, for throughput.",
    "min_throughput": "Frames a second to keep, for latency or energy.",
    "miss": "With `deadline`: the share of the frames that may take longer.",
    "power_sensor": "What measures joules: the name of a sensor, as `devices` lists them, or the file of a meter's "
    "log; none: nothing does. Without it, the best sensor of the machine.",
    "preprocessing": "How a picture becomes the input: a TOML file, or a preset: imagenet, yolo, raw and others "
    "(docs/decoders.md).",
    "threshold": "The least score that a built-in decoder lists; without it, that of its family.",
}

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
