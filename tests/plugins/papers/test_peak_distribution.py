"""Counts of orders by their peak, against every order of small graphs."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given

from tests.support.examples import examples
from tests.support.graphs import randoms
from tests.support.memory import every_order, random_memory_graph, simulated_peak
from tests.support.memory_networks import PROFILES
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.errors import OptionError
from tvm_pipeline.memory import Buffer, MemoryGraph, memory_graph, minimum_peak
from tvm_pipeline.memory.concatenation import free_concatenations
from tvm_pipeline_papers import peak_distribution
from tvm_pipeline_papers.peak_distribution import Orders


@examples(60)
@given(randoms())
def test_every_order_is_counted(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 6)
    peaks = Counter(simulated_peak(graph, order) for order in every_order(graph))
    found = Orders(graph)
    assert found.peaks == peaks
    assert list(found.peaks) == sorted(peaks)
    most = rng.choice(list(peaks))
    within = {peak: count for peak, count in peaks.items() if peak <= most}
    assert Orders(graph, most).peaks == within
    assert found.within(most) == Orders(graph, most).count == sum(within.values())


@pytest.mark.thorough
def test_orders_are_drawn_uniformly() -> None:
    """Three branches, wide and then thin: each order that has at most two wide buffers alive is drawn equally often."""
    buffers = [Buffer(f"wide{i}", 9, (i,), (3 + i,)) for i in range(3)]
    buffers += [Buffer(f"thin{i}", 1, (3 + i,), (6,)) for i in range(3)]
    graph = MemoryGraph("branches", tuple("abcdefg"), tuple(buffers))
    peaks = {order: simulated_peak(graph, order) for order in every_order(graph)}
    most = 26
    allowed = {order for order, peak in peaks.items() if peak <= most}
    assert (len(allowed), len(peaks)) == (54, 90)
    rng, orders = random.Random(0), Orders(graph, most)
    drawn = Counter(orders.draw(rng) for _ in range(100 * len(allowed)))
    assert set(drawn) == allowed
    assert all(50 < count < 160 for count in drawn.values())


def test_no_order_is_drawn_whose_last_step_needs_more() -> None:
    """What the first operator writes is dead at once: only behind the other one it is too much."""
    buffers = (Buffer("short", 10, (0,), ()), Buffer("kept", 20, (1,), (), pinned=True))
    orders = Orders(MemoryGraph("two", ("a", "b"), buffers), 25)
    assert {orders.draw(random.Random(seed)) for seed in range(20)} == {(0, 1)}


@pytest.mark.thorough
@pytest.mark.parametrize(("cell", "best_alone", "count"), [("a", True, 325_296), ("b", False, 497_556_000)])
def test_cells_of_swiftnet(cell: str, best_alone: bool, count: int) -> None:
    """Of cell A the best orders alone, 0.000129 of all, of which `benchmarks/serenity_tables.py` counts every one."""
    graph = read_graph(PROFILES / f"swiftnet/swiftnet-cell-{cell}.json")
    free = free_concatenations(graph, memory_graph(graph))
    least = minimum_peak(free).peak_bytes
    orders = Orders(free, least if best_alone else None)
    assert (orders.count, min(orders.peaks)) == (count, least)


def test_what_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = MemoryGraph("wide", tuple("ijklmnop"), tuple(Buffer(f"b{op}", 1, (op,), ()) for op in range(8)))
    with pytest.raises(OptionError, match="no order of graph wide needs 0 bytes"):
        Orders(wide, 0)
    monkeypatch.setattr(peak_distribution, "MOST_DOWNSETS", 200)
    with pytest.raises(OptionError, match="graph wide has more than 200 sets"):
        Orders(wide)
