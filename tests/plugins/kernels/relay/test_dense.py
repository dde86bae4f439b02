"""Dense layers have TOPI's bits in tiles of ours, whatever their shape, and those with odd outputs are padded."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.tvm.targets import LEVELS, TARGETS, by_topi, run, runs_here
from tvm_pipeline_kernels.tiles import dense_tile
from tvm_pipeline_tvm.relay import fold
from tvm_pipeline_tvm.relay.pad_channels import pad_channels

import tvm  # isort: skip
from tvm import relay  # isort: skip

RNG = np.random.default_rng(0)


def dense(rows: int, terms: int, outputs: int) -> tvm.IRModule:
    """Return a dense layer with bias, activation and a second reader."""
    x = relay.var("x", shape=(rows, terms))
    y = relay.nn.dense(x, relay.const(RNG.standard_normal((outputs, terms)).astype("float32")))
    y = relay.nn.relu(y + relay.const(RNG.standard_normal(outputs).astype("float32")))
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], y)))


@given(
    st.integers(1, 40),
    st.integers(1, 3000).map(lambda count: 4 * count),
    st.sampled_from([(4, 16), (8, 16), (16, 32)]),
)
def test_tiles_divide_the_layer_and_fit_into_registers(rows, outputs, processor):
    lanes, registers = processor
    tile = dense_tile(rows, outputs, lanes, registers)
    assert rows % tile.rows == outputs % tile.columns == 0
    vectors = max(1, tile.columns // lanes)
    assert tile.rows * vectors + vectors < registers


@examples(10)
@given(rows=st.integers(1, 40), terms=st.integers(1, 70), outputs=st.integers(1, 150), level=st.sampled_from(LEVELS))
def test_dense_layers_have_the_bits_of_topi(rows, terms, outputs, level):
    mod = dense(rows, terms, outputs)
    library = fold.fast_build(mod, level)
    if runs_here(level):
        frame = {"x": RNG.standard_normal((rows, terms)).astype("float32")}
        with by_topi():
            expected = run(fold.fast_build(mod, level), frame)
        np.testing.assert_array_equal(run(library, frame), expected)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [LEVELS[0], TARGETS[-1]])
def test_odd_outputs_are_padded_where_there_are_several_rows(target):
    mod = dense(6, 20, 6625)
    padded = pad_channels(mod)
    assert "strided_slice" in str(padded)
    library = fold.fast_build(padded, target)
    if runs_here(target):
        frame = {"x": RNG.standard_normal((6, 20)).astype("float32")}
        np.testing.assert_array_equal(run(library, frame), run(fold.fast_build(mod, target), frame))
    assert pad_channels(dense(1, 20, 6625))["main"].body.op.name == "nn.relu"
    assert "strided_slice" not in str(pad_channels(dense(1, 20, 6625)))
