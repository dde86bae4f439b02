"""Arenas: tensors alive at the same time never overlap, and no more is taken than is needed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory import Buffer, MemoryGraph, peak_bytes
from tvm_pipeline.memory.arena import Lifetime, check_layout, exact_layout, lifetimes, most_alive, plan_arena


def tensors(most: int, sizes: st.SearchStrategy[int]) -> st.SearchStrategy[list[Lifetime]]:
    one = st.builds(
        lambda first, more, size: Lifetime(first, first + more, size), st.integers(0, 12), st.integers(0, 6), sizes
    )
    return st.lists(one, max_size=most)


LIFETIMES = tensors(20, st.integers(0, 5) | st.integers(1, 2000))


def rounded(size: int) -> int:
    return (size + 63) // 64 * 64


def alive(lifetimes: list[Lifetime]) -> int:
    """Return the bytes (in whole lines of 64) alive at the peak: no arena can be smaller."""
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
    assert alive(lifetimes) == most_alive(lifetimes)
    assert alive(lifetimes) <= size <= sum(rounded(tensor.bytes) for tensor in lifetimes)
    check_layout(lifetimes, offsets, size)
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
        assert check(chain) == alive(chain)


def test_real_sizes_stay_near_the_bound() -> None:
    """Chains with skips, as residual networks have: within a third of the bound (greedy by size is no proof)."""
    rng = random.Random(0)
    for _ in range(50):
        sizes = [rng.choice((200704, 401408, 802816, 100352)) for _ in range(40)]
        row = [Lifetime(i, i + rng.choice((1, 1, 1, 3)), size) for i, size in enumerate(sizes)]
        assert check(row) <= alive(row) * 4 / 3


def test_nothing_takes_nothing() -> None:
    assert plan_arena([]) == ([], 0)
    assert exact_layout([]).arena_bytes == 0


def smallest_arena(lifetimes: list[Lifetime]) -> int:
    """Return the smallest arena over all orders of lowest free offsets, one of which gives an optimal layout."""
    best = sum(tensor.bytes for tensor in lifetimes)
    for order in itertools.permutations(lifetimes):
        placed: list[tuple[int, Lifetime]] = []
        for tensor in order:
            near = [(at, o) for at, o in placed if o.first <= tensor.last and tensor.first <= o.last and o.bytes]
            free = (
                offset
                for offset in sorted({0, *(at + other.bytes for at, other in near)})
                if all(offset + tensor.bytes <= at or at + other.bytes <= offset for at, other in near)
            )
            placed.append((next(free), tensor))
        best = min(best, max((at + tensor.bytes for at, tensor in placed), default=0))
    return best


def test_the_exact_layout_is_the_smallest() -> None:
    """Greedy does worse than the bound on only few random tensors: these are tried."""
    rng, searched = random.Random(0), 0
    while searched < 12:
        row = [Lifetime(f := rng.randrange(6), f + rng.randrange(4), rng.randint(1, 6)) for _ in range(6)]
        if plan_arena(row, 1)[1] > most_alive(row, 1):
            searched += 1
            layout = exact_layout(row, 1)
            check_layout(row, layout.offsets, layout.arena_bytes)
            assert layout.status == "optimal"
            assert layout.arena_bytes == smallest_arena(row)


def test_the_exact_layout_is_smaller_than_the_greedy_one() -> None:
    rng = random.Random(3)
    rows = [
        [Lifetime(f := rng.randrange(9), f + rng.randrange(5), 64 * rng.randint(1, 9)) for _ in range(14)]
        for _ in range(99)
    ]
    row = next(row for row in rows if plan_arena(row)[1] > most_alive(row))
    layout = exact_layout(row)
    check_layout(row, layout.offsets, layout.arena_bytes)
    assert layout.bound_bytes <= layout.arena_bytes < plan_arena(row)[1]
    assert all(offset % 64 == 0 for offset in layout.offsets)


def test_the_checker_names_what_overlaps() -> None:
    row = [Lifetime(0, 4, 64, "conv"), Lifetime(3, 5, 64, "relu"), Lifetime(5, 6, 64)]
    check_layout(row, [0, 64, 0], 128)
    with pytest.raises(PlanError, match=r"conv \(bytes 0 to 64\) and relu \(bytes 63 to 127\) overlap.* step 3"):
        check_layout(row, [0, 63, 0], 128)
    with pytest.raises(PlanError, match="tensor 2 lies at bytes 65 to 129 of an arena of 128"):
        check_layout(row, [0, 64, 65], 128)
    with pytest.raises(PlanError, match="2 offsets for 3 tensors"):
        check_layout(row, [0, 64], 128)


@st.composite
def memory_graphs(draw: st.DrawFn) -> MemoryGraph:
    """Draw graphs with buffers of several producers, buffers that may be overwritten, and workspace."""
    count = draw(st.integers(1, 7))
    unary = [draw(st.booleans()) for _ in range(count)]
    buffers, size = [Buffer("input", 8, (), (), draw(st.booleans()))], st.sampled_from([8, 16])
    readers: list[list[int]] = [[]]
    marks: list[tuple[int, ...]] = []
    for index in range(count):
        reads = draw(st.lists(st.integers(0, len(buffers) - 1), min_size=1, max_size=3, unique=True))
        joins = buffers[-1].producers == (index - 1,) and not readers[-1] and len(reads) > 1
        if joins and len(buffers) - 1 not in reads:
            buffers[-1] = Buffer(buffers[-1].name, buffers[-1].bytes, (index - 1, index), ())
            marks.append(())
        else:
            bytes_ = buffers[reads[0]].bytes if unary[index] else draw(size)
            buffers.append(Buffer(f"b{index}", bytes_, (index,), (), draw(st.booleans())))
            readers.append([])
            marks.append(tuple(read for read in reads if buffers[read].bytes == bytes_))
        for read in reads:
            readers[read].append(index)
    buffers = [Buffer(b.name, b.bytes, b.producers, tuple(r), b.pinned) for b, r in zip(buffers, readers, strict=True)]
    workspace = tuple(draw(st.sampled_from([0, 0, 4])) for _ in range(count))
    return MemoryGraph("random", tuple(map(str, range(count))), tuple(buffers), workspace, tuple(marks))


@examples(200)
@given(memory_graphs())
def test_lifetimes_take_the_bytes_of_the_footprint(graph: MemoryGraph) -> None:
    order = range(len(graph))
    found, tensor_of = lifetimes(graph, order)
    assert most_alive(found, 1) == peak_bytes(graph, order)
    for buffer, tensor in zip(graph.buffers, tensor_of, strict=True):
        if tensor < 0:
            assert (buffer.producers, buffer.consumers, buffer.pinned) == ((), (), False)
            continue
        assert found[tensor].bytes >= buffer.bytes
        users = (*buffer.producers, *buffer.consumers)
        assert all(found[tensor].first <= user <= found[tensor].last for user in users)


def test_what_is_written_in_place_lives_in_what_it_overwrites() -> None:
    buffers = (Buffer("x", 64, (), (0,)), Buffer("y", 64, (0,), (1, 2)), Buffer("z", 64, (1,), (2,)))
    sum_of_both = Buffer("sum", 64, (2,), (), True)
    graph = MemoryGraph("net", ("conv", "relu", "add"), (*buffers, sum_of_both), (), ((0,), (1,), (1, 2)))
    found, tensor_of = lifetimes(graph, (0, 1, 2))
    # The relu must not overwrite y, which the sum still reads.
    assert tensor_of[0] == tensor_of[1] != tensor_of[2]
    assert tensor_of[3] in (tensor_of[1], tensor_of[2])
    assert [(tensor.first, tensor.last) for tensor in found] == [(0, 2), (1, 2)]


def test_tensors_of_a_block_keep_their_distances() -> None:
    """The second tensor of the block moves the first one up, since what it would meet is alive at the same time."""
    tensors = [Lifetime(0, 3, 128), Lifetime(2, 2, 64, "", "block", 0), Lifetime(2, 3, 64, "", "block", 64)]
    for offsets, arena in (plan_arena(tensors), exact_of(tensors)):
        check_layout(tensors, offsets, arena)
        assert offsets[2] == offsets[1] + 64
        assert arena == 256


def test_a_gap_in_a_block_is_free() -> None:
    tensors = [Lifetime(0, 1, 64, "", "block", -64), Lifetime(0, 1, 64, "", "block", 64), Lifetime(0, 0, 64)]
    for offsets, arena in (plan_arena(tensors), exact_of(tensors)):
        check_layout(tensors, offsets, arena)
        assert offsets[1] == offsets[0] + 128
        assert arena == 192


def exact_of(tensors: list[Lifetime]) -> tuple[Sequence[int], int]:
    layout = exact_layout(tensors)
    return layout.offsets, layout.arena_bytes
