"""Which arguments of a kernel its result may overwrite, proven on the kernel's lowered TIR.

A result may take the bytes of an argument if each element of the argument is read for the value of the same element of
the result alone, and each element of the result is stored once:

    for i: for j: out[16 * i + j] = max(sums[j] + x[16 * i + j], 0)    out may be x
    for i: out[i] = x[n - 1 - i]                                       no: reads what another iteration has overwritten
    for i: for k: out[i] = x[i] * w[k]                                 no: the second time, x[i] is x[i] * w[0]
    for k: sums[0] += x[k];  for i: out[i] = x[i] / sums[0]            no: x[k] is read for other elements, too

Then the only store that changes an element of `x` is the one that all reads of this element go into. LLVM is told that
arguments do not overlap, so it may move a load over a store. It may not move a load behind the store whose value needs
it, and every other store leaves the element alone. A vector is stored in parts where the machine has shorter ones; so
nothing between load and store may cross its lanes.

Indices are compared, and stores counted, as numbers (`tir_numbers.py`). What is not understood is refused. The two
`build.py` keep what `overwritable` finds; `overwritten` maps the arguments of a function to what a kernel reads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_pipeline_tvm.kernels import Entry, KernelLibrary, origin
from tvm_pipeline_tvm.tir_numbers import BINARY, VARIABLES, Iterations, Numbers, UnknownError, lanes_of, name_of

AT_ONCE = 1 << 20  # elements of a result that are counted at once: more take memory

_OPERANDS = {
    **dict.fromkeys((*BINARY, "Div", "Mod", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "LShift", "RShift"), ("a", "b")),
    "Not": ("a",),
    "BitwiseNot": ("a",),
    "Cast": ("value",),
    "Select": ("condition", "true_value", "false_value"),
    "Ramp": ("base", "stride"),
    "Broadcast": ("value",),
}
_ACROSS_LANES = {"Ramp", "Broadcast", "Shuffle"}
# Calls that TVM does not mark as computing lane by lane, though they do; the last are of one number.
_LANE_BY_LANE = {"if_then_else", "likely", "reinterpret", "rsqrt", "erf", "isnan", "nearbyint"}
_OF_ONE_NUMBER = {"call_extern", "call_pure_extern", "call_llvm_intrin", "call_llvm_pure_intrin"}
_ON_DEVICES = 4  # ForKind.THREAD_BINDING


class _RefusedError(Exception):
    """The result may overwrite no argument."""


def overwritable(function: Any) -> tuple[int, ...]:
    """Return the positions of the arguments of a kernel that its result may overwrite.

    Args:
        function: a PrimFunc of known shapes behind the passes that flatten buffers and make vectors, and before the
            one that makes its packed interface. Its last argument is the result.

    Returns:
        positions, each of an argument of as many elements of as many bytes as the result; any one of them may be the
        result, or several if they are the same tensor. Nothing where the kernel writes several results.
    """
    try:
        return _Proof(function).positions()
    except (_RefusedError, UnknownError):
        return ()


def overwritten(
    library: KernelLibrary, arguments: Sequence[Entry | None], positions: Collection[int]
) -> tuple[Entry, ...]:
    """Return the entries whose bytes the result of a kernel may take.

    Args:
        arguments: what is given to the kernel's function; None is a weight.
        positions: what `overwritable` allows of them.

    An entry that is given twice, or also under another shape, must be allowed wherever it is given.
    """
    given = [(index, entry) for index, entry in enumerate(arguments) if entry is not None]
    kept = {origin(library, entry) for index, entry in given if index not in positions}
    return tuple(dict.fromkeys(entry for _, entry in given if origin(library, entry) not in kept))


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """A load of an argument: its position, and the expression of the index."""

    position: int
    index: Any


_NONE: frozenset[_Read] = frozenset()


class _Proof:
    """One walk over a function, which drops the arguments that may not be overwritten."""

    def __init__(self, function: Any) -> None:
        self._body = function.body
        buffers = [_argument(function, param) for param in function.params]
        if not buffers or buffers[-1] is None:
            raise _RefusedError
        self._result, self._size, bits = buffers[-1]
        self._bits = {each[0]: each[2] for each in buffers if each is not None}
        self._position = {each[0]: index for index, each in enumerate(buffers[:-1]) if each is not None}
        self._candidates = {
            index for index, each in enumerate(buffers[:-1]) if each is not None and each[1:] == (self._size, bits)
        }
        self._alias: dict[Any, Any] = {}  # of a buffer the argument that it shows
        self._iterations = Iterations()
        self._held: dict[Any, frozenset[_Read]] = {}  # what was read for a variable
        self._stored = 0
        self._is_stored = np.zeros(self._size, bool)

    def positions(self) -> tuple[int, ...]:
        self._drop(_NONE)
        self._statement(self._body)
        if self._stored != np.count_nonzero(self._is_stored):  # else some element was stored twice
            raise _RefusedError
        return tuple(sorted(self._candidates))

    def _drop(self, reads: Collection[_Read]) -> None:
        """Refuse the arguments of these loads; nothing is left to prove where that were all."""
        self._candidates -= {read.position for read in reads}
        if not self._candidates:
            raise _RefusedError

    def _buffer(self, buffer: Any) -> Any:
        """Return what names the memory of a buffer that is read or written."""
        described = buffer if type(buffer).__name__ == "Buffer" else buffer.ty
        name = buffer.data if described is buffer else self._alias.get(buffer, buffer)
        if name in self._bits and not (
            _is_number(described.elem_offset, 0) and _bits(described.dtype) == self._bits[name]
        ):
            raise _RefusedError  # indices count something else
        return name

    def _statement(self, node: Any) -> None:
        kind = type(node).__name__
        if kind == "SeqStmt":
            for each in node.seq:
                self._statement(each)
            return
        if kind == "For":
            self._loop(node)
            return
        if kind == "IfThenElse":
            self._branches(node)
            return
        if kind == "BufferStore":
            self._store(node)
            return
        if kind in ("LetStmt", "Bind"):
            self._bind(node)
        elif kind in ("Evaluate", "AttrStmt"):
            if kind == "AttrStmt" and node.attr_key in ("thread_extent", "virtual_thread"):
                raise _RefusedError
            self._drop(self._reads(node.value))
        elif kind == "AssertStmt":
            self._drop(self._reads(node.condition))
        elif kind == "DeclBuffer":
            self._declare(node)
        elif kind == "Allocate":
            self._drop(frozenset().union(*map(self._reads, (*node.extents, node.condition))))
        elif kind not in ("AllocateConst", "AllocBuffer"):
            raise _RefusedError
        body = None if kind in ("Bind", "Evaluate", "AllocBuffer") else getattr(node, "body", None)
        if body is not None:
            self._statement(body)

    def _loop(self, node: Any) -> None:
        is_plain = _is_number(node.min, 0) and (getattr(node, "step", None) is None or _is_number(node.step, 1))
        if int(node.kind) == _ON_DEVICES or not is_plain:
            raise _RefusedError
        self._drop(self._reads(node.extent))
        for _ in self._iterations.loop(node, -(-self._size // AT_ONCE)):
            self._statement(node.body)

    def _branches(self, node: Any) -> None:
        self._drop(self._reads(node.condition))
        for body, wanted in ((node.then_case, True), (node.else_case, False)):
            if body is not None:
                with self._iterations.branch(node.condition, wanted):
                    self._statement(body)

    def _bind(self, node: Any) -> None:
        self._iterations.bind(node.var, node.value)
        self._held[node.var] = self._reads(node.value)

    def _declare(self, node: Any) -> None:
        """Note which buffer another shows; in TVM 0.19 both have the same data."""
        data = getattr(node, "data", None)
        if data is None:
            return
        if name_of(data) == "buffer_data":
            self._alias[node.buffer] = self._alias.get(data.args[0], data.args[0])
        else:
            self._drop(self._reads(data))

    def _store(self, node: Any) -> None:
        self._drop(frozenset().union(*map(self._reads, node.indices)))
        reads, name = self._reads(node.value), self._buffer(node.buffer)
        if name in self._position:
            raise _RefusedError
        if name != self._result:
            self._drop(reads)
            return
        if getattr(node, "predicate", None) is not None or len(node.indices) != 1:
            raise _RefusedError
        lanes = lanes_of(node.indices[0])
        index, runs = self._iterations.everywhere(node.indices[0], lanes), self._iterations.runs(lanes)
        self._drop([read for read in reads if not self._is_at(read, index, runs)])
        places = index[runs]
        if places.size and not 0 <= places.min() <= places.max() < self._size:
            raise _RefusedError
        self._is_stored[places] = True
        self._stored += places.size

    def _is_at(self, read: _Read, index: Numbers, runs: Numbers) -> bool:
        """Return whether a load reads the element that is stored, wherever the store runs."""
        try:
            read_at = self._iterations.everywhere(read.index, index.shape[-1])
        except UnknownError:
            return False
        return bool(np.all((read_at == index) | ~runs))

    def _reads(self, node: Any) -> frozenset[_Read]:
        """Return the loads of candidates whose elements the lanes of an expression are made of, one by one."""
        kind = type(node).__name__
        if kind in ("IntImm", "FloatImm", "StringImm"):
            return _NONE
        if kind in VARIABLES:
            name = self._alias.get(node, node)
            if name in self._bits:  # its address is taken
                raise _RefusedError
            return self._held.get(node, _NONE)
        if kind in ("BufferLoad", "TensorLoad"):
            reads = self._loaded(node)
        elif kind == "Let":
            self._bind(node)
            reads = self._reads(node.body)
        elif kind == "Call":
            reads = frozenset().union(*map(self._reads, node.args))
        elif kind == "Shuffle":
            reads = frozenset().union(*map(self._reads, (*node.vectors, *node.indices)))
        elif kind in _OPERANDS:
            reads = frozenset().union(*(self._reads(getattr(node, each)) for each in _OPERANDS[kind]))
        else:
            raise _RefusedError
        if reads and not (_is_lane_by_lane(node) and {lanes_of(read.index) for read in reads} == {lanes_of(node)}):
            self._drop(reads)
            return _NONE
        return reads

    def _loaded(self, node: Any) -> frozenset[_Read]:
        name = self._buffer(node.buffer if type(node).__name__ == "BufferLoad" else node.source)
        if name == self._result or getattr(node, "predicate", None) is not None:
            raise _RefusedError
        reads: frozenset[_Read] = frozenset().union(*map(self._reads, node.indices))
        position = self._position.get(name)
        if position not in self._candidates:
            return reads
        if len(node.indices) != 1:
            raise _RefusedError
        return reads | {_Read(position, node.indices[0])}


def _argument(function: Any, param: Any) -> tuple[Any, int, str] | None:
    """Return what names the memory of an argument, its elements, and the bits of each; None of a number."""
    buffers = getattr(function, "buffer_map", None)
    if buffers is None:  # TVM 0.27: the argument is the buffer
        name, described = param, param.ty
        if type(described).__name__ != "BufferType":
            return None
    elif param not in buffers:
        return None
    else:
        described = buffers[param]
        name = described.data
    if not all(type(extent).__name__ == "IntImm" for extent in described.shape):
        raise _RefusedError
    return name, math.prod(int(extent) for extent in described.shape), _bits(described.dtype)


def _is_number(node: Any, number: int) -> bool:
    return type(node).__name__ == "IntImm" and int(node) == number


def _bits(dtype: Any) -> str:
    """Return the bits of an element; for types of vectors and others the type."""
    if str(dtype) == "bool":
        return "8"
    bits = re.fullmatch(r"[a-z]+(\d+)", str(dtype))
    return bits[1] if bits else str(dtype)


def _is_lane_by_lane(node: Any) -> bool:
    """Return whether each lane of an expression is computed from the same lane of its operands."""
    if type(node).__name__ != "Call":
        return type(node).__name__ not in _ACROSS_LANES
    name = name_of(node)
    if name in _OF_ONE_NUMBER:
        return lanes_of(node) == 1
    return name in _LANE_BY_LANE or bool(name and node.op.get_attr("TVectorizable"))
