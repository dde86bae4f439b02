"""Put values that TVM has named back where they are used, because LLVM refuses their names.

TVM 0.19 writes debug information for each value that its elimination of common subexpressions names. LLVM 22 takes such
information for integers and pointers alone, and refuses a library with a name for a vector or a float:
`space_to_depth`, `group_norm` and `resize2d` meet that. LLVM eliminates common subexpressions by itself:

    let cse: int32x16 = floordiv(index, 4)            out[i] = data[floordiv(index, 4)] + weight[floordiv(index, 4)]
    out[i] = data[cse] + weight[cse]           ->
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tir

_BUILDER = "target.build.llvm"  # TVM finds the function that makes LLVM's code by this name
_lock = threading.Lock()
_active = 0
_stock: Any = None


@contextmanager
def without_refused_lets() -> Iterator[None]:
    """Make LLVM's code without names that it refuses until the block ends; several threads may build at once."""
    global _active, _stock
    with _lock:
        _active += 1
        if _active == 1:
            _stock = tvm.get_global_func(_BUILDER)
            tvm.register_func(_BUILDER, _build, override=True)
    try:
        yield
    finally:
        with _lock:
            _active -= 1
            if _active == 0:
                tvm.register_func(_BUILDER, _stock, override=True)


def _build(mod: tvm.IRModule, target: tvm.target.Target) -> Any:
    functions = {name: in_place(function) for name, function in mod.functions_items()}
    return _stock(tvm.IRModule(functions, attrs=mod.attrs), target)


def in_place(function: tir.PrimFunc) -> tir.PrimFunc:
    """Return the function with each value in the place of a name that LLVM refuses."""
    body = tir.stmt_functor.ir_transform(function.body, None, _inlined, ["tir.LetStmt", "tir.Let"])
    return function if body.same_as(function.body) else function.with_body(body)


def _inlined(node: Any) -> Any:
    if re.fullmatch("handle|bool|u?int[0-9]+", node.var.dtype):
        return None
    return tir.stmt_functor.substitute(node.body, {node.var: node.value})
