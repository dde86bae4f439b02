"""Products of matrices: any rows, terms and columns, packed weights and activations, with what is fused to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.relax.fused import TARGETS, run
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import dense
from tvm_pipeline_kernels.relax.schedules.cores import cores_of

RNG = np.random.default_rng(0)
EACH_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
COLUMNS = st.sampled_from([1, 5, 16, 40, 48, 112, 170])  # the last has 11 vectors of 16 numbers


@EACH_TARGET
@examples(3)
@given(st.sampled_from([1, 2, 7, 30]), st.integers(1, 9), COLUMNS)
def test_weights(target: tvm.target.Target, rows: int, terms: int, columns: int) -> None:
    x, weights = (RNG.standard_normal(shape).astype("float32") for shape in ((rows, terms), (terms, columns)))
    bias, other = (RNG.standard_normal(shape).astype("float32") for shape in ((columns,), (rows, columns)))
    packed = relax.const(dense.packed(weights, cores_of(target).lanes))

    def build(builder: relax.BlockBuilder, x: Any, other: Any) -> Any:
        product = builder.emit(builder.call_te(dense.compute_dense, x, packed, columns))
        return op.nn.relu(op.add(op.add(product, relax.const(bias)), other))

    found, rules = run(build, [x, other], target)
    np.testing.assert_allclose(found, np.maximum(x @ weights + bias + other, 0), rtol=1e-4, atol=1e-5)
    assert rules == ["dense"]


@EACH_TARGET
@examples(3)
@given(st.integers(1, 3), st.sampled_from([1, 5, 30]), st.integers(1, 9), COLUMNS)
def test_activations(target: tvm.target.Target, batches: int, rows: int, terms: int, columns: int) -> None:
    left = RNG.standard_normal((batches, rows, terms)).astype("float32")
    right = RNG.standard_normal((batches, terms, columns)).astype("float32")

    def build(builder: relax.BlockBuilder, left: Any, right: Any) -> Any:
        product = builder.call_te(dense.compute_batch, left, right, cores_of(target).lanes)
        return op.multiply(builder.emit(product), relax.const(np.float32(0.5)))

    found, rules = run(build, [left, right], target)
    np.testing.assert_allclose(found, left @ right / 2, rtol=1e-4, atol=1e-5)
    assert rules == ["dense"]
