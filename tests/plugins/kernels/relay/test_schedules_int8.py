"""Convolutions of bytes by schedules of our own: sums are exact, whatever their shape and the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.tvm.targets import LEVELS, run, runs_here
from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm.relay.fold import fast_build

import tvm  # isort: skip
from tvm import relay  # isort: skip

WITH_VNNI = "llvm -mcpu=znver4"
OWN = (
    ("conv2d_avx_1x1", "_schedule_conv_NCHWc_int8"),
    ("conv2d_avx_common", "_schedule_conv_NCHWc_int8"),
    ("depthwise_conv2d", "_schedule_depthwise_conv2d_NCHWc_impl"),
)

# Channels, those of the output (0: depthwise), height and width; kernel, stride, padding.
CONVOLUTIONS = (
    ((16, 48, 7, 5), (1, 1), 1, (0, 0, 0, 0)),  # several blocks in a tile
    ((16, 24, 7, 9), (3, 3), 2, (0, 1, 1, 0)),  # blocks of 8, tiles that do not divide
    ((24, 16, 13, 1), (5, 3), 1, (2, 1, 2, 1)),
    ((16, 0, 9, 11), (3, 3), 1, (1, 1, 1, 1)),
    ((24, 0, 8, 9), (3, 3), 2, (0, 1, 1, 0)),
    ((8, 0, 17, 4), (2, 5), 1, (0, 2, 1, 2)),  # several groups of columns, bands that do not divide the height
)


def bytes_of(draw: np.random.Generator, dtype: str, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return draw.integers(limits.min, limits.max + 1, shape).astype(dtype)


def sums(image: Array, kernel: Array, stride: int, padding: tuple[int, ...], depthwise: bool) -> Array:
    top, left, bottom, right = padding
    padded = np.pad(image.astype("int32"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, kernel.shape[2:], axis=(2, 3))
    windows = windows[:, :, ::stride, ::stride]
    if depthwise:
        return np.einsum("nchwij,cij->nchw", windows, kernel[:, 0].astype("int32"))
    return np.einsum("nchwij,ocij->nohw", windows, kernel.astype("int32"))


@pytest.fixture(scope="module")
def network() -> tuple[tvm.IRModule, dict[str, Array], list[Array]]:
    """All of CONVOLUTIONS, each followed by an addition that belongs into its kernel; a frame, and what they give."""
    draw = np.random.default_rng(1)
    frame: dict[str, Array] = {}
    bodies, expected = [], []
    for index, ((channels, outputs, *extents), window, stride, padding) in enumerate(CONVOLUTIONS):
        image = frame[f"image{index}"] = bytes_of(draw, "uint8", 1, channels, *extents)
        kernel = bytes_of(draw, "int8", outputs or channels, channels if outputs else 1, *window)
        options: dict[str, Any] = {"strides": (stride, stride), "padding": padding, "kernel_size": window}
        convolution = relay.nn.conv2d(
            relay.var(f"image{index}", shape=image.shape, dtype="uint8"),
            relay.const(kernel),
            channels=len(kernel),
            groups=1 if outputs else channels,
            out_dtype="int32",
            **options,
        )
        bias = draw.integers(-9, 10, (len(kernel), 1, 1)).astype("int32")
        bodies.append(relay.add(convolution, relay.const(bias)))
        expected.append(sums(image, kernel, stride, padding, not outputs) + bias)
    body = relay.Tuple(bodies)
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    return relay.transform.InferType()(mod), frame, expected


@pytest.mark.thorough
@pytest.mark.parametrize("target", [LEVELS[0], WITH_VNNI])
def test_sums_are_exact(
    target: str, network: tuple[tvm.IRModule, dict[str, Array], list[Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_ours(*_: Any) -> None:
        raise AssertionError("TOPI's schedule was asked")

    for module, name in OWN:
        monkeypatch.setattr(f"tvm.topi.x86.{module}.{name}", not_ours)
    mod, frame, expected = network
    library = fast_build(mod, target)
    assert ("vpdpbusd" in library.lib.get_source("asm")) == (target == WITH_VNNI)
    if runs_here(target):
        for output, right in zip(run(library, frame), expected, strict=True):
            np.testing.assert_array_equal(output, right)
