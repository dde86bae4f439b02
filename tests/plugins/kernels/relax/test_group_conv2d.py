"""Grouped convolutions of Relax against numpy."""

from __future__ import annotations

import numpy as np
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tvm import te

from tests.plugins.kernels.relax.layers import EPILOGUES, apart, blocked, convolution
from tests.relax.fused import target_of
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import group_conv2d
from tvm_pipeline_kernels.tiles import channel_block


@examples(4)
@given(
    lanes=st.sampled_from((16, 8, 4)),
    groups=st.sampled_from((2, 3, 4, 8)),
    depth=st.sampled_from((1, 2, 3, 4, 8, 16)),
    each=st.sampled_from((0, 0, 0, 1, 2, 16)),
    extents=st.tuples(st.integers(1, 15), st.integers(1, 20)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    epilogue=st.sampled_from(EPILOGUES),
)
@example(16, 8, 4, 4, (9, 14), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "bias, relu6")  # blocks of groups
@example(8, 4, 4, 4, (9, 11), (3, 3), (2, 1), (1, 1, 1, 1), (1, 1), "none")  # and no tile fits
@example(16, 4, 4, 4, (37, 9), (1, 3), (1, 1), (0, 1, 0, 1), (1, 1), "residual")  # nor a band
@example(16, 2, 32, 32, (7, 9), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "residual")  # groups of blocks
@example(8, 2, 16, 32, (6, 7), (3, 3), (2, 2), (0, 0, 1, 1), (1, 1), "none")
@example(16, 2, 5, 7, (8, 8), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), "residual")  # pixels in a row
@example(16, 2, 34, 34, (7, 7), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), "bias, relu6")
@example(4, 3, 5, 3, (9, 13), (3, 3), (2, 3), (1, 2, 0, 1), (2, 1), "sigmoid")
@example(16, 6, 1, 2, (9, 13), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "residual")  # depthwise, two of each channel
def test_it_is_the_convolution_of_each_group(
    lanes: int,
    groups: int,
    depth: int,
    each: int,
    extents: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    epilogue: str,
) -> None:
    each = each or depth
    top, left, bottom, right = padding
    assume(extents[0] + top + bottom > (kernel[0] - 1) * dilation[0])
    assume(extents[1] + left + right > (kernel[1] - 1) * dilation[1])
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, groups * depth, *extents), dtype="float32")
    weights = rng.standard_normal((groups * each, depth, *kernel), dtype="float32")
    wanted = convolution(data, weights, groups, strides, padding, dilation)
    block, arrays = 0, (data, weights)
    if group_conv2d.layout(groups * depth, groups * each, groups, lanes) == "blocks":
        block = channel_block(groups * each, lanes)
        arrays = blocked(data, channel_block(groups * depth, lanes)), group_conv2d.packed(weights, groups, lanes)

    def layer(*tensors: te.Tensor) -> te.Tensor:
        return group_conv2d.compute(*tensors, groups, strides, padding, dilation, lanes)

    assert apart(group_conv2d, layer, arrays, wanted, epilogue, block, target_of(lanes)) < 1e-4
