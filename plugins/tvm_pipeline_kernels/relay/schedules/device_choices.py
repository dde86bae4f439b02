"""What tuning may choose of TOPI's schedules for GPUs: the knobs of AutoTVM's templates that change no value.

A workload and a choice are JSON here, as AutoTVM writes them: the template with its arguments, and the config's
entities. Sums keep the order that TOPI's default has: input channels, then the rows and the columns of the kernel.
So a knob that would change it stays as it is. Templates whose default is an algorithm of another kind (Winograd), or
whose only knob divides a sum among threads (dense layers), are not here. A choice puts no other template in the place
of the default's either.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tvm import autotvm
from tvm.autotvm.task.space import ConfigEntity, FallbackConfigEntity

DeviceWorkload: TypeAlias = str  # such as '["conv2d_nchw.cuda",["TENSOR",[1,16,8,8],"float32"],...]'
DeviceChoice: TypeAlias = str  # such as '[["tile_f","sp",[-1,1,16,2]],...]'
DEFAULT: DeviceChoice = "[]"  # TOPI's own
Fixed: TypeAlias = Mapping[str, tuple[str, Any]]  # by knob: the kind of its entity, and its only value


def _whole_window(arguments: Any) -> Fixed:
    """Keep rows and columns of the kernel inside the loop of channels, as the default has them by other means."""
    rows, columns = arguments[1][1][2:]
    return {"tile_ry": ("sp", [-1, rows]), "tile_rx": ("sp", [-1, columns])}


# By template, the knobs that stay. Convolutions of Intel's schedules have no template but one of another layout.
_FIXED: dict[str, Callable[[Any], Fixed]] = {
    "conv2d_nchw.cuda": _whole_window,
    "group_conv2d_nchw.cuda": _whole_window,
    "depthwise_conv2d_nchw.cuda": lambda _: {"unroll_explicit": ("ot", 0)},  # which TOPI's default sets anyway
    # TOPI binds an axis twice where `fuse_yx` is 1.
    "conv2d_transpose_nchw.cuda": lambda _: {"tile_rc": ("sp", [-1, 1, 16]), "fuse_yx": ("ot", 0)},
    "batch_matmul.cuda": lambda _: {},
    "conv2d_nchw_spatial_pack.mali": lambda _: {},
    "conv2d_nchw_spatial_pack.bifrost": lambda _: {},
    "depthwise_conv2d_nchw.mali": lambda _: {},
    "dense.mali": lambda _: {},
    "dense.bifrost": lambda _: {},
    "depthwise_conv2d_nchw.intel_graphics": lambda _: {"unroll_explicit": ("ot", 0)},
}
# These set their knobs anew where a config is a fallback; the others keep what it holds.
_OVERWRITE_FALLBACKS = {"conv2d_transpose_nchw.cuda", "batch_matmul.cuda"}


def text_of(workload: Any) -> DeviceWorkload | None:
    """Return AutoTVM's workload as text; None where its template cannot be tuned."""
    template, *arguments = workload
    if template not in _FIXED or _has_other_order(template, arguments):
        return None
    return json.dumps(workload, separators=(",", ":"))


def _has_other_order(template: str, arguments: Any) -> bool:
    """Return whether no knob keeps the order: TOPI splits rows by the factor of columns in grouped convolutions."""
    if template == "group_conv2d_nchw.cuda":
        rows, columns = arguments[1][1][2:]
        return bool(rows != columns)
    return False


def workload_of_text(text: DeviceWorkload) -> Any:
    """Return AutoTVM's workload; the inverse of `text_of`."""
    return _tuples(json.loads(text))


def fixed_knobs(text: DeviceWorkload) -> Fixed:
    """Return the knobs that stay, so that sums keep their order."""
    template, *arguments = workload_of_text(text)
    return _FIXED[template](arguments)


def choice_of(config: ConfigEntity) -> DeviceChoice:
    """Return a config's entities as text."""
    return json.dumps(config.to_json_dict()["entity"], separators=(",", ":"))


def keeps_order(text: DeviceWorkload, choice: DeviceChoice) -> bool:
    """Return whether a choice leaves the knobs alone that would change the order of a sum."""
    found = {name: (kind, value) for name, kind, value in json.loads(choice)}
    return all(found.get(name) == expected for name, expected in fixed_knobs(text).items())


def config_of(text: DeviceWorkload, choice: DeviceChoice) -> Any:
    """Return the config that TOPI is to have for a workload.

    It calls itself a fallback wherever the template keeps its knobs then: Relay takes a fallback's template by its
    priority, and changes no layout for it, so all but the knobs stays as without a choice.
    """
    read = ConfigEntity.from_json_dict({"index": -1, "code_hash": None, "entity": json.loads(choice)})
    if workload_of_text(text)[0] in _OVERWRITE_FALLBACKS:
        read.cost = 0.0
        return read
    config = FallbackConfigEntity()
    for name in read:
        config[name] = read[name]
    return config


def task_of(text: DeviceWorkload, target: Any) -> autotvm.task.Task:
    """Return AutoTVM's task of a workload, whose space holds only choices that keep the order of sums.

    Raises:
        RuntimeError: TOPI cannot schedule the workload alone.
    """
    template, *arguments = workload_of_text(text)
    task = autotvm.task.create(template, arguments, target)
    spaces: OrderedDict[str, Any] = task.config_space.space_map
    fixed = ConfigEntity.from_json_dict(
        {"index": -1, "code_hash": None, "entity": [(name, *entity) for name, entity in fixed_knobs(text).items()]}
    )
    for name in fixed:
        spaces[name].entities = [fixed[name]]
    return task


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
