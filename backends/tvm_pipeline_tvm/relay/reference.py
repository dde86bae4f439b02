"""What a Relay module computes in float64, and how far a compiled library is from it.

Where kernels may round otherwise than direct sums (`Model.tolerance`), `build.py` measures here what that costs. The
module is evaluated operator by operator: layers of many products by `float64.py`, cheap ones by the table that
folds constants (`fold_table.py`), and what neither has is compiled by TVM, alone and in float64.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.contrib import graph_executor

from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.float64 import (
    convolution,
    sigmoid,
    softmax,
    transposed_convolution,
    widened,
    worst_error,
)
from tvm_pipeline_tvm.numpy_rules import Array, ints
from tvm_pipeline_tvm.relay.fold_table import TABLE, ResultType, parts
from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions, read_by
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.relay.refused_lets import without_refused_lets
from tvm_pipeline_tvm.tvm_errors import reason

_Rule = Callable[..., Any]


def error_of(library: Library, mod: tvm.IRModule, params: Mapping[str, Any]) -> float:
    """Return the largest error of a library's outputs, over the largest value of each; see `float64.worst_error`.

    The input is noise, as profiles have it.

    Args:
        mod: what the library was compiled from; `params` are its weights.

    Raises:
        ModelError: an operator of the module cannot be computed in float64.
    """
    frame = {tensor.name: noise(Port.of(tensor)) for tensor in library.inputs}
    executor = graph_executor.create(json.dumps(library.graph), library.module, tvm.cpu())
    executor.set_input(**library.params, **frame)
    executor.run()
    found = [executor.get_output(index).numpy() for index in range(executor.get_num_outputs())]
    return worst_error(found, in_float64(mod, params, frame))


def in_float64(mod: tvm.IRModule, params: Mapping[str, Any], frame: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of `main` for a frame, computed in float64; raise as `error_of`."""
    main = relay.transform.InferType()(mod)["main"]
    values: dict[relay.Expr, Any] = {}
    for parameter in main.params:
        name = parameter.name_hint
        values[parameter] = widened(frame[name] if name in frame else params[name].numpy())
    order = outer_expressions(main.body)
    uses = Counter(child for expr in order for child in read_by(expr))
    compiled: dict[Any, Any] = {}
    for expr in order:
        if expr not in values:
            values[expr] = _value(expr, values, compiled)
        for child in read_by(expr):
            uses[child] -= 1
            if not uses[child] and child is not main.body:
                values.pop(child, None)
    result = values[main.body]
    return result if isinstance(result, list) else [result]


def _value(expr: relay.Expr, values: Mapping[relay.Expr, Any], compiled: dict[Any, Any]) -> Any:
    if isinstance(expr, relay.Constant):
        return widened(expr.data.numpy())
    if isinstance(expr, relay.Tuple):
        return [values[field] for field in expr.fields]
    if isinstance(expr, relay.TupleGetItem):
        return values[expr.tuple_value][expr.index]
    if not isinstance(expr, relay.Call) or not isinstance(expr.op, tvm.ir.Op):
        raise ModelError(f"control flow ({type(expr).__name__}) is not computed in float64")
    name, arguments = expr.op.name, [values[argument] for argument in expr.args]
    if name == "split":
        return parts(expr.attrs, arguments[0])
    if name in _LAYERS:
        made = _LAYERS[name](expr.attrs, expr.checked_type, *arguments)
        if made is not None:
            return made
    out = ResultType.of(expr.checked_type)
    if name in TABLE and out:
        out = ResultType(out.shape, "float64" if out.dtype.startswith("float") else out.dtype)
        with np.errstate(all="ignore"):
            made = TABLE[name](expr.attrs, out, *arguments)
        if made is not None and (made.shape, str(made.dtype)) == out:
            return made
    return _by_tvm(expr, arguments, compiled)


def _by_tvm(call: relay.Call, arguments: list[Any], compiled: dict[Any, Any]) -> Any:
    """Return the value of an operator that TVM compiles alone, for arguments in float64."""
    flat = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
    variables = iter(
        [relay.var(f"x{index}", shape=each.shape, dtype=str(each.dtype)) for index, each in enumerate(flat)]
    )
    given = [
        relay.Tuple([next(variables) for _ in argument]) if isinstance(argument, list) else next(variables)
        for argument in arguments
    ]
    function = relay.Function(relay.analysis.free_vars(relay.Tuple(given)), relay.Call(call.op, given, call.attrs))
    key = tvm.ir.structural_hash(function)
    try:
        if key not in compiled:
            with without_refused_lets(), tvm.transform.PassContext(opt_level=0):
                factory = relay.build(tvm.IRModule.from_expr(function), "llvm")
            compiled[key] = graph_executor.GraphModule(factory["default"](tvm.cpu()))
        executor = compiled[key]
        executor.set_input(**{f"x{index}": each for index, each in enumerate(flat)})
        executor.run()
    except Exception as error:  # TVM's passes raise whatever their author had at hand
        raise ModelError(f"operator {call.op.name} is not computed in float64: {reason(error)}") from error
    made = [widened(executor.get_output(index).numpy()) for index in range(executor.get_num_outputs())]
    return made if isinstance(call.checked_type, relay.TupleType) else made[0]


def _conv2d(attrs: Any, _type: Any, data: Array, kernel: Array) -> Array | None:
    if (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout or "NCHW")) != ("NCHW", "OIHW", "NCHW"):
        return None
    if data.dtype != np.float64:
        return None
    strides, padding, dilation = map(ints, (attrs.strides, attrs.padding, attrs.dilation))
    return convolution(data, kernel, strides, padding, dilation, int(attrs.groups))


def _conv2d_transpose(attrs: Any, type_: Any, data: Array, kernel: Array) -> Array | None:
    layouts = str(attrs.data_layout), str(attrs.kernel_layout), int(attrs.groups), ints(attrs.dilation)
    if layouts != ("NCHW", "IOHW", 1, [1, 1]) or data.dtype != np.float64:
        return None
    return transposed_convolution(data, kernel, ints(attrs.strides), ints(attrs.padding), ints(type_.shape))


def _dense(attrs: Any, _type: Any, data: Array, weights: Array) -> Array | None:
    return data @ weights.T if data.dtype == np.float64 else None


def _batch_matmul(attrs: Any, _type: Any, left: Array, right: Array) -> Array | None:
    if left.dtype != np.float64:
        return None
    left = left.swapaxes(1, 2) if attrs.transpose_a else left
    return left @ (right.swapaxes(1, 2) if attrs.transpose_b else right)


def _bias_add(attrs: Any, _type: Any, data: Array, bias: Array) -> Array:
    axis = int(attrs.axis) % data.ndim
    return data + bias.reshape([-1 if index == axis else 1 for index in range(data.ndim)])


def _batch_norm(attrs: Any, _type: Any, data: Array, gamma: Array, beta: Array, mean: Array, variance: Array) -> Any:
    extents = [1] * data.ndim
    extents[int(attrs.axis)] = -1
    scale = (gamma if attrs.scale else 1.0) / np.sqrt(variance + float(attrs.epsilon))
    made = (data - mean.reshape(extents)) * scale.reshape(extents)
    return [made + beta.reshape(extents) if attrs.center else made, mean, variance]


_LAYERS: dict[str, _Rule] = {
    "nn.conv2d": _conv2d,
    "nn.conv2d_transpose": _conv2d_transpose,
    "nn.dense": _dense,
    "nn.batch_matmul": _batch_matmul,
    "nn.bias_add": _bias_add,
    "nn.batch_norm": _batch_norm,
    "nn.dropout": lambda attrs, type_, x: [x, np.ones_like(x)],
    "nn.leaky_relu": lambda attrs, type_, x: np.where(x > 0, x, x * float(attrs.alpha)),
    "nn.softmax": lambda attrs, type_, x: softmax(x, int(attrs.axis)),
    "nn.global_avg_pool2d": lambda attrs, type_, x: (
        x.mean(axis=(2, 3), keepdims=True) if str(attrs.layout) == "NCHW" else None
    ),
    "nn.batch_flatten": lambda attrs, type_, x: x.reshape(len(x), -1),
    "sigmoid": lambda attrs, type_, x: sigmoid(x),
    "tanh": lambda attrs, type_, x: np.tanh(x),
}
