"""Arenas: tensors alive at the same time never overlap, and no more is taken than the plan needs."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tvm")  # the package that it stands in imports TVM

from tvm_pipeline.relay.storage import Lifetime, plan_arena

LIFETIMES = st.lists(
    st.builds(
        lambda first, more, size: Lifetime(first, first + more, size),
        st.integers(0, 12),
        st.integers(0, 6),
        st.integers(0, 5) | st.integers(1, 2000),
    ),
    max_size=20,
)


def rounded(size: int) -> int:
    return (size + 63) // 64 * 64


def most_alive(lifetimes: list[Lifetime]) -> int:
    """The bytes (in whole lines of 64) alive at the fullest step: no arena can be smaller."""
    last = max((tensor.last for tensor in lifetimes), default=0)
    return max(sum(rounded(t.bytes) for t in lifetimes if t.first <= step <= t.last) for step in range(last + 1))


def check(lifetimes: list[Lifetime]) -> int:
    offsets, size = plan_arena(lifetimes)
    assert len(offsets) == len(lifetimes)
    assert all(offset % 64 == 0 and offset >= 0 for offset in offsets)
    for (a, at), (b, bt) in itertools.combinations(zip(lifetimes, offsets, strict=True), 2):
        if not (a.last < b.first or b.last < a.first):
            assert at + a.bytes <= bt or bt + b.bytes <= at or 0 in (a.bytes, b.bytes)
    assert all(offset + tensor.bytes <= size for tensor, offset in zip(lifetimes, offsets, strict=True))
    assert most_alive(lifetimes) <= size <= sum(rounded(tensor.bytes) for tensor in lifetimes)
    return size


@given(LIFETIMES)
def test_what_lives_together_never_overlaps(lifetimes: list[Lifetime]) -> None:
    check(lifetimes)


@given(st.integers(1, 30), st.integers(1, 5000))
def test_a_chain_of_equal_tensors_takes_two_buffers(length: int, size: int) -> None:
    chain = [Lifetime(step, step + 1, size) for step in range(length)]
    assert check(chain) == min(length, 2) * rounded(size)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20))
def test_a_shrinking_chain_takes_what_is_alive(sizes: list[int]) -> None:
    """As networks do that halve their pictures; the same when it grows."""
    sizes = sorted(sizes, reverse=True)
    for row in (sizes, sizes[::-1]):
        chain = [Lifetime(step, step + 1, size) for step, size in enumerate(row)]
        assert check(chain) == most_alive(chain)


def test_real_sizes_stay_near_the_bound() -> None:
    """Chains with skips, as residual networks have: within a third of the bound (greedy by size is no proof)."""
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.choice((200704, 401408, 802816, 100352)) for _ in range(40)]
        tensors = [Lifetime(i, i + rng.choice((1, 1, 1, 3)), size) for i, size in enumerate(sizes)]
        assert check(tensors) <= most_alive(tensors) * 4 / 3


def test_nothing_takes_nothing() -> None:
    assert plan_arena([]) == ([], 0)
