"""Off-chip traffic against every choice of order and evictions that there is, on graphs small enough for it."""

from __future__ import annotations

import inspect
import itertools
import random
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tvm_pipeline.errors import GraphError, OptionError
from tvm_pipeline.memory import Buffer, MemoryGraph
from tvm_pipeline.memory.orders import kahn_order, program_order
from tvm_pipeline.memory.traffic import belady, traffic
from tvm_pipeline.memory.traffic_order import least_traffic, traffic_order


@pytest.fixture(autouse=True, scope="module")
def plain_loop() -> Iterator[None]:
    """Run the loop as plain Python: on such small graphs compiling takes longer than all runs together."""
    with pytest.MonkeyPatch.context() as patch:
        for caller in (traffic, traffic_order):
            patch.setattr(sys.modules[caller.__module__], "belady", inspect.unwrap(belady))
        yield


def random_graph(rng: random.Random, most: int, sizes: Sequence[int] = (1, 2, 3)) -> MemoryGraph:
    """Return operators that read some inputs and buffers; some buffers have two producers, some are pinned."""
    count = rng.randint(1, most)
    buffers = [(rng.choice(sizes), [], rng.random() < 0.2) for _ in range(rng.randint(1, 2))]
    readers: list[list[int]] = [[] for _ in buffers]
    for index in range(count):
        reads = rng.sample(range(len(buffers)), min(len(buffers), rng.randint(1, 2)))
        last = len(buffers) - 1
        if buffers[last][1] and not readers[last] and last not in reads and rng.random() < 0.3:
            buffers[last][1].append(index)
        else:
            buffers.append((rng.choice(sizes), [index], rng.random() < 0.2))
            readers.append([])
        for read in reads:
            readers[read].append(index)
    workspace = tuple(rng.choice((0, 0, 0, 1)) for _ in range(count))
    made = (
        Buffer(f"b{index}", size, tuple(writers), tuple(readers[index]), pinned)
        for index, (size, writers, pinned) in enumerate(buffers)
    )
    return MemoryGraph("random", tuple(map(str, range(count))), tuple(made), workspace)


def subsets(items: frozenset[int]) -> Iterator[frozenset[int]]:
    for count in range(len(items) + 1):
        yield from map(frozenset, itertools.combinations(sorted(items), count))


def orders(graph: MemoryGraph) -> list[tuple[int, ...]]:
    before = [(p, c) for b in graph.buffers for p in b.producers for c in b.consumers]
    every = itertools.permutations(range(len(graph)))
    return [order for order in every if all(order.index(p) < order.index(c) for p, c in before)]


def least_moved(graph: MemoryGraph, order: Sequence[int], capacity: int) -> int:
    """Return the least over all evictions, of any buffers at any time, step by step."""
    buffers = range(len(graph.buffers))
    inputs = frozenset(b for b in buffers if not graph.buffers[b].producers)
    states = {(frozenset[int](), inputs): 0}  # on chip, off chip -> bytes moved

    def total(indices: frozenset[int]) -> int:
        return sum(graph.buffers[index].bytes for index in indices)

    for step, index in enumerate(order):
        reads = frozenset(b for b in buffers if index in graph.buffers[b].consumers)
        writes = frozenset(b for b in buffers if index in graph.buffers[b].producers)
        begun = frozenset(b for b in buffers if b in inputs or {*order[:step]} & {*graph.buffers[b].producers})
        later = {*order[step + 1 :]}
        live = frozenset(b for b in buffers if later & {*graph.buffers[b].producers, *graph.buffers[b].consumers})
        kept = frozenset(b for b in buffers if graph.buffers[b].pinned)
        following: dict[tuple[frozenset[int], frozenset[int]], int] = {}
        for (chip, off), moved in states.items():
            for gone in subsets(chip - reads - writes):
                cost = moved + total(gone - off)
                there = (chip - gone) | reads | writes
                streams = total(reads | writes) + graph.workspace_bytes[index] > capacity
                if not streams and total(there) + graph.workspace_bytes[index] > capacity:
                    continue
                cost += total(((reads | writes) & begun) - chip)
                now_off = (off | gone) - writes
                stays = frozenset[int]() if streams else there & live
                leaving = (there - stays) & (live | kept) - now_off
                state = stays, now_off | leaving
                following[state] = min(following.get(state, cost + total(leaving)), cost + total(leaving))
        states = following
    return min(states.values(), default=0)


def test_the_search_agrees_with_every_order_and_eviction() -> None:
    rng = random.Random(0)
    by_rule = 0
    for _ in range(150):
        graph, capacity = random_graph(rng, 5), rng.randint(1, 9)
        best = min(least_moved(graph, order, capacity) for order in orders(graph))
        best_by_rule = min(traffic(graph, order, capacity).bytes for order in orders(graph))
        found = traffic_order(graph, capacity, exchanges=200)
        assert least_traffic(graph, capacity) <= found.bound_bytes == best <= best_by_rule <= found.traffic_bytes
        assert found.traffic_bytes == traffic(graph, found.order, capacity).bytes
        by_rule += found.traffic_bytes == best
    # Belady's rule knows neither sizes nor what must be written back; it is rarely far off.
    assert by_rule >= 140


def test_the_rule_is_never_better_than_the_best_evictions() -> None:
    rng = random.Random(1)
    same = 0
    for _ in range(100):
        graph, capacity = random_graph(rng, 12, (1, 2, 3, 5)), rng.randint(6, 14)
        order = program_order(graph)
        best, moved = least_moved(graph, order, capacity), traffic(graph, order, capacity).bytes
        assert best <= moved
        same += best == moved
    assert 80 <= same < 100


@examples(50)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1, max_size=2), min_size=1, max_size=8), st.integers(2, 4))
def test_the_rule_is_optimal_for_pages(reads: list[set[int]], capacity: int) -> None:
    """As Belady proved: of buffers of one size, none of which is ever written."""
    pages = (
        Buffer(f"page{page}", 1, (), tuple(step for step, found in enumerate(reads) if page in found))
        for page in range(6)
    )
    done = [Buffer(f"done{step}", 0, (step,), (step + 1,)) for step in range(len(reads) - 1)]
    names = tuple(map(str, range(len(reads))))
    graph = MemoryGraph("pages", names, (*pages, *done), (0,) * len(reads))
    order = range(len(reads))
    assert traffic(graph, order, capacity).bytes == least_moved(graph, order, capacity)


def wide(branches: int) -> MemoryGraph:
    """Return an input of 2 bytes, read by branches of two operators of 4 bytes, that are joined."""
    count = 2 * branches + 1
    buffers = [Buffer("input", 2, (), tuple(range(0, 2 * branches, 2)))]
    for index in range(branches):
        buffers += [
            Buffer(f"a{index}", 4, (2 * index,), (2 * index + 1,)),
            Buffer(f"b{index}", 4, (2 * index + 1,), (2 * branches,)),
        ]
    buffers.append(Buffer("sum", 4, (2 * branches,), (), True))
    return MemoryGraph("wide", tuple(map(str, range(count))), tuple(buffers), (0,) * count)


def test_a_large_chip_moves_inputs_and_outputs_alone() -> None:
    graph = wide(3)
    for capacity in (100, 18):
        assert traffic(graph, program_order(graph), capacity).bytes == 6 == least_traffic(graph, capacity)
    # The third branch needs 8 bytes beside the two results that wait; of these one leaves, and comes back for the sum.
    moved = traffic(graph, program_order(graph), 16)
    assert (moved.loaded_bytes, moved.stored_bytes, moved.streamed) == (2, 4, ())


def test_what_is_larger_than_the_chip_streams() -> None:
    graph = wide(2)
    moved = traffic(graph, program_order(graph), 8)
    # The sum needs 12 bytes: b0 and b1 come back or are there, and its output goes straight out.
    assert moved.streamed == ("4",)
    tiny = traffic(graph, program_order(graph), 1)
    assert tiny.streamed == graph.operators
    # The input twice, a0 to b1 out and in again, the sum out.
    assert (tiny.loaded_bytes, tiny.stored_bytes) == (2 * 2 + 4 * 4, 4 * 4 + 4)
    assert tiny.bytes == least_traffic(graph, 1)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_chip_holds_something(capacity: int) -> None:
    for judge in (lambda: traffic(wide(2), (), capacity), lambda: traffic_order(wide(2), capacity)):
        with pytest.raises((OptionError, GraphError)):
            judge()
    with pytest.raises(OptionError, match=f"memory of {capacity} bytes holds nothing"):
        traffic(wide(2), range(5), capacity)


def test_orders_must_be_legal() -> None:
    with pytest.raises(GraphError, match="stands before"):
        traffic(wide(1), (1, 0, 2), 10)
    with pytest.raises(GraphError, match="stands before"):
        traffic_order(wide(1), 10, [(1, 0, 2)])


@given(st.integers(0, 2**32), st.integers(4, 40))
@examples(20)
def test_never_worse_than_what_is_known(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 20)
    known = [program_order(graph), kahn_order(graph)]
    found = traffic_order(graph, capacity, known, exchanges=50, most_states=50)
    moved = [traffic(graph, order, capacity).bytes for order in known]
    assert least_traffic(graph, capacity) <= found.bound_bytes <= found.traffic_bytes <= min(moved)
    assert traffic(graph, found.order, capacity).bytes == found.traffic_bytes
