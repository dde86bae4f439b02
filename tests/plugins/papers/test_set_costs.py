"""Stages that cost what a function says of the whole set, against every pipeline there is."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.brute_force import every_cut
from tests.support.graphs import graphs, random_chain
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import InfeasibleError, NoPlanError, OptionError
from tvm_pipeline.planning.search.cuts import ideals, prefixes
from tvm_pipeline_papers.fewest_bottleneck import fewest_bottleneck
from tvm_pipeline_papers.set_costs import SetSeconds, least_bottleneck_of_sets


def monotone(graph: OperatorGraph, seed: int) -> SetSeconds:
    """Return costs that never fall with more operators: work, cache overflow, and something for a few pairs."""
    rng = random.Random(seed)
    work = {(d, o.name): rng.randint(1, 9) for d in "abc" for o in graph.operators}
    param_bytes = {o.name: rng.randint(0, 9) for o in graph.operators}
    cache = {d: rng.randint(0, 20) for d in "abc"}
    pair = {o.name for o in graph.operators if rng.random() < 0.5}
    cannot = {(d, o.name) for d in "abc" for o in graph.operators if rng.random() < 0.05}

    def seconds(device: str, operators: tuple[str, ...]) -> float:
        if any((device, name) in cannot for name in operators):
            return math.inf
        spilled = max(0, sum(param_bytes[name] for name in operators) - cache[device])
        together = len(pair & set(operators))
        return float(max(sum(work[device, name] for name in operators), 3 * spilled) + together * (together - 1))

    return seconds


@given(graphs(2, 6), st.integers(0, 10**6), st.integers(1, 3))
def test_it_is_the_best_of_all_cuts(graph: OperatorGraph, seed: int, count: int) -> None:
    seconds, devices = monotone(graph, seed), "abc"[:count]
    figures = [max(map(seconds, devices, stages)) for stages in every_cut(graph, count) if len(stages) == count]
    best = min(figures, default=math.inf)
    cuts = ideals(graph)
    assert cuts is not None
    if math.isinf(best):
        with pytest.raises(InfeasibleError, match="each device needs one"):
            least_bottleneck_of_sets(cuts, devices, seconds, at_most_s=1e9)
        return
    found = least_bottleneck_of_sets(cuts, devices, seconds)
    assert found.bottleneck_s == best
    assert found.seconds == tuple(map(seconds, devices, found.stages))
    assert sorted(name for stage in found.stages for name in stage) == sorted(graph.operator_names)
    again = least_bottleneck_of_sets(cuts, devices, seconds, at_most_s=best)
    assert again.bottleneck_s == best
    assert again.evaluations <= found.evaluations


@given(graphs(2, 6), st.integers(0, 10**6), st.integers(1, 3))
def test_along_one_order_it_agrees_with_bisection_and_greedy_fill(graph: OperatorGraph, seed: int, count: int) -> None:
    seconds, names = monotone(graph, seed), graph.operator_names
    try:
        segments = fewest_bottleneck(len(names), count, lambda d, a, b: seconds("abc"[d], tuple(names[a:b])))
    except NoPlanError:
        return
    found = least_bottleneck_of_sets(prefixes(graph), "abc"[:count], seconds)
    assert found.bottleneck_s == segments.bottleneck_s


def test_a_pipeline_needs_devices() -> None:
    graph = random_chain(random.Random(0), 2)
    with pytest.raises(OptionError, match="at least one device"):
        least_bottleneck_of_sets(prefixes(graph), [], lambda device, operators: 1.0)
