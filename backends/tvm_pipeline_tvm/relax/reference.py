"""What a Relax module computes in float64, and how far a compiled library is from it: Relay's file of the same name.

The module is evaluated operator by operator: layers of many products by `float64.py`, cheap ones by the table that
folds constants (`numpy_table.py`), and what neither has is compiled by TVM, alone and in float64.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax

from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.float64 import convolution, sigmoid, softmax, transposed_convolution, widened, worst_error
from tvm_pipeline_tvm.numpy_rules import Array, ints
from tvm_pipeline_tvm.relax.dataflow import Constant, fields, name_of, plain_main, shape_of
from tvm_pipeline_tvm.relax.numpy_table import TABLE, ResultType
from tvm_pipeline_tvm.tvm_errors import reason

if TYPE_CHECKING:
    from tvm_pipeline_tvm.relax.build import Library

_Rule = Callable[..., Any]


def error_of(library: Library, mod: tvm.IRModule) -> float:
    """Return the largest error of a library's outputs, over the largest value of each; see `float64.worst_error`.

    The input is noise, as profiles have it.

    Args:
        mod: what the library was compiled from.

    Raises:
        ModelError: an operator of the module cannot be computed in float64.
    """
    frame = {tensor.name: noise(Port.of(tensor)) for tensor in library.inputs}
    tensors = {(-1, index): tvm.runtime.tensor(frame[tensor.name]) for index, tensor in enumerate(library.inputs)} | {
        (index, output): tvm.runtime.empty(made.shape, made.dtype)
        for index, kernel in enumerate(library.kernels)
        for output, made in enumerate(kernel.outputs)
    }
    for function, arguments in library.bound(range(len(library.kernels)), tensors, lambda each: library.tensors[each]):
        function(*arguments)
    found = [tensors[head].numpy() for head in library.heads]
    picks: defaultdict[str, list[Array]] = defaultdict(list)
    for index, call in enumerate(library.calls):
        if (index, 1) in tensors:
            picks[call.function].append(tensors[index, 1].numpy())
    return worst_error(found, in_float64(mod, frame, picks))


def in_float64(
    mod: tvm.IRModule, frame: Mapping[str, Array], picks: Mapping[str, list[Array]] | None = None
) -> list[Array]:
    """Return the outputs of `main` for a frame, computed in float64; raise as `error_of`.

    Args:
        picks: the indices that the library's calls of `topk` picked, by the function's name; each call removes its own.
            Rounding may exchange nearly equal values. With the library's own picks, that counts as no error.
    """
    bindings, result = plain_main(mod["main"])
    values: dict[Any, Any] = {param: widened(frame[str(param.name)]) for param in mod["main"].params}
    uses = Counter(chain.from_iterable(_variables(each) for each in (*(b.value for b in bindings), result)))
    for binding in bindings:
        picked = _picked(binding.value, values, picks or {})
        values[binding.var] = _value(binding.value, values) if picked is None else picked
        for variable in _variables(binding.value):
            uses[variable] -= 1
            if not uses[variable]:
                values.pop(variable, None)
    made = _value(result, values)
    return made if isinstance(made, list) else [made]


def _picked(call: Any, values: Mapping[Any, Any], picks: Mapping[str, list[Array]]) -> list[Array] | None:
    """Return the values that a call of `topk` picked, and their indices; None for any other expression."""
    function = call.args[0].name_hint if name_of(call) == "relax.call_tir" else ""
    if not function.startswith("topk") or not picks.get(function):
        return None
    data, indices = _value(call.args[1], values)[0], picks[function].pop(0)
    axis = next((axis for axis in range(data.ndim) if data.shape[axis] != indices.shape[axis]), -1)
    return [np.take_along_axis(data, indices, axis), indices]


def _variables(expr: Any) -> list[Any]:
    """Return the variables that an expression reads, each as often as it does."""
    if isinstance(expr, relax.Var):
        return [expr]
    inner: list[Any] = []
    if isinstance(expr, tvm.ir.Call):
        inner = list(expr.args)
    elif isinstance(expr, relax.Tuple):
        inner = list(expr.fields)
    elif isinstance(expr, relax.TupleGetItem):
        inner = [expr.tuple_value]
    return [variable for each in inner for variable in _variables(each)]


def _value(expr: Any, values: Mapping[Any, Any]) -> Any:
    if isinstance(expr, relax.Var):
        return values[expr]
    if isinstance(expr, Constant):
        return widened(expr.value.numpy())
    if isinstance(expr, relax.Tuple):
        return [_value(field, values) for field in expr.fields]
    if isinstance(expr, relax.TupleGetItem):
        return _value(expr.tuple_value, values)[expr.index]
    name = name_of(expr).removeprefix("relax.")
    if not name:
        raise ModelError(f"{type(expr).__name__} is not computed in float64")
    arguments = [_value(each, values) if _is_tensor(each) else None for each in expr.args]
    made = _LAYERS[name](expr, *arguments) if name in _LAYERS else None
    if made is None and name in TABLE:
        made = _by_table(expr, TABLE[name], arguments)
    return _by_tvm(expr, arguments) if made is None else made


def _is_tensor(expr: Any) -> bool:
    if isinstance(expr, relax.Tuple):
        return all(map(_is_tensor, expr.fields))
    return isinstance(getattr(expr, "ty", None), (relax.TensorType, relax.TupleType))


def _by_table(call: Any, rule: _Rule, arguments: list[Any]) -> Any:
    outs = [ResultType.of(type_) for type_ in fields(call.ty)]
    wide = [ResultType(o.shape, "float64" if o.dtype.startswith("float") else o.dtype) for o in outs if o]
    if len(wide) != len(outs):
        return None
    with np.errstate(all="ignore"):
        made = rule(call, wide[0], *arguments)
    parts = made if isinstance(made, tuple) else (made,)
    if any(part is None or (part.shape, str(part.dtype)) != out for part, out in zip(parts, wide, strict=True)):
        return None
    return list(parts) if isinstance(call.ty, relax.TupleType) else parts[0]


def _by_tvm(call: Any, arguments: list[Any]) -> Any:
    """Return the value of an operator that TVM compiles alone, for arguments in float64."""
    flat = [each for argument in arguments for each in (argument if isinstance(argument, list) else [argument])]
    tensors = [each for each in flat if each is not None]
    params = [relax.Var(f"x{i}", relax.TensorType(each.shape, str(each.dtype))) for i, each in enumerate(tensors)]
    rest = iter(params)
    given = [
        relax.Tuple([next(rest) for _ in argument])
        if isinstance(argument, list)
        else own
        if argument is None
        else next(rest)
        for own, argument in zip(call.args, arguments, strict=True)
    ]
    builder = relax.BlockBuilder()
    try:
        with builder.function("main", params):
            builder.emit_func_output(builder.emit(relax.Call(call.op, given, call.attrs, call.ty_args)))
        machine = relax.VirtualMachine(tvm.compile(builder.get(), target="llvm"), tvm.cpu())
        made = machine["main"](*map(tvm.runtime.tensor, tensors))
    except Exception as error:  # TVM's passes raise whatever their author had at hand
        raise ModelError(f"operator {name_of(call)} is not computed in float64: {reason(error)}") from error
    if isinstance(call.ty, relax.TupleType):
        return [widened(each.numpy()) for each in made]
    return widened(made.numpy())


def _conv2d(call: Any, data: Array, kernel: Array) -> Array | None:
    attrs = call.attrs
    layouts = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
    if layouts != ("NCHW", "OIHW", "NCHW") or data.dtype != np.float64:
        return None
    strides, padding, dilation = map(ints, (attrs.strides, attrs.padding, attrs.dilation))
    return convolution(data, kernel, strides, padding, dilation, int(attrs.groups))


def _conv2d_transpose(call: Any, data: Array, kernel: Array) -> Array | None:
    attrs = call.attrs
    described = str(attrs.data_layout), str(attrs.kernel_layout), int(attrs.groups), ints(attrs.dilation)
    if described != ("NCHW", "IOHW", 1, [1, 1]) or data.dtype != np.float64:
        return None
    return transposed_convolution(data, kernel, ints(attrs.strides), ints(attrs.padding), shape_of(call))


_LAYERS: dict[str, _Rule] = {
    "nn.conv2d": _conv2d,
    "nn.conv2d_transpose": _conv2d_transpose,
    "matmul": lambda call, left, right: left @ right if left.dtype == np.float64 else None,
    "nn.leakyrelu": lambda call, x: np.where(x > 0, x, x * float(call.attrs.alpha)),
    "nn.silu": lambda call, x: x * sigmoid(x),
    "nn.softmax": lambda call, x: softmax(x, int(call.attrs.axis)),
}
