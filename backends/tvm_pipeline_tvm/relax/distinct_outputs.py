"""The outputs of a Relax module: their names, and a tensor of its own for each.

A stage writes each output to a place of its own, and a plan names a tensor by the operator that computes it. A model
may give one tensor out twice, also under two shapes, or give out an input as it is. Such an output becomes a copy:

    y = exp(x)      outputs: y, reshape(y), x
    y = exp(x)      outputs: y, astype(reshape(y)), astype(x)        of the type that they have

Next: `importer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.numpy_table import static_shape
from tvm_pipeline_tvm.relax.rule_rewriting import Rewriter

OUTPUT_NAMES = "output_names"  # an attribute of `main`, which passes hand on
_MOVES = frozenset(f"relax.{name}" for name in ("reshape", "flatten", "squeeze", "expand_dims", "nn.batch_flatten"))


def distinct_outputs(mod: tvm.IRModule, names: Sequence[str]) -> tvm.IRModule:
    """Return a module of the same results, each a tensor of its own, with the names of the outputs of `main`.

    Raises:
        ModelError: an output depends on no input, so that no operator computes it.
    """
    main = mod["main"]
    values = {binding.var: binding.value for binding in main.body.blocks[0].bindings}
    result = values.get(main.body.body, main.body.body)
    outputs = list(result.fields) if isinstance(result, relax.Tuple) else [main.body.body]
    for output in outputs:
        if static_shape(output.ty) is None:
            raise ModelError(f"an output is no tensor of a fixed shape but {output.ty}; give out tensors")
    moving = _depends(main)
    for position, output in enumerate(outputs):
        if output not in moving:
            named = names[position] if position < len(names) else f"{position} (the first is 0)"
            raise ModelError(f"output {named} does not depend on the inputs; leave it out of the exported model")
    counts = _copies(outputs, values, set(main.params))
    if any(counts):
        copied = [_copy(output, count) for output, count in zip(outputs, counts, strict=True)]
        new = relax.Tuple(copied) if isinstance(result, relax.Tuple) else copied[0]
        main = Rewriter(main, lambda _: ()).written("main", new)
    main = main.with_attr(OUTPUT_NAMES, list(names)) if names else main
    functions = {symbol: main if symbol.name_hint == "main" else other for symbol, other in mod.functions.items()}
    return tvm.IRModule(functions)


def output_names(mod: tvm.IRModule) -> tuple[str, ...]:
    """Return the names of the outputs of `main`; none where the module does not tell."""
    attrs = mod["main"].attrs
    if attrs is None or OUTPUT_NAMES not in attrs.keys():  # noqa: SIM118  DictAttrs has no __iter__
        return ()
    return tuple(str(name) for name in attrs[OUTPUT_NAMES])


def _depends(main: relax.Function) -> set[Any]:
    """Return the tensors that depend on an input."""
    found = set(main.params)
    for binding in main.body.blocks[0].bindings:
        if any(read in found for read in relax.analysis.free_vars(binding.value)):
            found.add(binding.var)
    return found


def _copy(output: Any, count: int) -> Any:
    """Return an output behind so many copies, a chain of its own for each."""
    dtype = output.ty.dtype
    for _ in range(count):
        output = relax.op.astype(output, dtype)
    return output


def _copies(outputs: list[Any], values: Mapping[Any, Any], inputs: set[Any]) -> list[int]:
    """Return how many copies stand between each output and the operator that computes it, so that all differ."""
    seen: dict[Any, int] = {}
    counts = []
    for output in outputs:
        root = _root(output, values)
        counts.append(seen.get(root, 1 if root in inputs else 0))
        seen[root] = counts[-1] + 1
    return counts


def _root(output: Any, values: Mapping[Any, Any]) -> Any:
    """Return what computes an output, behind all that only moves elements: a tensor, or a field of a tuple."""
    while output in values:
        value = values[output]
        if isinstance(value, relax.Var):
            output = value
        elif name_of(value) in _MOVES:
            output = value.args[0]
        elif isinstance(value, relax.TupleGetItem):
            return value.tuple_value, value.index
        else:
            break
    return output
