"""Each idea that keeps the search for orders small can be switched off: the peak stays the least."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import product

import pytest

from tests.support.examples import seeds
from tests.support.memory import least_peak, random_memory_graph, simulated_peak
from tvm_pipeline.memory.exact_order import Pruning, exact_order

IDEAS = [field.name for field in fields(Pruning)]


def check(pruning: Pruning, seed: int) -> None:
    graph = random_memory_graph(random.Random(seed), 7)
    least = least_peak(graph)
    found = exact_order(graph, pruning=pruning)
    assert (found.peak_bytes, found.status) == (least, "optimal")
    assert simulated_peak(graph, found.order) == least


@pytest.mark.parametrize("idea", IDEAS)
def test_without_one_idea(idea: str) -> None:
    for seed in range(30):
        check(Pruning(**{idea: False}), seed)


@pytest.mark.parametrize("idea", IDEAS)
def test_with_one_idea_alone(idea: str) -> None:
    for seed in range(30, 50):
        check(Pruning(**{name: name == idea for name in IDEAS}), seed)


def test_all_combinations() -> None:
    """Each of the 256 combinations prunes the search of another random graph; the quick tests draw 16 of them."""
    every = list(enumerate(product((False, True), repeat=len(IDEAS)), 100))
    for seed, chosen in random.Random(0).sample(every, len(seeds(256))):
        check(Pruning(**dict(zip(IDEAS, chosen, strict=True))), seed)
