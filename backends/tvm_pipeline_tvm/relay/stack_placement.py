"""Call compiled kernels with the stack pointer at a fixed offset in its page.

TVM's kernels spill vector registers to the stack without aligning it. The stack pointer modulo 4096 decides what the
spills cost: on an AVX2 machine squeezenet takes 34, 38 or 48 ms a frame, and only the depth of Python calls around it
differs. Spills that straddle cache lines cost 12 %. In one window of about 1 KB they seem to alias the loads of a
convolution's tile and cost 40-80 % (benchmarks/stack_placement.py draws the map). So this module chooses the offset: it
passes an argument that the callee never reads by value on the stack, and the argument's size moves the callee's frame.
That works on x86-64 Linux, where `getcontext` reads the stack pointer; elsewhere a call is a plain call.

Kernels of TVM 0.27 do not need it: the depth moved their time by 2 to 4 %, on a machine with AVX-512.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from tvm._ffi.base import _LIB, check_call

PAGE = 4096
# Stack pointer at entry, modulo 4096: spills fall on whole vectors, away from the window that aliases.
PLACE = 3600
# The debug executor's stack above a kernel is 16 bytes deeper: with this offset its kernels add up to a whole run.
PLACE_OF_NODE = PLACE + 16
_STACK_POINTER = 20  # of the 8-byte words of a ucontext_t: five before the registers, and RSP is the 16th of those

Padding = tuple[Any, ...]


def placed(function: Any, offset: int = PLACE) -> Callable[..., None]:
    """Return a function that calls `function` with the stack pointer at `offset`.

    Args:
        function: a TVM packed function that takes no argument or one integer, and returns nothing.
        offset: the stack pointer at entry, modulo PAGE.
    """
    if not (sys.platform == "linux" and platform.machine() == "x86_64"):
        return function
    values, codes = (ctypes.c_int64 * 1)(), (ctypes.c_int * 1)()
    result, code = ctypes.c_int64(), ctypes.c_int()
    fixed = (values, codes)
    returned = (ctypes.byref(result), ctypes.byref(code))
    context, first = (ctypes.c_uint64 * 256)(), _paddings()[0]
    counts = ctypes.c_int(0), ctypes.c_int(1)
    tell, call, moves = _libc().getcontext, _LIB.TVMFuncCall, _moves()

    def run(*integers: int) -> None:
        count = counts[len(integers)]
        if integers:
            values[0] = integers[0]
        # Both calls have the same arguments in number and kind, so their frames begin at the same address.
        tell(context, *fixed, count, *returned, *first)
        padding = moves.get((offset - context[_STACK_POINTER]) % PAGE, first)
        check_call(call(function.handle, *fixed, count, *returned, *padding))

    return run


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def _paddings() -> list[Padding]:
    """Return extra arguments of all sizes: structures move the stack by multiples of 32 bytes, two integers by 16."""
    integer = ctypes.c_int64(0)
    structures = [type(f"Padding{size}", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_char * size)]})()
                  for size in range(24, 24 + PAGE // 2, 16)]  # fmt: skip
    return [(*integers, structure) for integers in ((), (integer, integer)) for structure in structures]


@cache
def _moves() -> dict[int, Padding]:
    """Return the padding for each number of bytes that the stack moves against the first padding, measured once."""
    context = (ctypes.c_uint64 * 256)()
    rest = (ctypes.byref(ctypes.c_int64()), ctypes.byref(ctypes.c_int64()), ctypes.c_int(0), *[ctypes.c_void_p()] * 2)

    def pointer(padding: Padding) -> int:
        _libc().getcontext(context, *rest, *padding)
        return context[_STACK_POINTER]

    start = pointer(_paddings()[0])
    return {(pointer(padding) - start) % PAGE: padding for padding in _paddings()}
