"""Schedules of our own for x86, in place of TOPI's while `fast_build` runs.

conv2d.py            convolutions in blocked layout: register tiles by `tiles.py`
conv2d_int8.py       the same of uint8 by int8, four products at a time
conv2d_transpose.py  transposed convolutions: a convolution for each phase of the stride
conv2d_winograd.py   3x3 convolutions by Winograd's algorithm, within a tolerance
depthwise.py         depthwise convolutions in blocked layout: padding by rows
depthwise_int8.py    the same of uint8 by int8, a group of kernel columns at a time
group_conv2d.py      grouped convolutions: vectors along the image
batch_matmul.py      products of matrices: columns packed, tiles that need not divide
dense.py             dense layers: weights in blocks that fill vectors, tiles that fit into registers
lowering.py          what no schedule can say: tiles in registers, weights fetched early, functions of vectors
pooling.py           pooling in blocked layout: sums and maxima in registers, the division in their loop
concatenate.py       concatenations of channels: one pass, with what is fused to them
anchor.py            the operator that a schedule is about, among what is fused to it
choice_context.py    where TOPI finds what tuning chose of convolutions
device_choices.py    what tuning may choose of TOPI's schedules for GPUs

TOPI's stay wherever ours do not apply: other element types, and outputs that are stored in another layout. Sums have
TOPI's order, so values are TOPI's bit for bit, but for three: see `conv2d.py`, `concatenate.py` and `batch_matmul.py`.
Sums of int8 are exact. Those of Winograd and of elementary functions are others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_pipeline_kernels.relay.schedules import (
    batch_matmul,
    concatenate,
    conv2d,
    conv2d_int8,
    conv2d_transpose,
    conv2d_winograd,
    dense,
    depthwise,
    depthwise_int8,
    group_conv2d,
    pooling,
)
from tvm_pipeline_tvm.relay.topi import Replacement

__all__ = ["own_schedules"]


def _or_topi(module: str, name: str, schedule: Callable[..., bool]) -> Callable[..., Any]:
    """Return a schedule of TOPI's signature: ours where it applies, else TOPI's."""

    def schedule_or_topi(s: Any, config: Any, data: Any, kernel: Any, convolution: Any, output: Any) -> Any:
        if schedule(s, config, data, kernel, convolution, output):
            return s
        return _own.stock(module, name)(s, config, data, kernel, convolution, output)

    return schedule_or_topi


def _in_blocks(module: str) -> Callable[..., None]:
    """Return TOPI's default of a workload, but for the channel blocks."""

    def fallback(config: Any, workload: Any) -> None:
        _own.stock(module, "_fallback_schedule")(config, workload)
        conv2d.set_channel_blocks(config, workload)

    return fallback


def _dense_tiles(module: str) -> Callable[..., None]:
    """Return TOPI's default of a dense layer: ours where it applies, else TOPI's."""

    def default(*arguments: Any) -> None:
        if not dense.settle_tiles(*arguments):
            _own.stock(module, "_default_dense_pack_config")(*arguments)

    return default


def _unless_none(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Relay calls: ours, or TOPI's where ours returns None."""

    def ours_or_topi(*arguments: Any) -> Any:
        result = ours(*arguments)
        return _own.stock("", name)(*arguments) if result is None else result

    return ours_or_topi


def _alter_layout(attrs: Any, inputs: Any, types: Any, result: Any) -> Any:
    """Return what Relay makes of a convolution when it changes layouts: ours where Winograd's algorithm is chosen."""
    altered = conv2d_winograd.alter(attrs, inputs, types)
    return _own.stock(".nn", "conv2d_alter_layout")(attrs, inputs, types, result) if altered is None else altered


_CALLED_BY_RELAY: dict[str, Callable[..., Any]] = {
    "conv2d_transpose_nchw": conv2d_transpose.compute,
    "schedule_conv2d_transpose_nchw": conv2d_transpose.schedule,
    "conv2d_nchw_int8": conv2d_int8.settle_blocks,
    "depthwise_conv2d_NCHWc": depthwise_int8.compute,
    "schedule_depthwise_conv2d_NCHWc": depthwise_int8.schedule,
    "group_conv2d_nchw": group_conv2d.compute,
    "schedule_group_conv2d_nchw": group_conv2d.schedule,
    "schedule_pool": pooling.schedule,
    "schedule_adaptive_pool": pooling.schedule,
    "batch_matmul": batch_matmul.compute,
    "schedule_batch_matmul": batch_matmul.schedule,
    "concatenate": concatenate.compute,
    "schedule_concatenate_cpu": concatenate.schedule,
    "schedule_injective": concatenate.schedule,  # what Relay calls where a change of layout follows
}
_own = Replacement(
    {
        **{
            (module, "_schedule_conv_NCHWc"): _or_topi(module, "_schedule_conv_NCHWc", conv2d.schedule)
            for module in ("conv2d_avx_1x1", "conv2d_avx_common")
        },
        ("depthwise_conv2d", "_schedule_depthwise_conv2d_NCHWc_impl"): _or_topi(
            "depthwise_conv2d", "_schedule_depthwise_conv2d_NCHWc_impl", depthwise.schedule
        ),
        **{
            (module, "_fallback_schedule"): _in_blocks(module)
            for module in ("conv2d_avx_1x1", "conv2d_avx_common", "depthwise_conv2d")
        },
        **{
            (module, "_schedule_conv_NCHWc_int8"): _or_topi(module, "_schedule_conv_NCHWc_int8", conv2d_int8.schedule)
            for module in ("conv2d_avx_1x1", "conv2d_avx_common")
        },
        ("conv2d_int8", "_get_default_config_int8"): conv2d_int8.set_channel_blocks,
        ("conv2d_alter_op", "_get_default_config_int8"): conv2d_int8.set_channel_blocks,
        ("conv2d_alter_op", "conv2d_alter_int8_common"): conv2d_int8.legalized,
        **{(module, "_default_dense_pack_config"): _dense_tiles(module) for module in ("dense", "dense_alter_op")},
        (".nn", "conv2d_alter_layout"): _alter_layout,
        **{("", name): _unless_none(name, ours) for name, ours in _CALLED_BY_RELAY.items()},
    }
)
own_schedules = _own.active
