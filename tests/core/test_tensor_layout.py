"""Blocked layouts against loops that place one element at a time."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.core.tensor_layout import is_blocked, logical_shape, primal, relayout, to_logical

Array = npt.NDArray[Any]


def packed(logical: Array, layout: str) -> Array:
    """`logical` in `layout`, element by element: each inner block takes its axis' index modulo its size."""
    axes = re.findall(r"(\d*)([A-Za-z])", layout)
    order = [letter for _, letter in axes if letter.isupper()]
    extent = dict(zip(order, logical.shape, strict=True))
    blocks = {axis: [int(n) for n, letter in axes if letter == axis.lower()] for axis in order}
    shape = [
        int(n) if letter.islower() else extent[letter] // int(np.prod(blocks[letter], dtype=int)) for n, letter in axes
    ]
    physical = np.empty(shape, logical.dtype)
    for index in itertools.product(*map(range, logical.shape)):
        digits = {}
        for axis, value in zip(order, index, strict=True):
            inner = []
            for block in reversed(blocks[axis]):  # the last block of an axis turns fastest
                value, remainder = divmod(value, block)
                inner.insert(0, remainder)
            digits[axis] = [value, *inner]
        position = tuple(digits[letter.upper()].pop(0) for _, letter in axes)
        physical[position] = logical[index]
    return physical


LAYOUTS = {
    "NCHW16c": (1, 32, 3, 2),
    "NCHW4c": (2, 8, 3, 2),
    "NHWC8c": (2, 3, 2, 16),
    "OIHW8i16o": (32, 16, 3, 1),
    "OIHW16i16o4i": (16, 128, 1, 2),
    "OIHW1i16o": (32, 1, 3, 3),
    "HWIO": (3, 3, 4, 8),
    "NHWC": (1, 3, 2, 4),
    "NCW4c": (1, 8, 5),
    "NC16n": (32, 3),
    "AB2a2b": (4, 6),
    "": (3, 4, 5),
}


def numbered(shape: tuple[int, ...]) -> Array:
    return np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpacking_gives_the_logical_order(layout: str) -> None:
    logical = numbered(LAYOUTS[layout])
    physical = packed(logical, layout) if layout else logical
    assert logical_shape(physical.shape, layout) == logical.shape
    np.testing.assert_array_equal(to_logical(physical, layout), logical)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packing_from_the_logical_order_and_back(layout: str) -> None:
    logical = numbered(LAYOUTS[layout])
    physical = packed(logical, layout) if layout else logical
    target = np.full(physical.shape, -1, np.int32)
    relayout(logical, "", target, layout)
    np.testing.assert_array_equal(target, physical)
    back = np.full(logical.shape, -1, np.int32)
    relayout(target, layout, back, "")
    np.testing.assert_array_equal(back, logical)


@given(
    st.sampled_from([("NCHW4c", "NCHW16c"), ("NCHW16c", "NCHW8c"), ("NCHW", "NCHW8c"), ("NCHW2n4c", "NCHW16c2n")]),
    st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3), st.integers(1, 3)),
)
def test_from_one_blocked_layout_to_another(layouts: tuple[str, str], outer: tuple[int, ...]) -> None:
    source, destination = layouts
    logical = numbered((outer[0] * 2, outer[1] * 16, *outer[2:]))
    expected = packed(logical, destination)
    target = np.full(expected.shape, -1, np.int32)
    relayout(packed(logical, source), source, target, destination)
    np.testing.assert_array_equal(target, expected)


def test_a_flattened_tensor_is_the_same_elements_in_another_shape() -> None:
    logical = numbered((1, 32, 2, 2))
    flat = np.empty((1, 128), np.int32)
    relayout(packed(logical, "NCHW16c"), "NCHW16c", flat, "")
    np.testing.assert_array_equal(flat, logical.reshape(1, 128))


def test_what_is_not_blocked_is_not_copied() -> None:
    array = numbered((2, 3))
    assert to_logical(array, "") is array
    assert to_logical(array, "NC") is array
    assert [is_blocked(layout) for layout in ("", "NCHW", "NCHW16c")] == [False, False, True]
    assert [primal(layout) for layout in ("", "NCHW", "OIHW16i16o4i")] == ["", "NCHW", "OIHW"]
    assert logical_shape((1, 4, 55, 55, 16), "NCHW16c") == (1, 64, 55, 55)


def test_another_number_of_elements_is_refused() -> None:
    with pytest.raises(ValueError, match="reshape"):
        relayout(numbered((2, 16)), "", np.empty((1, 1, 16), np.int32), "NC16c")
