"""Read the kernels of a Relax module: what each call computes, and on what. Next: `build.py`, which keeps them.

FuseOps gathers elementary operators into primitive functions, and FuseTIR makes one kernel of each:

    fused_conv2d_add_relu(x, w, b):  conv2d(x, w) -> add(., b) -> relu        before FuseTIR: the elementary operators
    call_tir(fused_conv2d_add_relu, (x, w, b))                               after it: the calls, in the same order
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, s_tir, tirx

from tvm_pipeline.core.tensor_layout import is_blocked
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source, tensor_bytes
from tvm_pipeline_tvm.relax.dataflow import LAYOUT, Constant, fields, name_of, plain_main

MACS = "tvm_pipeline.macs"  # of a block: the multiply-accumulates of its function, where others are done for them
WEIGHT_ENTRY: Entry = (-2, 0)
_WEIGHT = Source(None, -1)
# What keeps every byte where it is, and what moves elements besides.
RESHAPES = frozenset(("reshape", "squeeze", "expand_dims", "flatten"))
MOVES = RESHAPES | {"layout_transform"}
_ONLY_MOVES = re.compile("(?:(?:{})(?:_|$))+".format("|".join(sorted(MOVES))))


@dataclass(slots=True)
class Call:
    """One call of a kernel: its function, and what it is given.

    Attributes:
        arguments: an entry of the module, or the index of a constant.
    """

    function: str
    arguments: list[Entry | int]


@dataclass(slots=True)
class FlatModule:
    """What a module computes, as a list of calls.

    Attributes:
        kernels: what each call computes.
        is_view: whether a call only shows its input under another shape.
        heads: the entries that are the module's outputs.
        constants: the weights, each once: the steps of an LSTM are given copies that were packed apart.
    """

    kernels: list[Kernel] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    is_view: list[bool] = field(default_factory=list)
    heads: list[Entry] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)


def flat_module(mod: tvm.IRModule) -> FlatModule:
    """Return the kernels of a module between FuseOps and FuseTIR.

    Raises:
        ModelError: an operator is no kernel; the message names it.
    """
    flat, main = FlatModule(), mod["main"]
    entries: dict[Any, list[Entry]] = {param: [(-1, index)] for index, param in enumerate(main.params)}
    numbers: dict[Any, int] = {}  # of constants, and of what is in them

    def constant(value: Any) -> int:
        if value not in numbers:
            array = value.value.numpy()
            content = str(array.dtype), array.shape, hashlib.sha256(array.tobytes()).digest()
            if content not in numbers:
                numbers[content] = len(flat.constants)
                flat.constants.append(value.value)
            numbers[value] = numbers[content]
        return numbers[value]

    def given(expr: Any) -> list[Entry | int]:
        if isinstance(expr, Constant):
            return [constant(expr)]
        if isinstance(expr, relax.Tuple):
            return [each for part in expr.fields for each in given(part)]
        if isinstance(expr, relax.TupleGetItem):
            return [given(expr.tuple_value)[expr.index]]
        return list(entries[expr])

    bindings, result = plain_main(main)
    for binding in bindings:
        value = binding.value
        if not isinstance(value, tvm.ir.Call):
            entries[binding.var] = _only_entries(given(value))
            continue
        called, arguments = _called(value)
        flat.calls.append(Call(_name(called), [each for argument in arguments for each in given(argument)]))
        types = [type_ for argument in arguments for type_ in fields(argument.ty)]
        kernel, is_view = _kernel(mod, mod[called], flat, types, fields(value.ty))
        flat.kernels.append(kernel)
        flat.is_view.append(is_view)
        entries[binding.var] = [(len(flat.kernels) - 1, index) for index in range(len(kernel.outputs))]
    flat.heads = _only_entries(given(result))
    return flat


def _only_entries(found: Sequence[Entry | int]) -> list[Entry]:
    return [each if isinstance(each, tuple) else WEIGHT_ENTRY for each in found]


def _name(symbol: Any) -> str:
    return str(getattr(symbol, "name_hint", None) or symbol.name)


def _called(value: Any) -> tuple[Any, Sequence[Any]]:
    """Return the function that a call runs and its arguments."""
    if name_of(value) == "relax.call_tir":
        return value.args[0], value.args[1].fields
    if isinstance(value.op, tvm.ir.GlobalVar):
        return value.op, value.args
    raise ModelError(
        f"operator {name_of(value).removeprefix('relax.')} has no kernel: TVM {tvm.__version__} cannot legalise it"
    )


def _kernel(
    mod: tvm.IRModule, function: Any, flat: FlatModule, types: Sequence[Any], results: Sequence[Any]
) -> tuple[Kernel, bool]:
    """Return the kernel of the last call of `flat`, and whether it is a view."""
    arguments = flat.calls[-1].arguments
    count = itertools.count()
    known: list[tuple[Source, str]] = []
    for argument in arguments:
        if isinstance(argument, int):
            known.append((_WEIGHT, ""))
            continue
        writer, index = argument
        known.append((Source(None, next(count)), flat.kernels[writer].outputs[index].layout if writer >= 0 else ""))
    walk = _Walk(mod)
    made = walk.result(function, flat.calls[-1].function, known, [tuple(map(int, type_.shape)) for type_ in results])
    reads = tuple(argument for argument in arguments if isinstance(argument, tuple))
    weights = [type_ for type_, argument in zip(types, arguments, strict=True) if isinstance(argument, int)]
    if not walk.operators and not reads:  # a weight that was not folded is a value of its own here
        walk.operators.append(("constant", 1))
        walk.arguments.append(())
        made = [(Source(0, index), "") for index in range(len(results))]
    outputs = tuple(
        Output(tuple(map(int, type_.shape)), str(type_.dtype), layout, source)
        for type_, (source, layout) in zip(results, made, strict=True)
    )
    param_bytes = sum(tensor_bytes([int(extent) for extent in type_.shape], str(type_.dtype)) for type_ in weights)
    kernel = Kernel(tuple(walk.operators), tuple(walk.arguments), reads, outputs, param_bytes, walk.macs)
    return kernel, kernel.is_glue and walk.kinds <= RESHAPES


class _Walk:
    """Collects the elementary operators of one kernel."""

    def __init__(self, mod: tvm.IRModule) -> None:
        self._mod = mod
        self.operators: list[tuple[str, int]] = []
        self.arguments: list[tuple[Source, ...]] = []
        self.kinds: set[str] = set()
        self.macs = 0

    def result(
        self, function: Any, name: str, given: list[tuple[Source, str]], shapes: list[tuple[int, ...]]
    ) -> list[tuple[Source, str]]:
        """Return the sources and layouts of what a function gives, from those of what it is given."""
        if isinstance(function, tirx.PrimFunc):
            return self._operator(function, name, given, shapes)
        rest = iter(given)
        values = {param: list(itertools.islice(rest, len(fields(param.ty)))) for param in function.params}

        def of(expr: Any) -> list[tuple[Source, str]]:
            if isinstance(expr, relax.Tuple):
                return [each for part in expr.fields for each in of(part)]
            if isinstance(expr, relax.TupleGetItem):
                return [of(expr.tuple_value)[expr.index]]
            return [(_WEIGHT, "")] if isinstance(expr, Constant) else values[expr]

        bindings, result = plain_main(function)
        for binding in bindings:
            value = binding.value
            if not isinstance(value, tvm.ir.Call):
                values[binding.var] = of(value)
                continue
            called, arguments = _called(value)
            read = [each for argument in arguments for each in of(argument)]
            extents = [tuple(map(int, type_.shape)) for type_ in fields(value.ty)]
            values[binding.var] = self._operator(self._mod[called], _name(called), read, extents)
        return of(result)

    def _operator(
        self, function: Any, name: str, read: list[tuple[Source, str]], shapes: list[tuple[int, ...]]
    ) -> list[tuple[Source, str]]:
        kind = _kind(name)
        self.kinds.add(kind)
        stated = function.attrs.get(LAYOUT) if function.attrs else None
        if _ONLY_MOVES.fullmatch(kind):
            return [(read[0][0], str(stated or ""))]
        layout = str(stated) if stated is not None else ""
        if stated is None:
            inherited = [layout for _, layout in read if is_blocked(layout)]
            layout = next((each for each in inherited if _rank(each) == len(shapes[0])), "")
        number = len(self.operators)
        self.operators.append((kind, sum(map(math.prod, shapes))))
        self.arguments.append(tuple(source for source, _ in read))
        self.macs += macs_of(function)
        return [(Source(number, index), layout) for index in range(len(shapes))]


def _kind(name: str) -> str:
    """Return the kind of a function's name: of a kernel that FuseTIR made, the names of its parts.

    Examples:
        >>> _kind("conv2d12"), _kind("fused_conv2d3_add1_tir_tanh")
        ('conv2d', 'conv2d_add_tanh')
    """
    parts = name.removeprefix("fused_")
    numbers = r"\d+$" if parts == name else r"\d+(?=_|$)"
    return re.sub(r"(?<![^_])tir_", "", re.sub(numbers, "", parts))


def _rank(layout: str) -> int:
    return sum(map(str.isalpha, layout))


def macs_of(function: Any) -> int:
    """Return the multiply-accumulates of a function, scheduled or not.

    They are those of blocks that add products up, unless a block says what they would be (MACS).
    """
    told = [int(block.annotations[MACS]) for block in _blocks(function.body) if MACS in block.annotations]
    return (
        sum(told)
        if told
        else sum(
            math.prod(int(axis.dom.extent) for axis in block.iter_vars)
            for block in _blocks(function.body)
            if _adds_products(block.body) and any(axis.iter_type == tirx.IterVar.CommReduce for axis in block.iter_vars)
        )
    )


def _blocks(statement: Any) -> Iterator[Any]:
    """Yield the blocks of a function."""
    if isinstance(statement, s_tir.SBlockRealize):
        yield statement.block
        yield from _blocks(statement.block.body)
    elif isinstance(statement, tirx.For):
        yield from _blocks(statement.body)
    elif isinstance(statement, tirx.SeqStmt):
        for each in statement:
            yield from _blocks(each)


def _adds_products(body: Any) -> bool:
    value = getattr(body, "value", None)
    return isinstance(value, tirx.Add) and any(isinstance(side, tirx.Mul) for side in (value.a, value.b))
