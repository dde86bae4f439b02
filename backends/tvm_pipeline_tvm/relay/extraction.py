"""ExtractOperatorGraph: a module's operator graph, as a Relay pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import msgspec
import tvm
from tvm import relay

from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError
from tvm_pipeline_tvm.alignment import Alignment, align
from tvm_pipeline_tvm.kernels import Kernel
from tvm_pipeline_tvm.relay.kernel_walkers import kernels_of_module
from tvm_pipeline_tvm.relay.output_names import output_names

ATTRIBUTE = "operator_graph"


def ExtractOperatorGraph(name: str = "main", params: Collection[str] = ()) -> tvm.transform.Pass:  # noqa: N802
    """Return a pass that attaches the operator graph of `main` to the module; `operator_graph(mod)` reads it.

    An operator is what `main` calls: a fused function after `relay.transform.FuseOps`, else a single operator.
    The graph holds parameter bytes, output bytes and multiply-accumulates of each.

        before: fn (%data) { %0 = fn (Primitive=1) {conv2d, add, relu}(%data, w, b); softmax(%0) }
        after:  the same, and operator_graph(mod) is  data -> conv2d+add+relu_0 -> softmax_1

    Args:
        name: the name of the graph.
        params: names of parameters of `main` that are weights; none where they are bound as constants.
    """

    @tvm.transform.module_pass(opt_level=0, name="ExtractOperatorGraph", required=["InferType"])
    def extract(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        graph = analyse(mod, name, params).graph
        return mod.with_attr(ATTRIBUTE, msgspec.json.encode(graph).decode())

    return extract


def operator_graph(mod: tvm.IRModule) -> OperatorGraph:
    """Return the graph that ExtractOperatorGraph attached; raise GraphError where none is attached."""
    attached = mod.get_attr(ATTRIBUTE)
    if attached is None:
        raise GraphError("the module carries no operator graph; run ExtractOperatorGraph first")
    return msgspec.json.decode(str(attached), type=OperatorGraph)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A module's operator graph, and the calls of `main` behind each operator."""

    graph: OperatorGraph
    alignment: Alignment
    kernels: list[Kernel]
    calls: list[relay.Call]


def analyse(mod: tvm.IRModule, name: str = "main", params: Collection[str] = ()) -> Analysis:
    """Read the operator graph off a type-checked module; raise ModelError where it is no dataflow graph."""
    variables = [var for var in mod["main"].params if var.name_hint not in params]
    inputs = tuple(
        Tensor(var.name_hint, tuple(int(n) for n in var.checked_type.shape), var.checked_type.dtype)
        for var in variables
    )
    kernels, calls, heads = kernels_of_module(mod, variables)
    names = output_names(mod)  # of the file, which a pass of the user's may have given other outputs since
    graph, alignments = align(name, inputs, [kernels], [heads], names if len(names) == len(heads) else ())
    return Analysis(graph, alignments[0], kernels, calls)
