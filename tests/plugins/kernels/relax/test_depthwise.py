"""Depthwise convolutions of Relax against numpy."""

from __future__ import annotations

import re

import numpy as np
import tvm
from hypothesis import example, given
from hypothesis import strategies as st
from tvm import te
from tvm.s_tir import Schedule

from tests.plugins.kernels.relax.layers import EPILOGUES, apart, blocked, convolution
from tests.relax.fused import target_of
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import depthwise
from tvm_pipeline_kernels.relax.schedules.cores import Cores, cores_of
from tvm_pipeline_kernels.tiles import channel_block

_few = st.integers(1, 3)


@examples(8)
@given(
    lanes=st.sampled_from((16, 8, 4)),
    channels=st.sampled_from((3, 10, 16, 24, 32)),
    extents=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=st.tuples(_few, st.integers(1, 5)),
    strides=st.tuples(_few, _few),
    padding=st.tuples(*[st.integers(0, 2)] * 4),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    epilogue=st.sampled_from(EPILOGUES),
)
@example(16, 32, (15, 17), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "residual")  # neither bands nor tiles fit
@example(8, 16, (14, 14), (3, 3), (2, 2), (0, 0, 1, 1), (1, 1), "none")
@example(4, 4, (4, 30), (9, 9), (1, 1), (4, 4, 4, 4), (1, 1), "sigmoid")  # too many products to unroll
def test_it_is_the_convolution_of_each_channel(
    lanes: int,
    channels: int,
    extents: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: tuple[int, int],
    epilogue: str,
) -> None:
    top, left, bottom, right = padding
    fits = (extents[0] + top + bottom > (kernel[0] - 1) * dilation[0]) and (
        extents[1] + left + right > (kernel[1] - 1) * dilation[1]
    )
    if not fits:
        return
    rng = np.random.default_rng(0)
    data = rng.standard_normal((2, channels, *extents), dtype="float32")
    weights = rng.standard_normal((channels, 1, *kernel), dtype="float32")
    wanted, block = convolution(data, weights, channels, strides, padding, dilation), channel_block(channels, lanes)
    arrays = blocked(data, block), blocked(weights.transpose(1, 0, 2, 3), block)[0]

    def layer(*tensors: te.Tensor) -> te.Tensor:
        return depthwise.compute(*tensors, strides, padding, dilation)

    assert apart(depthwise, layer, arrays, wanted, epilogue, block, target_of(lanes)) < 1e-4


def _scheduled(cores: Cores, width: int, window: int) -> Schedule:
    data, kernel = te.placeholder((1, 2, 28, width, cores.lanes)), te.placeholder((2, window, window, cores.lanes))
    padding = (window // 2,) * 4
    s = Schedule(te.create_prim_func([data, kernel, depthwise.compute(data, kernel, (1, 1), padding, (1, 1))]))
    depthwise.schedule(s, s.get_sblock(depthwise.NAME), cores)
    return s


def test_the_image_is_padded_band_by_band() -> None:
    """A band of rows stays in the nearest cache; the whole image would be written and read once more."""
    s = _scheduled(Cores(16, 32), 16, 3)
    bands, *padded = (int(s.get(loop).extent) for loop in s.get_loops("pad"))
    assert bands == 2 * 2
    assert padded == [1, 1, 16, 18, 16]


def _assembly(width: int, window: int) -> str:
    target = target_of(16)
    return str(tvm.compile(_scheduled(cores_of(target), width, window).mod, target=target).mod.inspect_source("asm"))


def test_sums_stay_in_registers() -> None:
    """Every product is a multiply-add of vectors, and no vector is kept on the stack."""
    vectors = [line for line in _assembly(16, 3).splitlines() if "%zmm" in line]
    assert sum("vfmadd" in line for line in vectors) >= 9 * 8
    assert [line for line in vectors if "rsp" in line or "rbp" in line] == []


def test_the_columns_of_the_last_tile_are_not_asked_for_one_by_one() -> None:
    """A last tile of fewer columns has code of its own; a question at each column made a layer 1.5 times as slow."""
    branches = [len(re.findall(r"^\tj(?!mp)", _assembly(width, 5), re.MULTILINE)) for width in (32, 36)]
    assert branches[1] < branches[0] + 10
