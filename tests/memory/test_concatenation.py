"""Graphs whose concatenations take no memory, against a simulation that looks up what a tensor is made of."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given

from tests.support.examples import examples
from tests.support.graphs import randoms
from tests.support.memory_networks import Net
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.memory import MemoryGraph, footprint, memory_graph, minimum_peak, peak_bytes
from tvm_pipeline.memory.concatenation import free_concatenations
from tvm_pipeline.memory.orders import kahn_order, program_order


def random_graph(rng: random.Random) -> OperatorGraph:
    net = Net()
    made = [net.input(2, 2, rng.randint(1, 5)) for _ in range(rng.randint(1, 2))]
    for _ in range(rng.randint(2, 9)):
        if rng.random() < 0.6:
            made.append(net.concat(*rng.sample(made, min(len(made), rng.randint(1, 3)))))
        else:
            made.append(net.conv(rng.choice(made), rng.randint(1, 5)))
    return net.graph("random")


def simulated(graph: OperatorGraph, order: Sequence[str]) -> list[int]:
    """Return the bytes alive at each operator of an order; concatenations that are no outputs are not in it."""
    joins = {o.name for o in graph.operators if o.kind == "concat" and o.outputs[0].name not in graph.outputs}
    by_name = {operator.name: operator for operator in graph.operators}

    def parts(tensor: str) -> set[str]:
        return {part for read in by_name[tensor].inputs for part in parts(read)} if tensor in joins else {tensor}

    reads = {name: set().union(*map(parts, by_name[name].inputs)) for name in order}
    steps = []
    for step, name in enumerate(order):
        begun = {tensor.name for tensor in graph.inputs} | set(order[: step + 1])
        wanted = set().union(*(reads[other] for other in order[step:])) | set(graph.outputs)
        steps.append(sum(graph.tensors[tensor].bytes for tensor in (begun & wanted) | {name}))
    return steps


@examples(150)
@given(randoms())
def test_bytes_alive_are_those_of_the_parts(rng: random.Random) -> None:
    graph = random_graph(rng)
    free = free_concatenations(graph, memory_graph(graph))
    for order in (program_order(free), kahn_order(free)):
        assert footprint(free, order) == simulated(graph, [free.operators[index] for index in order])
    assert minimum_peak(free).peak_bytes <= minimum_peak(memory_graph(graph)).peak_bytes


def test_a_chain_of_concatenations_is_one_of_all_parts() -> None:
    net = Net()
    x, y, z = (net.input(1, 1, channels) for channels in (1, 2, 4))
    net.conv(net.concat(net.concat(x, y), z), 8)
    graph = net.graph("chain")
    copied = memory_graph(graph)
    free = free_concatenations(graph, copied)
    assert free.operators == ("conv2d_2",)
    assert [(b.name, b.consumers) for b in free.buffers] == [
        *((f"input_{i}", (0,)) for i in range(3)),
        ("conv2d_2", ()),
    ]
    assert (minimum_peak(copied).peak_bytes, minimum_peak(free).peak_bytes) == (4 * (7 + 8), 4 * (7 + 8))
    # Listed, the first concatenation lies beside its parts.
    assert peak_bytes(copied, program_order(copied)) == 4 * (7 + 8)


def test_an_output_is_a_buffer_of_its_own_and_its_other_readers_read_that() -> None:
    net = Net()
    first = net.concat(net.input(1, 1, 1), net.input(1, 1, 2))
    second = net.concat(first, net.input(1, 1, 4))
    net.conv(second, 8)
    graph = net.graph("kept")
    kept = OperatorGraph(graph.name, graph.inputs, graph.operators, (*graph.outputs, second))
    free = free_concatenations(kept, memory_graph(kept))
    assert free.operators == ("concat_1", "conv2d_2")
    read = {buffer.name: [free.operators[index] for index in buffer.consumers] for buffer in free.buffers}
    assert read == {**{f"input_{i}": ["concat_1"] for i in range(3)}, "concat_1": ["conv2d_2"], "conv2d_2": []}
    # So does a concatenation that leaves its stage.
    stage = memory_graph(graph, ["concat_0", "concat_1"])
    assert free_concatenations(graph, stage).operators == ("concat_1",)


def test_a_graph_without_free_concatenations_stays_as_it_is() -> None:
    net = Net()
    net.add("conv2d+concat", (net.conv(net.input(1, 1, 1), 2),), (1, 1, 4))
    graph = net.graph("fused")
    memory = memory_graph(graph)
    assert free_concatenations(graph, memory) is memory


def test_workspace_and_operators_in_place_keep_their_own() -> None:
    x, y, c, r, z = (Tensor(name, (size,), "int8") for name, size in zip("xycrz", (4, 8, 12, 12, 2), strict=True))
    operators = (
        Operator("conv", "conv2d", ("x",), (y,)),
        Operator("concat", "concatenate", ("x", "y"), (c,)),
        Operator("relu", "relu", ("c",), (r,)),
        Operator("last", "conv2d", ("r",), (z,)),
    )
    graph = OperatorGraph("net", (x,), operators, ("z",))
    memory = memory_graph(graph, in_place=True)
    memory = MemoryGraph("net", memory.operators, memory.buffers, (1, 20, 3, 4), memory.in_place)
    free = free_concatenations(graph, memory)
    # What could overwrite the concatenation can overwrite no part of it.
    assert (free.operators, free.workspace_bytes, free.in_place) == (("conv", "relu", "last"), (1, 3, 4), ((), (), ()))
    assert footprint(memory, program_order(memory)) == [4 + 8 + 1, 12 + 12 + 20, 12 + 3, 12 + 2 + 4]
    assert footprint(free, program_order(free)) == [4 + 8 + 1, 12 + 12 + 3, 12 + 2 + 4]
