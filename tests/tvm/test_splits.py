"""Splits of blocked channels, on every CPU."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import Weights, image, module_of
from tests.tvm.targets import LEVELS, built, run
from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.splits import SplitByIndices

import tvm  # isort: skip
from tvm import relay  # isort: skip

FRAME = {"data": np.random.default_rng(1).standard_normal((1, 3, 16, 16)).astype("float32")}


def test_sections_become_indices() -> None:
    x = relay.var("x", shape=(1, 24, 8, 8))
    before = relay.concatenate(relay.split(relay.split(x, 3, axis=-3)[1], 2, axis=2), axis=1)
    after = relay.concatenate(relay.split(relay.split(x, [8, 16], axis=1)[1], [4], axis=2), axis=1)
    tvm.ir.assert_structural_equal(SplitByIndices()(module_of(before)), module_of(after))


@pytest.mark.parametrize("sections", [1, [5, 9]])
def test_other_splits_stay(sections: int | list[int]) -> None:
    x = relay.var("x", shape=(1, 24, 8, 8))
    before = module_of(relay.split(x, sections, axis=1).astuple())
    tvm.ir.assert_structural_equal(SplitByIndices()(before), before)


def sections() -> tuple[tvm.IRModule, Weights]:
    """Return splits of 24 channels into 3 sections and of 10 into 5, whose fields kernels of blocks read."""
    weights, data, made = Weights(), image(), []
    for channels, count in ((24, 3), (10, 5)):
        parts = relay.split(weights.conv(data, channels, 1), count, axis=1)
        made.append(relay.concatenate([weights.conv(parts[0], 8, 1), *list(parts)[1:]], axis=1))
    return module_of(relay.Tuple(made)), weights


def expected() -> list[Array]:
    """Return what they compute, by numpy."""
    _, weights = sections()
    params = iter(array.numpy() for array in weights.params.values())

    def convolution(x: Array) -> Array:
        kernel, bias = next(params), next(params)
        return np.maximum(np.einsum("nchw,oc->nohw", x, kernel[:, :, 0, 0]) + bias[:, None, None], 0)

    made = []
    for count in (3, 5):
        first, *others = np.split(convolution(FRAME["data"]), count, axis=1)
        made.append(np.concatenate([convolution(first), *others], axis=1))
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("target", LEVELS[:1])
def test_blocks_of_every_extent_are_split(target: str) -> None:
    mod, weights = sections()
    outputs = built(mod, target, weights.params, FRAME)
    if outputs is not None:
        for output, wanted in zip(outputs, expected(), strict=True):
            np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)


def test_a_module_without_types_is_built_and_left_as_it_is() -> None:
    x = relay.var("x", shape=(1, 24, 8, 8))
    mod = tvm.IRModule.from_expr(relay.Function([x], relay.split(x, 3, axis=1).astuple()))
    before = tvm.IRModule(dict(mod.functions))
    frame = {"x": np.arange(24 * 64, dtype="float32").reshape(1, 24, 8, 8)}
    np.testing.assert_array_equal(np.concatenate(run(fast_build(mod, "llvm"), frame), axis=1), frame["x"])
    tvm.ir.assert_structural_equal(mod["main"], before["main"])
