"""RewriteConcat on Relax: before -> expected module, the same outputs, kernels of less memory; what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax
from tvm.relax import op

from tests.relax.fused import TARGETS, module_of
from tests.relax.imported import TARGET, noise
from tests.support.examples import examples
from tests.support.onnx_networks import Net
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.build import prepared
from tvm_pipeline_tvm.relax.dataflow import name_of, shape_of
from tvm_pipeline_tvm.relax.extraction import analyse
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.reference import in_float64
from tvm_pipeline_tvm.relax.rewrite_concat import Concatenations, RelaxRewriting, RewriteConcat, optimal_peak_bytes

SHAPE = (1, 4, 8, 8)
Emit = Callable[[Any], Any]


def weights(*shape: int) -> np.ndarray:
    draw = np.random.default_rng(len(shape) + sum(shape))
    return (draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")


def conv(emit: Emit, x: Any, w: np.ndarray, **options: Any) -> Any:
    """Return a convolution of the same extent, whose kernel lies as `kernel_layout` says."""
    size = w.shape[options.get("kernel_layout", "OIHW").index("H")]
    return emit(op.nn.conv2d(x, relax.const(w), padding=size // 2, **options))


def relu(emit: Emit, x: Any) -> Any:
    return emit(op.nn.relu(x))


def add(emit: Emit, x: Any, y: Any) -> Any:
    return emit(op.add(x, y))


def concat(emit: Emit, *tensors: Any, axis: int = 1) -> Any:
    return emit(op.concat(tensors, axis))


def branches(emit: Emit, x: Any) -> list[Any]:
    return [relu(emit, conv(emit, x, weights(width, 4, 1, 1))) for width in (8, 8, 12)]


W, BIAS = weights(4, 28, 1, 1), relax.const(weights(1, 4, 1, 1))


def convolution(emit: Emit, x: Any) -> Any:
    joined = concat(emit, *branches(emit, x))
    return relu(emit, add(emit, conv(emit, joined, W), BIAS))


def partial_convolutions(emit: Emit, x: Any) -> Any:
    """The widest part is the first of the sum, and the last that is bound."""
    a, b, c = branches(emit, x)
    b, a, c = conv(emit, b, W[:, 8:16]), conv(emit, a, W[:, :8]), conv(emit, c, W[:, 16:])
    return relu(emit, add(emit, add(emit, b, add(emit, a, c)), BIAS))


NHWC = {"data_layout": "NHWC", "kernel_layout": "HWIO"}
SCALE = weights(28)


def channels_last(emit: Emit, x: Any) -> Any:
    x = emit(op.permute_dims(x, [0, 2, 3, 1]))
    x = concat(emit, *(conv(emit, x, weights(1, 1, 4, width), **NHWC) for width in (8, 8, 12)), axis=-1)
    x = emit(op.nn.max_pool2d(emit(op.multiply(x, relax.const(SCALE[None, None, None]))), (3, 3), layout="NHWC"))
    return conv(emit, x, W.transpose(2, 3, 1, 0), **NHWC)


def partial_channels_last(emit: Emit, x: Any) -> Any:
    x = emit(op.permute_dims(x, [0, 2, 3, 1]))
    ends = [slice(0, 8), slice(8, 16), slice(16, 28)]
    parts = [conv(emit, x, weights(1, 1, 4, end.stop - end.start), **NHWC) for end in ends]
    scaled = [
        emit(op.multiply(part, relax.const(SCALE[None, None, None, end])))
        for part, end in zip(parts, ends, strict=True)
    ]
    pooled = [emit(op.nn.max_pool2d(part, (3, 3), layout="NHWC")) for part in scaled]
    b, a, c = (conv(emit, pooled[i], W[:, ends[i]].transpose(2, 3, 1, 0), **NHWC) for i in (1, 0, 2))
    return add(emit, b, add(emit, a, c))


D, FRAME = weights(28, 1, 3, 3), relax.const(weights(28, 4, 4)[None])


def depthwise(emit: Emit, x: Any) -> Any:
    x = conv(emit, concat(emit, *branches(emit, x)), D, groups=28, strides=2)
    return add(emit, relu(emit, x), FRAME)


def partial_depthwise(emit: Emit, x: Any) -> Any:
    parts = [
        conv(emit, part, D[start : start + count], groups=count, strides=2)
        for part, start, count in zip(branches(emit, x), (0, 8, 16), (8, 8, 12), strict=True)
    ]
    return add(emit, concat(emit, *(relu(emit, part) for part in parts)), FRAME)


def nested(emit: Emit, x: Any) -> Any:
    """A concatenation that another reads, as in DenseNet."""
    a, b, c = branches(emit, x)
    return conv(emit, relu(emit, concat(emit, concat(emit, a, b), c)), W)


def partial_nested(emit: Emit, x: Any) -> Any:
    a, b, c = (relu(emit, part) for part in branches(emit, x))
    b, a, c = conv(emit, b, W[:, 8:16]), conv(emit, a, W[:, :8]), conv(emit, c, W[:, 16:])
    return add(emit, b, add(emit, a, c))


CASES = {
    "convolution": (convolution, partial_convolutions),
    "channels last": (channels_last, partial_channels_last),
    "depthwise": (depthwise, partial_depthwise),
    "nested": (nested, partial_nested),
}


@pytest.mark.parametrize("name", CASES)
def test_expected_module_of_fewer_bytes(name: str) -> None:
    before, expected = (module_of(network, SHAPE) for network in CASES[name])
    after = RewriteConcat()(before)
    tvm.ir.assert_structural_equal(after["main"], expected["main"])
    assert optimal_peak_bytes(after) < optimal_peak_bytes(before)


def test_each_sum_is_fused_behind_its_own_convolution() -> None:
    mod = RewriteConcat()(module_of(convolution, SHAPE))
    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_87"}, host={"kind": "llvm"})
    for fused in (kernel_passes.fused(mod, TARGETS[0]), gpu_fused(mod, cuda)):
        graph = analyse(fused).graph
        read = {each.kind: graph.tensors[each.inputs[0]].shape[1] for each in graph.operators[3:]}
        assert read == {"conv2d": 12, "conv2d+add": 8, "conv2d+add+add+relu": 8}


def test_what_somebody_wants_whole_is_not_rewritten() -> None:
    def two_results(emit: Emit, x: Any) -> Any:
        joined = concat(emit, *branches(emit, x))
        return relax.Tuple([conv(emit, joined, W), joined])

    def softmax(emit: Emit, x: Any) -> Any:
        joined = concat(emit, *branches(emit, x))
        return add(emit, conv(emit, joined, W), conv(emit, emit(op.nn.softmax(joined, axis=1)), W))

    def of_rows(emit: Emit, x: Any) -> Any:
        return conv(emit, concat(emit, relu(emit, x), x, axis=2), weights(2, 4, 1, 1))

    def in_groups(emit: Emit, x: Any) -> Any:
        return conv(emit, concat(emit, *branches(emit, x)), weights(4, 7, 1, 1), groups=4)

    def by_input(emit: Emit, x: Any, w: Any) -> Any:
        return emit(op.nn.conv2d(concat(emit, *branches(emit, x)), w))

    def over_channels(emit: Emit, x: Any) -> Any:
        return emit(op.mean(concat(emit, *branches(emit, x)), [1, 2], keepdims=True))

    for network in (two_results, softmax, of_rows, in_groups, over_channels):
        assert not Concatenations(module_of(network, SHAPE)).names, network.__name__
    assert not Concatenations(module_of(by_input, SHAPE, (4, 28, 1, 1))).names


def test_what_the_largest_kernel_needs_anyway_is_not_rewritten() -> None:
    def network(emit: Emit, x: Any) -> Any:
        wide = conv(emit, convolution(emit, x), weights(40, 4, 1, 1))
        return conv(emit, emit(op.nn.softmax(wide, axis=1)), weights(4, 40, 1, 1))

    mod = module_of(network, SHAPE)
    assert Concatenations(mod).names
    assert RewriteConcat()(mod).same_as(mod)


# ------------------------------------------------------------------------------------------ networks that nobody chose

BY_CHANNEL: list[Callable[[Emit, Any, int], Any]] = [
    lambda emit, x, _: relu(emit, x),
    lambda emit, x, _: emit(op.clip(x, -0.5, 1.5)),
    lambda emit, x, _: emit(op.tanh(x)),
    lambda emit, x, _: emit(op.maximum(x, relax.const(0.25))),
    lambda emit, x, count: emit(op.multiply(x, relax.const(weights(1, count, 1, 1)))),
    lambda emit, x, count: add(emit, x, relax.const(weights(count, 1, 1))),
    lambda emit, x, count: emit(op.power(emit(op.abs(x)), relax.const(np.abs(weights(count, 1, 1)) + 1))),
    lambda emit, x, count: conv(emit, x, weights(count, 1, 3, 3), groups=count),
    lambda emit, x, _: emit(op.mean(x, [2, 3], keepdims=True)),
    # A reader that needs all channels, and one that the sum of these reads.
    lambda emit, x, _: emit(op.nn.softmax(x, axis=1)),
    lambda emit, x, count: conv(emit, x, weights(count, count, 3, 3)),
]


def drawn(data: st.DataObject) -> Callable[[Emit, Any], Any]:
    """Return a network that concatenates what it has at hand, and computes channel by channel in between."""

    def network(emit: Emit, x: Any) -> Any:
        known = [x, conv(emit, x, weights(3, 4, 1, 1)), conv(emit, x, weights(5, 4, 3, 3))]
        for _ in range(data.draw(st.integers(1, 3))):
            parts = [data.draw(st.sampled_from(known)) for _ in range(data.draw(st.integers(2, 3)))]
            if data.draw(st.booleans()):
                parts = [relu(emit, part) for part in parts]
            x = concat(emit, *parts)
            for operator in data.draw(st.lists(st.sampled_from(BY_CHANNEL), max_size=3)):
                x = operator(emit, x, shape_of(x)[1])
            if shape_of(x)[2:] == SHAPE[2:]:
                known.append(x)
        read = conv(emit, x, weights(4, shape_of(x)[1], 1, 1))
        return relax.Tuple([read, known[-1]]) if data.draw(st.booleans()) and len(known) > 3 else read

    return network


@examples(30)
@given(st.data())
def test_every_network_computes_the_same_with_any_choice_in_parts(data: st.DataObject) -> None:
    """In float64, operator by operator, where another order of a sum is seen in the last bits alone."""
    mod = module_of(drawn(data), SHAPE)
    found = Concatenations(mod)
    chosen = [name for name in found.names if data.draw(st.booleans())]
    frame = {"x0": noise(SHAPE)}
    as_it_is, in_parts = (in_float64(found.rewritten(some), frame) for some in ((), chosen))
    for made, expected in zip(in_parts, as_it_is, strict=True):
        np.testing.assert_allclose(made, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


# ------------------------------------------------------------------------------------------ networks of bytes


def quantised(*, last_groups: int) -> Any:
    """Return a network of int8: three pools of a picture, joined, and a convolution of what is joined, with a stride.

    Args:
        last_groups: of the convolution: 48 is a depthwise one, and 1 adds all channels up.
    """
    net = Net()
    scale, zero = net.const(0.05), net.const(3, "int8")

    def rounded(x: str) -> str:
        return net.op("DequantizeLinear", net.op("QuantizeLinear", x, scale, zero), scale, zero)

    data = rounded(net.input("data", 1, 16, 16, 16))
    sizes = (3, 5, 7)
    pools = [net.op("MaxPool", data, kernel_shape=[size] * 2, pads=[size // 2] * 4) for size in sizes]
    joined = rounded(net.op("Concat", *map(rounded, pools), axis=1))
    integers = np.random.default_rng(0).integers(-50, 50, (48, 48 // last_groups, 3, 3))
    kernel = net.op("DequantizeLinear", net.const(integers, "int8"), net.const(0.01), net.const(0, "int8"))
    x = net.op("Conv", joined, kernel, net.weight(48), strides=[4, 4], pads=[1] * 4, group=last_groups)
    return net.model("bytes", rounded(net.op("Relu", x)))


def test_bytes_keep_their_bits_and_their_kernels_in_integers() -> None:
    rewriting = RelaxRewriting(quantised(last_groups=48))
    assert rewriting.is_quantized
    assert rewriting.peak_bytes(rewriting.names) < rewriting.peak_bytes(())
    mods = [prepared(import_model(rewriting.rewritten(some)), True) for some in ((), rewriting.names)]
    for mod, count in zip(mods, (1, 3), strict=True):
        assert [str(each.args[0].ty.dtype) for each in calls(mod, "relax.nn.conv2d")] == ["uint8"] * count
    frame = tvm.runtime.tensor(noise((1, 16, 16, 16)))
    before, after = (relax.VirtualMachine(tvm.compile(mod, TARGET), tvm.cpu())["main"](frame).numpy() for mod in mods)
    assert len(np.unique(before)) > 10
    np.testing.assert_array_equal(after, before)


def test_sums_of_bytes_over_all_channels_stay_whole() -> None:
    """The concatenation is computed of bytes, so that the convolution is a layer in integers as before."""
    rewriting = RelaxRewriting(quantised(last_groups=1))
    for chosen in ((), rewriting.names):
        mod = prepared(import_model(rewriting.rewritten(chosen)), True)
        [layer] = calls(mod, "relax.nn.conv2d")
        assert str(layer.args[0].ty.dtype) == "uint8"


def calls(mod: tvm.IRModule, name: str) -> list[Any]:
    return [each.value for each in mod["main"].body.blocks[0].bindings if name_of(each.value) == name]
