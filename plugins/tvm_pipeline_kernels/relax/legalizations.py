"""Operators on plain tensors that a rule of `schedules/` makes and schedules, for LegalizeOps; TVM legalises the rest.

    concat((x, y), axis=2)                      ->  call_tir(concatenate, x, y)
    matmul(x: (1, 512), w: (512, 1000))        ->  call_tir(matmul, x, w in blocks of columns)
    matmul(q: (1, 8, 49, 32), k: (1, 8, 32, 49))  ->  reshape -> call_tir(matmul) of 8 batches -> reshape
    softmax(x)                                  ->  call_tir(softmax, x)

Float32 only, but for concatenations of bytes: for other types TVM's own are right, and the plain rule runs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import relax

from tvm_pipeline_kernels.relax.schedules import concatenate, dense, softmax
from tvm_pipeline_kernels.relax.schedules.cores import Cores
from tvm_pipeline_kernels.relax.schedules.stored_weights import stored
from tvm_pipeline_tvm.relax.dataflow import constant_of, fields, name_of, shape_of
from tvm_pipeline_tvm.relax.numpy_table import constant

Legalization = Callable[[Any, Any], Any]


def legalizations(cores: Cores, storage: str = "float32") -> dict[str, Legalization]:
    """Return what LegalizeOps is to take in the place of its own for these cores.

    Args:
        storage: of the weights of products; see `stored_weights.py`.
    """
    makers: dict[str, Callable[[int, Any, Any], Any]] = {
        "relax.concat": _concatenation,
        "relax.matmul": partial(_product, storage),
        "relax.nn.softmax": partial(_softmax, "softmax", softmax.compute_softmax),
        "relax.nn.log_softmax": partial(_softmax, "log_softmax", softmax.compute_log_softmax),
    }
    return {name: partial(_or_tvm, partial(maker, cores.lanes)) for name, maker in makers.items()}


def _or_tvm(ours: Legalization, builder: Any, call: Any) -> Any:
    """Return what our maker makes of a call; where it makes nothing, what TVM's does."""
    types = [type_ for each in (call, *call.args) for type_ in fields(each.ty)]
    taken = ("float32", "int8", "uint8") if name_of(call) == "relax.concat" else ("float32",)
    is_taken = all(isinstance(type_, relax.TensorType) and type_.dtype in taken for type_ in types)
    made = ours(builder, call) if is_taken else None
    if made is None:
        made = tvm.ir.Op.get(name_of(call)).get_attr("FLegalize")(builder, call)
    return made


def _product(storage: str, lanes: int, builder: Any, call: Any) -> Any | None:
    """A product of matrices: with weights, or of two activations of the same batches."""
    (left, right), shape = call.args, shape_of(call)
    if len(shape) < 2 or 0 in shape or len(left.ty.shape) < 2:
        return None
    *batches, rows, terms = shape_of(left)
    weights, columns = constant_of(right), shape[-1]
    if weights is not None and weights.ndim == 2:
        data = _reshaped(builder, left, (math.prod(batches) * rows, terms))
        kernel = constant(stored(dense.packed(weights, lanes), storage))
        made = builder.call_te(dense.compute_dense, data, kernel, columns=columns, primfunc_name_hint="matmul")
    elif batches and tuple(batches) == shape[:-2] == shape_of(right)[:-2]:
        count = math.prod(batches)
        one = _reshaped(builder, left, (count, rows, terms))
        other = _reshaped(builder, right, (count, terms, columns))
        made = builder.call_te(dense.compute_batch, one, other, lanes=lanes, primfunc_name_hint="matmul")
    else:
        return None
    return _reshaped(builder, builder.emit(made), shape)


def _concatenation(lanes: int, builder: Any, call: Any) -> Any | None:
    axis = call.attrs.axis
    if not isinstance(call.args[0], relax.Tuple) or axis is None:
        return None
    return builder.call_te(
        concatenate.compute_plain, list(call.args[0].fields), int(axis), primfunc_name_hint="concatenate"
    )


def _softmax(name: str, compute: Callable[..., Any], lanes: int, builder: Any, call: Any) -> Any:
    return builder.call_te(compute, call.args[0], int(call.attrs.axis), lanes=lanes, primfunc_name_hint=name)


def _reshaped(builder: Any, value: Any, shape: Sequence[int]) -> Any:
    if shape_of(value) == tuple(shape):
        return value
    made = builder.normalize(relax.op.reshape(value, shape))
    return builder.emit(tvm.ir.Op.get("relax.reshape").get_attr("FLegalize")(builder, made))
