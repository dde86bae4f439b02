"""Read a Relax function that is one block of dataflow: what all passes of this package take and make."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, tirx

from tvm_pipeline.errors import GraphError, ModelError, PlanError

# What a pass raises comes back through TVM, which makes a RuntimeError of every class that it does not know.
for _error in (GraphError, ModelError, PlanError):
    tvm_ffi.register_error(_error.__name__, _error)

LAYOUT = "tvm_pipeline.layout"  # of a function: the layout of its result; empty for the plain one
Constant = type(relax.const(0.0))  # its class has another name in each version of TVM


def one_block(mod: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose functions are one block of dataflow each, where nothing else is in them."""
    return tvm.transform.Sequential([relax.transform.ConvertToDataflow(1), relax.transform.Normalize()])(mod)


def plain_main(function: Any) -> tuple[list[Any], Any]:
    """Return the bindings of a function, and its result.

    Raises:
        ModelError: it has control flow.
    """
    body = function.body
    if not isinstance(body, relax.SeqExpr):
        return [], body
    bindings = [binding for block in body.blocks for binding in block.bindings]
    for binding in bindings:
        if isinstance(binding, relax.MatchCast) or isinstance(binding.value, (relax.If, relax.Function)):
            kind = type(binding.value).__name__
            raise ModelError(
                f"main computes {binding.var.name} by control flow or a shape that is known at run time ({kind}); only "
                "a plain graph of operators with fixed shapes can be cut"
            )
    return bindings, body.body


def name_of(expr: Any) -> str:
    """Return the operator that an expression calls, such as "relax.nn.conv2d"; empty where it calls none."""
    return str(expr.op.name) if isinstance(expr, tvm.ir.Call) and isinstance(expr.op, tvm.ir.Op) else ""


def constant_of(expr: Any) -> np.ndarray | None:
    """Return the value of a constant; None of everything else."""
    return expr.value.numpy() if isinstance(expr, Constant) else None


def shape_of(expr: Any) -> tuple[int, ...]:
    return tuple(int(extent) for extent in expr.ty.shape)


def fields(type_: Any) -> list[Any]:
    """Return the types of the fields of a tuple, or the only type."""
    return list(type_.fields) if isinstance(type_, relax.TupleType) else [type_]


def has_fixed_shape(type_: Any) -> bool:
    """Return whether a type is of one tensor, of which every extent is known."""
    if not isinstance(type_, relax.TensorType) or not isinstance(type_.shape, relax.ShapeExpr):
        return False
    return all(isinstance(extent, tirx.IntImm) for extent in type_.shape)
