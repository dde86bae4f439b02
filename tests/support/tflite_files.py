"""TFLite files of a few operators, made here: what TVM's importers lack, and what they must refuse."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.edgetpu.networks import Op, Options, Type, Writer, packed, schema
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model

IMAGE = (1, 4, 6, 2)


def model_of(content: bytes, name: str = "tensor/0:0", shape: tuple[int, ...] = IMAGE) -> Model:
    return Model("net", "tflite", content, (Tensor(name, shape),))


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


def transposed(custom: bool, kernel: int, stride: int, same: bool) -> bytes:
    """Return a transposed convolution with a bias, of TFLite's own or of MediaPipe's."""
    down, across = (n * stride if same else (n - 1) * stride + kernel for n in IMAGE[1:3])
    draw, writer, shape = np.random.default_rng(3), Writer(), (1, down, across, 3)
    x, y = floats(writer, IMAGE), floats(writer, shape)
    weights = floats(writer, (3, kernel, kernel, 2), draw.standard_normal((3, kernel, kernel, 2)).astype(np.float32))
    bias = floats(writer, (3,), np.array([1, -2, 3], np.float32))
    if custom:
        writer.operator(Op.CUSTOM, [x, weights, bias], [y], version=1)
        writer.codes[0].customCode = "Convolution2DTransposeBias"
        writer.operators[0].customOptions = np.array([1 if same else 2, stride, stride], "<i4").view(np.uint8)
    else:
        size = writer.tensor((4,), Type.INT32, scale=0, data=np.array(shape, np.int32))
        options = schema.TransposeConvOptionsT(padding=0 if same else 1, strideW=stride, strideH=stride)
        reads = [size, weights, x, bias]
        writer.operator(Op.TRANSPOSE_CONV, reads, [y], Options.TransposeConvOptions, options, version=3)
    return writer.content([x], [y])


def of_one_operator(change: Callable[[Writer, int], int], subgraphs: int = 1) -> bytes:
    """Return a file of the operators that `change` writes behind an input."""
    writer = Writer()
    x = floats(writer, IMAGE)
    content = writer.content([x], [change(writer, x)])
    if subgraphs > 1:
        parsed = schema.ModelT.InitFromPackedBuf(content, 0)
        parsed.subgraphs *= subgraphs
        content = packed(parsed)
    return content


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
