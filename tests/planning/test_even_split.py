"""The even split against every split."""

from __future__ import annotations

import doctest
from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.planning.search import even_split as module
from tvm_pipeline.planning.search.even_split import even_split


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 3))
def test_no_split_has_a_smaller_largest_group(sizes: list[int], groups: int, start: int) -> None:
    sums = list(accumulate(sizes, initial=start))
    ends = even_split(sums, groups)
    if len(sizes) < groups:
        assert ends == []
        return
    assert len(ends) == groups
    assert ends[-1] == len(sizes)
    assert all(before < after for before, after in pairwise([0, *ends]))

    def largest(split: list[int]) -> int:
        return max(sums[after] - sums[before] for before, after in pairwise([0, *split]))

    others = ([*inner, len(sizes)] for inner in combinations(range(1, len(sizes)), groups - 1))
    assert largest(ends) == min(map(largest, others))


def test_the_example_runs() -> None:
    assert doctest.testmod(module) == (0, 2)
