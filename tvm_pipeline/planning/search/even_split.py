"""Split a sequence into consecutive groups whose largest is as small as possible: a good first plan in milliseconds.

Next: `lexicographic.py` and `planning/sat/least_bytes.py`, which start from it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


def even_split(sums: Sequence[int], groups: int) -> list[int]:
    """Return the positions in `sums` at which consecutive groups end, so that the largest group is the least possible.

    Bisection finds the least size. For a given size, every group takes as many items as fit, but leaves at least one
    item for each later group. The function takes O(groups log(len(sums)) log(sums[-1])) time.

    Args:
        sums: ascending prefix sums of the items' sizes; `sums[0]` is the sum of no items.
        groups: the number of groups; each has at least one item.

    Returns:
        `groups` positions, the last one `len(sums) - 1`; empty if there are fewer items than groups.

    Examples:
        >>> even_split([0, 4, 5, 6, 13], 2)  # items of 4, 1, 1 and 7
        [3, 4]
        >>> even_split([0, 4, 5], 3)
        []
    """
    last = len(sums) - 1
    if last < groups:
        return []
    low, high = 0, sums[-1] - sums[0]
    while low < high:
        middle = (low + high) // 2
        if _filled(sums, groups, middle):
            high = middle
        else:
            low = middle + 1
    return _filled(sums, groups, low)


def _filled(sums: Sequence[int], groups: int, most: int) -> list[int]:
    """Fill one group after another up to the size `most`, and return their ends; empty if items are left over."""
    ends: list[int] = []
    start = 0
    for group in range(1, groups + 1):
        end = min(bisect_right(sums, sums[start] + most) - 1, len(sums) - 1 - (groups - group))
        if end <= start:
            return []
        ends.append(end)
        start = end
    return ends if start == len(sums) - 1 else []
