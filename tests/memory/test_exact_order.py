"""The orders of least peak, against every order there is; bounds where time is short; larger graphs."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given

from tests.support.examples import examples, seeds
from tests.support.graphs import randoms
from tests.support.memory import least_peak, random_memory_graph, simulated_peak
from tvm_pipeline.memory import Buffer, MemoryGraph, minimum_peak

ROOT = Path(__file__).parents[2]

# Prints the orders of random graphs.
PROGRAM = """
import random, sys
from tests.support.memory import random_memory_graph
from tvm_pipeline.memory import minimum_peak

for seed in range(12):
    print(seed, minimum_peak(random_memory_graph(random.Random(seed), 14), time_limit_s=None))
from numba import config
print("plain" if config.DISABLE_JIT else "compiled", file=sys.stderr)
"""


@given(randoms())
@examples(150)
def test_no_order_needs_less(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 7)
    least = least_peak(graph)
    found = minimum_peak(graph)
    assert (found.peak_bytes, found.bound_bytes, found.status, found.gap) == (least, least, "optimal", 0.0)
    assert simulated_peak(graph, found.order) == least


@given(randoms())
@examples(50)
def test_free_orders_stand_between_their_bound_and_their_peak(rng: random.Random) -> None:
    graph = random_memory_graph(rng, 6)
    least = least_peak(graph)
    for method in ("program", "kahn", "dfs"):
        found = minimum_peak(graph, method)
        assert found.bound_bytes <= least <= found.peak_bytes == simulated_peak(graph, found.order)


def test_without_time_the_answer_is_an_order_and_a_bound() -> None:
    for seed in seeds(20):
        graph = random_memory_graph(random.Random(seed), 24)
        found, best = minimum_peak(graph, time_limit_s=0.0), minimum_peak(graph)
        assert found.bound_bytes <= best.peak_bytes <= found.peak_bytes == simulated_peak(graph, found.order)


def test_an_empty_graph_and_buffers_of_no_bytes() -> None:
    kept = Buffer("kept", 5, (), (), pinned=True)
    assert minimum_peak(MemoryGraph("empty", (), (kept,))).peak_bytes == 5
    nothing = MemoryGraph("nothing", ("a", "b"), (Buffer("x", 0, (0,), (1,)),))
    assert minimum_peak(nothing).order == (0, 1)


def test_an_overwritten_buffer_has_no_other_reader_to_come() -> None:
    # b may overwrite x, which c reads too: only after c.
    x, y, z = Buffer("x", 4, (0,), (1, 2)), Buffer("y", 4, (1,), (), pinned=True), Buffer("z", 1, (2,), (), pinned=True)
    found = minimum_peak(MemoryGraph("shared", ("a", "b", "c"), (x, y, z), in_place=((), (0,), ())))
    assert (found.order, found.peak_bytes) == ((0, 2, 1), 5)


def test_sums_in_any_order_take_one_buffer() -> None:
    """Eight branches added up as they come need two buffers at a time, however many they are."""
    branches = [Buffer(f"b{i}", 10, (2 * i,), (2 * i + 1,)) for i in range(8)]
    total = Buffer("sum", 10, tuple(range(1, 16, 2)), (), pinned=True)
    found = minimum_peak(MemoryGraph("sum", tuple(f"op{i}" for i in range(16)), (*branches, total)))
    assert (found.peak_bytes, found.status) == (20, "optimal")


@pytest.mark.thorough
def test_compiled_and_plain_loops_find_the_same_orders() -> None:
    outputs = {}
    for plain, name in (("1", "plain"), ("0", "compiled")):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": plain}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
        assert done.stderr.split()[-1] == name
        outputs[name] = done.stdout
    assert outputs["plain"] == outputs["compiled"]
    assert outputs["plain"].count("\n") == 12
