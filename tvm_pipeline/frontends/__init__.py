"""Read and check model files without TVM: `load` returns a Model that a backend compiles.

onnx.py               ONNX files, checked by the package onnx
onnx_rewriting.py     what is rewritten of them before a compiler sees them
onnx_control_flow.py  If, Loop and Scan taken out of them
onnx_known.py         what is known of their tensors before they run
onnx_inlining.py      nodes of a subgraph become nodes of the graph around it
onnx_types.py         numpy's names of the types of their tensors
onnx_graph.py         an ONNX file as an operator graph, and cut into files
onnx_magnitudes.py    how large the integers of its tensors can be
onnx_model.py         an ONNX file as a compiled model, for backends that run it as it is
onnx_folding.py       constants, and what depends on shapes alone, as weights
onnx_walk.py          what TVM cannot take of them, with the operator's name
onnx_shapes.py        what to write for shapes that they leave open
batching.py           a model whose calls compute several frames
tflite.py             TFLite files, read by the package tflite
tflite_checks.py      what a TFLite file must have, since TFLite's kernels end the process where it has not
tflite_resizing.py    TFLite files whose inputs are open get fixed shapes
model_metadata.py     what a file says about itself: labels, task, sizes

Each format has a module of its own. It names the file, the input or the operator at fault before a compiler sees it.
Read `core/model.py` next.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import GraphError, ModelError, OptionError, nearest
from tvm_pipeline.files import read_bytes
from tvm_pipeline.frontends import onnx, tflite

Shapes = Mapping[str, tuple[int, ...]]
Values = Mapping[str, Any]  # numbers, or lists of them

TESTING_NETWORKS = (
    "squeezenet",
    "squeezenet1.1",
    "mobilenet",
    "inception_v3",
    "mlp",
    *(f"resnet-{layers}" for layers in (18, 34, 50, 101, 152)),
    *(f"densenet-{layers}" for layers in (121, 161, 169, 201)),
    *(f"vgg-{layers}" for layers in (11, 13, 16, 19)),
)

KINDS = (".onnx", ".tflite", ".relay", ".txt", ".json")  # the suffixes of models
_BY_TORCH = (
    "it is a model of PyTorch; export it to ONNX: `yolo export model={model}.pt format=onnx` for a model of "
    'Ultralytics, else `torch.onnx.export(model, (example,), "{model}.onnx")` in Python'
)
_BY_KERAS = (
    "it is a model of TensorFlow; export it by tf2onnx to {model}.onnx (pip install tf2onnx), or by "
    "`tf.lite.TFLiteConverter` to {model}.tflite"
)
_BY_TENSORRT = "it is an engine of TensorRT, made for one GPU; give the .onnx file that it was made from"
# What to do about files of models that other programs write, by suffix.
EXPORTS = {
    **dict.fromkeys((".pt", ".pth", ".pt2", ".torchscript", ".safetensors"), _BY_TORCH),
    **dict.fromkeys((".keras", ".h5", ".pb"), _BY_KERAS),
    **dict.fromkeys((".engine", ".trt"), _BY_TENSORRT),
}

_NAME = re.compile(r"([^\s,=\[\]]+)\s*=\s*")
_SHAPE = re.compile(r"([^\s,\[\]]+):\[\s*(\d+(?:\s*,\s*\d+)*)\s*\]", re.ASCII)


def load(source: str | Path, input_shapes: Shapes | None = None, input_values: Values | None = None) -> Model:
    """Read a model file, or take a network of `relay.testing` by its name.

    Args:
        source: a .onnx, .tflite, .relay/.txt (Relay text) or .json (Relay JSON) file, or a name of TESTING_NETWORKS
            such as `resnet-50`. A file NAME.params beside a Relay file is read as its parameters.
        input_shapes: shapes by input name, for inputs whose shape the file leaves open.
        input_values: numbers or arrays by input name, for inputs of an ONNX file that become constants.

    Returns:
        The model, with its content unchanged unless inputs became constants or `Model.notes` tells what was
        rewritten. Its `inputs` have fixed shapes; they are empty for Relay files and for
        built-in networks of the usual shape, whose importer knows them.

    Raises:
        ModelError: the file cannot be read, is not of its format, or leaves a shape open.
        OptionError: `input_shapes` names an input that the model does not have, or gives it another shape than the
            file does; or `input_values` binds an input that is not there, or to what it cannot hold.

    Examples:
        >>> model = load("resnet-50", {"data": (1, 3, 64, 64)})
        >>> model.format, model.inputs[0].name, model.inputs[0].shape
        ('relay.testing', 'data', (1, 3, 64, 64))
    """
    path = Path(source)
    shapes, values = dict(input_shapes or {}), dict(input_values or {})
    if values and path.suffix.lower() != ".onnx":
        raise OptionError(
            f"`input_values`: only the inputs of an .onnx file can become constants, not those of {source}"
        )
    if str(source) in TESTING_NETWORKS and not path.exists():
        inputs = tuple(Tensor(name, shape) for name, shape in shapes.items())
        if inputs and (len(inputs) > 1 or inputs[0].name != "data" or len(inputs[0].shape) != 4):
            raise OptionError(f"`input_shapes`: {source} has one input, data, with four dimensions")
        return Model(str(source), "relay.testing", b"", inputs)
    if path.suffix.lower() in EXPORTS:
        raise ModelError(f"{path}: {EXPORTS[path.suffix.lower()].format(model=path.stem)}")
    check_there(source)
    content = read_bytes(path, ModelError)
    if not content:
        raise ModelError(f"{path}: the file is empty")
    match path.suffix.lower():
        case ".onnx":
            return onnx.read(path.stem, path, content, shapes, values)
        case ".tflite":
            return tflite.read(path.stem, path, content, shapes)
        case ".relay" | ".txt" | ".json":
            if shapes:
                raise OptionError(f"`input_shapes`: {path} fixes its shapes itself")
            beside = path.with_suffix(".params")
            params = read_bytes(beside, ModelError) if beside.exists() else b""
            if path.suffix.lower() == ".json" and b'"root"' not in content[:100]:
                raise ModelError(
                    f"{path}: it is no Relay module; if it is an operator graph, `plan` and `simulate` take it, and "
                    "nothing compiles or measures it"
                )
            kind = "relay.json" if path.suffix.lower() == ".json" else "relay"
            return Model(path.stem, kind, content, params=params)  # type: ignore[arg-type]
    raise ModelError(f"{path}: unknown kind of model; it must be one of {', '.join(KINDS)} (the last three: Relay)")


def check_there(source: str | Path) -> None:
    """Raise ModelError, with the nearest name, where there is neither such a file nor such a built-in network."""
    path = Path(source)
    if not path.exists() and str(source) not in TESTING_NETWORKS:
        siblings = [str(file) for file in path.parent.glob("*") if file.suffix.lower() in KINDS]
        advice = nearest(str(source), [*TESTING_NETWORKS, *siblings], f"built-in are {', '.join(TESTING_NETWORKS)}")
        raise ModelError(f"{source}: no such file, and no built-in network; {advice}")


def interface_of(model: Model) -> OperatorGraph | None:
    """Return a model's inputs and outputs before it is compiled, as a graph; None where its file does not tell them."""
    try:
        if model.format == "onnx":
            from tvm_pipeline.frontends.onnx_graph import OnnxGraph

            return OnnxGraph(model).graph
        outputs = tflite.outputs_of(model.content) if model.format == "tflite" else ()
        if not outputs:
            return None
        whole = Operator("model", "model", tuple(tensor.name for tensor in model.inputs), outputs)
        return OperatorGraph(model.name, model.inputs, (whole,), tuple(tensor.name for tensor in outputs))
    except (GraphError, ModelError):  # what compiles it says more
        return None


def parse_values(text: str) -> dict[str, Any]:
    """Read values of inputs: `NAME=VALUE`, several separated by blanks or commas; VALUE is a number or an array.

    Raises:
        OptionError: the text is something else.

    Examples:
        >>> parse_values("sr=16000, scale=[0.5, 2]")
        {'sr': 16000, 'scale': [0.5, 2]}
    """
    values: dict[str, Any] = {}
    rest = text.strip()
    while rest:
        found = _NAME.match(rest)
        try:
            value, end = json.JSONDecoder().raw_decode(rest, found.end() if found else len(rest))
            is_number = np.asarray(value).dtype.kind in "biuf"
        except (ValueError, RecursionError):  # no JSON, or lists of unequal length
            is_number = False
        if not found or not is_number or found[1] in values:
            raise OptionError(f'`input_values` {text!r}: give it as "sr=16000, scale=[1,2]", each input once')
        values[found[1]] = value
        rest = rest[end:].lstrip(" ,")
    if not values:
        raise OptionError(f'`input_values` {text!r}: give it as "sr=16000, scale=[1,2]", each input once')
    return values


def is_relay(source: str | Path) -> bool:
    """Return whether a .json file holds a Relay module and not an operator graph; TVM writes the key `root` first.

    Raises:
        GraphError: the file cannot be read.
    """
    return b'"root"' in read_bytes(source, GraphError)[:100]


def parse_shapes(text: str) -> dict[str, tuple[int, ...]]:
    """Read shapes as tvmc takes them: `NAME:[EXTENT,...]`, several separated by blanks or commas.

    Raises:
        OptionError: the text is something else.

    Examples:
        >>> parse_shapes("left:[1,3,224,224], right:[1,3,224,224]")
        {'left': (1, 3, 224, 224), 'right': (1, 3, 224, 224)}
    """
    found = _SHAPE.findall(text)
    shapes = {name: tuple(int(extent) for extent in extents.split(",")) for name, extents in found}
    rest = _SHAPE.sub("", text).strip(" ,")
    if not shapes or rest or len(shapes) != len(found) or min(map(min, shapes.values())) < 1:
        raise OptionError(f'`input_shapes` {text!r}: give it as "data:[1,3,224,224]", each input once, extents from 1')
    return shapes
