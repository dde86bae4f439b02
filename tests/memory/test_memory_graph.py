"""The peak of an order, against a simulation by spans; graphs from operator graphs and their stages; bad input."""

from __future__ import annotations

import doctest
import random
import time

import pytest
from hypothesis import given

from tests.support.examples import examples
from tests.support.graphs import graphs, random_chain, random_order, randoms
from tests.support.memory import random_memory_graph, simulated_peak
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError, OptionError
from tvm_pipeline.memory import (
    Buffer,
    MemoryGraph,
    check_order,
    footprint,
    memory_graph,
    minimum_peak,
    peak_bytes,
    stage_memory,
)
from tvm_pipeline.memory.orders import dfs_order, kahn_order
from tvm_pipeline.memory.stage_memory import least_peak, listed_peak, order_peak, stage_graph


def diamond(kind: str = "relu") -> OperatorGraph:
    """Return a convolution, two branches of which one is of `kind`, and their sum."""
    x = Tensor("x", (4,), "int8")
    operators = (
        Operator("a", "conv2d", ("x",), (Tensor("a", (8,), "int8"),)),
        Operator("b", kind, ("a",), (Tensor("b", (8,), "int8"),)),
        Operator("c", "conv2d", ("a",), (Tensor("c", (8,), "int8"),)),
        Operator("d", "add", ("b", "c"), (Tensor("d", (8,), "int8"),)),
    )
    return OperatorGraph("diamond", (x,), operators, ("d",))


@given(randoms())
def test_a_peak_is_that_of_the_buffers_spans(rng: random.Random) -> None:
    graph = random_memory_graph(rng)
    for order in (range(len(graph)), kahn_order(graph), dfs_order(graph)):
        assert peak_bytes(graph, order) == simulated_peak(graph, order)


@given(graphs(), randoms())
@examples(40)
def test_every_order_of_an_operator_graph_is_one_of_its_memory_graph(graph: OperatorGraph, rng: random.Random) -> None:
    memory = memory_graph(graph)
    position = {name: index for index, name in enumerate(memory.operators)}
    order = [position[name] for name in random_order(rng, graph)]
    assert peak_bytes(memory, order) == simulated_peak(memory, order)


def test_the_footprint_counts_what_lives_and_what_is_written() -> None:
    assert footprint(memory_graph(diamond()), range(4)) == [4 + 8, 16, 24, 24]


def test_inputs_may_be_pinned_and_outputs_not() -> None:
    graph = diamond()
    assert footprint(memory_graph(graph, pin_inputs=True), range(4)) == [12, 20, 28, 28]
    sink = memory_graph(graph, pin_outputs=False)
    assert [buffer.pinned for buffer in sink.buffers] == [False] * 5


def test_an_elementwise_operator_overwrites_only_what_dies() -> None:
    graph = memory_graph(diamond(), in_place=True)
    assert footprint(graph, [0, 1, 2, 3]) == [12, 16, 24, 16]  # `a` has a reader to come when relu runs
    assert footprint(graph, [0, 2, 1, 3]) == [12, 16, 16, 16]
    assert memory_graph(diamond("conv2d+relu"), in_place=True).in_place[1] == ()


def test_a_stage_has_its_own_inputs_and_outputs() -> None:
    stage = memory_graph(diamond(), ["c", "b"])
    assert stage.operators == ("b", "c")
    assert {b.name: (b.producers, b.pinned) for b in stage.buffers} == {
        "a": ((), False),
        "b": ((0,), True),
        "c": ((1,), True),
    }
    with pytest.raises(GraphError, match="no operator nobody"):
        memory_graph(diamond(), ["b", "nobody"])


@pytest.mark.parametrize(
    ("buffers", "options", "message"),
    [
        ((Buffer("x", 1, (1,), (0,)),), {}, "x is read by operator a before b has written it.*cycle"),
        ((Buffer("x", 1, (0,), (0,)),), {}, "before a has written it"),
        ((Buffer("x", -1, (0,), (1,)),), {}, "x has -1 bytes"),
        ((Buffer("x", None, (0,), (1,)),), {}, "x has None bytes.*sizes must be known"),
        ((Buffer("x", 1 << 62, (0,), ()), Buffer("y", 1 << 62, (1,), ())), {}, "more bytes than 64 bits"),
        ((Buffer("x", 1, (0, 0), (1,)),), {}, "each must be there once"),
        ((Buffer("x", 1, (0,), (7,)),), {}, "from 0 to 1"),
        ((Buffer("x", 1, (0,), (1,)),), {"workspace_bytes": (1,)}, "1 entries for 2 operators"),
        ((Buffer("x", 1, (0,), (1,)),), {"workspace_bytes": (1, -1)}, "workspace of operator b has -1 bytes"),
        ((Buffer("x", 1, (0,), (1,)), Buffer("y", 1, (1,), ())), {"in_place": ((), (1,))}, "b is to overwrite y"),
        ((Buffer("x", 1, (0,), (1,)), Buffer("y", 1, (1,), ())), {"in_place": ((), (5,))}, "overwrite buffer 5"),
        ((Buffer("x", 1, (0,), (1,)),), {"in_place": ((), (0,))}, "does not write exactly one buffer"),
    ],
)
def test_bad_graphs_are_named(buffers: tuple[Buffer, ...], options: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        MemoryGraph("bad", ("a", "b"), buffers, **options)


def test_bad_orders_and_methods_are_named() -> None:
    graph = memory_graph(diamond())
    with pytest.raises(GraphError, match="c stands before a"):
        check_order(graph, [2, 0, 1, 3])
    with pytest.raises(GraphError, match="each of 0 to 3 once"):
        check_order(graph, [0, 1, 2])
    with pytest.raises(OptionError, match=r"no method best.*exact, program"):
        minimum_peak(graph, "best")


@given(graphs(2), randoms())
@examples(40)
def test_the_order_of_a_stage_is_judged_without_a_search(graph: OperatorGraph, rng: random.Random) -> None:
    order = random_order(rng, graph)
    start, end = sorted(rng.sample(range(len(order) + 1), 2))
    stage = order[start:end]
    memory = stage_graph(graph, stage)
    position = {name: index for index, name in enumerate(memory.operators)}
    expected = simulated_peak(memory, [position[name] for name in stage])
    assert order_peak(graph, stage) == expected >= least_peak(graph, stage).bound_bytes
    assert listed_peak(graph, stage) == order_peak(graph, memory.operators) == simulated_peak(memory, range(len(stage)))


def test_an_order_of_a_stage_that_is_none_is_refused() -> None:
    for order, message in (
        (["b", "b", "a"], "operator b stands twice in an order of a stage"),
        (["b", "a"], "operator b stands before a, whose output it reads"),
        (["a", "z"], "graph diamond has no operator z"),
    ):
        with pytest.raises(GraphError, match=message):
            order_peak(diamond(), order)


@pytest.mark.thorough
def test_judging_an_order_keeps_nothing_and_takes_linear_time() -> None:
    """A chain of 8000 operators takes about 8 times as long as one of 1000; a search or a square would take 64."""
    chains = [random_chain(random.Random(0), length) for length in (1000, 8000)]
    seconds = []
    for chain in chains:
        names = chain.operator_names
        chain.edges  # noqa: B018, kept by the graph
        times = []
        for _ in range(5):
            began = time.process_time()
            listed_peak(chain, names)
            times.append(time.process_time() - began)
        seconds.append(min(times))
    assert seconds[1] < 25 * seconds[0]


def test_the_example_of_a_stage_runs() -> None:
    results = doctest.testmod(stage_memory)
    assert results.attempted
    assert not results.failed
