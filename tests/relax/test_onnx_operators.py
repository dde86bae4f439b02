"""What is rewritten of ONNX computes what it does in onnxruntime: old forms, recurrent layers, quantised operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper
from tvm import relax

from tests.relax.imported import TARGET, assert_as_onnxruntime, compared, kinds, model_of, noise
from tests.support.onnx_models import onnx_bytes
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified

node = helper.make_node
IMAGE = (1, 4, 7, 9)
CONSTANTS = {
    "w": noise((6, 4, 3, 3)),
    "wt": noise((4, 6, 3, 3), seed=1),
    "c": noise((4,), seed=2),
    "c4": noise((4, 1, 1), seed=5),
    "low": np.array(-0.5, "float32"),
    "high": np.array(0.5, "float32"),
    "pads": np.array([0, 0, 1, 0, 0, 0, 0, 2]),
    "fill": np.array(1.5, "float32"),
    "twice": np.array([1, 2, 1, 3]),
    "last": np.array(-1),
    "two": np.array([3, -4]),
    "no": np.zeros(0, "float32"),
    "doubled": np.array([1, 1, 2, 2], "float32"),
    "odd": np.array([1, 1, 0.6, 1.7], "float32"),
    "sizes": np.array([1, 4, 3, 5]),
    "one": np.array([1]),
    "end": np.array([-1]),
    "axis": np.array([2]),
    "three": np.array(3, "int64"),
}
NODES: dict[int, list[onnx.NodeProto]] = {
    7: [
        node("Clip", ["x"], ["clip"], min=-0.5, max=0.5),
        node("Pad", ["x"], ["pad"], pads=[0, 0, 1, 0, 0, 0, 0, 2], value=1.5),
        node("Slice", ["x"], ["slice"], axes=[1, 3], starts=[1, -4], ends=[3, 9]),
        node("Softmax", ["x"], ["softmax"], axis=2),
        node("Unsqueeze", ["x"], ["unsqueeze"], axes=[0]),
        node("ReduceMean", ["x"], ["reduce"], axes=[1], keepdims=0),
    ],
    10: [
        node("Resize", ["x", "doubled"], ["resize"], mode="nearest"),
        node("Slice", ["x", "one", "end", "axis"], ["slice"]),
        node("MaxPool", ["x"], ["max"], kernel_shape=[2, 2], strides=[3, 3], ceil_mode=1),
        node("AveragePool", ["x"], ["mean"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, pads=[1, 1, 1, 1]),
        node("LogSoftmax", ["x"], ["logsoftmax"]),
    ],
    13: [
        node("Conv", ["x", "w"], ["upper"], auto_pad="SAME_UPPER", strides=[2, 2]),
        node("Conv", ["x", "w"], ["lower"], auto_pad="SAME_LOWER", strides=[2, 3]),
        node("Conv", ["x", "w"], ["valid"], auto_pad="VALID", dilations=[2, 2]),
        node("MaxPool", ["x"], ["max"], kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER"),
        node("AveragePool", ["x"], ["mean"], kernel_shape=[2, 3], strides=[2, 2], auto_pad="SAME_UPPER"),
        node("ConvTranspose", ["x", "wt"], ["turned"], strides=[2, 2], output_shape=[14, 18]),
        node("ConvTranspose", ["x", "wt"], ["padded"], strides=[2, 2], output_padding=[1, 0], pads=[1, 1, 1, 1]),
        node("Clip", ["x", "low"], ["above"]),
        node("Clip", ["x", "", "high"], ["below"]),
        node("Clip", ["x", "high", "low"], ["crossed"]),
        node("Pad", ["x", "pads", "fill"], ["pad"]),
        node("Pad", ["x", "pads"], ["edge"], mode="edge"),
        node("Tile", ["x", "twice"], ["tile"]),
        node("Gather", ["x", "last"], ["gather"], axis=1),
        node("Gather", ["x", "two"], ["gathers"], axis=3),
        node("Resize", ["x", "no", "doubled"], ["doubles"], mode="nearest", nearest_mode="floor"),
        node("Resize", ["x", "", "doubled"], ["linear"], mode="linear"),
        node("Resize", ["x", "", "odd"], ["oddly"], mode="linear"),
        node("Resize", ["x", "", "odd"], ["nearest"], mode="nearest", coordinate_transformation_mode="asymmetric"),
        node(
            "Resize", ["x", "", "", "sizes"], ["corners"], mode="linear", coordinate_transformation_mode="align_corners"
        ),
        node("Resize", ["x", "", "", "sizes"], ["cubic"], mode="cubic"),
        node("Max", ["x", "c4", "high"], ["largest"]),
        node("Min", ["x", "low", "x"], ["least"]),
        node("Sum", ["c4", "x", "x"], ["total"]),
        node("Celu", ["x"], ["celu"], alpha=0.5),
        node("Pow", ["x", "three"], ["power"]),
        node("IsInf", ["x"], ["infinite"], detect_negative=0),
        node("Cast", ["x"], ["cast"], to=TensorProto.FLOAT),
        node("HardSigmoid", ["x"], ["hardsigmoid"]),
        node("PRelu", ["x", "slope"], ["prelu"]),
        node("InstanceNormalization", ["x", "c", "c"], ["instance"]),
        node("TopK", ["x", "one"], ["values", "places"], axis=1),
        node("CumSum", ["x", "three"], ["sums"]),
    ],
    19: [
        node("Resize", ["x", "", "", "hw"], ["axes"], mode="linear", axes=[2, 3]),
        node("Resize", ["x", "", "halves"], ["smooth"], mode="linear", axes=[3, 2], antialias=1),
        node("AveragePool", ["x"], ["mean"], kernel_shape=[2, 2], dilations=[2, 2]),
        node("Pad", ["x", "pair", "", "axes2"], ["reflect"], mode="reflect"),
        node("ReduceMax", ["x", "axes2"], ["reduce"], keepdims=0),
        node("LayerNormalization", ["x", "row"], ["layer"]),
        node("Split", ["x"], ["left", "right"], axis=1, num_outputs=2),
        node("Mish", ["x"], ["mish"]),
    ],
}
MORE = {
    "slope": noise((4, 1, 1), seed=4),
    "hw": np.array([5, 4]),
    "halves": np.array([0.5, 0.5], "float32"),
    "pair": np.array([1, 2]),
    "axes2": np.array([2]),
    "row": noise((9,), seed=3),
}


@pytest.mark.parametrize("opset", NODES)
def test_operators_compute_what_they_do_in_onnxruntime(opset: int) -> None:
    nodes = NODES[opset]
    read = {name for each in nodes for name in each.input}
    constants = {name: value for name, value in (CONSTANTS | MORE).items() if name in read}
    outputs = tuple(name for each in nodes for name in each.output)
    assert_as_onnxruntime(onnx_bytes(nodes, constants, shape=IMAGE, outputs=outputs, opset=opset))


def test_a_broadcast_along_an_axis() -> None:
    """As opset 6 has it, which onnxruntime has no more."""
    content = onnx_bytes([node("Add", ["x", "c"], ["y"], axis=1, broadcast=1)], CONSTANTS, shape=IMAGE, opset=6)
    mod = simplified(import_model(model_of(content)))
    (binding, _) = mod["main"].body.blocks[0].bindings
    assert binding.value.args[1].value.numpy().tolist() == CONSTANTS["c"].reshape(1, 4, 1, 1).tolist()


@pytest.mark.parametrize("direction", ["reverse", "bidirectional"])
def test_recurrent_layers_step_by_step(direction: str) -> None:
    steps, batch, size, hidden, ways = 3, 2, 4, 5, 2 if direction == "bidirectional" else 1
    nodes, constants, outputs = [], {}, []
    for kind, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)) if ways == 2 else (("LSTM", 4),):
        for linear in (0, 1) if kind == "GRU" else (0,):
            name = f"{kind}{linear}"
            for part, shape in (
                ("w", (gates * hidden, size)),
                ("r", (gates * hidden, hidden)),
                ("b", (2 * gates * hidden,)),
            ):
                constants[name + part] = noise((ways, *shape), seed=len(constants)) / 2
            states = ["h", "c"] if kind == "LSTM" else ["h"]
            given = [f"{name}{each}" for each in ("Y", "H", "C")][: 1 + len(states)]
            options = {"linear_before_reset": linear} if kind == "GRU" else {}
            read = ["x", name + "w", name + "r", name + "b", "", *states]
            nodes.append(node(kind, read, given, hidden_size=hidden, direction=direction, **options))
            outputs += given
    for name in ("h", "c"):
        constants[name] = noise((ways, batch, hidden), seed=9)
    assert_as_onnxruntime(onnx_bytes(nodes, constants, shape=(steps, batch, size), outputs=tuple(outputs), opset=14))


def test_recurrent_layers_with_the_batch_first() -> None:
    """onnxruntime has none: the same layer behind a transposition gives the same."""
    constants = {"w": noise((2, 12, 4)), "r": noise((2, 12, 3), seed=1), "b": noise((2, 24), seed=2)}
    direction = "bidirectional"
    nodes = [
        node("LSTM", ["x", "w", "r", "b"], ["Y", "H", "C"], hidden_size=3, direction=direction, layout=1),
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        node("LSTM", ["t", "w", "r", "b"], ["y", "h", "c"], hidden_size=3, direction=direction),
        node("Transpose", ["y"], ["y1"], perm=[2, 0, 1, 3]),
        *(node("Transpose", [name], [f"{name}1"], perm=[1, 0, 2]) for name in "hc"),
    ]
    pairs = (("Y", "y1"), ("H", "h1"), ("C", "c1"))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for pair in pairs for name in pair]
    content = onnx_bytes(nodes, constants, shape=(2, 3, 4), outputs=tuple(values), opset=14)
    machine = relax.VirtualMachine(tvm.compile(simplified(import_model(model_of(content))), TARGET), tvm.cpu())
    found = [each.numpy() for each in machine["main"](tvm.runtime.tensor(noise((2, 3, 4))))]
    for own, other in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(own, other)


STEP = np.array(0.05, "float32")
BYTES = {
    "s": STEP,
    "z": np.array(110, "uint8"),
    "w8": noise((6, 4, 3, 3), "int8") - np.int8(60),
    "ws": np.linspace(0.01, 0.06, 6, dtype="float32"),
    "wz": np.zeros(6, "int8"),
    "b32": noise((6,), "int32", 1) * 30,
    "bs": STEP * np.linspace(0.01, 0.06, 6, dtype="float32"),
    "bz": np.zeros(6, "int32"),
    "ys": np.array(0.3, "float32"),
    "yz": np.array(120, "uint8"),
    "m8": noise((9, 5), "int8", 2) - np.int8(60),
    "ms": np.array(0.02, "float32"),
    "mz": np.array(3, "int8"),
    "u8": noise((9, 5), "uint8", 3),
    "uz": np.array(7, "uint8"),
}


def test_quantised_convolutions_run_in_float() -> None:
    """QuantizeLinear and DequantizeLinear of activations stay; weights are float constants."""
    content = onnx_bytes(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["q"]),
            node("DequantizeLinear", ["q", "s", "z"], ["d"]),
            node("DequantizeLinear", ["w8", "ws", "wz"], ["w"], axis=0),
            node("DequantizeLinear", ["b32", "bs", "bz"], ["b"], axis=0),
            node("Conv", ["d", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            node("Relu", ["c"], ["r"]),
            node("QuantizeLinear", ["r", "ys", "yz"], ["qy"]),
            node("DequantizeLinear", ["qy", "ys", "yz"], ["y"]),
        ],
        BYTES,
        shape=IMAGE,
    )
    mod = simplified(import_model(model_of(content)))
    assert kinds(mod) == ["quantize", "dequantize", "nn.conv2d", "add", "nn.relu", "quantize", "dequantize"]
    found, wanted = compared(content)
    np.testing.assert_allclose(found[0], wanted[0], atol=0.31)  # one step of it
    assert np.mean(found[0] == wanted[0]) > 0.99


def test_halves_are_rounded_to_even_and_saturate() -> None:
    content = onnx_bytes(
        [node("QuantizeLinear", ["x", "s", "z"], ["y"])],
        {"s": np.array(0.5, "float32"), "z": np.array(3, "uint8")},
        shape=(8,),
    )
    frame = {"x": np.array([0.25, 0.75, 1.25, -0.25, -0.75, -9, 500, 126.25], "float32")}
    (found,), (wanted,) = compared(content, frame)
    assert found.tolist() == wanted.tolist() == [3, 5, 5, 3, 1, 0, 255, 255]


def test_operators_of_bytes() -> None:
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("QLinearConv", ["q", "s", "z", "w8", "ws", "wz", "ys", "yz", "b32"], ["conv"], pads=[1, 1, 1, 1]),
        node("QLinearMatMul", ["q", "s", "z", "m8", "ms", "mz", "ys", "yz"], ["matmul"]),
        node("ConvInteger", ["q", "w8", "z"], ["sums"], strides=[2, 2]),
        node("MatMulInteger", ["q", "m8", "z", "mz"], ["product"]),
        node("MatMulInteger", ["q", "u8"], ["plain"]),
        node("DynamicQuantizeLinear", ["x"], ["dynamic", "scale", "zero"]),
    ]
    read = {name for each in nodes for name in each.input}
    constants = {name: value for name, value in BYTES.items() if name in read}
    outputs = ("conv", "matmul", "sums", "product", "plain", "dynamic", "scale", "zero")
    content = onnx_bytes(nodes, constants, shape=IMAGE, outputs=outputs)
    found, wanted = compared(content)
    for name, own, other in zip(outputs, found, wanted, strict=True):
        assert own.dtype == other.dtype, name
        rounded = name in ("conv", "matmul", "dynamic", "zero")  # at a half, float sums may round otherwise
        np.testing.assert_allclose(own.astype("float64"), other, rtol=1e-6, atol=rounded, err_msg=name)
        assert not rounded or np.mean(own == other) > 0.99, name
