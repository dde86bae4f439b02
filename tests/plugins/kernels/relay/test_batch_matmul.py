"""Products of batches of matrices are numpy's, whatever their shape, and so is what follows them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.tvm.targets import LEVELS, TARGETS, run, runs_here
from tvm_pipeline_kernels.tiles import matrix_tile
from tvm_pipeline_tvm.relay import fold

import tvm  # isort: skip
from tvm import relay  # isort: skip

RNG = np.random.default_rng(0)
FACTOR = np.float32(0.125)


def product(shapes: list[tuple[int, int, int]], transposed: list[bool]) -> tvm.IRModule:
    """Return a product of two arrays, a factor and an activation."""
    left, right = (relay.var(name, shape=shape) for name, shape in zip("xy", shapes, strict=True))
    result = relay.nn.batch_matmul(left, right, transpose_a=transposed[0], transpose_b=transposed[1])
    result = relay.nn.relu(result * relay.const(FACTOR))
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([left, right], result)))


@given(st.integers(2, 300), st.integers(16, 300), st.sampled_from([(4, 16), (8, 16), (16, 32)]))
def test_tiles_fit_into_registers(rows, columns, processor):
    lanes, registers = processor
    tile = matrix_tile(rows, columns, lanes, registers)
    assert tile.columns % lanes == 0
    vectors = tile.columns // lanes
    assert tile.rows * vectors + vectors < registers


@examples(10)
@given(
    batches=st.sampled_from([(1, 1), (3, 3), (3, 1)]),
    extents=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70)),
    transposed=st.lists(st.booleans(), min_size=2, max_size=2),
    level=st.sampled_from(LEVELS),
)
def test_products_are_those_of_numpy(batches, extents, transposed, level):
    rows, terms, columns = extents
    shapes = [(rows, terms), (terms, columns)]
    shapes = [
        (batch, *(shape[::-1] if turned else shape))
        for batch, shape, turned in zip(batches, shapes, transposed, strict=True)
    ]
    library = fold.fast_build(product(shapes, transposed), level)
    if runs_here(level):
        arrays = [RNG.standard_normal(shape).astype("float32") for shape in shapes]
        left, right = (
            array.swapaxes(1, 2) if turned else array for array, turned in zip(arrays, transposed, strict=True)
        )
        expected = np.maximum(np.matmul(left.astype("float64"), right) * FACTOR, 0)
        (found,) = run(library, dict(zip("xy", arrays, strict=True)))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [LEVELS[0], TARGETS[-1]])
def test_attention_is_built_for_every_target(target):
    x = relay.var("x", shape=(2, 33, 24))
    shares = relay.nn.softmax(relay.nn.batch_matmul(x, x))
    mixed = relay.transpose(relay.nn.batch_matmul(shares, x, transpose_b=False), (1, 0, 2))
    library = fold.fast_build(tvm.IRModule.from_expr(relay.Function([x], mixed)), target)
    if runs_here(target):
        array = RNG.standard_normal((2, 33, 24)).astype("float32")
        powers = np.exp(np.matmul(array.astype("float64"), array.swapaxes(1, 2)))
        expected = np.matmul(powers / powers.sum(2, keepdims=True), array).transpose(1, 0, 2)
        (found,) = run(library, {"x": array})
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
