"""Convolutions with channels last are computed channels first, with the same inputs and outputs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.tvm.targets import run
from tvm_pipeline_tvm.relay.channels_first import channels_first
from tvm_pipeline_tvm.relay.fold import fast_build

import tvm  # isort: skip
from tvm import relay  # isort: skip


def network(layout: str, kernel_layout: str) -> tuple[tvm.IRModule, dict[str, tvm.nd.NDArray]]:
    """Return layers that know a layout; weights are parameters, as importers write them."""
    draw = np.random.default_rng(1)
    weights_shape = {"HWIO": (3, 3, 4, 8), "OIHW": (8, 4, 3, 3)}[kernel_layout]
    shapes = {"weights": weights_shape, "bias": (8,), "transposed": (8, 6, 2, 2)}
    params = {name: tvm.nd.array(draw.standard_normal(shape).astype("float32")) for name, shape in shapes.items()}
    image = relay.var("image", shape=(1, 6, 5, 4) if layout == "NHWC" else (1, 4, 6, 5))
    weights, bias, transposed = (relay.var(name, shape=shape) for name, shape in shapes.items())
    x = relay.nn.conv2d(
        image, weights, channels=8, kernel_size=(3, 3), padding=(1, 1), data_layout=layout, kernel_layout=kernel_layout
    )
    x = relay.nn.relu(relay.nn.bias_add(x, bias, axis=layout.index("C")))
    x = relay.nn.max_pool2d(x, (2, 2), (2, 2), layout=layout)
    x = relay.nn.conv2d_transpose(
        x, transposed, (2, 2), channels=6, kernel_size=(2, 2), data_layout=layout, kernel_layout="IOHW"
    )
    x = relay.nn.avg_pool2d(relay.image.resize2d(x, (8, 8), layout=layout), (2, 2), layout=layout)
    mod = tvm.IRModule.from_expr(relay.Function([image, weights, bias, transposed], x))
    return relay.transform.InferType()(mod), params


@pytest.mark.thorough
def test_values_are_those_of_channels_last() -> None:
    mod, params = network("NHWC", "HWIO")
    changed = channels_first(mod, params)
    assert 'layout="NHWC"' not in re.sub("(src|dst)_layout", "", changed.astext(show_meta_data=False))
    assert [each.name_hint for each in changed["main"].params] == ["image"], "weights are constants now"
    frame = {"image": np.random.default_rng(2).standard_normal((1, 6, 5, 4)).astype("float32")}
    outputs = [run(fast_build(each, "llvm", params), frame)[0] for each in (mod, changed)]
    assert outputs[0].shape == (1, 7, 7, 6)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


def test_channels_first_are_left_alone() -> None:
    mod, params = network("NCHW", "OIHW")
    assert channels_first(mod, params) is mod
