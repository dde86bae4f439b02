"""Padded channels change no result, and are cut off behind what follows channel by channel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.networks import Weights, module_of
from tests.tvm.targets import run
from tvm_pipeline_tvm.padded_channels import padded_channels
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.pad_channels import pad_channels

import tvm  # isort: skip
from tvm import relay  # isort: skip

FRAME = {"data": np.random.default_rng(3).standard_normal((1, 16, 9, 9)).astype("float32")}
Ends = Callable[[Weights, relay.Expr], relay.Expr]


def module(end: Ends, channels: int = 100) -> tuple[tvm.IRModule, dict[str, object]]:
    weights = Weights()
    x = relay.var("data", shape=(1, 16, 9, 9))
    y = end(weights, relay.nn.conv2d(x, weights(channels, 16, 1, 1), channels=channels, kernel_size=(1, 1)))
    return module_of(y), weights.params


def kinds(mod: tvm.IRModule) -> list[str]:
    found: list[str] = []

    def visit(expr: relay.Expr) -> None:
        if isinstance(expr, relay.Call):
            found.append(expr.op.name)

    relay.analysis.post_order_visit(mod["main"], visit)
    return found


def bias(weights: Weights, y: relay.Expr) -> relay.Expr:
    return relay.nn.relu(relay.nn.bias_add(y, weights(100)))


ENDS: dict[str, tuple[Ends, list[str]]] = {
    "nothing": (lambda _, y: y, ["nn.conv2d", "strided_slice"]),
    "classifier": (
        lambda w, y: relay.nn.softmax(relay.nn.batch_flatten(relay.nn.global_avg_pool2d(bias(w, y)))),
        [
            "nn.conv2d",
            "nn.bias_add",
            "nn.relu",
            "nn.global_avg_pool2d",
            "strided_slice",
            "nn.batch_flatten",
            "nn.softmax",
        ],
    ),
    "an addition for each channel": (lambda w, y: relay.add(y, w(100, 1, 1)), ["nn.conv2d", "add", "strided_slice"]),
    "a product for each channel": (
        lambda w, y: relay.multiply(y, w(1, 100, 1, 1)),
        ["nn.conv2d", "multiply", "strided_slice"],
    ),
    "a number": (
        lambda _, y: relay.multiply(y, relay.const(np.float32(3))),
        ["nn.conv2d", "multiply", "strided_slice"],
    ),
    "an image that is added": (lambda w, y: relay.add(y, w(1, 100, 9, 9)), ["nn.conv2d", "strided_slice", "add"]),
    "two readers": (
        lambda w, y: relay.add(relay.nn.relu(y), relay.sigmoid(y)),
        ["nn.conv2d", "nn.relu", "strided_slice", "sigmoid", "strided_slice", "add"],
    ),
}


BUILT = ("nothing", "an image that is added", "two readers")  # the other modules have what these have


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ENDS)
def test_results_are_the_same(name: str) -> None:
    end, expected = ENDS[name]
    mod, params = module(end)
    padded = pad_channels(mod, params)
    assert kinds(padded) == expected
    assert [str(p.name_hint) for p in padded["main"].params] == [str(p.name_hint) for p in mod["main"].params]
    if name in BUILT:
        for own, wanted in zip(
            run(fast_build(padded, "llvm", params), FRAME), run(fast_build(mod, "llvm", params), FRAME), strict=True
        ):
            np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-6)


def test_only_what_gains_is_padded() -> None:
    assert padded_channels(1000) == 1008
    for channels in (24, 40, 64, 96, 144, 255, 1024):  # few, whole blocks, or blocks of 15
        assert padded_channels(channels) == channels
    mod, params = module(lambda _, y: y, 96)
    assert pad_channels(mod, params) is mod


def test_weights_that_are_no_parameters_are_left_alone() -> None:
    x, w = relay.var("data", shape=(1, 16, 9, 9)), relay.var("w", shape=(100, 16, 1, 1))
    y = relay.nn.conv2d(x, w, channels=100, kernel_size=(1, 1))
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x, w], y)))
    assert pad_channels(mod, {}) is mod


@pytest.mark.thorough
def test_a_network_that_is_deeper_than_python_recurses() -> None:
    y = relay.var("data", shape=(1, 16, 4, 4))
    for _ in range(3000):
        y = relay.nn.relu(y)
    mod = module_of(y)
    assert pad_channels(mod, {}) is mod
