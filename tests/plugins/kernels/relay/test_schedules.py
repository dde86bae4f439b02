"""Schedules of our own compute what TOPI's compute, bit for bit, for vectors of each width that this machine has."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from random import Random
from typing import Any, TypeAlias

import numpy as np
import pytest

from tests.support.networks import Weights, module_of
from tests.support.stages import random_frame
from tests.tvm.targets import LEVELS, by_topi, run, runs_here
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline_kernels.relay import schedules
from tvm_pipeline_tvm.relay import fold
from tvm_pipeline_tvm.relay.topi import Replacement

import tvm  # isort: skip
from tvm import relay  # isort: skip

WIDE = {"llvm -mcpu=x86-64-v3": "ymm", "llvm -mcpu=x86-64-v4": "zmm"}
Network: TypeAlias = tuple[tvm.IRModule, dict[str, Any], Any]


def layer(random: Random) -> tuple[tvm.IRModule, dict[str, Any], Tensor]:
    """Return a convolution with what may follow it: strides, padding and extents that no tile divides."""
    weights = Weights()
    channels = random.choice([3, 8, 12, 16, 24, 48])
    height, width = random.randint(5, 23), random.randint(5, 23)
    x = relay.var("data", shape=(1, channels, height, width))
    kernel = random.choice([(1, 1), (3, 3), (1, 7), (5, 5)])
    options: dict[str, Any] = {
        "kernel_size": kernel,
        "strides": (random.choice([1, 2]), random.choice([1, 2])),
        "padding": tuple(extent // 2 for extent in kernel),
    }
    y = relay.nn.relu(weights.conv(x, 16, 1))  # so that what is under test reads a blocked layout
    if random.random() < 0.4:
        y = relay.nn.conv2d(y, weights(16, 1, *kernel), channels=16, groups=16, **options)
    else:
        out = random.choice(
            [16, 32, 48, 64]
        )  # TOPI has other input blocks, and sums in their order, where 16 divides less
        y = relay.nn.conv2d(y, weights(out, 16, *kernel), channels=out, **options)
    count = int(relay.transform.InferTypeLocal(y).shape[1])
    if random.random() < 0.7:
        y = relay.nn.bias_add(y, weights(count))
    if random.random() < 0.5:
        y = relay.add(y, relay.nn.relu(y))  # a second reader of the convolution
    if random.random() < 0.5:
        y = relay.clip(y, 0.0, 6.0)
    module = module_of(y)
    return module, weights.params, Tensor("data", (1, channels, height, width))


@pytest.mark.thorough
@pytest.mark.parametrize("target", list(filter(runs_here, LEVELS)))
def test_random_convolutions_have_the_bits_of_topi(target: str) -> None:
    """One for each target; `benchmarks/kernel_bits.py` draws more."""
    module, params, tensor = layer(Random(target))
    frame = random_frame([tensor])
    (own,) = run(fold.fast_build(module, target, params), frame)
    with by_topi():
        (expected,) = run(fold.fast_build(module, target, params), frame)
    np.testing.assert_array_equal(own, expected, err_msg=str(module))


@pytest.mark.thorough
def test_channels_that_fill_no_vector() -> None:
    weights = Weights()
    x = relay.var("data", shape=(1, 12, 11, 13))
    y = weights.conv(weights.conv(x, 10, 3), 17, 1)
    module = module_of(y)
    frame = random_frame([Tensor("data", (1, 12, 11, 13))])
    (plain,) = run(fold.fast_build(module, "llvm", weights.params), frame)
    for target in filter(runs_here, ("llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64-v4")):
        (own,) = run(fold.fast_build(module, target, weights.params), frame)
        np.testing.assert_allclose(own, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("target", WIDE)
def test_the_inner_loop_multiplies_vectors_as_wide_as_the_target_has(target: str) -> None:
    """Sums are as many as hide the latency of an addition, each in a register as wide as the target has."""
    weights = Weights()
    x = relay.var("data", shape=(1, 16, 14, 14))
    y = weights.conv(weights.conv(x, 64, 1), 64, 3)
    module = module_of(y)
    library = fold.fast_build(module, target, weights.params)
    assembly = library.get_lib().get_source("asm")
    wide = [line for line in assembly.splitlines() if "vfmadd" in line and WIDE[target] in line]
    assert len(wide) >= 2 * 10  # as many independent sums as hide the latency, in each of the two convolutions


@pytest.fixture(scope="session")
def deep() -> Callable[[str], tuple[Network, str]]:
    """A convolution whose weights no cache keeps, with its assembly for a target; an image that no tile divides."""

    @cache
    def compiled(target: str) -> tuple[Network, str]:
        weights = Weights()
        y = weights.conv(weights.conv(relay.var("data", shape=(1, 16, 7, 7)), 128, 1), 64, 3)
        module = module_of(y)
        library = fold.fast_build(module, target, weights.params)
        return (module, weights.params, library), library.get_lib().get_source("asm")

    return compiled


@pytest.mark.thorough
@pytest.mark.parametrize("target", list(filter(runs_here, WIDE)))
def test_weights_are_fetched_before_they_are_needed_and_change_no_bit(
    deep: Callable[[str], tuple[Network, str]], target: str
) -> None:
    (module, params, library), assembly = deep(target)
    assert "prefetch" in assembly
    frame = random_frame([Tensor("data", (1, 16, 7, 7))])
    with by_topi():
        stock = fold.fast_build(module, target, params)
    assert "prefetch" not in stock.get_lib().get_source("asm")
    np.testing.assert_array_equal(run(library, frame)[0], run(stock, frame)[0])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", WIDE)
def test_no_sum_is_stored_between_its_additions(deep: Callable[[str], tuple[Network, str]], target: str) -> None:
    """At the edge of the image a part of a tile is skipped, which LLVM cannot see through unless it is on the stack."""
    lines = deep(target)[1].splitlines()
    places = [place for place, line in enumerate(lines) if "vfmadd" in line]
    loops = [lines[first:second] for first, second in pairwise(places) if second - first < 8]
    stores = [line for loop in loops for line in loop if re.search(r"vmov[au]ps\s+%[yz]mm\d+, .*\(", line)]
    assert len(loops) > 20
    assert not stores


@pytest.mark.thorough
@pytest.mark.parametrize(("read", "written", "extent"), [(32, 64, 1), (512, 17, 3)], ids=["few", "no vector"])
def test_other_weights_are_not_fetched(read: int, written: int, extent: int) -> None:
    weights = Weights()
    y = weights.conv(weights.conv(relay.var("data", shape=(1, 16, 3, 3)), read, 1), written, extent)
    module = module_of(y)
    assert "prefetch" not in fold.fast_build(module, "llvm -mcpu=x86-64-v3", weights.params).get_lib().get_source("asm")


def test_topi_is_left_as_it_was() -> None:
    from tvm.topi.x86 import conv2d_avx_1x1, depthwise_conv2d

    stock = conv2d_avx_1x1._schedule_conv_NCHWc, depthwise_conv2d._schedule_depthwise_conv2d_NCHWc_impl
    with schedules.own_schedules():
        assert conv2d_avx_1x1._schedule_conv_NCHWc is not stock[0]
    assert (conv2d_avx_1x1._schedule_conv_NCHWc, depthwise_conv2d._schedule_depthwise_conv2d_NCHWc_impl) == stock


def test_a_second_build_does_not_end_the_replacement_of_the_first() -> None:
    from tvm.topi.x86 import conv2d_avx_1x1

    replacement = Replacement({("conv2d_avx_1x1", "_fallback_schedule"): "ours"})
    stock = conv2d_avx_1x1._fallback_schedule
    first, second = replacement.active(), replacement.active()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert conv2d_avx_1x1._fallback_schedule == "ours"
    assert replacement.stock("conv2d_avx_1x1", "_fallback_schedule") is stock
    second.__exit__(None, None, None)
    assert conv2d_avx_1x1._fallback_schedule is stock
