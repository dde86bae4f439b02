"""SERENITY's scheduler finds what the exact search finds, also when its budget must fall and rise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings

from tests.support.graphs import randoms
from tests.support.memory import least_peak, random_memory_graph, simulated_peak
from tvm_pipeline.memory import minimum_peak, serenity


@given(randoms())
@settings(max_examples=60)
def test_no_order_needs_less(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 6)
    found = minimum_peak(graph, "serenity")
    assert found.peak_bytes == found.bound_bytes == least_peak(graph) == simulated_peak(graph, found.order)


def test_soft_budgets_make_steps_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few schedules a step, a lower budget still leads to the optimum, or nothing is claimed."""
    proven = 0
    monkeypatch.setattr(serenity, "STEP_LIMIT", 12)
    for seed in range(40):
        graph = random_memory_graph(random.Random(seed), 14)
        best, found = minimum_peak(graph), minimum_peak(graph, "serenity")
        assert found.bound_bytes <= best.peak_bytes <= found.peak_bytes == simulated_peak(graph, found.order)
        proven += found.status == "optimal"
    assert proven > 20
