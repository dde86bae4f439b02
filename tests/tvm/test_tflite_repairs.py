"""TFLite operators that TVM's importer lacks, against TFLite's own kernels, and files that it cannot take."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")
needs("ai_edge_litert")

import tvm
from tvm import relay

from tests.edgetpu.networks import Op, Options, Type, Writer, packed, run, schema
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.tvm.relay.importer import import_model
from tvm_pipeline.tvm.relay.tflite_repairs import TRANSPOSE_BIAS

IMAGE = (1, 4, 6, 2)


def model_of(content: bytes, name: str = "tensor/0:0", shape: tuple[int, ...] = IMAGE) -> Model:
    return Model("net", "tflite", content, (Tensor(name, shape),))


def computed(content: bytes, frame: np.ndarray) -> np.ndarray:
    """Return what the imported module computes of a frame."""
    mod, params = import_model(model_of(content))
    with tvm.transform.PassContext(opt_level=1):
        return relay.create_executor("graph", mod, tvm.cpu(), "llvm", params).evaluate()(frame).numpy()


def frame_of(shape: tuple[int, ...] = IMAGE) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def floats(writer: Writer, shape: tuple[int, ...], data: np.ndarray | None = None, type_: int = Type.FLOAT32) -> int:
    return writer.tensor(shape, type_, scale=0, data=data)


def sparse_weights() -> bytes:
    """Return a fully connected layer whose weights are sparse rows in float16: DENSIFY, then DEQUANTIZE."""
    writer = Writer()
    x = floats(writer, IMAGE)
    flat = floats(writer, (1, 48))
    size = writer.tensor((2,), Type.INT32, scale=0, data=np.array([1, 48], np.int32))
    writer.operator(Op.RESHAPE, [x, size], [flat], version=1)
    values = np.array([0.5, -2, 3, 0.25], np.float16)
    stored = floats(writer, (3, 48), values, Type.FLOAT16)
    dense, sparse = schema.DimensionType.DENSE, schema.DimensionType.SPARSE_CSR
    segments, columns = schema.Uint8VectorT([0, 2, 2, 4]), schema.Uint8VectorT([1, 40, 0, 47])
    kind = schema.SparseIndexVector.Uint8Vector
    writer.tensors[stored].sparsity = schema.SparsityParametersT(
        traversalOrder=[0, 1],
        dimMetadata=[
            schema.DimensionMetadataT(dense, 3),
            schema.DimensionMetadataT(sparse, 0, kind, segments, kind, columns),
        ],
    )
    half, weights = floats(writer, (3, 48), type_=Type.FLOAT16), floats(writer, (3, 48))
    writer.operator(Op.DENSIFY, [stored], [half], version=1)
    writer.operator(Op.DEQUANTIZE, [half], [weights], version=3)
    y = floats(writer, (1, 3))
    layer = schema.FullyConnectedOptionsT()
    writer.operator(Op.FULLY_CONNECTED, [flat, weights, -1], [y], Options.FullyConnectedOptions, layer, version=1)
    return writer.content([x], [y])


def broadcast_choice() -> bytes:
    """Return SELECT_V2 whose condition is constant and of another rank, after an operator that reads a constant."""
    writer = Writer()
    x, y = floats(writer, IMAGE), floats(writer, IMAGE)
    condition = writer.tensor((2,), Type.BOOL, scale=0, data=np.array([True, False]))
    column, other = floats(writer, (2, 1), np.array([5, 7], np.float32)), floats(writer, (1, 2))
    order = writer.tensor((2,), Type.INT32, scale=0, data=np.array([1, 0], np.int32))
    writer.operator(Op.TRANSPOSE, [column, order], [other], version=1)
    writer.operator(Op.SELECT_V2, [condition, x, other], [y], version=1)
    return writer.content([x], [y])


@pytest.mark.parametrize("build", [sparse_weights, broadcast_choice])
def test_it_computes_what_tflite_computes(build: Callable[[], bytes]) -> None:
    content, frame = build(), frame_of()
    [expected] = run(content, {"tensor/0:0": frame}).values()
    np.testing.assert_allclose(computed(content, frame), expected, rtol=1e-6, atol=1e-6)


def transposed(custom: bool, kernel: int, stride: int, same: bool) -> bytes:
    """Return a transposed convolution with a bias, of TFLite's own or of MediaPipe's."""
    down, across = (n * stride if same else (n - 1) * stride + kernel for n in IMAGE[1:3])
    draw, writer, shape = np.random.default_rng(3), Writer(), (1, down, across, 3)
    x, y = floats(writer, IMAGE), floats(writer, shape)
    weights = floats(writer, (3, kernel, kernel, 2), draw.standard_normal((3, kernel, kernel, 2)).astype(np.float32))
    bias = floats(writer, (3,), np.array([1, -2, 3], np.float32))
    if custom:
        writer.operator(Op.CUSTOM, [x, weights, bias], [y], version=1)
        writer.codes[0].customCode = TRANSPOSE_BIAS
        writer.operators[0].customOptions = np.array([1 if same else 2, stride, stride], "<i4").view(np.uint8)
    else:
        size = writer.tensor((4,), Type.INT32, scale=0, data=np.array(shape, np.int32))
        options = schema.TransposeConvOptionsT(padding=0 if same else 1, strideW=stride, strideH=stride)
        reads = [size, weights, x, bias]
        writer.operator(Op.TRANSPOSE_CONV, reads, [y], Options.TransposeConvOptions, options, version=3)
    return writer.content([x], [y])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kernel", "stride", "same"), [(2, 2, True), (3, 2, True), (4, 2, True), (3, 2, False)])
def test_mediapipes_transposed_convolution_is_tflites_with_a_bias(kernel: int, stride: int, same: bool) -> None:
    """MediaPipe pads as TFLite does where the kernel is as wide as the stride or wider, which its networks keep to."""
    frame = frame_of()
    [expected] = run(transposed(False, kernel, stride, same), {"tensor/0:0": frame}).values()
    found = computed(transposed(True, kernel, stride, same), frame)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def refused(change: Callable[[Writer, int], int], subgraphs: int = 1) -> str:
    """Return the importer's message for a file of one operator that `change` writes."""
    writer = Writer()
    x = floats(writer, IMAGE)
    content = writer.content([x], [change(writer, x)])
    if subgraphs > 1:
        parsed = schema.ModelT.InitFromPackedBuf(content, 0)
        parsed.subgraphs *= subgraphs
        content = packed(parsed)
    with pytest.raises(ModelError) as raised:
        import_model(model_of(content))
    return str(raised.value)


def alone(code: int) -> Callable[[Writer, int], int]:
    return lambda writer, x: writer.operator(code, [x], [floats(writer, IMAGE)], version=1)[0]


def custom(writer: Writer, x: int) -> int:
    y = alone(Op.CUSTOM)(writer, x)
    writer.codes[0].customCode = "TransformLandmarks"
    return y


def stateful(writer: Writer, x: int) -> int:
    state = floats(writer, IMAGE)
    writer.tensors[state].isVariable = True
    return writer.operator(Op.ADD, [x, state], [floats(writer, IMAGE)], Options.AddOptions, schema.AddOptionsT())[0]


@pytest.mark.parametrize(
    ("change", "subgraphs", "message"),
    [
        (alone(Op.RFFT2D), 1, "operator rfft2d_0 is RFFT2D, which TVM 0.19 does not import; convert"),
        (alone(Op.IF), 3, "operator if_0 runs other subgraphs of the file, by what was computed (IF); export"),
        (alone(Op.READ_VARIABLE), 1, "operator read_variable_0 keeps a state between frames (READ_VARIABLE); export"),
        (stateful, 1, "operator add_0 keeps a state between frames in the tensor tensor/1:0; export the model with"),
        (custom, 1, "operator custom_0 (TransformLandmarks) is a custom operator, which only the program"),
        (alone(Op.ABS), 2, "it has 2 subgraphs, and TVM imports one; export the one that is to run alone"),
    ],
)
def test_a_file_that_tvm_cannot_take_names_the_operator(
    change: Callable[[Writer, int], int], subgraphs: int, message: str
) -> None:
    assert refused(change, subgraphs).startswith(f"net: TVM cannot import it: {message}")


def test_many_operators_of_a_kind_are_counted() -> None:
    def chain(writer: Writer, x: int) -> int:
        for _ in range(5):
            x = alone(Op.RFFT2D)(writer, x)
        return x

    assert "each of the operators rfft2d_0, rfft2d_1, rfft2d_2 and 2 more is RFFT2D" in refused(chain)
