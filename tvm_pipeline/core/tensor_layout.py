"""Blocked layouts: the orders in which compiled kernels store the elements of a tensor.

TVM writes NCHW16c for a tensor N x (C/16) x H x W x 16: upper-case letters are the logical axes, a number and a
lower-case letter are an inner block of one. An empty layout is the logical order itself. Read next: `runtime/slots.py`,
which converts tensors between the layouts of two devices.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

_AXES = re.compile(r"(\d*)([A-Za-z])")


def is_blocked(layout: str) -> bool:
    """Return whether the elements are in another order than the logical one."""
    return any(character.isdigit() for character in layout)


def primal(layout: str) -> str:
    """Return the logical axes, in order: NCHW for NCHW16c."""
    return "".join(character for character in layout if character.isupper())


def logical_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """Return the shape without blocks: (1, 4, 55, 55, 16) in NCHW16c is (1, 64, 55, 55)."""
    if not is_blocked(layout):
        return shape
    return tuple(int(np.prod(extents)) for extents in _extents(shape, layout).values())


def to_logical(array: npt.NDArray[Any], layout: str) -> npt.NDArray[Any]:
    """Return the elements in logical order; a view if nothing moves."""
    if not is_blocked(layout):
        return array
    letters = _letters(layout)
    order = [position for axis in primal(layout) for position, letter in enumerate(letters) if letter.upper() == axis]
    logical: npt.NDArray[Any] = array.transpose(order).reshape(logical_shape(array.shape, layout))
    return logical


def relayout(source: npt.NDArray[Any], layout: str, target: npt.NDArray[Any], target_layout: str) -> None:
    """Write `source` into `target`, each in its own layout; both have the same number of logical elements."""
    logical = to_logical(source, layout)
    if not is_blocked(target_layout):
        np.copyto(target, logical.reshape(target.shape))
        return
    letters = _letters(target_layout)
    extents = _extents(target.shape, target_layout)
    split = logical.reshape([extent for axis in primal(target_layout) for extent in extents[axis]])
    # The axes of `split` are (outer, block) for each logical axis; find the position of each physical axis.
    positions = [
        position for axis in primal(target_layout) for position, letter in enumerate(letters) if letter.upper() == axis
    ]
    np.copyto(target, split.transpose(np.argsort(positions)))


def _letters(layout: str) -> list[str]:
    return [letter for _, letter in _AXES.findall(layout)]


def _extents(shape: tuple[int, ...], layout: str) -> dict[str, list[int]]:
    """Return for each logical axis the extents of its outer part and its blocks."""
    extents: dict[str, list[int]] = {axis: [] for axis in primal(layout)}
    for extent, letter in zip(shape, _letters(layout), strict=True):
        extents[letter.upper()].append(extent)
    return extents
