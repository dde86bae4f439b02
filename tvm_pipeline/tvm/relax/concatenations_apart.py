"""ConcatenationsApart: concatenations that a slice can do in place are kernels of their own, as with Relay."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx

NAME = "concatenate"  # of the functions that our legalisation makes
PATTERN = "op_pattern"
OPAQUE = 8  # FuseOps leaves functions of this pattern alone


@tvm.transform.module_pass(opt_level=0, name="ConcatenationsApart")
class ConcatenationsApart:
    """The pass: concatenations of consecutive bytes get a pattern that FuseOps does not fuse.

    They are those along the first axis of an extent above 1, such as the channels of one image.
    """

    def transform_module(self, mod: tvm.IRModule, _context: Any) -> tvm.IRModule:
        functions = dict(mod.functions.items())
        for symbol, function in functions.items():
            is_named = isinstance(function, tirx.PrimFunc) and str(symbol.name_hint).startswith(NAME)
            if is_named and _is_of_whole_bytes(function):
                functions[symbol] = function.with_attr(PATTERN, OPAQUE)
        return tvm.IRModule(functions, attrs=mod.attrs)


def _is_of_whole_bytes(function: tirx.PrimFunc) -> bool:
    shapes = [tuple(map(int, param.shape)) for param in function.params]
    first, result = shapes[0], shapes[-1]
    along = [axis for axis in range(len(result)) if len(first) == len(result) and first[axis] != result[axis]]
    return len(along) == 1 and math.prod(result[: along[0]]) == 1
