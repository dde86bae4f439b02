"""Transposed and grouped convolutions, pooling, concatenation by our schedules compute what TOPI's do, on all x86."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.support.networks import Weights, module_of
from tests.support.stages import random_frame
from tests.tvm.targets import LEVELS, TARGETS, built, by_topi, run, runs_here
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline_tvm.relay import fold

import tvm  # isort: skip
from tvm import relay  # isort: skip

X86 = list(filter(runs_here, LEVELS))
WIDE = "llvm -mcpu=x86-64-v4"

Network = tuple[tvm.IRModule, dict[str, Any], Tensor]
Layer = Callable[[Random, Weights, relay.Expr], relay.Expr]


def channels_of(expr: relay.Expr) -> int:
    return int(relay.transform.InferTypeLocal(expr).shape[1])


def transposed(random: Random, weights: Weights, x: relay.Expr) -> relay.Expr:
    """Return a transposed convolution, often with what may follow it; kernels and strides need not divide."""
    kernel, strides, padding, more = [], [], [], []
    for _ in range(2):
        kernel.append(random.choice([1, 2, 2, 3, 4, 5]))
        strides.append(random.choice([1, 2, 2, 3]))
        padding.append((random.randrange(kernel[-1]), random.randrange(kernel[-1])))
        more.append(random.randrange(strides[-1]))
    out = random.choice([1, 5, 8, 24])
    y = relay.nn.conv2d_transpose(
        x,
        weights(channels_of(x), out, *kernel),
        channels=out,
        kernel_size=kernel,
        strides=strides,
        padding=(padding[0][0], padding[1][0], padding[0][1], padding[1][1]),
        output_padding=more,
    )
    if random.random() < 0.5:
        y = relay.nn.bias_add(y, weights(out))
    if random.random() < 0.5:
        y = relay.add(y, relay.nn.relu(y))  # a second reader
    return y


def grouped(random: Random, weights: Weights, x: relay.Expr) -> relay.Expr:
    """Return a grouped convolution of 1x1, often with what may follow it; a larger window or a stride is TOPI's."""
    groups, read = random.choice([2, 4]), random.choice([3, 6, 8])
    y = weights.conv(x, groups * read, 1)
    if random.random() < 0.3:  # of few pixels, which what follows may repeat
        y = relay.nn.global_avg_pool2d(y)
    out = groups * random.choice([2, 5, 8, 9])
    window, stride = random.choice([(1, 1), (1, 1), (1, 1), (3, 1), (1, 2)])
    y = relay.nn.conv2d(
        y,
        weights(out, read, window, window),
        channels=out,
        kernel_size=(window, window),
        strides=(stride, stride),
        padding=(window // 2, window // 2),
        groups=groups,
    )
    if random.random() < 0.7:
        y = relay.nn.bias_add(y, weights(out))
    return relay.add(y, relay.nn.relu(y)) if random.random() < 0.5 else y


def pooled(random: Random, weights: Weights, x: relay.Expr) -> relay.Expr:
    """Return a pooling in blocked layout: of windows, of parts, or of all; of averages or the largest."""
    y = weights.conv(x, random.choice([16, 48, 80]), 1)
    kind = random.choice(["window", "window", "part", "all", "all"])
    if kind == "part":
        return random.choice([relay.nn.adaptive_avg_pool2d, relay.nn.adaptive_max_pool2d])(y, (2, 3))
    if kind == "all":
        return random.choice([relay.nn.global_avg_pool2d, relay.nn.global_avg_pool2d, relay.nn.global_max_pool2d])(y)
    window = random.choice([(2, 2), (3, 3), (3, 2), (6, 6)])
    options: dict[str, Any] = {
        "strides": (random.choice([1, 2]), random.choice([1, 2])),
        "padding": random.choice([(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 1, 0)]),
        "ceil_mode": random.random() < 0.3,
    }
    if random.random() < 0.3:
        return relay.nn.relu(relay.nn.max_pool2d(y, window, **options))
    y = relay.nn.avg_pool2d(y, window, count_include_pad=random.random() < 0.3, **options)
    return relay.clip(y, -1.0, 1.0) if random.random() < 0.5 else y


def largest(random: Random, weights: Weights, x: relay.Expr) -> relay.Expr:
    """Return the largest of each window with nothing behind it; the tiles of columns need not divide the output."""
    y = relay.multiply(weights.conv(x, 32, 1), relay.const(-1.0))  # so that padding read as zeros would show
    size, pad = random.choice([2, 3]), random.choice([0, 1])
    return relay.nn.max_pool2d(y, (size, size), (2, random.choice([1, 2])), padding=(pad, pad), ceil_mode=pad == 0)


def concatenated(random: Random, weights: Weights, x: relay.Expr) -> relay.Expr:
    """Return a concatenation in NCHW or in blocked layout, with what may be fused before and behind."""
    if random.random() < 0.5:
        parts = [weights.conv(x, random.choice([16, 32]), 1) for _ in range(random.randint(2, 3))]
    else:
        parts = [x, relay.floor(x), relay.nn.relu(x)][: random.randint(2, 3)]
    y = relay.concatenate(parts, axis=1)
    count = channels_of(y)
    if random.random() < 0.5:
        y = relay.nn.relu(relay.multiply(y, weights(count, 1, 1)))
    if random.random() < 0.3:  # channels take turns: another shape behind the concatenation
        _, _, height, width = (int(extent) for extent in relay.transform.InferTypeLocal(y).shape)
        y = relay.reshape(relay.transpose(relay.reshape(y, (1, 2, -1, height, width)), (0, 2, 1, 3, 4)), (1, count, -1))
    elif random.random() < 0.5:
        y = weights.conv(y, 16, 1)
    return y


def network(layer: Layer, random: Random) -> Network:
    weights = Weights()
    shape = (1, random.choice([2, 8, 24]), random.randint(7, 21), random.randint(7, 40))
    y = layer(random, weights, relay.nn.relu(relay.var("data", shape=shape)))
    module = module_of(y)
    return module, weights.params, Tensor("data", shape)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "target"),  # each layer for two widths of vectors
    zip([transposed, grouped, pooled, largest, concatenated], cycle(X86), strict=False),
)
def test_random_layers_have_the_bits_of_topi(layer: Layer, target: str) -> None:
    module, params, tensor = network(layer, Random(target))
    frame = random_frame([tensor])
    (own,) = run(fold.fast_build(module, target, params), frame)
    with by_topi():
        library = fold.fast_build(module, target, params)
    np.testing.assert_array_equal(own, run(library, frame)[0], err_msg=str(module))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("target", "layer"),
    zip([TARGETS[0], LEVELS[0], TARGETS[-1]], cycle([transposed, pooled, concatenated]), strict=False),
)
def test_every_target_builds(layer: Layer, target: str) -> None:
    module, params, tensor = network(layer, Random(1))
    built(module, target, params, random_frame([tensor]))


def spread(x: Array, kernel: Array, stride: int, padding: int) -> Array:
    """Return a transposed convolution by its definition: each pixel adds its multiple of the kernel to the output."""
    _, _, height, width = x.shape
    _, channels, extent, _ = kernel.shape
    y = np.zeros((1, channels, (height - 1) * stride + extent, (width - 1) * stride + extent), np.float64)
    for row in range(height):
        for column in range(width):
            top, left = row * stride, column * stride
            y[:, :, top : top + extent, left : left + extent] += np.einsum("c,cokl->okl", x[0, :, row, column], kernel)
    return y[:, :, padding or None : -padding or None, padding or None : -padding or None]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("stride", "extent", "padding", "target"),
    [
        (*case, target)
        for case, target in zip(
            [(1, 3, 1), (2, 2, 0), (2, 3, 1), (3, 2, 0), (4, 8, 2), (16, 16, 0)], cycle(LEVELS), strict=False
        )
    ],
)
def test_a_transposed_convolution_is_what_its_definition_says(
    target: str, stride: int, extent: int, padding: int
) -> None:
    """The largest strides have more phases than fit into the registers, and are left to TOPI."""
    if not runs_here(target):
        pytest.skip(f"this machine cannot run {target}")
    weights = Weights()
    x, kernel = relay.var("data", shape=(1, 6, 5, 11)), weights(6, 3, extent, extent)
    y = relay.nn.conv2d_transpose(
        x, kernel, channels=3, kernel_size=(extent, extent), strides=(stride, stride), padding=(padding, padding)
    )
    module = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x, kernel], y)))
    frame = random_frame([Tensor("data", (1, 6, 5, 11))])
    (own,) = run(fold.fast_build(module, target, weights.params), frame)
    expected = spread(frame["data"], weights.params["w0"].numpy(), stride, padding)
    np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.thorough
def test_scale_and_shift_behind_a_concatenation_round_once() -> None:
    """In one pass LLVM multiplies and adds by one instruction, so values are nearer to the true ones than TOPI's."""
    weights = Weights()
    x = relay.var("data", shape=(1, 16, 9, 8))
    parts = [weights.conv(x, 32, 1), weights.conv(x, 16, 1)]
    y = relay.add(relay.multiply(relay.concatenate(parts, axis=1), weights(48, 1, 1)), weights(48, 1, 1))
    module = module_of(y)
    frame = random_frame([Tensor("data", (1, 16, 9, 8))])
    for target in filter(runs_here, ("llvm -mcpu=x86-64-v3", WIDE)):
        (own,) = run(fold.fast_build(module, target, weights.params), frame)
        with by_topi():
            library = fold.fast_build(module, target, weights.params)
        np.testing.assert_allclose(own, run(library, frame)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layer", "instruction"),
    [
        (lambda w, x: relay.nn.avg_pool2d(w.conv(x, 16, 1), (3, 3), padding=(1, 1)), "vdivps"),
        (lambda w, x: relay.nn.max_pool2d(w.conv(x, 16, 1), (3, 3), (2, 2)), "vmaxps"),
        (
            lambda w, x: w.conv(relay.sqrt(relay.concatenate([w.conv(x, 16, 1), w.conv(x, 32, 1)], axis=1)), 16),
            "vsqrtps",
        ),
        (
            lambda w, x: relay.nn.conv2d_transpose(x, w(8, 8, 2, 2), channels=8, kernel_size=(2, 2), strides=(2, 2)),
            "vfmadd",
        ),
    ],
    ids=["average", "largest", "concatenation", "transposed"],
)
def test_loops_that_topi_leaves_to_single_numbers_are_of_vectors(
    layer: Callable[[Weights, relay.Expr], relay.Expr], instruction: str
) -> None:
    weights = Weights()
    y = layer(weights, relay.var("data", shape=(1, 8, 13, 16)))
    module = module_of(y)

    def wide() -> int:
        assembly = fold.fast_build(module, WIDE, weights.params).get_lib().get_source("asm")
        return sum(instruction in line and "zmm" in line for line in assembly.splitlines())

    with by_topi():
        stock = wide()
    assert wide() > stock
