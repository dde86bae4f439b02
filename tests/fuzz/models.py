"""Fuzzers of the readers of models: one call is one damaged file, made of a sound small one by what a seed gives.

    onnx files      for `load`: bytes and fields of its protocol buffer
    tflite files    for `load`: bytes, numbers and offsets, and the archive behind the model
    graph files     for `read_graph`

A fuzzer raises where anything but an error of this package gets out. Next: __main__.py, which calls them.
"""

from __future__ import annotations

import io
import json
import random
import struct
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.edgetpu.networks import random_network
from tests.frontends.test_exhausting_models import functions, ifs, nested, scans, stating
from tests.support.mutations import cut, flipped, mutated, spliced
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.frontends import load

NUMBERS = (-1, 0, 1, 2, 7, 13, 64, 2**15, 2**20, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e38, float("nan"), float("inf"))
TEXTS = ("", "x", "y", "If", "Loop", "Scan", "Reshape", "Shape", "own", "\0", "é", "x" * 70_000, "[" * 5000)


def fuzz_onnx(draw: random.Random) -> None:
    """Read a damaged ONNX file, with values for one of its inputs now and then."""
    content = draw.choice(_onnx_files())
    if draw.random() < 0.6:
        model = onnx.load_from_string(content)
        for _ in range(draw.choice((1, 1, 2, 4))):
            _change_field(model, draw)
        content = model.SerializeToString()
    else:
        content = draw.choice((flipped, cut, spliced))(content, draw)
    given: dict[str, Any] = {}
    if draw.random() < 0.3:
        given["input_shapes"] = {"x": tuple(draw.choice((1, 2, 4, 2**20)) for _ in range(draw.choice((1, 2, 4))))}
    elif draw.random() < 0.2:
        given["input_values"] = {draw.choice(("x", "c")): draw.choice((0, 1, True, [1.5, 2], 1e300))}
    _read("net.onnx", content, lambda path: load(path, **given))


def fuzz_tflite(draw: random.Random) -> None:
    """Read a damaged TFLite file."""
    content = bytearray(random_network(draw.randrange(10), 5))
    if draw.random() < 0.7:
        for _ in range(draw.choice((1, 1, 2, 8))):  # offsets, lengths and numbers lie at multiples of four
            place = 4 * draw.randrange(len(content) // 4)
            number = draw.choice((draw.choice(NUMBERS), draw.randrange(len(content)), draw.randrange(64)))
            content[place : place + 4] = struct.pack("<q", number)[:4]
        damaged = bytes(content)
    else:
        damaged = draw.choice((flipped, cut, spliced))(bytes(content), draw)
    if draw.random() < 0.3:
        damaged = draw.choice((flipped, spliced))(damaged + _archive(draw), draw)
    _read("net.tflite", damaged, load)


def fuzz_graph_files(draw: random.Random) -> None:
    """Read a damaged operator graph."""
    _read("graph.json", mutated("graph.json", draw.choice(_graphs()), draw), read_graph)


FUZZERS: dict[str, Callable[[random.Random], None]] = {
    "onnx files": fuzz_onnx,
    "tflite files": fuzz_tflite,
    "graph files": fuzz_graph_files,
}


def _read(name: str, content: bytes, read: Callable[[Path], Any]) -> None:
    with tempfile.TemporaryDirectory() as folder, suppress(PipelineError):
        path = Path(folder) / name
        path.write_bytes(content)
        read(path)


# ---- Sound files ----


@cache
def _onnx_files() -> tuple[bytes, ...]:
    """Return files with convolutions, loops, branches, scans, functions and metadata."""
    draw = np.random.default_rng(0)
    weights = {"w": draw.standard_normal((4, 3, 3, 3)), "target": np.array([1, -1]), "v": np.ones((16, 4))}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], strides=[2, 2], name="first"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Dropout", ["b"], ["d"]),
        helper.make_node("Reshape", ["d", "target"], ["e"]),
        helper.make_node("MatMul", ["e", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (1, 3, 6, 6))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(a if a.dtype.kind == "i" else a.astype("float32"), n) for n, a in weights.items()],
    )
    plain = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    own = (nested(2, 3), ifs(3), ifs(2, differing=True), scans(1), functions(3, 2), stating(imgsz="[32, 64]"))
    return plain.SerializeToString(), *own


def _change_field(message: Any, draw: random.Random) -> None:
    """Change one field, somewhere inside a message of a protocol buffer."""
    fields = message.ListFields()
    field, value = draw.choice(fields) if fields else (draw.choice(message.DESCRIPTOR.fields), None)
    if field.message_type is not None and value is not None and draw.random() < 0.9:
        inner = draw.choice(value) if hasattr(value, "extend") else value
        return _change_field(inner, draw)
    if draw.random() < 0.2:
        return message.ClearField(field.name)
    if draw.random() < 0.2:
        field = draw.choice(message.DESCRIPTOR.fields)
    repeated = hasattr(getattr(message, field.name), "extend")
    if repeated and (held := getattr(message, field.name)) and draw.random() < 0.5:  # a part of it is lost, or twice
        kept = [draw.choice(held) for _ in range(draw.choice((1, len(held))))]
        message.ClearField(field.name)
        getattr(message, field.name).extend(kept)
    elif field.message_type is not None:
        getattr(message, field.name).add() if repeated else getattr(message, field.name).SetInParent()
    else:
        with suppress(ValueError, TypeError):  # numbers that the type of the field cannot hold
            odd = draw.choice(_odd_values(field))
            getattr(message, field.name).append(odd) if repeated else setattr(message, field.name, odd)
    return None


def _odd_values(field: Any) -> tuple[Any, ...]:
    if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return FLOATS
    if field.cpp_type == field.CPPTYPE_STRING:
        return tuple(text.encode() for text in TEXTS) if field.type == field.TYPE_BYTES else TEXTS
    return NUMBERS


def _archive(draw: random.Random) -> bytes:
    texts = ("cat\ndog\n", '{"names": {"0": "cat"}}', "{'imgsz': [32, 64]}", '{"names": {"²": 1}}', "{" * 3000)
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("labels.txt", "metadata.json"):
            archive.writestr(name, draw.choice(texts))
    return content.getvalue()


@cache
def _graphs() -> tuple[bytes, ...]:
    """Return a graph in both forms of a file."""
    nodes = [
        {"name": "image", "op": "InputLayer", "output_shape": [1, 8, 8, 3]},
        {"name": "conv", "op": "Conv2D", "param_bytes": 108, "output_bytes": 256, "macs": 6912},
        {"name": "add", "op": "Add", "output_bytes": 256},
    ]
    tensor = {"name": "t", "shape": [1, 4], "dtype": "float32"}
    operators = [
        {"name": "a", "op": "conv", "inputs": ["x"], "outputs": [tensor], "param_bytes": 4, "macs": 3},
        {"name": "b", "op": "relu", "inputs": ["t"], "outputs": [{**tensor, "name": "u"}]},
    ]
    whole = {"name": "net", "inputs": [{**tensor, "name": "x"}], "operators": operators, "outputs": ["u"]}
    linked = {"name": "net", "nodes": nodes, "edges": [[0, 1], ["conv", "add"], [0, 2]]}
    return json.dumps(linked).encode(), json.dumps(whole).encode()
