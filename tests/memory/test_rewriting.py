"""Concatenations and sums in parts: nothing lost, never more memory in float32, and the best choice of all.

That the parts compute the same is tested where they are real: `tests/tvm/test_rewrite_concat.py`.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.examples import examples
from tests.support.graphs import randoms
from tests.support.memory_networks import Net, randwire
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import GraphError
from tvm_pipeline.memory import MemoryGraph, memory_graph, minimum_peak, peak_bytes
from tvm_pipeline.memory.memory_graph import predecessors
from tvm_pipeline.memory.orders import program_order
from tvm_pipeline.memory.rewriting import rewritable, rewrite, rewritten


def random_net(rng: random.Random) -> OperatorGraph:
    """Return a net of convolutions, depthwise ones, pools, ReLUs, sums and concatenations, of 4 x 4 pixels."""
    net = Net()
    made = [net.input(4, 4, rng.randint(1, 3))]
    for _ in range(rng.randint(3, 9)):
        x = rng.choice(made[-4:])
        match rng.choice(["conv", "conv", "depthwise", "relu", "pool", "concat", "concat", "sum"]):
            case "conv":
                made.append(net.conv(x, rng.randint(1, 4), kind=rng.choice(["conv2d", "conv2d+relu"])))
            case "depthwise":
                made.append(net.add("depthwise_conv2d", (x,), net.shapes[x], 9 * net.shapes[x][-1]))
            case "relu":
                made.append(net.relu(x))
            case "pool":
                made.append(net.once("max_pool", x))
            case "concat":
                made.append(net.concat(*rng.choices(made, k=rng.randint(2, 3))))
            case "sum":
                alike = [other for other in made if net.shapes[other] == net.shapes[x]]
                made.append(net.sum(*dict.fromkeys(rng.choices(alike, k=3))))
    return net.graph("random")


def joined(*, kind: str = "conv2d", between: bool = False, dtype: str = "float32") -> OperatorGraph:
    """Return three 1x1 convolutions of 4, 8 and 4 channels, concatenated, and one reader that makes 2 (or 16).

    A tensor of one channel has 16 elements.
    """
    net = Net()
    data = net.input(4, 4, 1)
    x = net.concat(*(net.conv(data, filters) for filters in (4, 8, 4)))
    x = net.relu(x) if between else x
    if kind == "conv2d":
        net.conv(x, 2)
    else:
        net.add(kind, (x,), net.shapes[x], 9 * 16)
    graph = net.graph("joined")
    operators = (replace(o, outputs=tuple(replace(t, dtype=dtype) for t in o.outputs)) for o in graph.operators)
    return replace(graph, inputs=tuple(replace(t, dtype=dtype) for t in graph.inputs), operators=tuple(operators))


def buffers(memory: MemoryGraph) -> dict[str, tuple[int, list[str], list[str]]]:
    """Return bytes, producers and consumers of each buffer."""
    names = memory.operators
    return {b.name: (b.bytes, [names[i] for i in b.producers], [names[i] for i in b.consumers]) for b in memory.buffers}


def peak(graph: MemoryGraph) -> int:
    found = minimum_peak(graph)
    assert found.status == "optimal"
    return found.peak_bytes


def test_a_convolution_adds_partial_sums_to_one_buffer() -> None:
    graph = joined()
    memory = memory_graph(graph)
    assert rewritable(graph, memory) == {"concat_3": "partitioned"}
    made = rewrite(graph, memory)
    assert made.operators == ("concat_3",)
    parts = [f"conv2d_4[{index}]" for index in range(3)]
    assert made.graph.operators == ("conv2d_0", "conv2d_1", "conv2d_2", *parts)
    found = buffers(made.graph)
    assert found["conv2d_4"] == (2 * 64, parts, [])
    assert [found[f"conv2d_{i}"] for i in range(3)] == [
        (64 * width, [f"conv2d_{i}"], [part]) for i, (width, part) in enumerate(zip((4, 8, 4), parts, strict=True))
    ]
    # Before, the concatenation with its inputs; now the largest input with the image and the sum.
    assert (peak(memory), made.ordering.peak_bytes) == (2 * 16 * 64, (1 + 8 + 2) * 64)


def test_a_depthwise_convolution_writes_its_parts_where_they_belong() -> None:
    graph = joined(kind="depthwise_conv2d")
    memory = memory_graph(graph)
    made = rewrite(graph, memory)
    parts = [f"depthwise_conv2d_4[{index}]" for index in range(3)]
    assert buffers(made.graph)["depthwise_conv2d_4"] == (16 * 64, parts, [])
    # What is written, with the image and the largest input.
    assert (peak(memory), made.ordering.peak_bytes) == (32 * 64, (16 + 1 + 8) * 64)


def test_what_stands_between_is_done_in_parts() -> None:
    graph = joined(between=True)
    made = rewrite(graph, memory_graph(graph))
    found = buffers(made.graph)
    assert [found[f"relu_4[{i}]"] for i in range(3)] == [
        (64 * width, [f"relu_4[{i}]"], [f"conv2d_5[{i}]"]) for i, width in enumerate((4, 8, 4))
    ]
    in_place = rewrite(graph, memory_graph(graph, in_place=True))
    assert in_place.ordering.peak_bytes == 11 * 64 < made.ordering.peak_bytes == 17 * 64


def test_what_wants_it_whole_gets_it_whole_and_inputs_die_as_they_are_copied() -> None:
    net = Net()
    data = net.input(4, 4, 1)
    x = net.concat(net.conv(data, 4), net.conv(data, 8))
    net.add("softmax", (x,), (4, 4, 1))
    graph = net.graph("whole")
    memory = memory_graph(graph)
    assert rewritable(graph, memory) == {"concat_2": "piecewise"}
    made = rewrite(graph, memory)
    assert buffers(made.graph)["concat_2"] == (12 * 64, ["concat_2[0]", "concat_2[1]"], ["softmax_3"])
    assert (peak(memory), made.ordering.peak_bytes) == (24 * 64, (12 + 1 + 8) * 64)


def test_a_stage_hands_its_tensors_on_whole() -> None:
    graph = joined()
    stage = memory_graph(graph, [operator.name for operator in graph.operators[:-1]])
    assert rewritable(graph, stage) == {"concat_3": "piecewise"}
    assert rewritable(graph, memory_graph(graph, ["conv2d_4"])) == {}


def test_an_integer_sum_is_carried_in_int32() -> None:
    graph = joined(dtype="int8")
    made = rewrite(graph, memory_graph(graph))
    found = buffers(made.graph)
    assert found["conv2d_4[sum]"] == (4 * 32, [f"conv2d_4[{i}]" for i in range(3)], ["conv2d_4[requantize]"])
    assert found["conv2d_4"] == (32, ["conv2d_4[requantize]"], [])
    assert made.ordering.peak_bytes == (1 + 8) * 16 + 4 * 32  # before: 32 * 16


def test_an_integer_sum_that_needs_more_is_not_taken() -> None:
    net = Net()
    data = net.input(4, 4, 1)
    net.conv(net.concat(net.conv(data, 1), net.conv(data, 1)), 8)
    graph = net.graph("wide")
    operators = tuple(replace(o, outputs=(replace(o.outputs[0], dtype="int8"),)) for o in graph.operators)
    graph = replace(graph, operators=operators, inputs=(replace(graph.inputs[0], dtype="int8"),))
    memory = memory_graph(graph)
    assert peak(rewritten(graph, memory, ["concat_2"])) > peak(memory)
    made = rewrite(graph, memory)
    assert (made.operators, made.graph) == ((), memory)


def test_sums_of_a_random_wiring() -> None:
    graph = randwire(nodes=10, seed=0)
    memory = memory_graph(graph)
    made = rewrite(graph, memory)
    sums = [operator.name for operator in graph.operators if len(operator.inputs) > 1]
    assert set(made.operators) <= set(sums)
    assert made.ordering.peak_bytes == peak(rewritten(graph, memory, sums)) < peak(memory)


def test_a_convolution_in_groups_is_none_that_adds_over_all_channels() -> None:
    graph = joined()
    grouped = replace(graph, operators=(*graph.operators[:-1], replace(graph.operators[-1], macs=16 * 2 * 4)))
    assert rewritable(grouped, memory_graph(grouped)) == {"concat_3": "piecewise"}


@examples(60)
@given(randoms())
def test_no_choice_of_rewritings_needs_less(rng: random.Random) -> None:
    graph = random_net(rng)
    memory = memory_graph(graph)
    names = list(rewritable(graph, memory))[:4]
    found = rewrite(graph, memory, names)
    peaks = {
        chosen: peak(rewritten(graph, memory, chosen))
        for count in range(len(names) + 1)
        for chosen in itertools.combinations(names, count)
    }
    assert found.ordering.peak_bytes == peak_bytes(found.graph, found.ordering.order) == min(peaks.values())
    # Nor can any be left out.
    kept = tuple(name for name in names if name in found.operators)
    assert all(peaks[tuple(n for n in kept if n != left)] > peaks[kept] for left in kept)


@examples(60)
@given(randoms())
def test_parts_in_the_place_of_an_operator_need_no_more_and_lose_nothing(rng: random.Random) -> None:
    graph = random_net(rng)
    memory = memory_graph(graph, pin_inputs=rng.random() < 0.5)
    chosen = [name for name in rewritable(graph, memory) if rng.random() < 0.7]
    made = rewritten(graph, memory, chosen)
    assert peak_bytes(made, program_order(made)) <= peak_bytes(memory, program_order(memory))
    before, after = ancestors(memory), ancestors(made)
    joins = {operator.name for operator in graph.operators if operator.kind == "concat"}
    for name in graph.outputs:
        assert after[name] - joins == before[name] - joins
    kept = buffers(made)
    assert all(kept[name][0] == size for name, (size, *_) in buffers(memory).items() if name in kept)
    for operator in graph.operators:  # the parts of a tensor are as large as the tensor
        name = operator.outputs[0].name
        parts = [size for other, (size, *_) in kept.items() if other.startswith(f"{name}[")]
        assert name in kept or not parts or sum(parts) == operator.output_bytes


def ancestors(memory: MemoryGraph) -> dict[str, set[str]]:
    """Return for each buffer the operators that must have run before it is complete; parts count as one."""
    before, needs = predecessors(memory), []
    for index, name in enumerate(memory.operators):
        needs.append(set().union({name.partition("[")[0]}, *(needs[other] for other in before[index])))
    return {buffer.name: set().union(*(needs[index] for index in buffer.producers)) for buffer in memory.buffers}


def test_what_cannot_be_rewritten() -> None:
    graph = joined()
    memory = memory_graph(graph)
    with pytest.raises(GraphError, match="conv2d_0 cannot be rewritten"):
        rewrite(graph, memory, ["conv2d_0"])
    with pytest.raises(GraphError, match="has no operator"):
        rewritten(randwire(nodes=5), memory, [])
