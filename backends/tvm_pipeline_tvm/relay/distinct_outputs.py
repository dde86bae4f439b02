"""Give each output of a model a tensor of its own, so that a stage can write it and a plan can name it.

The operator graph knows a tensor by the operator that computes it. A model may give one tensor out twice, also under
two shapes, or give out an input as it is. Such an output becomes a copy, which is an operator like others:

    x -> y = exp(x)      outputs: y, reshape(y), x
    x -> y = exp(x)      outputs: y, copy(reshape(y)), copy(x)

It is done whatever the target is, so that all libraries of a platform have the same operators.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import tvm
from tvm import relay

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relay.kernel_walkers import only_moves
from tvm_pipeline_tvm.relay.output_names import output_names

# What a tensor is computed by: the expression behind all that only moves elements, and the field of its result.
_Root = tuple[relay.Expr, int]


def distinct_outputs(mod: tvm.IRModule, params: Collection[str] = ()) -> tvm.IRModule:
    """Return a module of the same results, each a tensor of its own that an operator computes.

    Args:
        mod: a type-checked module.
        params: names of parameters of `main` that are weights.

    Raises:
        ModelError: an output depends on no input, so that no operator computes it.
    """
    main = mod["main"]
    outputs = _outputs(main.body)
    names = output_names(mod)
    for position, output in enumerate(outputs):
        if all(variable.name_hint in params for variable in relay.analysis.free_vars(output)):
            named = names[position] if position < len(names) else f"{position} (the first is 0)"
            raise ModelError(f"output {named} does not depend on the inputs; leave it out of the exported model")
    if len(outputs) > 1 and _differ(outputs, [each for each in main.params if each.name_hint not in params]):
        return mod
    counts = _copies(_outputs(_simplified(mod).body) if len(outputs) > 1 else outputs)
    if not any(counts):
        return mod
    copied = []
    for output, count in zip(outputs, counts, strict=True):
        for _ in range(count):  # a copy of its own for each, since equal calls become one
            output = relay.copy(output)
        copied.append(output)
    body = relay.Tuple(copied) if isinstance(main.checked_type.ret_type, relay.TupleType) else copied[0]
    function = relay.Function(main.params, body, None, main.type_params, main.attrs)
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def _differ(outputs: list[relay.Expr], inputs: list[relay.Var]) -> bool:
    """Return whether the outputs and the inputs have so many elements or such types that no two are one tensor.

    What simplifying finds out takes minutes for the steps of a recurrent network: TVM goes through the whole graph for
    each thing that it simplifies.
    """
    sizes = [_size(each.checked_type) for each in (*outputs, *inputs)]
    among = sizes[: len(outputs)]
    return None not in sizes and len(set(among)) == len(among) and not set(among) & set(sizes[len(outputs) :])


def _size(type_: Any) -> tuple[int, str] | None:
    """Return the elements of a tensor and their type."""
    if not isinstance(type_, relay.TensorType):
        return None
    return math.prod(int(extent) for extent in type_.shape), str(type_.dtype)


def _simplified(mod: tvm.IRModule) -> relay.Function:
    """Return `main` as the build will see it, as far as that makes two tensors one."""
    passes = "SimplifyInference", "SimplifyExpr", "EliminateCommonSubexpr", "InferType"
    with tvm.transform.PassContext(opt_level=3):
        return tvm.transform.Sequential([getattr(relay.transform, name)() for name in passes])(mod)["main"]


def _outputs(body: relay.Expr) -> list[relay.Expr]:
    """Return the tensors of a result; one that is a tuple inside a tuple is left whole."""
    if isinstance(body, relay.Tuple):
        return list(body.fields)
    if isinstance(body.checked_type, relay.TupleType):
        return [relay.TupleGetItem(body, index) for index in range(len(body.checked_type.fields))]
    return [body]


def _copies(outputs: list[relay.Expr]) -> list[int]:
    """Return how many copies stand between each output and the operator that computes it, so that all differ."""
    seen: dict[_Root, int] = {}
    counts = []
    for output in outputs:
        root = _root(output)
        first = 1 if isinstance(root[0], relay.Var) else 0
        counts.append(seen.get(root, first))
        seen[root] = counts[-1] + 1
    return counts


def _root(expr: relay.Expr) -> _Root:
    while True:
        if isinstance(expr, relay.Call) and only_moves(expr):
            expr = expr.args[0]
        elif isinstance(expr, relay.TupleGetItem):
            if not isinstance(expr.tuple_value, relay.Tuple):
                return expr.tuple_value, expr.index
            expr = expr.tuple_value.fields[expr.index]
        else:
            return expr, 0
