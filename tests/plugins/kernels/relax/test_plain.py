"""The plain rule of Relax: every kind of kernel gives numpy's values in every vector width."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax, te
from tvm.relax import op

from tests.relax.fused import TARGETS, Array, run
from tests.support.examples import examples

RNG = np.random.default_rng(0)
SHAPES = st.lists(st.sampled_from([1, 2, 3, 7, 8, 16, 32]), min_size=1, max_size=4).map(tuple)


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype("float32")


def check(build: Any, expected: Any, *arrays: Array, target: tvm.target.Target, rules: list[str] | None = None) -> None:
    found, called = run(lambda _, *inputs: build(*inputs), list(arrays), target)
    expected = np.asarray(expected(*arrays))
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    assert called == (rules or ["plain"])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
@examples(3)
@given(SHAPES, st.data())
def test_broadcasts(target: tvm.target.Target, shape: tuple[int, ...], data: st.DataObject) -> None:
    other = tuple(data.draw(st.sampled_from([1, extent])) for extent in shape)
    check(
        lambda x, y: op.nn.relu(op.subtract(op.multiply(x, y), y)),
        lambda x, y: np.maximum(x * y - y, np.float32(0)),
        floats(*shape),
        floats(*other),
        target=target,
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
@examples(3)
@given(SHAPES, st.data())
def test_transposes_and_slices(target: tvm.target.Target, shape: tuple[int, ...], data: st.DataObject) -> None:
    axes = data.draw(st.permutations(range(len(shape))))
    axis = data.draw(st.integers(0, len(shape) - 1))
    step = data.draw(st.integers(1, 3))
    check(
        lambda x: op.strided_slice(op.permute_dims(op.exp(x), axes), [axis], [0], [shape[axes[axis]]], [step]),
        lambda x: np.exp(x).transpose(axes)[(slice(None),) * axis + (slice(None, None, step),)],
        floats(*shape),
        target=target,
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
@examples(3)
@given(SHAPES, st.data())
def test_reductions(target: tvm.target.Target, shape: tuple[int, ...], data: st.DataObject) -> None:
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=max(1, len(shape) - 1)))
    is_scalar = len(axes) == len(shape)
    check(
        lambda x: op.sum(op.exp(x), list(axes), keepdims=not is_scalar),
        lambda x: np.exp(x).sum(axis=tuple(axes), keepdims=not is_scalar),
        floats(*shape),
        target=target,
        rules=["default"] if is_scalar else None,
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
@pytest.mark.parametrize("columns", [1, 10, 48])
def test_product_that_has_no_rule(target: tvm.target.Target, columns: int) -> None:
    """Something expensive before the product stays a pass of its own, and what follows is a pass behind it."""
    check(
        lambda x, y, z: op.nn.relu(op.add(op.matmul(op.tanh(x), y), z)),
        lambda x, y, z: np.maximum(np.tanh(x) @ y + z, np.float32(0)),
        floats(3, 5, 7),
        floats(3, 7, columns),
        floats(columns),
        target=target,
        rules=["plain", "plain"],
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
def test_narrow_and_wide_types(target: tvm.target.Target) -> None:
    x = floats(2, 16, 8) * 50
    check(
        lambda x: op.astype(op.clip(op.round(x), -128, 127), "int8"),
        lambda x: np.clip(np.round(x), -128, 127).astype("int8"),
        x,
        target=target,
    )
    small = RNG.integers(0, 200, (3, 64), dtype=np.uint8)
    check(lambda x: op.maximum(x, op.flip(x, 1)), lambda x: np.maximum(x, x[:, ::-1]), small, target=target)
    check(
        lambda x: op.add(op.astype(x, "int64"), relax.const(5, "int64")),
        lambda x: x.astype("int64") + 5,
        small,
        target=target,
    )
    check(lambda x: op.greater(x, relax.const(np.float32(3))), lambda x: x > 3, x, target=target)
    check(
        lambda x: op.where(op.greater(x, relax.const(np.float32(3))), x, op.negative(x)),
        lambda x: np.where(x > 3, x, -x),
        x,
        target=target,
    )


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
def test_places_and_gathers(target: tvm.target.Target) -> None:
    x = floats(2, 16, 9)
    check(lambda x: op.argmax(x, 1), lambda x: x.argmax(1), x, target=target)
    places = np.array([3, 0, 8], "int64")
    check(lambda x, y: op.take(x, y, 2, mode="clip"), lambda x, y: x.take(y, 2), x, places, target=target)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.attrs["mcpu"])
@pytest.mark.parametrize("block", [16, 8, 5])
def test_blocked_layouts(target: tvm.target.Target, block: int) -> None:
    """Both ways between a plain image and one in channel blocks."""
    channels, height, width = 2 * block, 6, 7

    def blocked(x: Array) -> Array:
        return np.ascontiguousarray(x.reshape(1, 2, block, height, width).transpose(0, 1, 3, 4, 2))

    def to_blocks(x: te.Tensor) -> te.Tensor:
        return te.compute((1, 2, height, width, block), lambda n, outer, y, z, inner: x[n, outer * block + inner, y, z])

    def to_plain(x: te.Tensor) -> te.Tensor:
        shape = (1, channels, height, width)
        return te.compute(shape, lambda n, c, y, z: x[n, te.indexdiv(c, block), y, z, te.indexmod(c, block)])

    image = floats(1, channels, height, width)
    found, rules = run(lambda builder, x: builder.call_te(to_blocks, x), [image], target)
    assert rules == ["plain"]
    np.testing.assert_array_equal(found, blocked(image))
    found, rules = run(lambda builder, x: builder.call_te(to_plain, x), [blocked(image)], target)
    assert rules == ["plain"]
    np.testing.assert_array_equal(found, image)


def test_what_no_rule_can_schedule_stays_as_it_is() -> None:
    """A kernel without loops, as the addition of two numbers, is the default and is said to be."""
    check(
        lambda x, y: op.add(x, y),
        lambda x, y: x + y,
        np.float32(3),
        np.float32(4),
        target=TARGETS[0],
        rules=["default"],
    )
