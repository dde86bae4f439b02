"""Layouts in arenas of given bytes: those that exist are found, and no others."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.memory.test_arena import tensors
from tvm_pipeline.memory.arena import Lifetime, check_layout, exact_layout, most_alive
from tvm_pipeline.memory.fitting import fitting_offsets


@given(tensors(9, st.integers(0, 6)), st.integers(0, 3))
def test_a_layout_is_found_where_cp_sat_finds_one(some: list[Lifetime], more: int) -> None:
    """In the smallest arena and in larger ones there is a layout; in one that is a byte smaller there is none."""
    spans, sizes = [(tensor.first, tensor.last) for tensor in some], [tensor.bytes for tensor in some]
    least = exact_layout(some, 1)
    assert least.status == "optimal"
    offsets = fitting_offsets(spans, sizes, least.arena_bytes + more, math.inf)
    assert offsets is not None
    check_layout(some, offsets, least.arena_bytes + more)
    if least.arena_bytes:
        assert fitting_offsets(spans, sizes, least.arena_bytes - 1, math.inf) is None


def test_equal_tensors_fill_an_arena() -> None:
    """Tensors of three sizes fill an arena to the last byte in each of their steps."""
    some = [Lifetime(step, step + 3, size) for step in range(0, 40, 2) for size in (1, 1, 2, 3)]
    arena = most_alive(some, 1)
    offsets = fitting_offsets([(t.first, t.last) for t in some], [t.bytes for t in some], arena, math.inf)
    assert offsets is not None
    check_layout(some, offsets, arena)


@pytest.mark.parametrize("seed", range(5))
def test_an_arena_without_a_free_byte_is_filled(seed: int) -> None:
    """Tensors that are cut out of one rectangle of steps by bytes are laid out in it again."""
    draw, parts, some = random.Random(seed), [(0, 64, 1 << 16)], []
    while parts:
        first, steps, size = parts.pop()
        if steps < 20 and size < 20 << 10:
            some.append(Lifetime(first, first + steps - 1, size))
        elif steps * 1024 > size:
            cut = draw.randrange(1, steps)
            parts += [(first, cut, size), (first + cut, steps - cut, size)]
        else:
            cut = draw.randrange(1, size)
            parts += [(first, steps, cut), (first, steps, size - cut)]
    draw.shuffle(some)
    offsets = fitting_offsets([(t.first, t.last) for t in some], [t.bytes for t in some], 1 << 16, math.inf)
    assert offsets is not None
    check_layout(some, offsets, 1 << 16)


def test_the_deadline_ends_the_search() -> None:
    assert fitting_offsets([(0, 1)], [1], 1, -math.inf) is None
