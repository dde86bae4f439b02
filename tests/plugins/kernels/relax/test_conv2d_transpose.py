"""Transposed convolutions of Relax against numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tvm import te

from tests.plugins.kernels.relax.layers import EPILOGUES, apart, blocked, transposed
from tests.relax.fused import target_of
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import conv2d_transpose
from tvm_pipeline_kernels.tiles import channel_block


@examples(5)
@given(
    lanes=st.sampled_from((16, 8, 4)),
    channels=st.sampled_from((3, 8, 24)),
    outputs=st.sampled_from((1, 10, 16, 32)),
    extents=st.tuples(st.integers(1, 8), st.integers(1, 9)),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    epilogue=st.sampled_from(EPILOGUES),
)
@example(16, 24, 24, (5, 9), (2, 2), (2, 2), (0, 0, 0, 0), (0, 0), "bias, relu6")  # CenterFace
@example(8, 8, 16, (5, 13), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), "residual")  # phases of one and of two kernel rows
@example(16, 16, 48, (4, 17), (4, 4), (2, 2), (1, 1, 1, 1), (0, 0), "none")
@example(4, 3, 10, (2, 1), (3, 1), (3, 1), (1, 0, 2, 0), (0, 0), "none")
@example(4, 3, 4, (3, 5), (5, 2), (3, 3), (2, 0, 0, 0), (0, 2), "sigmoid")  # a phase without any
@example(8, 3, 8, (3, 5), (3, 3), (1, 2), (0, 1, 1, 0), (0, 0), "residual")  # phases of different width
def test_it_adds_the_kernel_at_each_number(
    lanes: int,
    channels: int,
    outputs: int,
    extents: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    more: tuple[int, int],
    epilogue: str,
) -> None:
    more = min(more[0], strides[0] - 1), min(more[1], strides[1] - 1)
    for axis in (0, 1):
        assume(max(padding[axis], padding[axis + 2]) < kernel[axis])
        assume((extents[axis] - 1) * strides[axis] + kernel[axis] + more[axis] > padding[axis] + padding[axis + 2])
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, channels, *extents), dtype="float32")
    weights = rng.standard_normal((channels, outputs, *kernel), dtype="float32")
    wanted = transposed(data, weights, strides, padding, more)
    in_block, block = channel_block(channels, lanes), channel_block(outputs, lanes)
    arrays = blocked(data, in_block), conv2d_transpose.packed(weights, in_block, block)

    def layer(*tensors: te.Tensor) -> te.Tensor:
        return conv2d_transpose.compute(*tensors, strides, padding, more)

    assert apart(conv2d_transpose, layer, arrays, wanted, epilogue, block, target_of(lanes)) < 1e-4
