"""SERENITY's scheduler finds what the exact search finds, also when its budget must fall and rise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

from tests.support.examples import examples
from tests.support.graphs import randoms
from tests.support.memory import least_peak, random_memory_graph, simulated_peak
from tvm_pipeline.memory import Buffer, MemoryGraph, footprint, minimum_peak
from tvm_pipeline.memory.orders import kahn_order
from tvm_pipeline_papers import serenity


@given(randoms())
@examples(60)
def test_no_order_needs_less(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 6)
    found = serenity.serenity_order(graph)
    assert found.peak_bytes == found.bound_bytes == least_peak(graph) == simulated_peak(graph, found.order)


@given(randoms())
@examples(60)
def test_each_of_its_ideas_can_be_left_out(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 7)
    for divide, budgeting, first in ((False, False, False), (True, False, True), (False, True, False)):
        found = serenity.serenity_order(graph, divide=divide, budgeting=budgeting, keep_first=first)
        assert found.peak_bytes == found.bound_bytes == least_peak(graph) == simulated_peak(graph, found.order)


def test_the_last_of_equal_schedules_is_kept_as_the_paper_prints() -> None:
    """Line 21 of Algorithm 1 compares with `<=`, so a later schedule of the same signature and peak replaces it."""
    graph = MemoryGraph("net", ("a", "b", "c"), (Buffer("x", 1, (0,), (2,)), Buffer("y", 1, (1,), (2,))))
    assert serenity.serenity_order(graph).order == (1, 0, 2)
    assert serenity.serenity_order(graph, keep_first=True).order == (0, 1, 2)


def test_what_is_left_out_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four branches, wide and then thin, have 19 schedules in a step, and 12 if one wide buffer is alive at a time.

    The operator behind them needs so much that a budget for all operators prunes none of the branches.
    """
    buffers = [Buffer("image", 1, (0,), (1, 2, 3, 4))]
    buffers += [Buffer(f"wide{i}", 9, (1 + i,), (5 + i,)) for i in range(4)]
    buffers += [Buffer(f"thin{i}", 1, (5 + i,), (9,)) for i in range(4)]
    buffers += [Buffer("sum", 1, (9,), (10,)), Buffer("large", 1000, (10,), (11,)), Buffer("end", 1, (11,), ())]
    graph = MemoryGraph("net", tuple("abcdefghijkl"), tuple(buffers))
    monkeypatch.setattr(serenity, "STEP_LIMIT", 12)

    def peak_of_the_branches(**ideas: bool) -> int:
        return max(footprint(graph, serenity.serenity_order(graph, **ideas).order)[:10])

    kahn = max(footprint(graph, kahn_order(graph))[:10])
    assert (kahn, peak_of_the_branches()) == (1 + 4 * 9, 1 + 9 + 3)
    assert peak_of_the_branches(divide=False) == kahn
    assert peak_of_the_branches(budgeting=False) == 1 + 9 + 3
    # Without the budget the limit of a step does not hold.
    assert serenity.serenity_order(graph, divide=False).status == "feasible"
    assert serenity.serenity_order(graph, divide=False, budgeting=False).status == "optimal"


@pytest.mark.thorough
def test_soft_budgets_make_steps_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few schedules a step, a lower budget still leads to the optimum, or nothing is claimed."""
    proven = 0
    monkeypatch.setattr(serenity, "STEP_LIMIT", 12)
    for seed in range(40):
        graph = random_memory_graph(random.Random(seed), 14)
        best, found = minimum_peak(graph), serenity.serenity_order(graph)
        assert found.bound_bytes <= best.peak_bytes <= found.peak_bytes == simulated_peak(graph, found.order)
        proven += found.status == "optimal"
    assert proven > 20
