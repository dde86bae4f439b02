"""Glue of several inputs: whatever it is given, every legal cut can be made real and computes what the whole does.

TVM gives a change of shape or layout behind a split every field of it, of which it shows one: so an LSTM ends up that
TVM has unrolled. The first part cuts libraries that are made up at random, with worse glue than TVM's, and computes
with symbols. The second cuts networks that TVM compiles, and compares bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("tvm")

from tests.support.examples import examples
from tests.support.networks import as_model, whole_outputs
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tests.support.tangled import tangled_module
from tests.tvm.test_numbering import library, random_fusion, random_network
from tvm_pipeline.backends.contract import Order
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.kernels import Entry, Kernel, Source
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.relay.slicing import as_graph
from tvm_pipeline_tvm.slice_plan import plan_slice

INPUTS = tuple(Tensor(f"x{index}", (1, 4, 4, 4)) for index in range(2))
Symbol = tuple[Any, ...]  # ("x0",), or (operator, field, symbols of its arguments)


def as_library(kernels: Sequence[Kernel], heads: Sequence[Entry], draw: Random) -> Library:
    """Return kernels as a compiled library; glue that reads one tensor may be a reshape that runs nothing."""
    count = len(INPUTS)
    nodes: list[dict[str, Any]] = [{"op": "null", "name": tensor.name, "inputs": []} for tensor in INPUTS]
    rows, placed = list(range(count + 1)), []
    for index, kernel in enumerate(kernels):
        is_reshape = kernel.is_glue and len(kernel.reads) == 1 and draw.random() < 0.5
        name = "__nop" if is_reshape else f"kernel_{index}"
        inputs = [[field if k < 0 else count + k, 0 if k < 0 else field, 0] for k, field in kernel.reads]
        nodes.append({"op": "tvm_op", "name": str(index), "attrs": {"func_name": name}, "inputs": inputs})
        rows.append(rows[-1] + len(kernel.outputs))
        placed.append(replace(kernel, node=count + index))
    attrs = {
        "shape": ["list_shape", [[1, 4, 4, 4]] * rows[-1]],
        "dltype": ["list_str", ["float32"] * rows[-1]],
        "device_index": ["list_int", [1] * rows[-1]],
    }
    ends = [[field if k < 0 else count + k, 0 if k < 0 else field, 0] for k, field in heads]
    graph = {"nodes": nodes, "heads": ends, "attrs": attrs, "node_row_ptr": rows}
    return Library("any", INPUTS, graph, placed, None, {})


def computed(
    graph: Mapping[str, Any], library_: Library, own: Sequence[list[int]], given_: Sequence[Symbol]
) -> list[Symbol]:
    """Return what the heads of a graph of the executor are, computed with symbols.

    Args:
        graph: the JSON of the library, or of a slice of it.
        own: the operators of each kernel, by what they are called in all libraries.
        given_: the symbols of the inputs.
    """
    kernel_of = {library_.graph["nodes"][kernel.node]["name"]: index for index, kernel in enumerate(library_.kernels)}
    known: dict[tuple[int, int], Symbol] = {}
    rest = iter(given_)
    for position, node in enumerate(graph["nodes"]):
        if node["op"] == "null":
            known[position, 0] = next(rest)
            continue
        kernel = library_.kernels[kernel_of[node["name"]]]
        reads = [known[producer, field] for producer, field, _ in node["inputs"]]
        made: list[Symbol] = []

        def symbol(source: Source, reads: list[Symbol] = reads, made: list[Symbol] = made) -> Symbol:
            if source.operator is not None:
                return (source.index, made[source.operator])
            return ("weight",) if source.index < 0 else reads[source.index]

        for name, arguments in zip(own[kernel_of[node["name"]]], kernel.arguments, strict=True):
            made.append((name, *map(symbol, arguments)))
        known.update({(position, field): symbol(output.source) for field, output in enumerate(kernel.outputs)})
    return [known[node, field] for node, field, _ in graph["heads"]]


@given(st.randoms(use_true_random=False))
def test_every_legal_cut_of_tangled_kernels_can_be_made_real(draw: Random) -> None:
    network = random_network(draw)
    made = [library(network, random_fusion(network, draw), draw, tangled=True) for _ in range(draw.randint(1, 2))]
    libraries = [as_library(kernels, heads, draw) for kernels, _, heads in made]
    graph, alignments = align("net", INPUTS, [one.kernels for one in libraries], [one.heads for one in libraries])
    frame: dict[str, Symbol] = {tensor.name: (tensor.name,) for tensor in INPUTS}
    whole = [
        computed(one.graph, one, own, list(frame.values())) for one, (_, own, _) in zip(libraries, made, strict=True)
    ]
    assert whole[0] == whole[-1], "the libraries are not of one network"
    for _ in range(6):
        known = dict(frame)
        for stage in random_stages(graph, draw, draw.randint(1, min(4, len(graph)))):
            index = draw.randrange(len(libraries))
            plan = plan_slice(libraries[index], alignments[index], graph, stage, draw.random() < 0.2)
            part = as_graph(libraries[index], plan)
            ends = computed(
                json.loads(part.graph_json), libraries[index], made[index][1], [known[p.name] for p in part.inputs]
            )
            known.update({port.name: end for port, end in zip(part.outputs, ends, strict=True)})
        assert [known[name] for name in graph.outputs] == whole[0]


@pytest.fixture(scope="module")
def tangled(cpu: Device) -> RelayModel:
    made = as_model("tangled", *tangled_module(2))
    return RelayModel.compile(made, [cpu.target], lambda _: None)


@pytest.mark.thorough
def test_tangled_networks_are_cut_anywhere(tangled: RelayModel, cpu: Device) -> None:
    kernels = tangled.libraries[cpu.target].kernels
    assert any(kernel.is_glue and len(kernel.reads) > 1 for kernel in kernels), "nothing was tested"
    frame = random_frame(tangled.graph.inputs)
    expected = [array.tobytes() for array in whole_outputs(tangled, cpu.target, frame)]

    @examples(15)
    @given(st.integers(0, 2**32), st.sampled_from((2, 3, 4, len(tangled.graph))), st.sampled_from(("listed", "memory")))
    def check(seed: int, stages: int, order: Order) -> None:
        tangled.order = order
        cut = random_stages(tangled.graph, Random(seed), stages)
        written = run_stages(tangled, [(stage, cpu) for stage in cut], frame)
        assert [array.tobytes() for array in model_outputs(tangled, written)] == expected

    check()
