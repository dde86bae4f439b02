"""RewriteConcat: the pass that computes the readers of a concatenation in parts, so that no kernel has to make it.

`concatenations.py` has what is no IR's of it; `relay/rewrite_concat.py` is the same of Relay.

Next: `rule_rewriting.py`, which writes functions anew, and `kernel_passes.py`, which makes kernels of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_pipeline.core.model import Model
from tvm_pipeline.memory.rewriting import fewest
from tvm_pipeline_tvm import concatenations
from tvm_pipeline_tvm.concatenations import (
    ModelInParts,
    axis_of,
    cut,
    is_depthwise,
    least_peak_bytes,
    partial_kernel,
    splits_convolution,
    widest_first,
)
from tvm_pipeline_tvm.numpy_rules import ints
from tvm_pipeline_tvm.relax.build import in_integers, prepared
from tvm_pipeline_tvm.relax.channels_first import OF_ONE, OF_TWO
from tvm_pipeline_tvm.relax.dataflow import (
    Constant,
    constant_of,
    has_fixed_shape,
    name_of,
    one_block,
    plain_main,
    shape_of,
)
from tvm_pipeline_tvm.relax.extraction import analyse, main_of
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.integer_layers import LANES
from tvm_pipeline_tvm.relax.kernel_passes import fused
from tvm_pipeline_tvm.relax.numpy_table import constant
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter, is_plain
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.target_text import tvm_target

TARGET = "llvm -mcpu=x86-64-v3"  # whose kernels stand for those of all CPU cores; nothing is compiled for it

_CONVOLUTION = "relax.nn.conv2d"
_BY_ELEMENT = frozenset(f"relax.{name}" for name in (*OF_ONE, *OF_TWO, "nn.prelu"))
_POOLS = frozenset(f"relax.nn.{name}" for name in ("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"))
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("max", "mean", "min", "sum"))
_ROUNDINGS = frozenset(("relax.quantize", "relax.dequantize"))


@tvm.transform.module_pass(opt_level=0, name="RewriteConcat")
class RewriteConcat:
    """The pass that replaces concatenations of channels by partial convolutions where that lowers the peak.

        before: j = concat((x, y), axis=1); gv = conv2d(j, w)               (x has the most channels)
        after:  b = conv2d(y, w[:, a:]); a = conv2d(x, w[:, :a]); gv = add(b, a)

        before: j = concat((x, y), axis=1); gv = conv2d(j, w, groups=a + b)
        after:  a = conv2d(x, w[:a], groups=a); b = conv2d(y, w[a:], groups=b); gv = concat((a, b), axis=1)

    The module is `simplified`, and convolutions with constant weights are rewritten in every plain layout, together
    with the operators between them and the concatenation that work on each channel by itself (ReLU, pooling, batch
    norms). FuseOps goes through the bindings in their order, and fuses an operator with the addition behind it unless
    that has a convolution already. So all partial convolutions stand before the additions, in the reverse order of
    their sum, and each addition is fused behind its own convolution; otherwise the first one would take in all
    additions, and all other partial sums would wait for it. The part of the most channels comes first, since the sum
    of those before is alive beside each of the others. A concatenation with a reader that needs it whole stays as it
    is.

    Peaks are those of the best order of the fused kernels, as the pass MemoryOrder makes it. Only the concatenations
    that the least peak requires are rewritten. Float sums change in their last bits, since their terms are added in
    another order. So in a module with `quantize` or `dequantize`, whose bits must stay, convolutions that add channels
    up read concatenations whole: two partial sums are no layer of `integer_layers.py`. What computes each channel by
    itself is done in parts there, depthwise convolutions among it.

    Run it before FuseKernels; weights must be constants (`relax.transform.BindParams`).

    Raises:
        ModelError: `main` is no dataflow graph.
    """

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        found = Concatenations(mod)
        chosen = fewest(found.names, found.peak_bytes)
        return found.rewritten(chosen) if chosen else mod


class RelaxRewriting(ModelInParts):
    """A Model that Relax imports, and its concatenations.

    Raises:
        ModelError: TVM cannot import the model.
    """

    def __init__(self, model: Model) -> None:
        found = Concatenations(import_model(model))
        super().__init__(model, found, "relax.json", is_quantized=found.is_quantized)


class Concatenations(concatenations.Concatenations[Any]):
    """The concatenations of a module that can be done in parts; some of them are chosen by their names.

    Args:
        mod: of plain dataflow, as a frontend makes it.

    Attributes:
        names: one for each: position and shape in the simplified module.
        is_quantized: whether it has roundings to integers, so that all bits must stay.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = simplified(one_block(mod))
        self._reading = _Reading(main_of(self._mod))
        self.is_quantized = self._reading.is_quantized
        all_ = concatenations.named((var, shape_of(var), "") for var in self._reading.concatenations)
        super().__init__({name: var for name, var in all_.items() if self._reading.can_be_in_parts(var)})

    @staticmethod
    def _optimal_peak_bytes(mod: tvm.IRModule) -> int:
        return optimal_peak_bytes(mod)

    def _written(self, chosen: Sequence[Any]) -> tvm.IRModule:
        if not chosen:
            return self._mod
        main = _Writing(self._reading, chosen).main()
        functions = dict(self._mod.functions.items())
        functions[self._mod.get_global_var("main")] = main
        return tvm.IRModule(functions, attrs=self._mod.attrs, global_infos=self._mod.global_infos)


def optimal_peak_bytes(mod: tvm.IRModule) -> int:
    """Return the peak bytes of the best order of the kernels that are made of a simplified module for CPU cores."""
    made = fused(prepared(mod, in_integers([TARGET])), tvm_target(TARGET), apart=True)
    return least_peak_bytes(analyse(made).graph)


class _Reading:
    """What reads each tensor of a function.

    Attributes:
        values: what each tensor is computed by.
        concatenations: the tensors that are concatenations of several, in the order of the bindings.
        is_quantized: see `Concatenations`.
    """

    def __init__(self, main: relax.Function) -> None:
        self.main = main
        bindings, result = plain_main(main)
        self.values = {binding.var: binding.value for binding in bindings}
        self.is_quantized = any(name_of(value) in _ROUNDINGS for value in self.values.values())
        found = self.values.items() if is_plain(main) else ()
        self.concatenations = [var for var, value in found if is_concatenation(value)]
        self._readers: dict[Any, list[Any]] = defaultdict(list)
        for var, value in self.values.items():
            for read in relax.analysis.free_vars(value):
                self._readers[read].append(var)
        self._results = set(relax.analysis.free_vars(result))

    def can_be_in_parts(self, concatenation: Any) -> bool:
        """Return whether all readers can read it in parts; a layer in integers stays one if it has so many channels."""
        value = self.values[concatenation]
        axis = axis_of_concatenation(value)
        if self.is_quantized and any(shape_of(part)[axis] % LANES for part in value.args[0].fields):
            return False
        return self.take_parts(concatenation, axis)

    def take_parts(self, var: Any, axis: int) -> bool:
        """Return whether `var` is no result and all its readers can read its channels (on `axis`) in parts."""
        readers = self._readers[var]
        return (
            var not in self._results and bool(readers) and all(self._takes_parts(each, var, axis) for each in readers)
        )

    def _takes_parts(self, reader: Any, var: Any, axis: int) -> bool:
        value = self.values[reader]
        if is_concatenation(value):
            return axis_of_concatenation(value) == axis
        if not isinstance(value, tvm.ir.Call) or not var.same_as(value.args[0]) or not has_fixed_shape(reader.ty):
            return False
        if self.is_quantized and name_of(value) == _CONVOLUTION and not _is_depthwise(value, axis):
            return False
        if name_of(value) == "relax.dequantize" and not self.take_parts(reader, axis):
            return False  # a layer in integers reads bytes, and no concatenation of floats
        return _splits(value, axis)


def is_concatenation(value: Any) -> bool:
    """Return whether a value is the concatenation of several tensors of fixed shapes along an axis."""
    if name_of(value) != "relax.concat" or value.attrs.axis is None or not has_fixed_shape(value.ty):
        return False
    return isinstance(value.args[0], relax.Tuple) and len(value.args[0].fields) > 1


def axis_of_concatenation(value: Any) -> int:
    return int(value.attrs.axis) % len(shape_of(value))


def _is_depthwise(call: Any, axis: int) -> bool:
    return is_depthwise(call.attrs, shape_of(call.args[0]), axis)


def _splits(call: Any, axis: int) -> bool:
    """Return whether the call can be done in parts along that axis of its first argument."""
    name, attrs, (first, *others) = name_of(call), call.attrs, call.args
    data = shape_of(first)
    if name == _CONVOLUTION:
        (kernel,) = others
        return isinstance(kernel, Constant) and splits_convolution(attrs, data, shape_of(kernel), axis)
    if name in _POOLS:
        layout = str(attrs.layout)
        return layout.find("C") == axis and str(attrs.out_layout) in ("", layout)
    if name in _REDUCTIONS:
        reduced = range(len(data)) if attrs.axis is None else [each % len(data) for each in ints(attrs.axis)]
        return bool(attrs.keepdims) and axis not in reduced
    if name not in _BY_ELEMENT or shape_of(call) != data:
        return False
    return all(
        shape_of(each) == (1,) * len(shape_of(each)) or _along(call, each, axis) is not None
        if isinstance(each, Constant)
        else not isinstance(each, relax.Var)  # a number
        for each in others
    )


def _along(call: Any, argument: Any, axis: int) -> int | None:
    """Return the axis of a constant that runs along `axis` of the call's result; None where it is no such vector."""
    stated = getattr(call.attrs, "axis", None)
    return axis_of(shape_of(argument), shape_of(call), axis, None if stated is None else int(stated))


class _Writing(Rewriter):
    """Writes the function without the concatenations `chosen`."""

    def __init__(self, reading: _Reading, chosen: Sequence[Any]) -> None:
        super().__init__(reading.main, lambda _: ())
        self._reading, self._chosen = reading, set(chosen)
        self._parts: dict[Any, tuple[int, list[Any]]] = {}  # of an old tensor: the axis of its channels, and its parts

    def main(self) -> relax.Function:
        return self.written("main", self._old.body.body)

    def _bind(self, var: Any, value: Any) -> None:
        if is_concatenation(value):
            axis = axis_of_concatenation(value)
            parts = [part for field in value.args[0].fields for part in self._parts_of(field)]
            self._keep(var, axis, parts, apart=var in self._chosen)
        elif isinstance(value, tvm.ir.Call) and value.args and value.args[0] in self._parts:
            axis, parts = self._parts[value.args[0]]
            calls = _partial_calls(value, axis, parts)
            if name_of(value) == _CONVOLUTION and not _is_depthwise(value, axis):
                self._new[var] = self._summed(calls, [shape_of(part)[axis] for part in parts])
            else:
                made = [self.emit(call) for call in calls]
                self._keep(var, axis, made, apart=self._reading.take_parts(var, axis))
        else:
            super()._bind(var, value)

    def _parts_of(self, expr: Any) -> list[Any]:
        return self._parts[expr][1] if expr in self._parts else [self.replaced(expr)]

    def _keep(self, var: Any, axis: int, parts: list[Any], *, apart: bool) -> None:
        """Note the parts of a tensor, or concatenate them where a reader needs it whole."""
        if apart:
            self._parts[var] = axis, parts
        else:
            self._new[var] = self.emit(relax.op.concat(parts, axis))

    def _summed(self, calls: Sequence[Any], channels: Sequence[int]) -> Any:
        """Return the sum of partial convolutions, which are bound in its reverse order; see `RewriteConcat`."""
        total, *others = [self.emit(calls[index]) for index in reversed(widest_first(channels))][::-1]
        for other in others:
            total = self.emit(relax.op.add(other, total))
        return total


def _partial_calls(call: Any, axis: int, parts: Sequence[Any]) -> list[Any]:
    """Return the call on each part by itself; its constants are cut along their channels."""
    made, start = [], 0
    for part in parts:
        count = shape_of(part)[axis]
        if name_of(call) == _CONVOLUTION:
            made.append(_partial_convolution(call, axis, part, start))
        else:
            others = [
                _cut(each, _along(call, each, axis), start, count) if isinstance(each, Constant) else each
                for each in call.args[1:]
            ]
            made.append(relax.Call(call.op, [part, *others], call.attrs))
        start += count
    return made


def _partial_convolution(call: Any, axis: int, part: Any, start: int) -> Any:
    attrs, (data, weights) = call.attrs, call.args
    own = partial_kernel(attrs, shape_of(data), shape_of(weights), axis, start, shape_of(part)[axis])
    return relax.op.nn.conv2d(
        part,
        _cut(weights, own.axis, own.start, own.extent),
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=own.groups,
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype=attrs.out_dtype or None,
    )


def _cut(argument: Any, axis: int | None, start: int, count: int) -> Any:
    values = constant_of(argument)
    assert values is not None
    own = cut(values, axis, start, count)
    return argument if own is values else constant(own)
