"""Regions of a binary map: connected components, and the smallest turned rectangle around each.

A map is taken apart into runs, stretches of pixels in one row, which are far fewer than pixels. Read next: text.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Runs(NamedTuple):
    """The runs of a map, row by row: pixels `start` to `end` - 1 of `row` belong to component `component`."""

    row: NDArray[np.intp]
    start: NDArray[np.intp]
    end: NDArray[np.intp]
    component: NDArray[np.intp]


def components(pixels: NDArray[np.bool_]) -> Runs:
    """Return the runs of a map (rows, columns) with their components, numbered from 0; diagonal neighbours touch.

    Examples:
        >>> components(np.array([[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 0, 0]], bool)).component.tolist()
        [0, 1, 0, 1, 2]
    """
    padded = np.pad(pixels, ((0, 0), (1, 1))).astype(np.int8)
    steps = np.diff(padded, axis=1)
    row, start = np.nonzero(steps == 1)
    end = np.nonzero(steps == -1)[1]
    above, below = _touching(row, start, end, pixels.shape[1])
    component = np.arange(len(row))
    while True:  # each run takes the least number of those it touches, and then the number which that one has
        least = component.copy()
        np.minimum.at(least, above, component[below])
        np.minimum.at(least, below, component[above])
        least = least[least]
        if np.array_equal(least, component):
            break
        component = least
    return Runs(row, start, end, np.unique(component, return_inverse=True)[1].reshape(-1))


def _touching(
    row: NDArray[np.intp], start: NDArray[np.intp], end: NDArray[np.intp], width: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the pairs of runs in neighbouring rows that touch: indices of the upper and of the lower ones."""
    # In one long line of rows that are one pixel apart and more, runs are sorted by their start and by their end.
    line = (width + 2) * row
    first = np.searchsorted(line + end, line + (width + 2) + start, side="left")  # ends at or after the start
    after = np.searchsorted(line + start, line + (width + 2) + end, side="right")  # starts at or before the end
    # Above: the lower run is looked for from the upper one, so the roles are those of the next row.
    counts = np.maximum(after - first, 0)
    above = np.repeat(np.arange(len(row)), counts)
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return above, np.repeat(first, counts) + offsets


def hull(points: NDArray[Any]) -> NDArray[np.float64]:
    """Return the corners of the convex hull of points (count, 2), in order: Andrew's monotone chain.

    Examples:
        >>> hull(np.array([[0, 0], [2, 0], [1, 1], [2, 2], [0, 2]])).tolist()
        [[0.0, 0.0], [2.0, 0.0], [2.0, 2.0], [0.0, 2.0]]
    """
    ordered = sorted({(float(x), float(y)) for x, y in points})
    if len(ordered) < 3:
        return np.array(ordered, np.float64)
    sides = []
    for sequence in (ordered, ordered[::-1]):
        side: list[tuple[float, float]] = []
        for x, y in sequence:
            while len(side) > 1 and _turn(side[-2], side[-1], (x, y)) <= 0:
                side.pop()
            side.append((x, y))
        sides.append(side[:-1])
    return np.array(sides[0] + sides[1], np.float64)


def _turn(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> float:
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])


class Rectangle(NamedTuple):
    """A turned rectangle: its center, the direction of its first side, and half of the length of each side."""

    center: NDArray[np.float64]
    along: NDArray[np.float64]
    half: NDArray[np.float64]

    def corners(self, more: float = 0.0) -> NDArray[np.float64]:
        """Return the four corners in order, of the rectangle that reaches `more` further on each side."""
        beside = np.array([-self.along[1], self.along[0]])
        a, b = self.along * (self.half[0] + more), beside * (self.half[1] + more)
        return np.asarray(self.center + np.array([-a - b, a - b, a + b, b - a]))


def smallest_rectangle(points: NDArray[Any]) -> Rectangle:
    """Return the rectangle of the least area around points (count, 2); one of its sides lies on their hull.

    Examples:
        >>> smallest_rectangle(np.array([[1, 0], [0, 1], [3, 2], [2, 3]])).half.round(3).tolist()
        [1.414, 0.707]
    """
    corners = hull(points)
    sides = np.roll(corners, -1, axis=0) - corners
    lengths = np.linalg.norm(sides, axis=1)
    along = sides[lengths > 0] / lengths[lengths > 0, None] if (lengths > 0).any() else np.array([[1.0, 0.0]])
    beside = np.stack([-along[:, 1], along[:, 0]], axis=1)
    spans = np.stack([corners @ along.T, corners @ beside.T])  # (2, corners, directions)
    low, high = spans.min(axis=1), spans.max(axis=1)
    best = int(np.argmin(np.prod(high - low, axis=0)))
    middle, half = (low + high)[:, best] / 2, (high - low)[:, best] / 2
    first = along[best]
    if half[1] > half[0]:  # the first side is the longer one
        first, half = beside[best], half[::-1]
        middle = np.array([middle[1], -middle[0]])
    if first[0] < 0:  # to the right
        first, middle = -first, -middle
    center = first * middle[0] + np.array([-first[1], first[0]]) * middle[1]
    return Rectangle(center, first, half)
