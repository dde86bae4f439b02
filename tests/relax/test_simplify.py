"""Fewer operators of the same values: each rule as a module before and after, and all of them run once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tvm_pipeline_tvm.relax.numpy_table import TABLE, constant
from tvm_pipeline_tvm.relax.simplify import simplified

TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})
IMAGE = (1, 8, 6, 6)
Build = Callable[..., Any]


def exact(*shape: int) -> np.ndarray:
    """Return numbers whose products and sums are exact: quarters of small whole numbers, none of them 0."""
    numbers = np.random.default_rng(sum(shape)).integers(1, 9, shape) / 4
    return (numbers * np.where(np.arange(numbers.size).reshape(shape) % 3, 1, -1)).astype("float32")


def c(*shape: int) -> Any:
    return constant(exact(*shape))


def function(build: Build, *shapes: tuple[int, ...]) -> relax.Function:
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{index}", relax.TensorType(shape, "float32")) for index, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            output = builder.emit_output(builder.emit(build(*params)))
        builder.emit_func_output(output)
    return builder.get()["main"]


class Case(NamedTuple):
    before: Build
    after: Build
    shapes: tuple[tuple[int, ...], ...] = (IMAGE,)


NORM = [exact(8), exact(8), exact(8), np.full(8, 0.25, "float32")]  # scale, shift, mean, variance
SCALE = (NORM[0] / np.sqrt(NORM[3])).astype("float32")
SHIFT = (NORM[1] - NORM[2] * SCALE).astype("float32")
SCALE_4D, SHIFT_4D = SCALE.reshape(1, 8, 1, 1), SHIFT.reshape(1, 8, 1, 1)
DENSE, GROUPED, TURNED = exact(8, 8, 3, 3), exact(8, 4, 3, 3), exact(8, 4, 2, 2)
NUMBERS = exact(1, 8, 1, 1)

A, LAST = exact(8, 1, 1), exact(1)


def norm(x: Any) -> Any:
    return relax.TupleGetItem(op.nn.batch_norm(x, *map(constant, NORM), axis=1, epsilon=0.0, training=False), 0)


def conv(x: Any, weights: np.ndarray, **options: Any) -> Any:
    return op.nn.conv2d(x, constant(weights), **{"padding": 1, **options})


def turned(x: Any, weights: np.ndarray) -> Any:
    return op.nn.conv2d_transpose(x, constant(weights), strides=2, groups=2)


def per_output(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return weights * scale.reshape(-1, 1, 1, 1)


def padded(x: Any, *widths: int) -> Any:
    """Put zeros before and behind rows, and before and behind columns."""
    return op.nn.pad(x, [0, 0, 0, 0, *widths])


CASES = {
    "zeros around an image": Case(
        lambda x: conv(padded(x, 0, 1, 2, 0), DENSE, strides=2, padding=0),
        lambda x: conv(x, DENSE, strides=2, padding=(0, 2, 1, 0)),
    ),
    "zeros and a padding": Case(
        lambda x: conv(padded(x, 1, 0, 0, 1), GROUPED, groups=2),
        lambda x: conv(x, GROUPED, groups=2, padding=(2, 1, 1, 2)),
    ),
    "a norm": Case(norm, lambda x: op.add(op.multiply(x, constant(SCALE_4D)), constant(SHIFT_4D))),
    "a norm behind a convolution": Case(
        lambda x: op.nn.relu(norm(conv(x, DENSE))),
        lambda x: op.nn.relu(op.add(conv(x, per_output(DENSE, SCALE)), constant(SHIFT_4D))),
    ),
    "a norm behind a bias": Case(
        lambda x: norm(op.add(conv(x, DENSE), constant(NUMBERS))),
        lambda x: op.add(conv(x, per_output(DENSE, SCALE)), constant(NUMBERS * SCALE_4D + SHIFT_4D)),
    ),
    "a norm behind a depthwise convolution": Case(
        lambda x: norm(conv(x, exact(8, 1, 3, 3), groups=8)),
        lambda x: op.add(conv(x, per_output(exact(8, 1, 3, 3), SCALE), groups=8), constant(SHIFT_4D)),
    ),
    "a norm behind a convolution of groups": Case(
        lambda x: norm(conv(x, GROUPED, groups=2)),
        lambda x: op.add(conv(x, per_output(GROUPED, SCALE), groups=2), constant(SHIFT_4D)),
    ),
    "a norm behind a transposed convolution of groups": Case(
        lambda x: norm(turned(x, TURNED)),
        lambda x: op.add(
            turned(x, (TURNED.reshape(2, 4, 4, 2, 2) * SCALE.reshape(2, 1, 4, 1, 1)).reshape(TURNED.shape)),
            constant(SHIFT_4D),
        ),
    ),
    "a factor before a convolution": Case(
        lambda x: conv(op.multiply(x, constant(NUMBERS)), DENSE), lambda x: conv(x, DENSE * NUMBERS)
    ),
    "a factor before a convolution of groups": Case(
        lambda x: conv(op.multiply(x, constant(NUMBERS)), GROUPED, groups=2),
        lambda x: conv(
            x, (GROUPED.reshape(2, 4, 4, 3, 3) * NUMBERS.reshape(2, 1, 4, 1, 1)).reshape(GROUPED.shape), groups=2
        ),
    ),
    "a summand before a convolution without padding": Case(
        lambda x: conv(op.subtract(x, constant(NUMBERS)), DENSE, padding=0),
        lambda x: op.add(
            conv(x, DENSE, padding=0), constant((DENSE * -NUMBERS).sum((1, 2, 3), dtype="float32").reshape(1, 8, 1, 1))
        ),
    ),
    "a summand before a convolution with padding": Case(
        lambda x: conv(op.add(x, constant(NUMBERS)), DENSE), lambda x: conv(op.add(x, constant(NUMBERS)), DENSE)
    ),
    "factors and summands in a row": Case(
        lambda x: op.multiply(op.add(op.multiply(op.add(x, c(8, 1, 1)), c(8, 1, 1)), c(1, 8, 1, 1)), c(1)),
        lambda x: op.add(op.multiply(x, constant((A * LAST)[None])), constant((A * A + exact(1, 8, 1, 1)) * LAST)),
    ),
    "a summand that is larger than the tensor": Case(
        lambda x: op.add(op.add(x, c(1, 8, 1, 1)), c(2, 8, 1, 1)),
        lambda x: op.add(op.add(x, c(1, 8, 1, 1)), c(2, 8, 1, 1)),
    ),
    "a quotient": Case(lambda x: op.divide(x, relax.const(4.0)), lambda x: op.multiply(x, relax.const(0.25))),
    "a quotient by almost nothing": Case(
        lambda x: op.divide(x, relax.const(1e-45)), lambda x: op.divide(x, relax.const(1e-45))
    ),
    "a constant in front": Case(lambda x: op.add(relax.const(2.0), x), lambda x: op.add(x, relax.const(2.0))),
    "a product of matrices": Case(
        lambda x: op.multiply(op.matmul(x, op.permute_dims(c(5, 8))), c(5)),
        lambda x: op.matmul(x, constant(np.ascontiguousarray(exact(5, 8).T) * exact(5))),
        ((3, 8),),
    ),
    "a pool of one pixel": Case(
        lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1)), lambda x: op.mean(x, [2, 3], keepdims=True)
    ),
    "a dropout": Case(lambda x: op.nn.relu(relax.TupleGetItem(op.nn.dropout(x, 0.5), 0)), lambda x: op.nn.relu(x)),
    "a square": Case(lambda x: op.power(x, relax.const(2.0)), lambda x: op.multiply(x, x)),
    "shapes": Case(
        lambda x: op.permute_dims(op.reshape(op.reshape(op.reshape(x, IMAGE), (8, 36)), (4, 72)), [0, 1]),
        lambda x: op.reshape(x, (4, 72)),
    ),
    "constants": Case(
        lambda x: op.add(x, op.multiply(op.sqrt(relax.const(4.0)), op.full((1, 8, 1, 1), relax.const(3.0)))),
        lambda x: op.add(x, constant(np.full((1, 8, 1, 1), 6, "float32"))),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_becomes_another(name: str) -> None:
    case = CASES[name]
    before = tvm.IRModule({"main": function(case.before, *case.shapes)})
    after = simplified(before)
    tvm.ir.assert_structural_equal(
        after, tvm.IRModule({"main": function(case.after, *case.shapes)}), map_free_vars=True
    )
    assert simplified(after) is after  # nothing is left to do


@pytest.fixture(scope="module")
def machine() -> relax.VirtualMachine:
    """All cases, as they were and simplified, compiled by TVM alone."""
    functions = {}
    for index, case in enumerate(CASES.values()):
        before = function(case.before, *case.shapes)
        after = simplified(tvm.IRModule({"main": before}))["main"]
        for kind, each in (("before", before), ("after", after)):
            functions[f"{kind}{index}"] = each.with_attr("global_symbol", f"{kind}{index}")
    return relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), TARGET), tvm.cpu())


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_same(name: str, machine: relax.VirtualMachine) -> None:
    index, case = list(CASES).index(name), CASES[name]
    frames = [tvm.runtime.tensor(exact(*shape)) for shape in case.shapes]
    before, after = (machine[f"{kind}{index}"](*frames).numpy() for kind in ("before", "after"))
    np.testing.assert_allclose(after, before, rtol=1e-5)


def test_what_is_read_twice_keeps_its_weights() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(IMAGE, "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit(conv(x, DENSE))
            output = builder.emit_output(op.add(builder.emit(op.multiply(y, constant(NUMBERS))), y))
        builder.emit_func_output(output)
    mod = builder.get()
    assert simplified(mod) is mod


def test_what_is_no_plain_graph_stays() -> None:
    """A function with a branch is left alone; the attributes of another are kept."""
    builder = relax.BlockBuilder()
    x, condition = relax.Var("x", relax.TensorType((2,), "float32")), relax.Var("c", relax.TensorType((), "bool"))
    with builder.function("branch", [x, condition]):
        one, other = (relax.SeqExpr([], relax.op.add(x, x)) for _ in range(2))
        builder.emit_func_output(builder.emit(relax.If(condition, one, other)))
    branch = builder.get()["branch"]
    plain = function(norm, IMAGE).with_attr("output_names", ["y"])
    mod = simplified(tvm.IRModule({"main": plain, "branch": branch}))
    assert mod["branch"].same_as(branch)
    assert list(mod["main"].attrs["output_names"]) == ["y"]


X = (2, 3, 4)
UNARY = ("negative", "abs", "sign", "square", "sqrt", "rsqrt", "exp", "log", "tanh", "sin", "cos", "sigmoid", "floor")
UNARY += ("ceil", "round", "trunc")
BINARY = ("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "equal", "not_equal", "less")
BINARY += ("less_equal", "greater", "greater_equal", "mod", "floor_mod")
EVALUATED: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda x, y, name=name: getattr(op, name)(x) for name in UNARY},
    **{name: lambda x, y, name=name: getattr(op, name)(x, y) for name in BINARY},
    "nn.relu": lambda x, y: op.nn.relu(op.subtract(x, y)),
    "clip": lambda x, y: op.clip(x, 0.5, 1.5),
    "astype": lambda x, y: op.astype(x, "int64"),
    "floor_divide": lambda x, y: op.floor_divide(
        *(op.astype(op.multiply(each, relax.const(4.0)), "int32") for each in (x, y))
    ),
    "where": lambda x, y: op.where(op.less(x, y), x, y),
    "logical_not": lambda x, y: op.logical_not(op.less(x, y)),
    "logical_and": lambda x, y: op.logical_and(op.less(x, y), op.less(x, relax.const(1.0))),
    "logical_or": lambda x, y: op.logical_or(op.less(x, y), op.less(x, relax.const(1.0))),
    "logical_xor": lambda x, y: op.logical_xor(op.less(x, y), op.less(x, relax.const(1.0))),
    "sum": lambda x, y: op.sum(x, [0, 2]),
    "mean": lambda x, y: op.mean(x, [1], keepdims=True),
    "prod": lambda x, y: op.prod(x, [-1]),
    "max": lambda x, y: op.max(x),
    "min": lambda x, y: op.min(x, [0]),
    "reshape": lambda x, y: op.reshape(x, (4, 6)),
    "flatten": lambda x, y: op.flatten(x),
    "expand_dims": lambda x, y: op.expand_dims(x, [0, 2]),
    "squeeze": lambda x, y: op.squeeze(op.expand_dims(x, 1)),
    "nn.batch_flatten": lambda x, y: op.nn.batch_flatten(x),
    "broadcast_to": lambda x, y: op.broadcast_to(x, (5, 2, 3, 4)),
    "permute_dims": lambda x, y: op.permute_dims(x, [2, 0, 1]),
    "concat": lambda x, y: op.concat([x, y], 1),
    "stack": lambda x, y: op.stack([x, y], 1),
    "split": lambda x, y: op.concat([op.split(x, 2, 2)[1], op.split(x, [1, 3], 2)[0]], 2),
    "strided_slice": lambda x, y: op.strided_slice(x, [1, 2], [0, -3], [3, 9], [2, 1]),
    "take": lambda x, y: op.take(x, relax.const([2, 0], "int64"), axis=1),
    "tile": lambda x, y: op.tile(x, [2, 1, 3]),
    "repeat": lambda x, y: op.repeat(x, 2, 1),
    "nn.pad": lambda x, y: op.nn.pad(x, [0, 0, 1, 2, 0, 3], "constant", 1.5),
    "full": lambda x, y: op.full((2, 2), relax.const(2.5)),
    "full_like": lambda x, y: op.full_like(x, relax.const(2.5)),
    "zeros": lambda x, y: op.zeros((2, 2), "float32"),
    "ones": lambda x, y: op.ones((2, 2), "int32"),
    "zeros_like": lambda x, y: op.zeros_like(x),
    "ones_like": lambda x, y: op.ones_like(x),
    "arange": lambda x, y: op.arange(2, 11, 3, "int64"),
    "quantize": lambda x, y: op.quantize(
        x, constant(np.full(3, 0.5, "float32")), relax.const([1, 0, 9], "uint8"), 1, "uint8"
    ),
    "dequantize": lambda x, y: op.dequantize(
        op.astype(x, "int8"), constant(np.full(3, 0.5, "float32")), relax.const([1, 0, 9], "int8"), 1, "float32"
    ),
}


def test_the_table_is_tested_whole() -> None:
    assert set(EVALUATED) == set(TABLE)


@pytest.fixture(scope="module")
def compiled() -> tuple[relax.VirtualMachine, dict[str, Any]]:
    """Each operator of the table: of inputs, compiled by TVM, and of constants, folded."""
    functions, folded = {}, {}
    for name, build in EVALUATED.items():
        symbol = name.replace(".", "_")
        functions[symbol] = function(build, X, X).with_attr("global_symbol", symbol)
        known = function(lambda build=build: build(constant(np.abs(exact(*X))), constant(exact(*X[::-1]).reshape(X))))
        folded[name] = simplified(tvm.IRModule({"main": known}))["main"].body.blocks[0].bindings
    return relax.VirtualMachine(tvm.compile(tvm.IRModule(functions), TARGET), tvm.cpu()), folded


@pytest.mark.parametrize("name", EVALUATED)
def test_numpy_computes_what_tvm_does(name: str, compiled: tuple[relax.VirtualMachine, dict[str, Any]]) -> None:
    machine, folded = compiled
    (binding,) = folded[name]
    frames = [np.abs(exact(*X)), exact(*X[::-1]).reshape(X)]
    wanted = machine[name.replace(".", "_")](*map(tvm.runtime.tensor, frames)).numpy()
    found = binding.value.value.numpy()
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(found, wanted, rtol=2e-6)


def test_whole_numbers_keep_their_type() -> None:
    """relax.const alone would make int32 of it: the end of a slice from the back was 1."""
    last = np.array([-(2**63) + 1])
    assert constant(last).value.numpy().tolist() == last.tolist()
