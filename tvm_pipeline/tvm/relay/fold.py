"""Constant folding in numpy, because Relay's own is most of the time that `relay.build` takes.

Relay's FoldConstant compiles every constant expression (a folded batch norm, a weight's change of layout)
through LLVM, runs the code once and throws it away: 26 of the 33 seconds that mobilenet takes to build.
numpy gives the same numbers at once.  What the table of operators below does not know is left to Relay.

Two ways to use it:

* :func:`fast_context` in place of ``tvm.transform.PassContext``: every FoldConstant that ``relay.build`` or
  ``relay.optimize`` reaches, those nested in other passes too, becomes ours, and nothing else changes.
* :func:`FoldConstantFast`, a pass like its siblings in ``relay.transform``.

``benchmarks/fold_constant.py`` measures it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import tvm
from tvm import autotvm, relay

from tvm_pipeline.tvm.relay.int8 import exact_int8
from tvm_pipeline.tvm.relay.lowered_int8 import lowered_int8
from tvm_pipeline.tvm.relay.refused_lets import without_refused_lets
from tvm_pipeline.tvm.relay.schedules import own_schedules
from tvm_pipeline.tvm.relay.schedules.choices import AnyChoices, following
from tvm_pipeline.tvm.relay.schedules.lowering import marked_loops
from tvm_pipeline.tvm.relay.splits import SplitByIndices

__all__ = ["FoldConstantFast", "building", "fast_build", "fast_context"]

Array: TypeAlias = npt.NDArray[Any]


def FoldConstantFast() -> tvm.transform.Pass:  # noqa: N802  a pass is named as its Relay siblings are
    """Fold constant expressions in numpy; a drop-in for ``relay.transform.FoldConstant()``.

    Before -> after::

        fn (%x) { add(%x, transpose(multiply(const, const))) }  ->  fn (%x) { add(%x, const) }

    Dtypes and shapes are those Relay infers; float32 arithmetic stays float32.  Left alone, as by Relay:
    calls without arguments (``zeros``), stateful and non-computational operators (QNN's among them), and the
    inside of ``Primitive`` functions.
    """
    return tvm.transform.module_pass(lambda mod, _: _fold_module(mod), opt_level=2, name="FoldConstantFast")


def fast_context(opt_level: int = 3, **context: Any) -> tvm.transform.PassContext:
    """A ``PassContext`` (`context` is its further keywords) in which every FoldConstant runs in numpy::

    with fast_context():
        lib = relay.build(mod, target, params=params)
    """
    instruments = [_FoldInNumpy(), *context.pop("instruments", ())]
    return tvm.transform.PassContext(opt_level=opt_level, instruments=instruments, **context)


def fast_build(
    mod: tvm.IRModule,
    target: Any,
    params: Any = None,
    choices: AnyChoices | None = None,
    instruments: Sequence[Any] = (),
) -> Any:
    """``relay.build`` as :func:`building` has it."""
    with building(choices, instruments):
        return relay.build(lowered_int8(SplitByIndices()(mod), target, params), target, params=params)


@contextmanager
def building(choices: AnyChoices | None = None, instruments: Sequence[Any] = ()) -> Iterator[None]:
    """A :func:`fast_context` with schedules of our own, `choices` of tuning for them, and more instruments.

    It also mends what TVM 0.19 cannot build for some x86 targets: see `int8.py`, `refused_lets.py` and `splits.py`.
    """
    silent, autotvm.GLOBAL_SCOPE.silent = autotvm.GLOBAL_SCOPE.silent, True
    try:
        context = fast_context(config={"tir.add_lower_pass": [(3, marked_loops)]}, instruments=instruments)
        with exact_int8(), own_schedules(), without_refused_lets(), following(choices or {}), context:
            yield
    finally:
        autotvm.GLOBAL_SCOPE.silent = silent


@tvm.instrument.pass_instrument
class _FoldInNumpy:
    """Stands in for FoldConstant wherever a pipeline of passes calls it.

    Pipelines such as ``relay.build``'s are closed C++; the one door into them is an instrument, which sees
    the module before each pass and may skip the pass.  A skipped pass hands on the very module the instrument
    saw, so to fold that module in place is to have the pass's effect.  By then ``relay.build``'s earlier
    passes have copied the user's module; only a FoldConstant called directly on it would change it.
    """

    def should_run(self, mod: tvm.IRModule, info: Any) -> bool:
        if info.name != "FoldConstant":
            return True
        mod.update(_fold_module(mod))
        return False


def _fold_module(mod: tvm.IRModule) -> tvm.IRModule:
    # A context of its own: what runs here must not meet the instruments of the one around it, ours above all.
    with tvm.transform.PassContext(opt_level=3):
        folded = relay.transform.InferType()(mod)  # a copy, and the types the folder reads
        changed = left_to_relay = False
        for name, function in folded.functions_items():
            if isinstance(function, relay.Function) and not _opaque(function):
                folder = _Folder()
                new = folder.fold(function)
                left_to_relay |= folder.left_to_relay
                if not new.same_as(function):
                    changed = True
                    folded.update_func(name, new)
        if changed:
            folded = relay.transform.InferType()(folded)
        if left_to_relay:
            folded = relay.transform.FoldConstant()(folded)
        return folded


def _opaque(function: relay.Function) -> bool:
    """Whether Relay's passes stay out of `function`: it is a kernel already, or another compiler's."""
    attrs = function.attrs
    return attrs is not None and any(
        name in attrs.keys() and attrs[name]  # noqa: SIM118  DictAttrs has no __iter__
        for name in ("Primitive", "Compiler", "SkipOptimization")
    )


class _Folder:
    """Rebuilds one function bottom-up, each constant subexpression as its value.

    Iterative: a network of a thousand operators in a row would exceed Python's recursion limit.
    """

    def __init__(self) -> None:
        self.left_to_relay = False  # met a constant expression, or a construct, that only Relay's pass folds
        # A folded call stays an array until something that is not folded reads it.
        self._new: dict[relay.Expr, relay.Expr | Array] = {}

    def fold(self, root: relay.Function) -> relay.Function:
        stack: list[relay.Expr] = [root]
        while stack:
            node = stack[-1]
            waiting = [child for child in _children(node) if child not in self._new]
            if waiting:
                stack.extend(waiting)
                continue
            stack.pop()
            if node not in self._new:
                self._new[node] = self._rebuild(node)
        return self._expr(root)

    def _expr(self, node: relay.Expr) -> relay.Expr:
        new = self._new[node]
        if isinstance(new, np.ndarray):
            new = self._new[node] = relay.Constant(tvm.nd.array(new), node.span)
        return new

    def _rebuild(self, node: relay.Expr) -> relay.Expr | Array:
        if isinstance(node, relay.Call):
            value = self._evaluate(node)
            return self._rebuild_call(node) if value is None else value
        if isinstance(node, relay.Tuple):
            fields = [self._expr(field) for field in node.fields]
            return node if _same(fields, node.fields) else relay.Tuple(fields, node.span)
        if isinstance(node, relay.TupleGetItem):
            source = self._expr(node.tuple_value)
            if isinstance(source, relay.Tuple):
                return source.fields[node.index]
            if source.same_as(node.tuple_value):
                return node
            return relay.TupleGetItem(source, node.index, node.span)
        if isinstance(node, relay.Function) and not _opaque(node):
            return relay.function.FunctionWithFields(node, body=self._expr(node.body))
        if isinstance(node, (relay.Let, relay.If, relay.Match)):
            self.left_to_relay = True  # control flow: rare in networks, and folding it takes scopes
        return node

    def _rebuild_call(self, call: relay.Call) -> relay.Call:
        op, args = self._expr(call.op), [self._expr(arg) for arg in call.args]
        if op.same_as(call.op) and _same(args, call.args):
            return call
        return relay.Call(op, args, call.attrs, call.type_args, call.span)

    def _evaluate(self, call: relay.Call) -> Array | None:
        """The value of a constant call, or None; where Relay's pass would know it, `left_to_relay` is set."""
        if not isinstance(call.op, tvm.ir.Op) or not call.args:
            return None
        name = call.op.name
        if name in _ONLY_RELAY_FOLDS:
            self.left_to_relay = True
            return None
        if name == "device_copy" or any(call.op.get_attr(a) for a in ("TOpIsStateful", "TNonComputational")):
            return None
        if not all(self._is_constant(arg) for arg in call.args):
            return None
        value = None
        if name in _TABLE and (out := _Out.of(call.checked_type)):
            values = [self._value(arg) for arg in call.args]
            with np.errstate(all="ignore"):
                value = _TABLE[name](call.attrs, out, *values)
        # The table declines what it does not cover (integer division, say) by None or by a type not Relay's.
        if value is None or (value.shape, str(value.dtype)) != out:
            self.left_to_relay = True
            return None
        return np.asarray(value)

    def _is_constant(self, node: relay.Expr) -> bool:
        new = self._new[node]
        if isinstance(new, relay.Tuple):
            return all(_is_constant_tree(field) for field in new.fields)
        return isinstance(new, (np.ndarray, relay.Constant))

    def _value(self, node: relay.Expr) -> Any:
        new = self._new[node]
        return new if isinstance(new, np.ndarray) else _numpy_tree(new)


def _children(node: relay.Expr) -> list[relay.Expr]:
    if isinstance(node, relay.Call):
        return [node.op, *node.args]
    if isinstance(node, relay.Tuple):
        return list(node.fields)
    if isinstance(node, relay.TupleGetItem):
        return [node.tuple_value]
    if isinstance(node, relay.Function) and not _opaque(node):
        return [node.body]
    return []


def _same(new: list[relay.Expr], old: Any) -> bool:
    return all(a.same_as(b) for a, b in zip(new, old, strict=True))


def _is_constant_tree(expr: relay.Expr) -> bool:
    if isinstance(expr, relay.Tuple):
        return all(_is_constant_tree(field) for field in expr.fields)
    return isinstance(expr, relay.Constant)


def _numpy_tree(expr: relay.Expr) -> Any:
    if isinstance(expr, relay.Tuple):
        return [_numpy_tree(field) for field in expr.fields]
    return expr.data.numpy()


# --- The table of operators ---
# name -> function of (the call's attributes, the type of its result, the values of its arguments), giving the
# value or None.  The type gives the result's shape, so operators that move no data are all one reshape.


class _Out(NamedTuple):
    """The type of a call's result: static shape and a dtype numpy has."""

    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, ty: Any) -> _Out | None:
        if not isinstance(ty, relay.TensorType) or ty.dtype not in _NUMPY_DTYPES:
            return None
        if not all(isinstance(dim, tvm.tir.IntImm) for dim in ty.shape):
            return None
        return cls(tuple(int(dim) for dim in ty.shape), ty.dtype)


_NUMPY_DTYPES = {"bool", "float16", "float32", "float64"}
_NUMPY_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}

# The first three Relay folds by the type of the argument, constant or not; the last wraps constants once
# devices are planned, and Relay sees through it.
_ONLY_RELAY_FOLDS = {"shape_of", "vm.shape_of", "ndarray_size", "on_device"}

_Rule: TypeAlias = Callable[..., "Array | None"]


def _arithmetic(ufunc: Callable[..., Any]) -> _Rule:
    return lambda attrs, out, *args: np.asarray(ufunc(*args))


def _floating(function: Callable[..., Any]) -> _Rule:
    # For integers numpy and Relay part ways (rounding of a quotient, negative powers): Relay's word is taken.
    return lambda attrs, out, *args: np.asarray(function(*args)) if out.dtype.startswith("float") else None


def _reshape(attrs: Any, out: _Out, x: Array, *like: Array) -> Array:
    return x.reshape(out.shape)


def _transpose(attrs: Any, out: _Out, x: Array) -> Array:
    return np.transpose(x, None if attrs.axes is None else _ints(attrs.axes))


def _round(x: Array) -> Array:
    whole = np.trunc(x)  # halves away from zero, as LLVM's round; np.round takes them to even
    return np.where(np.abs(x - whole) >= 0.5, whole + np.sign(x), whole)


def _clip(attrs: Any, out: _Out, x: Array) -> Array | None:
    low, high = attrs.a_min, attrs.a_max
    if not out.dtype.startswith("float"):
        low, high = max(low, np.iinfo(out.dtype).min), min(high, np.iinfo(out.dtype).max)
    return np.asarray(np.clip(x, x.dtype.type(low), x.dtype.type(high)))


def _sum(attrs: Any, out: _Out, x: Array) -> Array | None:
    if attrs.exclude or not out.dtype.startswith("int"):
        return None
    axes = None if attrs.axis is None else tuple(_ints(attrs.axis))
    return np.reshape(np.sum(x, axis=axes, dtype=out.dtype), out.shape)


def _take(attrs: Any, out: _Out, x: Array, indices: Array) -> Array | None:
    if attrs.batch_dims or attrs.mode not in ("clip", "wrap"):
        return None
    axis = None if attrs.axis is None else int(attrs.axis)
    return np.asarray(np.take(x, indices, axis=axis, mode=str(attrs.mode)))  # type: ignore[call-overload]


def _strided_slice(attrs: Any, out: _Out, x: Array) -> Array | None:
    begin, end, strides = map(_ints, (attrs.begin, attrs.end, attrs.strides or []))
    axes = range(len(begin)) if attrs.axes is None else _ints(attrs.axes)
    if attrs.slice_mode != "end" or len(begin) != len(end) or any(stride < 0 for stride in strides):
        return None
    strides += [1] * (len(begin) - len(strides))
    window = [slice(None)] * x.ndim
    for axis, *bounds in zip(axes, begin, end, strides, strict=True):
        window[axis] = slice(*bounds)
    return x[tuple(window)]


def _pad(attrs: Any, out: _Out, x: Array, fill: Array) -> Array | None:
    if attrs.pad_mode != "constant":
        return None
    return np.pad(x, [_ints(width) for width in attrs.pad_width], constant_values=fill.item())


def _layout_transform(attrs: Any, out: _Out, x: Array) -> Array | None:
    """Blocked layouts: OIHW8i16o splits axis I as (I, 8i) and O as (O, 16o), pieces stored in that order."""
    source, target = _axes_of(attrs.src_layout), _axes_of(attrs.dst_layout)
    logical = sorted({axis for axis, _ in source})
    if logical != sorted({axis for axis, _ in target}):
        return None
    # To the plain tensor: bring the pieces of each axis together, outermost first, and merge them.
    grouped = _grouped(source, logical)
    dims = [math.prod(x.shape[i] for i in grouped if source[i][0] == axis) for axis in logical]
    plain = x.transpose(grouped).reshape(dims)
    # And from it: split each axis, then write the pieces in the target's order.
    sizes: list[int] = []
    for axis, dim in zip(logical, dims, strict=True):
        factors = [factor for name, factor in target if name == axis]
        block = math.prod(factors[1:])
        if factors[0] or dim % block:  # a layout without its outer axis, or one that needs padding
            return None
        sizes += [dim // block, *factors[1:]]
    return np.transpose(plain.reshape(sizes), np.argsort(_grouped(target, logical)))


def _axes_of(layout: str) -> list[tuple[str, int]]:
    """OI4i -> [("O", 0), ("I", 0), ("I", 4)]; 0 marks the outer piece, whose size the tensor decides."""
    return [(name.upper(), int(factor or 0)) for factor, name in re.findall(r"(\d*)([A-Za-z])", str(layout))]


def _grouped(layout: list[tuple[str, int]], axes: list[str]) -> list[int]:
    """The positions in `layout` of the pieces of the first axis, then of the second, and so on."""
    return [i for axis in axes for i, (name, _) in enumerate(layout) if name == axis]


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


_TABLE: dict[str, _Rule] = {
    "add": _arithmetic(np.add),
    "subtract": _arithmetic(np.subtract),
    "multiply": _arithmetic(np.multiply),
    "negative": _arithmetic(np.negative),
    "abs": _arithmetic(np.abs),
    "maximum": _arithmetic(np.maximum),
    "minimum": _arithmetic(np.minimum),
    "left_shift": _arithmetic(np.left_shift),
    "right_shift": _arithmetic(np.right_shift),
    "nn.relu": _arithmetic(lambda x: np.maximum(x, x.dtype.type(0))),
    "divide": _floating(np.divide),
    "power": _floating(np.power),
    "sqrt": _floating(np.sqrt),
    "rsqrt": _floating(lambda x: np.reciprocal(np.sqrt(x))),
    "exp": _floating(np.exp),
    "floor": _floating(np.floor),
    "ceil": _floating(np.ceil),
    "round": _floating(_round),
    "clip": _clip,
    "cast": lambda attrs, out, x: x.astype(out.dtype),
    "cast_like": lambda attrs, out, x, like: x.astype(out.dtype),
    "sum": _sum,
    "reshape": _reshape,
    "reshape_like": _reshape,
    "expand_dims": _reshape,
    "squeeze": _reshape,
    "broadcast_to": lambda attrs, out, x: np.broadcast_to(x, out.shape),
    "full": lambda attrs, out, x: np.full(out.shape, x, out.dtype),
    "full_like": lambda attrs, out, like, x: np.full(out.shape, x, out.dtype),
    "zeros_like": lambda attrs, out, like: np.zeros(out.shape, out.dtype),
    "ones_like": lambda attrs, out, like: np.ones(out.shape, out.dtype),
    "transpose": _transpose,
    "layout_transform": _layout_transform,
    "concatenate": lambda attrs, out, fields: np.concatenate(fields, axis=int(attrs.axis)),
    "strided_slice": _strided_slice,
    "nn.pad": _pad,
    "take": _take,
    "tile": lambda attrs, out, x: np.tile(x, _ints(attrs.reps)),
    "repeat": lambda attrs, out, x: np.repeat(x, int(attrs.repeats), axis=int(attrs.axis)),
}
