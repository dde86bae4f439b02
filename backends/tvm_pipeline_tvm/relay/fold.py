"""Constant folding in numpy, because Relay's own is most of the time that `relay.build` takes.

Relay's FoldConstant compiles every constant expression (a folded batch norm, a weight's change of layout)
through LLVM, runs the code once and throws it away: 26 of the 33 seconds that mobilenet takes to build.
numpy gives the same numbers at once.  What the table of operators (`fold_table.py`) does not know is left to
Relay; constants of an import are folded by the same table, see `import_folding.py`.

Two ways to use it:

* :func:`fast_context` in place of ``tvm.transform.PassContext``: every FoldConstant that ``relay.build`` or
  ``relay.optimize`` reaches, those nested in other passes too, becomes ours, and nothing else changes.
* :func:`FoldConstantFast`, a pass like its siblings in ``relay.transform``.

``benchmarks/fold_constant.py`` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import autotvm, relay
from tvm.relay.backend import te_compiler

from tvm_pipeline_tvm.kernel_sets import Choices, relay_kernels
from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relay.concatenations_apart import ConcatenationsApart
from tvm_pipeline_tvm.relay.fold_table import FOLDED_BY_TYPE, TABLE, ResultType, parts
from tvm_pipeline_tvm.relay.infer_once import InferOnce
from tvm_pipeline_tvm.relay.int8 import exact_int8
from tvm_pipeline_tvm.relay.refused_lets import without_refused_lets
from tvm_pipeline_tvm.relay.splits import SplitByIndices

# Without this, TVM reads the options of its build again for each kernel, which takes a sixth of a compile's time.
te_compiler.libinfo = cache(te_compiler.libinfo)

MOST_FOLDED_BYTES = 1 << 26  # of a constant that is several times as large as those that it is computed from

__all__ = ["FoldConstantFast", "building", "fast_build", "fast_context"]


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
    """A ``PassContext`` (`context` is its further keywords) with FoldConstant in numpy, and InferType once a function::

    with fast_context():
        lib = relay.build(mod, target, params=params)
    """
    instruments = [_FoldInNumpy(), InferOnce(), *context.pop("instruments", ())]
    return tvm.transform.PassContext(opt_level=opt_level, instruments=instruments, **context)


def fast_build(
    mod: tvm.IRModule,
    target: Any,
    params: Any = None,
    choices: Choices | None = None,
    instruments: Sequence[Any] = (),
    *,
    in_place: bool = False,
    tolerance: float = 0.0,
) -> Any:
    """``relay.build`` as :func:`building` has it; with `in_place` slices can do concatenations so."""
    with building(choices, instruments, tolerance):
        prepared = relay_kernels().prepared(SplitByIndices()(mod), target, params)
        return relay.build(ConcatenationsApart()(prepared) if in_place else prepared, target, params=params)


@contextmanager
def building(choices: Choices | None = None, instruments: Sequence[Any] = (), tolerance: float = 0.0) -> Iterator[None]:
    """A :func:`fast_context` with the schedules that are installed, `choices` of tuning for them, and more instruments.

    Algorithms of other sums are used where their error in a layer is within the tolerance.
    It also mends what TVM 0.19 cannot build for some x86 targets: see `int8.py`, `refused_lets.py` and `splits.py`.
    """
    silent, autotvm.GLOBAL_SCOPE.silent = autotvm.GLOBAL_SCOPE.silent, True
    try:
        kernels = relay_kernels()
        # Each compiler behind TVM eliminates common subexpressions by itself.
        config = {"tir.add_lower_pass": [*kernels.lowering_passes()], "tir.disable_cse_tir": True}
        context = fast_context(config=config, instruments=instruments)
        with exact_int8(), kernels.building(choices or {}, tolerance), without_refused_lets(), context:
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
                folder = Folder()
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


class Folder:
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

    def _evaluate(self, call: relay.Call) -> Array | relay.Expr | None:
        """The value of a constant call, or None; where Relay's pass would know it, `left_to_relay` is set."""
        if not isinstance(call.op, tvm.ir.Op) or not call.args:
            return None
        name = call.op.name
        if name in FOLDED_BY_TYPE:
            return self._by_type(call)
        if name == "device_copy" or any(call.op.get_attr(a) for a in ("TOpIsStateful", "TNonComputational")):
            return None
        if not all(self._is_constant(arg) for arg in call.args):
            return None
        if name == "split":  # gives several tensors
            return relay.Tuple(
                [relay.Constant(tvm.nd.array(part)) for part in parts(call.attrs, self._value(call.args[0]))]
            )
        value = None
        if name in TABLE and (out := ResultType.of(self._type_of(call))):
            values = [self._value(arg) for arg in call.args]
            if _is_inflated(out, values):
                return None
            with np.errstate(all="ignore"):
                value = TABLE[name](call.attrs, out, *values)
        # The table declines what it does not cover (a division by zero, say) by None or by a type not Relay's.
        if value is None or (value.shape, str(value.dtype)) != out:
            return self._by_relay(call)
        return np.asarray(value)

    def _by_type(self, call: relay.Call) -> Array | relay.Expr | None:
        return self._by_relay(call)

    def _by_relay(self, call: relay.Call) -> relay.Expr | None:
        """Leave a constant call to Relay's pass."""
        self.left_to_relay = True
        return None

    def _type_of(self, call: relay.Call) -> Any:
        return call.checked_type

    def _is_constant(self, node: relay.Expr) -> bool:
        new = self._new[node]
        if isinstance(new, relay.Tuple):
            return all(_is_constant_tree(field) for field in new.fields)
        return isinstance(new, (np.ndarray, relay.Constant))

    def _value(self, node: relay.Expr) -> Any:
        new = self._new[node]
        return new if isinstance(new, np.ndarray) else _numpy_tree(new)


def _is_inflated(out: ResultType, values: Sequence[Any]) -> bool:
    """Whether a constant is large and several times what it is made of: a few bytes of a file could take all memory."""
    made = math.prod(out.shape) * np.dtype(out.dtype).itemsize
    arrays = [array for value in values for array in (value if isinstance(value, list) else [value])]
    return made > MOST_FOLDED_BYTES and made > 4 * sum(array.nbytes for array in arrays)


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
