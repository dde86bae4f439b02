"""ExtractOperatorGraph: a module's operator graph, as a Relax pass. Next: `partition_pipeline.py`, which cuts by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import tvm
from tvm import relax

from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError, ModelError
from tvm_pipeline_tvm.alignment import Alignment, align
from tvm_pipeline_tvm.relax.dataflow import fields, has_fixed_shape, plain_main
from tvm_pipeline_tvm.relax.kernel_walkers import FlatModule, flat_module

ATTRIBUTE = "operator_graph"
OUTPUT_NAMES = "output_names"  # of `main`: the names of its results in the file that it is from


@tvm.transform.module_pass(opt_level=0, name="ExtractOperatorGraph")
class ExtractOperatorGraph:
    """The pass that attaches the operator graph of `main` to the module; `operator_graph(mod)` reads it.

    An operator is a function that `main` calls: after `relax.transform.FuseOps` a fused one, of which the graph knows
    the elementary operators; after `relax.transform.FuseTIR` a kernel, which is called by its name. The graph holds
    parameter bytes, output bytes and multiply-accumulates of each. What only moves elements is no operator.

        before: main(x) { lv = fused_conv2d_add_relu(x, w, b); lv1 = call_tir(softmax, lv) }
        after:  the same, and operator_graph(mod) is  x -> conv2d+add+relu_0 -> softmax_1

    Args:
        name: the name of the graph.

    Raises:
        ModelError: `main` is no dataflow graph with fixed shapes, or an operator of it is not legalised.
    """

    def __init__(self, name: str = "main") -> None:
        self._name = name

    def transform_module(self, mod: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        graph = analyse(mod, self._name).graph
        return mod.with_attr(ATTRIBUTE, msgspec.json.encode(graph).decode())


def operator_graph(mod: tvm.IRModule) -> OperatorGraph:
    """Return the graph that ExtractOperatorGraph attached; raise GraphError where none is attached."""
    attached = mod.attrs.get(ATTRIBUTE) if mod.attrs else None
    if attached is None:
        raise GraphError("the module carries no operator graph; run ExtractOperatorGraph first")
    return msgspec.json.decode(str(attached), type=OperatorGraph)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A module's operator graph, and the calls of `main` behind each operator."""

    graph: OperatorGraph
    alignment: Alignment
    flat: FlatModule


def analyse(mod: tvm.IRModule, name: str = "main") -> Analysis:
    """Read the operator graph off a module behind FuseOps; raise ModelError where it is no dataflow graph."""
    flat = flat_main(mod)
    params = mod["main"].params
    inputs = tuple(Tensor(var.name, tuple(map(int, var.ty.shape)), str(var.ty.dtype)) for var in params)
    names = [str(each) for each in mod["main"].attrs.get(OUTPUT_NAMES) or ()]
    graph, alignments = align(
        name, inputs, [flat.kernels], [flat.heads], names if len(names) == len(flat.heads) else ()
    )
    return Analysis(graph, alignments[0], flat)


def analyse_as_attached(mod: tvm.IRModule, name: str = "main") -> Analysis:
    """Read the operator graph off a module, by the names of the one that is attached where it is of the same kernels.

    So a plan that was made for a module behind FuseOps is one for what FuseTIR and schedules make of it.
    """
    found = analyse(mod, name)
    if not (mod.attrs and ATTRIBUTE in mod.attrs.keys()):  # noqa: SIM118 - no mapping
        return found
    graph, attached = found.graph, operator_graph(mod)
    if _sizes(graph) != _sizes(attached):
        return found
    tensors, operators = dict(zip(_tensors(graph), _tensors(attached), strict=True)), attached.operators
    kernels = (found.alignment.kernels[operator.name] for operator in graph.operators)
    alignment = Alignment(
        {operator.name: own for operator, own in zip(operators, kernels, strict=True)},
        {value: tensors[tensor] for value, tensor in found.alignment.names.items()},
        found.alignment.values,
    )
    return Analysis(attached, alignment, found.flat)


def _tensors(graph: OperatorGraph) -> list[str]:
    written = (operator.outputs for operator in graph.operators)
    return [tensor.name for tensors in (graph.inputs, *written) for tensor in tensors]


def _sizes(graph: OperatorGraph) -> list[tuple[list[int], list[int], int]]:
    """Return of each operator the tensors that it reads, by their places, and its bytes, which no pass changes."""
    place = {name: index for index, name in enumerate(_tensors(graph))}
    return [
        (
            [place[name] for name in operator.inputs],
            [math.prod(tensor.shape) for tensor in operator.outputs],
            operator.param_bytes,
        )
        for operator in graph.operators
    ]


def flat_main(mod: tvm.IRModule) -> FlatModule:
    """Return what `main` computes as a list of calls; raise ModelError where it is no graph with fixed shapes."""
    main = main_of(mod)
    made = [binding.var for binding in plain_main(main)[0] if isinstance(binding.value, tvm.ir.Call)]
    for var, said in [*((param, "parameter") for param in main.params), *((var, "tensor") for var in made)]:
        if not all(map(has_fixed_shape, fields(var.ty) if said == "tensor" else [var.ty])):
            raise ModelError(
                f"{said} {var.name} of main is {var.ty}; only tensors of fixed shapes can be cut: give the frontend "
                "the shape of each input"
            )
    return flat_module(mod)


def main_of(mod: tvm.IRModule) -> Any:
    """Return the Relax function `main`."""
    found = mod["main"] if "main" in [symbol.name_hint for symbol in mod.get_global_vars()] else None
    if not isinstance(found, relax.Function):
        raise ModelError(
            f"the module has no Relax function main; it has {', '.join(map(_hint, mod.get_global_vars()))}"
        )
    return found


def _hint(symbol: Any) -> str:
    return str(symbol.name_hint)
