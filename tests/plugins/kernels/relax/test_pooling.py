"""Pooling in blocks: every window, stride and padding gives numpy's values, in every vector width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.relax.fused import TARGETS, Array, run
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import pooling

RNG = np.random.default_rng(0)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
PAIRS = st.tuples(st.integers(1, 3), st.integers(1, 3))


def windows(x: Array, window: Any, strides: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Array:
    """Return the numbers of each window, NaN for padding: (n, chunks, rows, columns, block, terms)."""
    top, left, bottom, right = padding
    wide = np.pad(x, ((0, 0), (0, 0), (top, bottom + 9), (left, right + 9), (0, 0)), constant_values=np.nan)
    counts = []
    for axis in (0, 1):
        room = x.shape[2 + axis] + padding[axis] + padding[axis + 2] - dilation[axis] * (window[axis] - 1) - 1
        counts.append((-(-room // strides[axis]) if ceil_mode else room // strides[axis]) + 1)
    terms = [
        wide[
            :,
            :,
            row * dilation[0] : row * dilation[0] + (counts[0] - 1) * strides[0] + 1 : strides[0],
            column * dilation[1] : column * dilation[1] + (counts[1] - 1) * strides[1] + 1 : strides[1],
        ]
        for row in range(window[0])
        for column in range(window[1])
    ]
    return np.stack(terms, axis=-1)


@st.composite
def poolings(draw: st.DrawFn) -> tuple[Array, dict[str, Any]]:
    window, strides, dilation = draw(PAIRS), draw(PAIRS), draw(PAIRS)
    reach = [step * (terms - 1) + 1 for step, terms in zip(dilation, window, strict=True)]
    padding = tuple(draw(st.integers(0, min(2, window[axis % 2] - 1))) for axis in range(4))
    height, width = (draw(st.integers(max(3, extent), 9)) for extent in reach)
    block, chunks = draw(st.sampled_from([16, 8, 4, 3])), draw(st.integers(1, 2))
    x = RNG.standard_normal((1, chunks, height, width, block)).astype("float32")
    return x, {
        "window": window,
        "strides": strides,
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": draw(st.booleans()),
    }


@EACH_TARGET
@examples(3)
@given(poolings())
def test_largest_bytes_of_windows(target: tvm.target.Target, drawn: tuple[Array, dict[str, Any]]) -> None:
    x, how = RNG.integers(0, 256, drawn[0].shape), drawn[1]
    terms = windows(x.astype("float32"), **how)
    expected = np.where(np.isnan(terms), 0, terms).max(axis=-1)
    found, rules = run(lambda builder, x: builder.call_te(pooling.compute_max, x, **how), [x.astype("uint8")], target)
    np.testing.assert_array_equal(found, expected)
    assert rules == ["pooling"]


@EACH_TARGET
@examples(3)
@given(poolings())
def test_largest_of_windows(target: tvm.target.Target, drawn: tuple[Array, dict[str, Any]]) -> None:
    x, how = drawn
    terms = windows(x, **how)
    expected = np.where(np.isnan(terms), np.finfo("float32").min, terms).max(axis=-1)

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        return op.negative(builder.emit(builder.call_te(pooling.compute_max, x, **how)))

    found, rules = run(build, [x], target)
    np.testing.assert_array_equal(found, -expected)
    assert rules == ["pooling"]


@EACH_TARGET
@examples(3)
@given(poolings(), st.booleans())
def test_means_of_windows(
    target: tvm.target.Target, drawn: tuple[Array, dict[str, Any]], includes_padding: bool
) -> None:
    x, how = drawn
    terms = windows(x, **how)
    counts = terms.shape[-1] if includes_padding else np.maximum((~np.isnan(terms)).sum(axis=-1), 1)
    expected = np.nansum(terms, axis=-1) / counts
    found, rules = run(
        lambda builder, x: builder.call_te(pooling.compute_avg, x, count_include_pad=includes_padding, **how),
        [x],
        target,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert rules == ["pooling"]


@EACH_TARGET
@pytest.mark.parametrize(("chunks", "height", "width", "block"), [(1, 7, 7, 16), (6, 3, 5, 8), (5, 1, 1, 4)])
def test_means_of_channels(target: tvm.target.Target, chunks: int, height: int, width: int, block: int) -> None:
    """Also where what is before the mean, and behind it, is fused to it."""
    x = RNG.standard_normal((2, chunks, height, width, block)).astype("float32")
    found, rules = run(
        lambda builder, x: op.nn.relu(builder.emit(builder.call_te(pooling.compute_mean, x))), [x], target
    )
    np.testing.assert_allclose(found, np.maximum(x.mean(axis=(2, 3), keepdims=True), 0), rtol=1e-5, atol=1e-6)
    assert rules == ["pooling"]


@EACH_TARGET
def test_a_mean_that_is_flattened(target: tvm.target.Target) -> None:
    """What follows has another shape, and is a pass of its own of the same kernel."""
    x = RNG.standard_normal((1, 3, 4, 4, 16)).astype("float32")

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        mean = builder.emit(builder.call_te(pooling.compute_mean, x))
        return op.reshape(op.permute_dims(mean, [0, 1, 4, 2, 3]), (1, 48))

    found, rules = run(build, [x], target)
    np.testing.assert_allclose(found, x.mean(axis=(2, 3)).reshape(1, 48), rtol=1e-5, atol=1e-6)
    assert rules[0] == "pooling"
