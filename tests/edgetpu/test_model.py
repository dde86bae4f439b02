"""TFLite files read: the operator graph against hand-worked figures, and what is said of files that cannot be cut."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema

from tests.edgetpu.networks import MOBILENET, Op, Type, changed, random_network
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import ModelError
from tvm_pipeline_edgetpu.model import read_model
from tvm_pipeline_edgetpu.work import macs

NETWORK = random_network(2)


def test_the_graph_of_mobilenet_has_the_published_size():
    graph = read_model(MOBILENET).graph
    assert graph.name == "mobilenet_v2_int8"
    assert graph.inputs == (Tensor("serving_default_x:0", (1, 224, 224, 3), "int8"),)
    assert graph.outputs == ("PartitionedCall:0",)
    multiplied = ("conv_2d", "depthwise_conv_2d", "fully_connected")
    # Sandler et al., CVPR 2018, Table 4: 300 M multiply-adds, 3.4 M parameters.
    assert sum(o.macs for o in graph.operators if o.kind in multiplied) == pytest.approx(300e6, rel=0.01)
    assert sum(o.param_bytes for o in graph.operators) == pytest.approx(3.47e6, rel=0.03)
    first = next(operator for operator in graph.operators if operator.kind == "conv_2d")
    assert first.macs == 112 * 112 * 32 * 3 * 3 * 3
    assert first.param_bytes == 32 * 3 * 3 * 3 + 32 * 4
    assert first.outputs[0].bytes == 112 * 112 * 32


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "count"),
    [
        ("conv_2d", [(1, 8, 8, 16), (32, 3, 3, 16), (32,)], [(1, 8, 8, 32)], 8 * 8 * 32 * 9 * 16),
        ("conv_2d", [(1, 8, 8, 16), (32, 3, 3, 4), (32,)], [(1, 8, 8, 32)], 8 * 8 * 32 * 9 * 4),  # four groups
        ("depthwise_conv_2d", [(1, 8, 8, 16), (1, 3, 3, 16)], [(1, 8, 8, 16)], 8 * 8 * 16 * 9),
        ("conv_3d", [(1, 4, 8, 8, 2), (3, 3, 3, 2, 5)], [(1, 4, 8, 8, 5)], 4 * 8 * 8 * 5 * 27 * 2),
        ("transpose_conv", [(4,), (32, 3, 3, 16), (1, 8, 8, 16)], [(1, 16, 16, 32)], 8 * 8 * 16 * 9 * 32),
        ("fully_connected", [(1, 64), (10, 64)], [(1, 10)], 640),
        ("batch_matmul", [(2, 3, 4), (2, 4, 5)], [(2, 3, 5)], 2 * 3 * 4 * 5),
        ("max_pool_2d", [(1, 8, 8, 4)], [(1, 4, 4, 4)], 4 * 4 * 4 * 6),
        ("mean", [(1, 7, 7, 4), (2,)], [(1, 4)], 7 * 7 * 4),
        ("softmax", [(1, 10)], [(1, 10)], 30),
        ("split", [(), (1, 4)], [(1, 2), (1, 2)], 4),
        ("reshape", [(1, 4), (1,)], [(4,)], 0),
        ("add", [(1, 4), (1, 4)], [(1, 4)], 4),
    ],
)
def test_work_of_one_operator(kind, inputs, outputs, count):
    assert macs(kind, inputs, outputs, window=6) == count


def subgraph(change):
    return lambda model: change(model.subgraphs[0])


def _two_subgraphs(model):
    model.subgraphs.append(model.subgraphs[0])


def _custom(name: str):
    def change(model):
        code = model.operatorCodes[0]
        code.builtinCode, code.deprecatedBuiltinCode, code.customCode = Op.CUSTOM, Op.CUSTOM, name

    return change


def _of_the_future(model):
    model.operatorCodes[0].builtinCode = 9999


def _variable(graph):
    graph.tensors[graph.operators[0].outputs[0]].isVariable = True


def _same_name(graph):
    graph.tensors[graph.outputs[0]].name = graph.tensors[graph.inputs[0]].name


def _open_picture(graph):
    graph.tensors[graph.inputs[0]].shapeSignature = [1, -1, -1, 4]


def _open_inside(graph):
    graph.tensors[graph.operators[0].outputs[0]].shapeSignature = [-1, 4, 4, 4]


def _text(graph):
    graph.tensors[graph.inputs[0]].type = Type.STRING


def _backwards(graph):
    graph.operators.reverse()


def _beyond(graph):
    graph.operators[0].inputs = [-7]


def _no_weights(model):
    model.buffers[1:] = [schema.BufferT() for _ in model.buffers[1:]]


def _far_weights(model):
    model.buffers[1].offset = 4096


def _other_file(graph):
    graph.tensors[0].externalBuffer = 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_two_subgraphs, "2 subgraphs; only models with one"),
        (_custom("edgetpu-custom-op"), "operator 0 is edgetpu-custom-op: edgetpu_compiler has compiled"),
        (_custom("TFLite_Detection_PostProcess"), "operator 0 is the custom operator 'TFLite_Detection_PostProcess'"),
        (_of_the_future, "operator 0 has the number 9999"),
        (subgraph(_variable), r"tensor tensor/\d+:0 of operator \w+_0 keeps a state"),
        (subgraph(_same_name), "2 tensors are called 'tensor/0:0'"),
        (subgraph(_open_picture), r"tensor tensor/0:0, an input, has the open shape \[1, -1, -1, 4\]"),
        (subgraph(_open_inside), r"of operator \w+_0 has the open shape \[-1, 4, 4, 4\]"),
        (subgraph(_text), "tensor tensor/0:0, an input, is of type string"),
        (subgraph(_backwards), "cannot be run in their order"),
        (subgraph(_beyond), "a tensor that is not there"),
        (_no_weights, r"reads tensor tensor/\d+:0, which nothing writes"),
        (_far_weights, "buffer 1 lies outside"),
        (subgraph(_other_file), "weights of tensor tensor/0:0 lie in another file"),
    ],
)
def test_a_file_that_cannot_be_cut_is_refused_with_its_name_and_reason(tmp_path, change, words):
    (tmp_path / "bad.tflite").write_bytes(changed(NETWORK, change))
    with pytest.raises(ModelError, match=rf"bad\.tflite: .*{words}"):
        read_model(tmp_path / "bad.tflite")


def test_a_float_file_may_be_cut(tmp_path):
    def to_float(graph):
        for tensor in graph.tensors:
            tensor.type = Type.FLOAT32 if tensor.type == Type.INT8 else tensor.type

    (tmp_path / "float.tflite").write_bytes(changed(NETWORK, subgraph(to_float)))
    assert {tensor.dtype for tensor in read_model(tmp_path / "float.tflite").graph.inputs} == {"float32"}


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b"PK\3\4 an archive", b"TFL3"])
def test_another_file_is_no_tflite_file(tmp_path, content):
    (tmp_path / "other.tflite").write_bytes(content)
    with pytest.raises(ModelError, match=r"other\.tflite: not a TFLite file"):
        read_model(tmp_path / "other.tflite")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"gone\.tflite"):
        read_model(tmp_path / "gone.tflite")


@given(st.integers(0, len(NETWORK) - 1))
def test_a_file_cut_short_is_refused(tmp_path_factory, length):
    path = tmp_path_factory.mktemp("cut") / "short.tflite"
    path.write_bytes(NETWORK[:length])
    with pytest.raises(ModelError, match=r"short\.tflite"):
        read_model(path)


@given(st.integers(0, 10**9))
def test_a_file_with_random_damage_is_read_or_refused(tmp_path_factory, seed):
    draw, content = random.Random(seed), bytearray(NETWORK)
    for _ in range(draw.randint(1, 8)):
        content[draw.randrange(8, len(content))] = draw.randrange(256)
    path = tmp_path_factory.mktemp("damaged") / "damaged.tflite"
    path.write_bytes(content)
    with suppress(ModelError):
        read_model(path)
