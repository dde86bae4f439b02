"""Softmax along any axis gives numpy's values, and so do its exponential function's edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te
from tvm.relax import op

from tests.relax.fused import TARGETS, Array, run
from tests.support.examples import examples
from tvm_pipeline_kernels import elementary
from tvm_pipeline_kernels.relax.schedules import softmax
from tvm_pipeline_kernels.relax.schedules.cores import cores_of

RNG = np.random.default_rng(0)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])


def exact(x: Array, axis: int) -> Array:
    powers = np.exp(x.astype("float64") - x.max(axis, keepdims=True))
    return np.asarray(powers / powers.sum(axis, keepdims=True))


@EACH_TARGET
@examples(3)
@given(st.lists(st.sampled_from([1, 3, 8, 16, 33, 40]), min_size=1, max_size=3), st.integers(-3, 2), st.booleans())
def test_rows(target: tvm.target.Target, shape: list[int], axis: int, is_log: bool) -> None:
    axis = axis % len(shape) - (len(shape) if axis < 0 else 0)
    x = (4 * RNG.standard_normal(shape)).astype("float32")
    compute = softmax.compute_log_softmax if is_log else softmax.compute_softmax

    def build(builder: relax.BlockBuilder, x: Any) -> Any:
        rows = builder.emit(builder.call_te(compute, x, axis, cores_of(target).lanes))
        return op.multiply(rows, relax.const(np.float32(3)))

    found, rules = run(build, [x], target)
    expected = np.log(exact(x, axis)) if is_log else exact(x, axis)
    np.testing.assert_allclose(found, 3 * expected, rtol=2e-6, atol=2e-6)
    assert rules == ["softmax"]


@EACH_TARGET
def test_masked_and_large_numbers(target: tvm.target.Target) -> None:
    """A number of minus infinity has no share, and thousands do not overflow."""
    x = np.array([[-np.inf, 1, 2, 3] * 6, [5000, 4999, -5000, 0] * 6], "float32")
    found, _ = run(
        lambda builder, x: builder.call_te(softmax.compute_softmax, x, 1, cores_of(target).lanes), [x], target
    )
    np.testing.assert_allclose(found, exact(x, 1), rtol=2e-6, atol=1e-30)


@EACH_TARGET
def test_exponential_function(target: tvm.target.Target) -> None:
    x = np.concatenate([np.linspace(-86.98, 88.7, 4001), [0, -0.0, 1, 88.8, 1e30, np.inf, -88, -1e30, -np.inf, np.nan]])
    x = x.astype("float32")
    found, _ = run(
        lambda builder, x: builder.call_te(lambda x: te.compute(x.shape, lambda i: elementary.exp(x[i])), x),
        [x],
        target,
    )
    with np.errstate(over="ignore"):
        expected = np.where(x < elementary.LEAST, 0, np.exp(x.astype("float64"))).astype("float32")
    np.testing.assert_allclose(found, expected, rtol=2e-7)
