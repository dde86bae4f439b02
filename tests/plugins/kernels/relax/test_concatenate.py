"""Concatenations along any axis, of blocks of any sizes, with what is fused to them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.relax.fused import TARGETS, run
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import concatenate

RNG = np.random.default_rng(0)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])


@EACH_TARGET
@examples(3)
@given(
    st.lists(st.sampled_from([1, 2, 5, 16]), min_size=1, max_size=5),
    st.integers(-5, 4),
    st.lists(st.sampled_from([1, 3, 16]), min_size=1, max_size=4),
)
def test_axes(target: tvm.target.Target, shape: list[int], axis: int, extents: list[int]) -> None:
    axis = axis % len(shape) - (len(shape) if axis < 0 else 0)
    arrays = []
    for extent in extents:
        shape[axis] = extent
        arrays.append(RNG.standard_normal(shape).astype("float32"))
    found, rules = run(
        lambda builder, *inputs: op.nn.relu(
            builder.emit(builder.call_te(concatenate.compute_plain, list(inputs), axis))
        ),
        arrays,
        target,
    )
    np.testing.assert_array_equal(found, np.maximum(np.concatenate(arrays, axis), 0))
    assert rules == ["concatenate"]


@EACH_TARGET
@pytest.mark.parametrize("blocks", [(16, 16, 16), (8, 12, 4), (12, 12, 8)])
def test_blocks(target: tvm.target.Target, blocks: tuple[int, int, int]) -> None:
    """Inputs of 48 and 96 channels, or so, in blocks of their own, then scale, shift and activation."""
    first, second, block = blocks
    arrays = [RNG.standard_normal((1, 2, 3, 5, first)), RNG.standard_normal((1, 4, 3, 5, second))]
    plain = np.concatenate([x.transpose(0, 1, 4, 2, 3).reshape(1, -1, 3, 5) for x in arrays], axis=1)
    scale, shift = RNG.standard_normal((2, 1, plain.shape[1] // block, 1, 1, block)).astype("float32")
    joined = plain.reshape(1, -1, block, 3, 5).transpose(0, 1, 3, 4, 2).astype("float32")
    found, rules = run(
        lambda builder, *inputs: op.nn.relu(
            op.add(
                op.multiply(
                    builder.emit(builder.call_te(concatenate.compute, list(inputs), block)), relax.const(scale)
                ),
                relax.const(shift),
            )
        ),
        [x.astype("float32") for x in arrays],
        target,
    )
    np.testing.assert_allclose(found, np.maximum(joined * scale + shift, 0), rtol=1e-5, atol=1e-6)
    assert rules == ["concatenate"]


@EACH_TARGET
def test_layout_behind(target: tvm.target.Target) -> None:
    """What follows reads the concatenation in another order."""
    arrays = [RNG.standard_normal((1, extent, 4, 5)).astype("float32") for extent in (2, 6)]
    found, rules = run(
        lambda builder, *inputs: op.permute_dims(
            builder.emit(builder.call_te(concatenate.compute_plain, list(inputs), 1)), [0, 2, 3, 1]
        ),
        arrays,
        target,
    )
    np.testing.assert_array_equal(found, np.concatenate(arrays, 1).transpose(0, 2, 3, 1))
    assert rules == ["concatenate"]
