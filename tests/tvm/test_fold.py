"""Folding in numpy gives what Relay's FoldConstant gives, and folds exactly the calls that it folds."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.parts import needs

needs("tvm")

import tvm
from tvm import relay
from tvm.contrib import graph_executor

from tests.support.examples import examples
from tests.support.networks import module_of
from tvm_pipeline_tvm.kernel_sets import relay_kernels
from tvm_pipeline_tvm.relay.fold import FoldConstantFast, fast_build, fast_context

TARGET = "llvm -mcpu=x86-64-v3" if platform.machine() == "x86_64" else "llvm"
RNG = np.random.default_rng(0)


def stock(mod: tvm.IRModule) -> tvm.IRModule:
    return relay.transform.FoldConstant()(mod)


def assert_folds_as_relay(expr: relay.Expr) -> None:
    """Both passes leave one constant (or a tuple of them) of the same type and, within rounding, value."""
    mod = module_of(expr)
    ours, theirs = FoldConstantFast()(mod)["main"], stock(mod)["main"]
    assert ours.checked_type == theirs.checked_type
    fields = [body.fields if isinstance(body, relay.Tuple) else [body] for body in (ours.body, theirs.body)]
    for our, their in zip(*fields, strict=True):
        actual, expected = our.data.numpy(), their.data.numpy()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        tolerance = 4 * np.finfo(actual.dtype).eps if actual.dtype.kind == "f" else 0
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture
def relay_must_not_fold(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to make any further fall-back on Relay's own pass an error."""
    relay_kernels()  # whose import makes one

    def forbidden() -> None:
        raise AssertionError("this should have been folded in numpy")

    return lambda: monkeypatch.setattr(relay.transform, "FoldConstant", forbidden)


def const(*shape: int, dtype: str = "float32", positive: bool = False) -> relay.Expr:
    data = RNG.uniform(0.1 if positive else -3, 3, shape) if "float" in dtype else RNG.integers(0, 50, shape)
    return relay.const(data.astype(dtype))


HALVES = relay.const(np.array([-2.5, -1.5, -0.5, -0.4, 0.0, 0.49999997, 0.5, 1.5, 2.5, 3e9], "float32"))

SIGNED = relay.const(np.array([-7, -6, -1, 0, 5, 7], "int64"))
DIVISORS = relay.const(np.array([[2], [-3]], "int64"))
SIGNS = [(-7, 2), (-7, -3), (7, -3), (6, -3), (0, 5)]
TRUTHS = relay.const(np.array([True, False, True]))

OPERATORS = {
    "abs": relay.abs(const(3, 4)),
    "add": relay.add(const(3, 1, 4), const(5, 1)),
    "add int8": relay.add(const(7, dtype="int8"), const(7, dtype="int8")),
    "broadcast_to": relay.broadcast_to(const(3, 1), (2, 3, 4)),
    "cast to int": relay.cast(const(20), "int8"),
    "cast to bool": relay.cast(const(5, dtype="int32"), "bool"),
    "cast to half": relay.cast(const(5), "float16"),
    "cast_like": relay.cast_like(const(5), const(5, dtype="int64")),
    "ceil": relay.ceil(HALVES),
    "clip": relay.clip(const(20), -1.0, 1.5),
    "clip int": relay.clip(const(20, dtype="int8"), -5, 20),
    "clip to its whole range": relay.clip(const(20, dtype="int32"), -(2**31), 2**31 - 1),
    "concatenate": relay.concatenate([const(2, 3), const(2, 1), relay.negative(const(2, 2))], axis=-1),
    "divide": relay.divide(const(4), const(4, positive=True)),
    "exp": relay.exp(const(30)),
    "expand_dims": relay.expand_dims(const(3, 4), axis=1, num_newaxis=2),
    "floor": relay.floor(HALVES),
    "full": relay.full(relay.const(3), (2, 2), "int8"),
    "full_like": relay.full_like(const(2, 3), relay.const(2.5)),
    "layout NCHW16c": relay.layout_transform(const(2, 32, 3, 5), "NCHW", "NCHW16c"),
    "layout from NCHW16c": relay.layout_transform(const(2, 2, 3, 5, 16), "NCHW16c", "NCHW"),
    "layout 4c to 8c": relay.layout_transform(const(1, 4, 3, 3, 4), "NCHW4c", "NCHW8c"),
    "layout NHWC": relay.layout_transform(const(1, 3, 4, 5), "NCHW", "NHWC"),
    "layout OIHW8i16o": relay.layout_transform(const(32, 16, 3, 3), "OIHW", "OIHW8i16o"),
    "layout HWIO": relay.layout_transform(const(3, 3, 16, 32), "HWIO", "OIHW8i16o"),
    "layout depthwise": relay.layout_transform(const(32, 1, 3, 3), "OIHW", "OIHW1i8o"),
    "layout OIHW4i16o4i": relay.layout_transform(const(32, 32, 1, 1, dtype="int8"), "OIHW", "OIHW4i16o4i"),
    "layout dense": relay.layout_transform(const(32, 20), "NC", "NC16n"),
    "layout C8c": relay.layout_transform(const(1, 16, 1, 1), "NCHW", "NCHW8c"),
    "left_shift": relay.left_shift(const(9, dtype="int32"), relay.const(3)),
    "all": relay.all(relay.const(np.array([[True, False], [True, True]])), axis=1),
    "any": relay.any(relay.const(np.array([[True, False], [False, False]])), axis=[1], keepdims=True),
    "arange": relay.arange(relay.const(2, "int64"), relay.const(11, "int64"), relay.const(3, "int64"), "int64"),
    "arange backwards": relay.arange(relay.const(5), relay.const(-2), relay.const(-2), "int32"),
    "copy": relay.copy(const(3)),
    "divide integers": relay.divide(SIGNED, DIVISORS),
    "equal": relay.equal(const(3, 9, dtype="int32"), const(9, dtype="int32")),
    # LLVM 22 does not take TVM's debug information for these as vectors, so here they are scalars.
    "floor_divide": relay.stack([relay.floor_divide(relay.const(a), relay.const(b)) for a, b in SIGNS], 0),
    "floor_mod": relay.stack([relay.floor_mod(relay.const(a), relay.const(b)) for a, b in SIGNS], 0),
    "gather": relay.gather(const(3, 4), 1, relay.const(np.array([[3, 0], [1, 1], [2, 0]]))),
    "greater": relay.greater(const(9), const(9)),
    "greater_equal": relay.greater_equal(SIGNED, DIVISORS),
    "less": relay.less(const(9), const(9)),
    "less_equal": relay.less_equal(SIGNED, DIVISORS),
    "logical_and": relay.logical_and(TRUTHS, relay.const(True)),
    "logical_not": relay.logical_not(TRUTHS),
    "logical_or": relay.logical_or(TRUTHS, relay.const(False)),
    "logical_xor": relay.logical_xor(TRUTHS, relay.const(True)),
    "max": relay.max(const(4, 5), axis=0),
    "min int": relay.min(const(4, 5, dtype="int32"), keepdims=True),
    "mod": relay.mod(SIGNED, DIVISORS),
    "not_equal": relay.not_equal(SIGNED, DIVISORS),
    "prod": relay.prod(const(2, 3, dtype="int64"), axis=1),
    "stack": relay.stack([const(2, 3), const(2, 3)], axis=1),
    "trunc_divide": relay.trunc_divide(SIGNED, DIVISORS),
    "trunc_mod": relay.trunc_mod(SIGNED, DIVISORS),
    "where": relay.where(TRUTHS, const(2, 3), const(3)),
    "maximum": relay.maximum(const(3, 4), const(4)),
    "minimum": relay.minimum(const(3, 4), const(4)),
    "multiply": relay.multiply(const(4, 1, 1), const(4, 3, 3)),
    "negative": relay.negative(const(3, dtype="int32")),
    "nn.pad": relay.nn.pad(const(1, 2, 3), ((0, 0), (1, 0), (2, 1)), pad_value=1.5),
    "nn.relu": relay.nn.relu(const(9)),
    "ones_like": relay.ones_like(const(2, 3)),
    "power": relay.power(const(9, positive=True), const(9)),
    "repeat": relay.repeat(const(2, 3), repeats=2, axis=1),
    "reshape": relay.reshape(const(4, 6), (0, -1, 2)),
    "reshape_like": relay.reshape_like(const(4, 6), const(3, 8)),
    "right_shift": relay.right_shift(relay.const(np.arange(-9, 9, dtype="int32")), relay.const(2)),
    "round": relay.round(HALVES),
    "rsqrt": relay.rsqrt(const(9, positive=True)),
    "scalar": relay.rsqrt(relay.add(relay.const(2.0), relay.const(1e-5))),
    "split": relay.split(relay.exp(const(4)), 2).astuple(),
    "split at indices": relay.split(const(2, 9), [2, 5], axis=-1)[1],
    "sqrt": relay.sqrt(const(9, positive=True)),
    "squeeze": relay.squeeze(const(1, 3, 1), axis=[0]),
    "strided_slice": relay.strided_slice(const(6, 9), [1, -7], [100, 8], [2]),
    "strided_slice axes": relay.strided_slice(const(2, 6, 9), [3], [5], axes=[2]),
    "subtract": relay.subtract(const(3, dtype="float64"), const(3, dtype="float64")),
    "sum int": relay.sum(relay.cast(const(4, 5, 6, dtype="int8"), "int32"), axis=[0, -1], keepdims=True),
    "take": relay.take(const(5, 4), relay.const(np.array([[0, 4], [9, 2]])), axis=0),
    "take wrap": relay.take(const(5, 4), relay.const(np.array([0, -1, 21])), mode="wrap"),
    "tile": relay.tile(const(2, 3), (2, 1, 2)),
    "transpose": relay.transpose(const(2, 3, 4), (2, 0, -2)),
    "transpose all": relay.transpose(const(2, 3, 4)),
    "tuple": relay.Tuple([relay.add(const(2), const(2)), const(3)]),
    "tuple item": relay.TupleGetItem(relay.Tuple([const(2), relay.sqrt(const(3, positive=True))]), 1),
    "zeros_like": relay.zeros_like(const(2, 3, dtype="int8")),
}


@pytest.mark.quick_cases(17)
@pytest.mark.parametrize("name", OPERATORS)
def test_operator_of_the_table(name: str, relay_must_not_fold: Callable[[], None]) -> None:
    assert_folds_as_relay(OPERATORS[name])
    relay_must_not_fold()
    FoldConstantFast()(module_of(OPERATORS[name]))


LEFT_TO_RELAY = {
    "unknown operator": relay.negative(relay.nn.softmax(relay.add(const(2, 3), const(3)))),
    "unknown operator with two results": relay.topk(const(4), 2).astuple(),
    "division of floats towards minus infinity": relay.floor_divide(const(4), const(4, positive=True)),
    "product of floats": relay.prod(const(2, 3), axis=1),
    "layout that pads": relay.layout_transform(const(1, 6, 2, 2), "NCHW", "NCHW4c"),
    "slice backwards": relay.strided_slice(const(6), [4], [0], [-1]),
    "sum of floats": relay.sum(const(4, 5), axis=1),
    "padding by mirror": relay.nn.pad(const(4, 5), ((1, 1), (0, 0)), pad_mode="reflect"),
    "shape of a constant": relay.shape_of(const(4, 5)),
}


@pytest.mark.parametrize("name", LEFT_TO_RELAY)
def test_what_the_table_lacks_is_folded_all_the_same(name: str) -> None:
    assert_folds_as_relay(LEFT_TO_RELAY[name])


X = relay.var("x", shape=(4,), dtype="float32")
PRIMITIVE = relay.Function([], relay.add(const(4), const(4))).with_attr("Primitive", 1)
FUNCTION = relay.Function([X], relay.add(X, relay.negative(const(4))))
LET = relay.var("bound")

AS_RELAY_DOES = {
    "no constant": relay.add(X, X),
    "partly constant": relay.add(relay.add(X, const(4)), relay.add(const(4), const(4))),
    "no arguments": relay.add(relay.zeros((4,), "float32"), const(4)),
    "qnn": relay.qnn.quantize(relay.abs(const(4)), relay.const(0.1), relay.const(3), out_dtype="int8"),
    "dropout": relay.nn.dropout(const(4)),
    "inside a primitive function": relay.Call(PRIMITIVE, []),
    "inside another function": relay.Call(FUNCTION, [const(4)]),
    "shape of a variable": relay.cast(relay.shape_of(X), "int8"),
    "let": relay.Let(LET, relay.add(const(4), const(4)), relay.add(X, LET)),
    "if": relay.If(relay.cast(relay.const(3), "bool"), relay.negative(X), X),
    "on device": relay.add(relay.annotation.on_device(const(4), tvm.cpu(), constrain_result=True), const(4)),
}


def test_a_huge_constant_of_small_ones_is_computed_with_each_frame() -> None:
    huge = relay.broadcast_to(relay.const(1.0), (1 << 16, 1 << 16))
    mod = module_of(relay.add(relay.var("x", shape=(1 << 16, 1 << 16)), huge))
    assert "broadcast_to" in FoldConstantFast()(mod).astext()


@pytest.mark.parametrize("name", AS_RELAY_DOES)
def test_folds_what_relay_folds_and_nothing_else(name: str) -> None:
    mod = module_of(AS_RELAY_DOES[name])
    before = mod.astext()
    tvm.ir.assert_structural_equal(FoldConstantFast()(mod), stock(mod), map_free_vars=True)
    assert mod.astext() == before, "the caller's module was changed"


@examples(25, deadline=None)
@given(st.data())
def test_random_chains_of_operators(data: st.DataObject) -> None:
    shapes = data.draw(hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=4, max_side=4))
    values = st.floats(0.125, 8, width=32)
    arrays = [data.draw(hnp.arrays("float32", shape, elements=values)) for shape in shapes.input_shapes]
    x, y, z = map(relay.const, arrays)
    binary = st.sampled_from([relay.add, relay.subtract, relay.multiply, relay.divide, relay.maximum])
    unary = st.sampled_from([relay.negative, relay.abs, relay.floor, relay.transpose, relay.nn.relu])
    expr = data.draw(binary)(x, data.draw(binary)(y, z))
    assert_folds_as_relay(data.draw(unary)(relay.sqrt(relay.abs(expr))))


@pytest.mark.thorough
@examples(25, deadline=None)
@given(st.permutations("NCHW"), st.permutations("NCHWc"), st.sampled_from([2, 4]))
def test_blocking_a_layout_and_back_is_the_identity(plain: list[str], blocked: list[str], block: int) -> None:
    if blocked.index("c") < blocked.index("C"):
        blocked[blocked.index("c")], blocked[blocked.index("C")] = "C", "c"
    source, target = "".join(plain), "".join(blocked).replace("c", f"{block}c")
    sizes = {"N": 2, "C": 8, "H": 3, "W": 5}
    x = const(*(sizes[axis] for axis in plain))
    there = relay.layout_transform(x, source, target)
    assert_folds_as_relay(there)
    back = FoldConstantFast()(module_of(relay.layout_transform(there, target, source)))["main"].body
    np.testing.assert_array_equal(back.data.numpy(), x.data.numpy())


@pytest.mark.thorough
def test_deep_graph() -> None:
    half = relay.const(np.float32(0.5))
    constant, mixed = half, X
    for _ in range(1100):  # deeper than Python recurses
        constant, mixed = relay.add(constant, half), relay.add(mixed, half)
    body = FoldConstantFast()(module_of(relay.add(mixed, constant)))["main"].body
    assert body.args[1].data.numpy() == 550.5


def test_in_a_sequence_of_passes() -> None:
    passes = [relay.transform.SimplifyInference(), FoldConstantFast(), relay.transform.FuseOps(2)]
    mod = module_of(relay.exp(relay.add(X, relay.add(const(4), const(4)))))
    with tvm.transform.PassContext(opt_level=3):
        fused = tvm.transform.Sequential(passes)(mod)["main"].body
    assert isinstance(fused.op, relay.Function)
    assert isinstance(fused.op.body.op, tvm.ir.Op)


def int8_network() -> relay.Expr:
    x = relay.var("x", shape=(1, 3, 16, 16), dtype="float32")
    one, zero, three = relay.const(0.1), relay.const(0), relay.const(3)
    x = relay.qnn.quantize(x, one, three, out_dtype="uint8")
    kernel = const(16, 3, 3, 3, dtype="int8")
    x = relay.qnn.conv2d(x, kernel, three, zero, one, one, kernel_size=(3, 3), channels=16, padding=(1, 1))
    x = relay.nn.bias_add(x, const(16, dtype="int32"))
    x = relay.qnn.requantize(x, relay.const(0.01), zero, one, three, out_dtype="uint8")
    return relay.qnn.dequantize(x, one, three)


def run(library: Any) -> np.ndarray:
    executor = graph_executor.GraphModule(library["default"](tvm.cpu()))
    executor.set_input("x", np.random.default_rng(1).standard_normal((1, 3, 16, 16), "float32"))
    executor.run()
    return executor.get_output(0).numpy()


@pytest.mark.thorough
def test_a_network_built_both_ways_gives_the_same_outputs(relay_must_not_fold: Callable[[], None]) -> None:
    """Of bytes; `test_slicing.py` compares one of floats with what Relay has folded."""
    mod = module_of(int8_network())
    with tvm.transform.PassContext(opt_level=3):
        expected = run(relay.build(mod, TARGET))
    before = mod.astext()  # not earlier: QNN's legalization writes defaults into the attributes it is given
    relay_must_not_fold()
    np.testing.assert_array_equal(run(fast_build(mod, TARGET)), expected)
    assert mod.astext() == before, "the caller's module was changed"


def test_context_keeps_the_options_of_a_pass_context() -> None:
    timing = tvm.ir.instrument.PassTimingInstrument()
    context = fast_context(opt_level=2, instruments=[timing], disabled_pass=["FuseOps"])
    assert (context.opt_level, list(context.disabled_pass)) == (2, ["FuseOps"])
    with context:
        mod, _ = relay.optimize(module_of(relay.add(X, relay.add(const(4), const(4)))), TARGET)
        assert "PlanDevices" in timing.render()
    assert isinstance(mod["main"].body.args[1], relay.Constant)
