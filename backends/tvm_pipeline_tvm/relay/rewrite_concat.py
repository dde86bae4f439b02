"""RewriteConcat: the pass that computes the readers of a concatenation in parts, so that no kernel has to make it.

`concatenations.py` has what is no IR's of it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Sequence
from typing import TypeAlias

import numpy as np
import tvm
from tvm import relay
from tvm.relay import dataflow_pattern

from tvm_pipeline.core.model import Model
from tvm_pipeline.memory.rewriting import fewest
from tvm_pipeline_tvm import concatenations
from tvm_pipeline_tvm.concatenations import (
    ModelInParts,
    axis_of,
    cut,
    is_depthwise,
    partial_kernel,
    splits_convolution,
    widest_first,
)
from tvm_pipeline_tvm.relay.extraction import analyse
from tvm_pipeline_tvm.relay.fold import FoldConstantFast
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions, read_by, rebuilt

_log = logging.getLogger(__name__)

# Operators whose output channels depend on one channel of the first input each, and on constants.
BY_ELEMENT = {
    *("abs", "add", "bias_add", "cast", "clip", "divide", "erf", "exp", "leaky_relu", "log", "maximum", "minimum"),
    *("multiply", "negative", "power", "prelu", "relu", "rsqrt", "sigmoid", "sqrt", "subtract", "tanh"),
    *("quantize", "dequantize", "requantize"),
}
POOLS = {"avg_pool2d", "global_avg_pool2d", "global_max_pool2d", "max_pool2d"}
CONVOLUTIONS = {"nn.conv2d", "qnn.conv2d"}
# The attributes that the parts of a convolution have in common.
SHARED_ATTRIBUTES = "strides padding dilation kernel_size data_layout kernel_layout out_layout out_dtype".split()  # noqa: SIM905


def RewriteConcat() -> tvm.transform.Pass:  # noqa: N802
    """Return a pass that replaces concatenations of channels by partial convolutions where that lowers the peak.

        before: fn (%x, %y) { %0 = concatenate((%x, %y), axis=1); conv2d(%0, w) }      (%x has the most channels)
        after:  fn (%x, %y) { %0 = stop_fusion(conv2d(%x, w[:, :a])); add(conv2d(%y, w[:, a:]), %0) }

        before: fn (%x, %y) { %0 = concatenate((%x, %y), axis=1); conv2d(%0, w, groups=a + b) }
        after:  fn (%x, %y) { concatenate((conv2d(%x, w[:a], groups=a), conv2d(%y, w[a:], groups=b)), axis=1) }

    `nn.conv2d` and `qnn.conv2d` with constant weights are rewritten in every plain layout, together with the operators
    between them and the concatenation that work on each channel by itself (ReLU, pooling, requantization).
    `stop_fusion` makes FuseOps put each addition behind its own convolution; otherwise the first convolution would
    take in all additions, and all other partial sums would wait for it. The part of the most channels comes first,
    since the sum of those before is alive beside each of the others. A concatenation with a reader that needs it whole
    stays as it is.

    Peaks are those of the best order of the fused kernels, as the pass MemoryOrder makes it. Only the concatenations
    that the least peak requires are rewritten. Depthwise and quantized convolutions give the same bits; float
    sums change in their last bits (5e-6 of outputs of size 1), since their terms are added in another order.

    Bind weights and run `relay.transform.SimplifyInference()` before, so that they are constants; quantized models must
    still be in QNN.

    Raises:
        ModelError: `main` is no dataflow graph.
    """

    @tvm.transform.module_pass(opt_level=0, name="RewriteConcat", required=["InferType"])
    def rewrite(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        found = Concatenations(mod)
        return found.rewritten(fewest(found.names, found.peak_bytes))

    return rewrite


class RelayRewriting(ModelInParts):
    """A Model that Relay imports, and its concatenations.

    Raises:
        ModelError: TVM cannot import the model.
    """

    def __init__(self, model: Model) -> None:
        _log.info(f"importing {model.name}")
        mod, params = import_model(model)
        if params:
            mod["main"] = relay.build_module.bind_params_by_name(mod["main"], params)
        passes = (relay.transform.SimplifyInference(), FoldConstantFast(), relay.transform.InferType())
        with tvm.transform.PassContext(opt_level=3):
            mod = tvm.transform.Sequential(passes)(mod)
        is_quantized = any(name.startswith("qnn.") for name in relay.analysis.list_op_freqs(mod))
        super().__init__(model, Concatenations(mod), "relay.json", is_quantized=is_quantized)


class Concatenations(concatenations.Concatenations[relay.Call]):
    """The concatenations of a module that can be done in parts; some of them are chosen by their names.

    Args:
        mod: type-checked, as `RewriteConcat` wants it.

    Attributes:
        names: one for each; the node of the model's file where the importer has told it, else position and shape.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod, self._reading = mod, _Reading(mod["main"])
        all_ = concatenations.named(
            (expr, _shape(expr), _source(expr)) for expr in self._reading.expressions if _is_concatenation(expr)
        )
        super().__init__({name: expr for name, expr in all_.items() if self._reading.take_parts(expr, _axis(expr))})

    @staticmethod
    def _optimal_peak_bytes(mod: tvm.IRModule) -> int:
        return optimal_peak_bytes(mod)

    def _written(self, chosen: Sequence[relay.Call]) -> tvm.IRModule:
        return _rewritten(self._mod, self._reading, chosen)


def _source(expr: relay.Expr) -> str:
    """Return the node of the model's file that an expression comes from; empty where the importer has not told."""
    return str(expr.span.source_name.name) if isinstance(expr.span, relay.Span) else ""


def optimal_peak_bytes(mod: tvm.IRModule) -> int:
    """Return the peak bytes of the best order of the kernels that FuseOps makes of `mod`; inputs stay alive."""
    passes = (
        relay.transform.SimplifyInference(),
        relay.qnn.transform.CanonicalizeOps(),
        FoldConstantFast(),
        relay.transform.FuseOps(2),
        relay.transform.InferType(),
    )
    own = _with_main(mod, dataflow_pattern.rewrite(_OwnRequantize(), mod["main"]))
    with tvm.transform.PassContext(opt_level=3):
        fused = tvm.transform.Sequential(passes)(own)
    return concatenations.least_peak_bytes(analyse(fused).graph)


class _OwnRequantize(dataflow_pattern.DFPatternCallback):
    """Copy each requantization: CanonicalizeOps writes the default rounding into the expression that it reads."""

    def __init__(self) -> None:
        super().__init__(rewrite_once=True)
        self.pattern = dataflow_pattern.is_op("qnn.requantize")(*(dataflow_pattern.wildcard() for _ in range(5)))

    def callback(self, pre: relay.Expr, post: relay.Expr, node_map: object) -> relay.Expr:
        options = {key: post.attrs[key] for key in ("axis", "rounding", "compute_dtype", "out_dtype")}
        return relay.qnn.requantize(*post.args, **options)


class _Reading:
    """The readers of each expression of a function, and the concatenations that no reader needs whole."""

    def __init__(self, main: relay.Function) -> None:
        self.expressions = outer_expressions(main.body)
        self.readers: dict[relay.Expr, list[relay.Expr]] = {}
        self.whole = {main.body}  # the results
        for expr in self.expressions:
            for argument in read_by(expr):
                self.readers.setdefault(argument, []).append(expr)
            if isinstance(expr, relay.Tuple) and expr.same_as(main.body):
                self.whole.update(expr.fields)

    def take_parts(self, expr: relay.Expr, axis: int) -> bool:
        """Return whether `expr` is no result and all its readers can read its channels (on `axis`) in parts."""
        readers = self.readers.get(expr, [])
        if expr in self.whole or not readers:
            return False
        return all(self._takes_parts(reader, expr, axis) for reader in readers)

    def _takes_parts(self, reader: relay.Expr, expr: relay.Expr, axis: int) -> bool:
        if isinstance(reader, relay.Tuple):  # `expr` goes into another concatenation
            joins = self.readers.get(reader, [])
            return reader not in self.whole and all(_is_concatenation(join) and _axis(join) == axis for join in joins)
        return isinstance(reader, relay.Call) and reader.args[0].same_as(expr) and _splits(reader, axis)


def _name(expr: relay.Expr) -> str:
    return str(expr.op.name) if isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) else ""


def _shape(expr: relay.Expr) -> tuple[int, ...]:
    return tuple(int(extent) for extent in expr.checked_type.shape)


def _is_scalar(expr: relay.Expr) -> bool:
    return isinstance(expr, relay.Constant) and int(np.prod(_shape(expr))) == 1


def _is_concatenation(expr: relay.Expr) -> bool:
    """Return whether it concatenates several tensors; QNN's must have constant scales and zero points."""
    if _name(expr) not in ("concatenate", "qnn.concatenate") or not isinstance(expr.args[0], relay.Tuple):
        return False
    quantization = [field for argument in expr.args[1:] for field in read_by(argument) or [argument]]
    static = all(isinstance(extent, tvm.tir.IntImm) for extent in expr.checked_type.shape)
    return static and len(expr.args[0].fields) > 1 and all(map(_is_scalar, quantization))


def _axis(concatenation: relay.Call) -> int:
    return int(concatenation.attrs.axis) % len(concatenation.checked_type.shape)


def _splits(call: relay.Call, axis: int) -> bool:
    """Return whether the call can be done in parts along that axis of its first argument."""
    name, attrs = _name(call), call.attrs
    others = call.args[1:]
    if not all(isinstance(argument, relay.Constant) for argument in others):
        return False
    if name in CONVOLUTIONS:
        return splits_convolution(attrs, _shape(call.args[0]), _shape(others[0]), axis)
    short = name.rpartition(".")[2]
    if short in POOLS:
        return str(attrs.layout).find("C") == axis
    if short not in BY_ELEMENT or _shape(call) != _shape(call.args[0]):
        return False
    return all(_is_scalar(argument) or _along(call, argument, axis) is not None for argument in others)


def _along(call: relay.Call, constant: relay.Constant, axis: int) -> int | None:
    """Return the axis of a constant that runs along `axis` of the call's result; None where it is no such vector."""
    names = call.attrs.keys() if call.attrs is not None else ()
    return axis_of(_shape(constant), _shape(call), axis, int(call.attrs.axis) if "axis" in names else None)


# A tensor in parts, and the number of channels of each part.
_Parts: TypeAlias = "list[tuple[relay.Expr, int]]"


def _rewritten(mod: tvm.IRModule, reading: _Reading, chosen: Collection[relay.Call]) -> tvm.IRModule:
    """Return the module without the concatenations `chosen`."""
    if not chosen:
        return mod
    writing = _Writing(reading, set(chosen))
    for expr in reading.expressions:
        writing.take(expr)
    main = mod["main"]
    function = relay.Function(main.params, writing.whole(main.body), main.ret_type, main.type_params, main.attrs)
    return relay.transform.InferType()(_with_main(mod, function))


def _with_main(mod: tvm.IRModule, function: relay.Function) -> tvm.IRModule:
    made = tvm.IRModule(mod.functions, mod.type_definitions, attrs=mod.attrs)
    made["main"] = function
    return made


class _Writing:
    """Builds the rewritten function, expression by expression."""

    def __init__(self, reading: _Reading, chosen: set[relay.Call]) -> None:
        self.reading, self.chosen = reading, chosen
        self.made: dict[relay.Expr, relay.Expr] = {}
        self.parts: dict[relay.Expr, tuple[int, _Parts]] = {}  # with the axis of the channels

    def whole(self, expr: relay.Expr) -> relay.Expr:
        if expr in self.parts:
            axis, parts = self.parts[expr]
            return relay.concatenate([part for part, _ in parts], axis=axis)
        return self.made[expr]

    def take(self, expr: relay.Expr) -> None:
        if expr in self.chosen:
            self.parts[expr] = _axis(expr), self.joined(expr)
        elif isinstance(expr, relay.Call) and expr.args and expr.args[0] in self.parts:
            axis, parts = self.parts[expr.args[0]]
            if _name(expr) in CONVOLUTIONS and not is_depthwise(expr.attrs, _shape(expr.args[0]), axis):
                self.made[expr] = _summed(_partial_calls(expr, axis, parts), [count for _, count in parts])
                return
            self.parts[expr] = axis, _partial_calls(expr, axis, parts)
            if not self.reading.take_parts(expr, axis):
                self.made[expr] = self.whole(expr)
                del self.parts[expr]
        else:
            self.made[expr] = rebuilt(expr, {argument: self.whole(argument) for argument in read_by(expr)})

    def joined(self, concatenation: relay.Call) -> _Parts:
        """Return the tensors that it concatenates, with the scale and the zero point of its result."""
        axis, fields = _axis(concatenation), concatenation.args[0].fields
        parts = [self.parts.get(field, (axis, []))[1] or [(self.made[field], _shape(field)[axis])] for field in fields]
        if _name(concatenation) == "qnn.concatenate":
            scales, zeros, *result = concatenation.args[1:]
            own = zip(scales.fields, zeros.fields, strict=True)
            kind = concatenation.checked_type.dtype
            parts = [_requantized(of, from_, result, kind) for of, from_ in zip(parts, own, strict=True)]
        return list(itertools.chain(*parts))


def _requantized(parts: _Parts, own: Sequence[relay.Constant], result: Sequence[relay.Constant], kind: str) -> _Parts:
    if all(one.data.numpy() == other.data.numpy() for one, other in zip(own, result, strict=True)):
        return parts
    return [(relay.qnn.requantize(part, *own, *result, out_dtype=kind), count) for part, count in parts]


def _summed(parts: _Parts, channels: Sequence[int]) -> relay.Expr:
    """Return the sum of partial convolutions, that of the most channels first: the other ones stand beside a sum."""
    total, *others = (parts[index][0] for index in widest_first(channels))
    for other in others:
        total = relay.add(other, relay.annotation.stop_fusion(total))
    return total


def _partial_calls(call: relay.Call, axis: int, parts: _Parts) -> _Parts:
    """Return the call on each part by itself; its constants are cut along their channels."""
    made, start = [], 0
    for part, count in parts:
        if _name(call) in CONVOLUTIONS:
            made.append(_partial_convolution(call, axis, part, start, count))
        else:
            constants = [_cut(constant, _along(call, constant, axis), start, count) for constant in call.args[1:]]
            made.append((relay.Call(call.op, [part, *constants], call.attrs), count))
        start += count
    return made


def _partial_convolution(
    call: relay.Call, axis: int, part: relay.Expr, start: int, count: int
) -> tuple[relay.Expr, int]:
    options = {key: call.attrs[key] for key in SHARED_ATTRIBUTES}
    weights, *scales = call.args[1:]  # and zero points; one of each, or one for each filter
    own = partial_kernel(call.attrs, _shape(call.args[0]), _shape(weights), axis, start, count)
    weights, filters = _cut(weights, own.axis, own.start, own.extent), _shape(call)[axis]
    if is_depthwise(call.attrs, _shape(call.args[0]), axis):
        filters = own.extent
        scales = [_cut(constant, 0, own.start, own.extent) for constant in scales]
    make = relay.nn.conv2d if _name(call) == "nn.conv2d" else relay.qnn.conv2d
    return make(part, weights, *scales, channels=filters, groups=own.groups, **options), filters


def _cut(constant: relay.Constant, axis: int | None, start: int, count: int) -> relay.Constant:
    values = constant.data.numpy()
    own = cut(values, axis, start, count)
    return constant if own is values else relay.const(own, constant.checked_type.dtype)
