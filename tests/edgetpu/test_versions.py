"""Versions of operators that edgetpu_compiler 16.0 does not know, as files that are converted today have them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import Op, Options, Type, Writer, random_feeds, run, schema
from tests.edgetpu.test_backend import compiled, tpus
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.errors import ModelError
from tvm_pipeline.profiling.bound import in_bound_thread

pytestmark = pytest.mark.usefixtures("nothing_installed")

RELU = schema.ActivationFunctionType.RELU


def network(kind: str, version: int, *, groups: int = 1, channels: int = 1, activation: int = 0) -> bytes:
    """Write one operator behind an addition, whose version is known."""
    writer, draw = Writer(), np.random.default_rng(0)

    def constant(*shape: int) -> int:
        made = writer.tensor(shape, scale=0.01, data=draw.integers(-30, 31, shape).astype(np.int8))
        writer.tensors[made].quantization.scale = [0.01] * channels
        writer.tensors[made].quantization.zeroPoint = [0] * channels
        return made

    x = writer.tensor((1, 4, 4, 4))
    added = writer.tensor((1, 4, 4, 4))
    writer.operator(Op.ADD, [x, x], [added], Options.AddOptions, schema.AddOptionsT())
    bias = writer.tensor((4,), Type.INT32, scale=0.0005, data=np.arange(4, dtype=np.int32))
    y = writer.tensor((1, 4, 4, 4))
    if kind == "conv_2d":
        reads, options = [added, constant(4, 3, 3, 4 // groups), bias], schema.Conv2DOptionsT(strideW=1, strideH=1)
        writer.operator(Op.CONV_2D, reads, [y], Options.Conv2DOptions, options, version=version)
    elif kind == "fully_connected":
        y = writer.tensor((16, 4))
        options = schema.FullyConnectedOptionsT()
        reads = [added, constant(4, 4), bias]
        writer.operator(Op.FULLY_CONNECTED, reads, [y], Options.FullyConnectedOptions, options, version=version)
    elif kind == "transpose_conv":
        shape = writer.tensor((4,), Type.INT32, scale=0, data=np.array([1, 4, 4, 4], np.int32))
        options = schema.TransposeConvOptionsT(strideW=1, strideH=1, fusedActivationFunction=activation)
        reads = [shape, constant(4, 3, 3, 4), added, bias]
        writer.operator(Op.TRANSPOSE_CONV, reads, [y], Options.TransposeConvOptions, options, version=version)
    else:
        writer.operator(Op.EXP, [added], [y], Options.ExpOptions, schema.ExpOptionsT(), version=version)
    return writer.content([x], [y])


def computed(platform: Platform, content: bytes) -> dict[str, np.ndarray]:
    """Return what a stage of the whole file computes on the first device."""
    model, settled = compiled(platform, content)
    runner = model.stage(model.graph.operator_names, settled.devices[0])
    feeds = random_feeds(model.graph)
    outputs = [port.buffer() for port in runner.outputs]
    in_bound_thread(runner, lambda: runner.run([feeds[port.name] for port in runner.inputs], outputs))
    return {port.name: array for port, array in zip(runner.outputs, outputs, strict=True)}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("kind", "version"), [("conv_2d", 6), ("fully_connected", 12), ("transpose_conv", 4)])
def test_a_version_that_says_more_than_the_operator_needs_is_lowered(plug, install_compiler, kind, version):
    plug("usb:0")
    calls, content = install_compiler(), network(kind, version)
    made = computed(tpus("usb:0"), content)
    whole = run(content, random_feeds(compiled(tpus("usb:0"), content)[0].graph), xnnpack=True)
    for name, value in whole.items():
        np.testing.assert_array_equal(made[name], value)
    assert calls() == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            network("conv_2d", 6, groups=2),
            r"conv_2d_1: .* CONV_2D up to version 5, .* version 6, .* in groups\.",
        ),
        (network("fully_connected", 12, channels=4), r"fully_connected_1: .* to version 9, .*_for_dense_layers = True"),
        (
            network("transpose_conv", 4, activation=RELU),
            r"transpose_conv_1: .* to version 3, .* a fused activation\.",
        ),
        (network("exp", 2), r"exp_1: .* knows EXP up to version 1, and net has version 2, because of its types or opt"),
    ],
)
def test_a_version_that_the_operator_needs_is_refused_before_the_compiler_is_called(
    plug, install_compiler, content, told
):
    plug("usb:0")
    calls = install_compiler()
    with pytest.raises(ModelError, match=f"^operator {told}"):
        computed(tpus("usb:0"), content)
    assert calls() == 0
    assert computed(tpus("cpu"), content)  # TFLite's own kernels know it
