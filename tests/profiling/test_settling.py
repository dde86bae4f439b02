"""Profiles of a power mode begin when the clocks have settled."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, cycle, repeat

import pytest

from tvm_pipeline.profiling.settling import LONGEST_S, settles


@pytest.mark.parametrize(
    ("seconds", "settled", "runs"),
    [
        (chain(repeat(0.8, 3), repeat(0.1)), True, 11),  # 8 times as slow at first: the medians agree from the 11th on
        (repeat(0.01), True, 31),  # LEAST_S of passes that are steady at once
        (cycle([*repeat(0.1, 5), *repeat(0.3, 5)]), False, None),
        ((0.01 * 1.1**number for number in range(99)), False, None),
    ],
    ids=["slow at first", "steady", "in turns", "ever slower"],
)
def test_passes_go_on_until_they_are_steady(seconds: Iterable[float], settled: bool, runs: int | None):
    now_s, done, seconds = 0.0, 0, iter(seconds)

    def run() -> None:
        nonlocal now_s, done
        now_s, done = now_s + next(seconds), done + 1

    assert settles(run, lambda: now_s) == settled
    assert runs in (done, None)
    assert settled or now_s >= LONGEST_S
