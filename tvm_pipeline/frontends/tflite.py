"""Read TFLite files, float and int8, by the flatbuffer schema of the package tflite. Next: `core/model.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends.tflite_checks import check_operators

_DTYPES = {
    "FLOAT32": "float32",
    "INT8": "int8",
    "UINT8": "uint8",
    "INT32": "int32",
    "INT64": "int64",
    "INT16": "int16",
}


def read(name: str, path: Path, content: bytes, shapes: dict[str, tuple[int, ...]]) -> Model:
    """Return a checked Model of a TFLite file.

    Args:
        name: the model's name.
        path: the file, for messages alone.
        content: the bytes of the file.
        shapes: shapes by input name, which must be those of the file.

    Raises:
        ModelError: the package tflite is missing, or the file is damaged, has several subgraphs or variable tensors,
            or leaves a shape open.
        OptionError: `shapes` differs from the file, which fixes its own shapes.
    """
    try:
        import tflite
    except ImportError as error:
        raise ModelError(
            f"{path}: reading TFLite needs the package tflite: pip install 'tvm-pipeline[edgetpu]' or '[relay]'"
        ) from error
    if content[4:8] != b"TFL3":
        raise ModelError(f"{path}: not a TFLite file (the identifier TFL3 is missing)")
    with blamed(f"{path}: a damaged TFLite file, perhaps cut short", ModelError, "download or convert it again"):
        parsed = tflite.Model.GetRootAsModel(content, 0)
        inputs = _inputs(tflite, path, parsed)
        graph = parsed.Subgraphs(0)
        outputs = tuple(graph.Tensors(graph.Outputs(o)).Name().decode() for o in range(graph.OutputsLength()))
        check_operators(tflite, path, parsed)
    known = {tensor.name: tensor.shape for tensor in inputs}
    for given, shape in shapes.items():
        if known.get(given) != shape:
            listed = ", ".join(f"{n}:{list(s)}" for n, s in known.items())
            raise OptionError(f"`input_shapes` {given}:{list(shape)}: {path} fixes its inputs itself: {listed}")
    return Model(name, "tflite", content, inputs, outputs=outputs)


def _inputs(tflite: Any, path: Path, parsed: Any) -> tuple[Tensor, ...]:
    if parsed.SubgraphsLength() != 1:
        raise ModelError(f"{path}: it has {parsed.SubgraphsLength()} subgraphs; only models with one can be cut")
    graph = parsed.Subgraphs(0)
    names = {value: key for key, value in vars(tflite.TensorType).items() if not key.startswith("_")}
    # Weights are at the end of a file, so a look at every buffer finds a file that was cut short.
    for index in range(parsed.BuffersLength()):
        buffer = parsed.Buffers(index)
        if buffer.DataLength() and buffer.DataAsNumpy().size != buffer.DataLength():
            raise ModelError(f"{path}: buffer {index} ends early; the file was cut short")
    for index in range(graph.TensorsLength()):
        tensor = graph.Tensors(index)
        if tensor.IsVariable():
            raise ModelError(f"{path}: tensor {tensor.Name().decode()} keeps a state between runs; it cannot be cut")
    inputs = []
    for position in range(graph.InputsLength()):
        tensor = graph.Tensors(graph.Inputs(position))
        label = tensor.Name().decode()
        shape = tuple(int(extent) for extent in tensor.ShapeAsNumpy())
        signature = [int(extent) for extent in tensor.ShapeSignatureAsNumpy()] if tensor.ShapeSignatureLength() else []
        if any(extent < 1 for extent in shape) or any(extent < 0 for extent in signature[1:]):
            raise ModelError(
                f"{path}: input {label} has the open shape {signature or shape}; convert it with a fixed one"
            )
        dtype = _DTYPES.get(names[tensor.Type()])
        if dtype is None:
            raise ModelError(f"{path}: input {label} is of type {names[tensor.Type()]}, which is not supported")
        inputs.append(Tensor(label, shape, dtype))
    if not inputs or not graph.OperatorsLength():
        raise ModelError(f"{path}: the graph has no inputs or no operators")
    return tuple(inputs)
