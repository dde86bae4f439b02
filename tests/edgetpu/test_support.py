"""Operators that an Edge TPU takes or refuses: each sentence of Google's page against a file that breaks it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema
from hypothesis import given
from hypothesis import strategies as st

from tests.edgetpu.networks import MOBILENET, Op, Options, Type, Writer, changed, random_network
from tvm_pipeline.errors import ModelError
from tvm_pipeline_edgetpu.model import read_model
from tvm_pipeline_edgetpu.support import check_quantised, unsupported

RELU = schema.ActivationFunctionType.RELU


def read(folder, content):
    (folder / "model.tflite").write_bytes(content)
    return read_model(folder / "model.tflite")


def axes(writer, *values):
    return writer.tensor((len(values),), Type.INT32, scale=0, data=np.array(values, np.int32))


def one(code, shape, result, parameters=(), options_type=0, options=None, *, before=False, type_=Type.INT8):
    """Return a file of one operator: its parameters are constants, behind the tensor that it reads or `before` it."""
    writer = Writer()
    data, made = writer.tensor(shape, type_), writer.tensor(result, type_)
    constants = [
        writer.tensor(value.shape, Type.INT8 if value.dtype == np.int8 else Type.INT32, data=value)
        for value in map(np.asarray, parameters)
    ]
    reads = [*constants, data] if before else [data, *constants]
    writer.operator(code, reads, [made], options_type, options)
    return writer.content([data], [made])


def ints(*values):
    return np.array(values, np.int32)


def pool(**more):
    return Options.Pool2DOptions, schema.Pool2DOptionsT(strideW=1, strideH=1, filterWidth=2, filterHeight=2, **more)


def conv(height, width):
    weights = np.ones((4, 3, 3, 4), np.int8)
    options = schema.Conv2DOptionsT(strideW=1, strideH=1, dilationHFactor=height, dilationWFactor=width)
    return one(Op.CONV_2D, (1, 8, 8, 4), (1, 8, 8, 4), [weights], Options.Conv2DOptions, options)


def depthwise(height, width):
    weights = np.ones((1, 3, 3, 4), np.int8)
    options = schema.DepthwiseConv2DOptionsT(strideW=1, strideH=1, dilationHFactor=height, dilationWFactor=width)
    shape = (1, 8, 8, 4)
    return one(Op.DEPTHWISE_CONV_2D, shape, shape, [weights], Options.DepthwiseConv2DOptions, options)


def dense(rows=1, format_=0):
    options = schema.FullyConnectedOptionsT(weightsFormat=format_)
    weights = np.ones((8, 16), np.int8)
    return one(Op.FULLY_CONNECTED, (rows, 16), (rows, 8), [weights], Options.FullyConnectedOptions, options)


def reduced(code, shape, result, *over):
    return one(code, shape, result, [ints(*over)], Options.ReducerOptions, schema.ReducerOptionsT())


def strided(strides, **masks):
    options = schema.StridedSliceOptionsT(**masks)
    parameters = [ints(0, 0, 0), ints(1, 4, 4), ints(*strides)]
    return one(Op.STRIDED_SLICE, (1, 4, 4), (1, 4, 4), parameters, Options.StridedSliceOptions, options)


def split(axis):
    """Return a split of [2, 1, 4] into halves along the one or the other axis."""
    writer = Writer()
    data = writer.tensor((2, 1, 4))
    made = [writer.tensor((1, 1, 4) if axis == 0 else (2, 1, 2)) for _ in range(2)]
    along = writer.tensor((), Type.INT32, scale=0, data=np.int32(axis))
    writer.operator(Op.SPLIT, [along, data], made, Options.SplitOptions, schema.SplitOptionsT(2))
    return writer.content([data], made)


def packed(axis):
    writer = Writer()
    left, right = writer.tensor((1, 4)), writer.tensor((1, 4))
    made = writer.tensor((2, 1, 4) if axis == 0 else (1, 4, 2))
    writer.operator(Op.PACK, [left, right], [made], Options.PackOptions, schema.PackOptionsT(2, axis))
    return writer.content([left, right], [made])


def joined(*constants, activation=0):
    """Return a concatenation of a computed [1, 4] and constants of that shape."""
    writer = Writer()
    data = writer.tensor((1, 4))
    more = [writer.tensor((1, 4), data=np.full((1, 4), value, np.int8)) for value in constants]
    made = writer.tensor((1, 4 * (1 + len(constants))))
    options = schema.ConcatenationOptionsT(axis=1, fusedActivationFunction=activation)
    writer.operator(Op.CONCATENATION, [data, *more], [made], Options.ConcatenationOptions, options)
    return writer.content([data], [made])


def computed_weights():
    writer = Writer()
    data, weights, made = writer.tensor((1, 16)), writer.tensor((8, 16)), writer.tensor((1, 8))
    options = schema.FullyConnectedOptionsT()
    writer.operator(Op.FULLY_CONNECTED, [data, weights, -1], [made], Options.FullyConnectedOptions, options)
    return writer.content([data, weights], [made])


IMAGE = (1, 8, 8, 4)
REFUSED = {
    "kind": (one(Op.LEAKY_RELU, IMAGE, IMAGE), "leaky_relu is not among"),
    "float": (one(Op.RELU, IMAGE, IMAGE, type_=Type.FLOAT32), r"float32; quantise the model to int8 \(post-training"),
    "int16": (one(Op.RELU, IMAGE, IMAGE, type_=Type.INT16), "int16"),
    "batch": (one(Op.RELU, (2, 8, 8, 4), (2, 8, 8, 4)), r"\[2, 8, 8, 4\]; only the three innermost"),
    "weights": (computed_weights(), "tensor/1:0 is computed, and has to be a constant"),
    "average pool": (
        one(Op.AVERAGE_POOL_2D, IMAGE, IMAGE, (), *pool(fusedActivationFunction=RELU)),
        "fused activation",
    ),
    "max pool": (one(Op.MAX_POOL_2D, IMAGE, IMAGE, (), *pool(fusedActivationFunction=RELU)), "fused activation"),
    "concatenation": (joined(0, activation=RELU), "fused activation"),
    "constant joined": (joined(1), "not all zeros"),
    "constants joined": (joined(0, 0), "more than one other"),
    "conv": (conv(1, 2), "dilated by 1 x 2"),
    "depthwise": (depthwise(2, 1), "dilated by 2 x 1"),
    "shuffled": (dense(format_=1), "shuffled"),
    "rows": (dense(rows=3), r"\[3, 8\]; only the innermost"),
    "mean of batch": (reduced(Op.MEAN, (1, 8, 4), (8, 4), 0), "batch axis"),
    "mean of 6": (reduced(Op.MEAN, (1, 8, 6), (1, 8), -1), "6 channels, which is no multiple of 4"),
    "max": (reduced(Op.REDUCE_MAX, (1, 8, 4), (8, 4), -3), "batch axis"),
    "min": (reduced(Op.REDUCE_MIN, (1, 8, 4), (8, 4), 0), "batch axis"),
    "sum": (reduced(Op.SUM, (1, 8, 4), (8, 4), 0), "batch axis"),
    "pack": (packed(0), "batch axis"),
    "pad": (one(Op.PAD, (1, 4), (2, 4), [ints(0, 1, 0, 0).reshape(2, 2)]), "batch axis"),
    "prelu": (one(Op.PRELU, IMAGE, IMAGE, [np.ones((8, 8, 4), np.int8)]), r"\[8, 8, 4\]; only the innermost"),
    "softmax": (one(Op.SOFTMAX, (1, 8, 4), (1, 8, 4)), r"\[1, 8, 4\]; only the innermost"),
    "long softmax": (one(Op.SOFTMAX, (1, 16001), (1, 16001)), "16001 elements; 16,000"),
    "split": (split(0), "batch axis"),
    "squeeze": (one(Op.SQUEEZE, (5, 1, 10), (5, 10)), "inner extents"),
    "stride": (strided((1, 2, 1)), r"\[1, 2, 1\]; all have to be 1"),
    "ellipsis": (strided((1, 1, 1), ellipsisMask=1), "ellipsis"),
    "new axis": (strided((1, 1, 1), newAxisMask=1), "adds an axis"),
}
TAKEN = {
    "average pool": one(Op.AVERAGE_POOL_2D, IMAGE, IMAGE, (), *pool()),
    "max pool": one(Op.MAX_POOL_2D, IMAGE, IMAGE, (), *pool()),
    "uint8": one(Op.RELU6, IMAGE, IMAGE, type_=Type.UINT8),
    "zeros joined": joined(0),
    "conv": conv(2, 2),
    "depthwise": depthwise(1, 1),
    "dense": dense(),
    "mean": reduced(Op.MEAN, IMAGE, (1, 4), 1, 2),
    "mean of 8": reduced(Op.MEAN, (1, 8, 8), (1, 8), 2),
    "max": reduced(Op.REDUCE_MAX, IMAGE, (1, 8, 8), -1),
    "pack": packed(2),
    "pad": one(Op.PAD, (1, 4), (1, 6), [ints(0, 0, 1, 1).reshape(2, 2)]),
    "prelu": one(Op.PRELU, IMAGE, IMAGE, [np.ones((1, 1, 4), np.int8)]),
    "softmax": one(Op.SOFTMAX, (1, 16000), (1, 16000)),
    "split": split(2),
    "squeeze": one(Op.SQUEEZE, (1, 1, 10), (10,)),
    "squeeze twice": one(Op.SQUEEZE, (1, 5, 10), (5, 10)),
    "stride": strided((1, 1, 1)),
    "transposed": one(
        Op.TRANSPOSE_CONV,
        (1, 4, 4, 4),
        IMAGE,
        [ints(*IMAGE), np.ones((4, 2, 2, 4), np.int8)],
        Options.TransposeConvOptions,
        schema.TransposeConvOptionsT(strideW=2, strideH=2),
        before=True,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_operator_that_breaks_a_rule(tmp_path, case):
    content, reason = REFUSED[case]
    model = read(tmp_path, content)
    refused = unsupported(model)
    assert list(refused) == model.graph.operator_names
    assert re.search(reason, next(iter(refused.values())))


@pytest.mark.parametrize("case", TAKEN)
def test_an_operator_that_keeps_the_rules(tmp_path, case):
    model = read(tmp_path, TAKEN[case])
    assert unsupported(model) == {}
    check_quantised(model, "model.tflite")


def test_mobilenet_is_taken_whole():
    # Coral publishes MobileNetV2 as mapped completely: https://coral.ai/models/image-classification.
    model = read_model(MOBILENET)
    assert unsupported(model) == {}
    check_quantised(model, MOBILENET)


def float_ends():
    """Return a network that is quantised inside and float outside, the default of converters."""
    writer = Writer()
    given = writer.tensor((1, 4), Type.FLOAT32, scale=0)
    inside, more = writer.tensor((1, 4)), writer.tensor((1, 4))
    made = writer.tensor((1, 4), Type.FLOAT32, scale=0)
    writer.operator(Op.QUANTIZE, [given], [inside])
    writer.operator(Op.RELU, [inside], [more])
    writer.operator(Op.DEQUANTIZE, [more], [made])
    return writer.content([given], [made])


def test_float_ends_are_left_to_the_cpu(tmp_path):
    model = read(tmp_path, float_ends())
    assert set(unsupported(model)) == {"quantize_0", "dequantize_2"}
    check_quantised(model, "model.tflite")


def two_kinds(code):
    """Return an operator that reads uint8 and writes int8."""
    writer = Writer()
    given, made = writer.tensor((1, 4), Type.UINT8), writer.tensor((1, 4))
    writer.operator(code, [given], [made])
    return writer.content([given], [made])


def test_uint8_against_int8(tmp_path):
    model = read(tmp_path, two_kinds(Op.RELU))
    assert "mixes int8 and uint8" in unsupported(model)["relu_0"]
    with pytest.raises(ModelError, match=r"^a\.tflite: operator relu_0: it mixes int8 and uint8; convert"):
        check_quantised(model, "a.tflite")
    model = read(tmp_path, two_kinds(Op.QUANTIZE))
    assert unsupported(model) == {}
    check_quantised(model, "a.tflite")


def test_a_float_model(tmp_path):
    def to_float(model):
        for tensor in model.subgraphs[0].tensors:
            tensor.type = Type.FLOAT32 if tensor.type == Type.INT8 else tensor.type

    model = read(tmp_path, changed(random_network(3), to_float))
    assert set(unsupported(model)) == set(model.graph.operator_names)
    with pytest.raises(ModelError, match=r"^a\.tflite: it computes in float32, .*representative_dataset"):
        check_quantised(model, "a.tflite")


def test_a_parameter_that_is_missing_is_said(tmp_path):
    model = read(tmp_path, one(Op.REDUCE_MAX, IMAGE, (1, 8, 8)))
    assert unsupported(model) == {"reduce_max_0": "it lacks an input or an option of a reduce_max; the file is damaged"}


@given(st.sampled_from(sorted(set(TAKEN) - {"uint8"})), st.sampled_from([Type.FLOAT32, Type.INT16, Type.INT32]))
def test_no_operator_is_taken_in_another_type(tmp_path_factory, case, type_):
    def retype(model):
        subgraph = model.subgraphs[0]
        for index in (*subgraph.inputs, *subgraph.outputs):
            subgraph.tensors[index].type = type_

    model = read(tmp_path_factory.mktemp("retyped"), changed(TAKEN[case], retype))
    assert "quantise" in next(iter(unsupported(model).values()))
