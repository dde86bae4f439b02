"""Read TFLite files, float and int8, by the flatbuffer schema of the package tflite. Next: `core/model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends.model_metadata import tflite_metadata
from tvm_pipeline.frontends.tflite_checks import check_lengths, check_operators
from tvm_pipeline.frontends.tflite_resizing import resized

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
        shapes: shapes by input name. LiteRT resizes the file to them where it leaves them open.

    The Model's content is the file, or the resized one. What runs it decides about control flow, state and custom
    operators: TFLite's kernels take more than TVM.

    Raises:
        ModelError: the package tflite is missing, or the file is damaged, leaves a shape open or cannot be resized.
        OptionError: `shapes` names an unknown input, or differs from what the file fixes.
    """
    try:
        import tflite
    except ImportError as error:
        raise ModelError(
            f"{path}: reading TFLite needs the package tflite, which the extras tvm, relay and edgetpu bring: "
            "pip install 'tvm-pipeline[edgetpu]'"
        ) from error
    if content[4:8] != b"TFL3":
        raise ModelError(f"{path}: not a TFLite file (the identifier TFL3 is missing)")
    with blamed(f"{path}: a damaged TFLite file, perhaps cut short", ModelError, "download or convert it again"):
        parsed = tflite.Model.GetRootAsModel(content, 0)
        check_lengths(path, parsed, len(content))
        inputs = _inputs(tflite, path, parsed, shapes)
        check_operators(tflite, path, parsed)
        graph = parsed.Subgraphs(0)
        outputs = tuple(graph.Tensors(graph.Outputs(o)).Name().decode() for o in range(graph.OutputsLength()))
        metadata = tflite_metadata(content, parsed)
    fixed = {tensor.name: tuple(signature) or tensor.shape for tensor, signature in inputs}  # -1 where it is open
    for given, shape in shapes.items():
        if given not in fixed or not _fits(shape, fixed[given]):
            listed = ", ".join(f"{label}:{list(extents)}" for label, extents in fixed.items())
            raise OptionError(f"`input_shapes` {given}:{list(shape)}: {path} fixes its inputs itself: {listed}")
    tensors = tuple(replace(tensor, shape=shapes.get(tensor.name, tensor.shape)) for tensor, _ in inputs)
    if any(-1 in fixed[label] for label in shapes):
        content = resized(path, content, {tensor.name: tensor.shape for tensor in tensors})
    return Model(name, "tflite", content, tensors, outputs=outputs, metadata=metadata)


def outputs_of(content: bytes) -> tuple[Tensor, ...]:
    """Return the outputs of a file that `load` has read; empty where it does not tell all their shapes."""
    import tflite

    graph = tflite.Model.GetRootAsModel(content, 0).Subgraphs(0)
    listed = [graph.Tensors(graph.Outputs(position)) for position in range(graph.OutputsLength())]
    names = {value: _DTYPES.get(key, "") for key, value in vars(tflite.TensorType).items()}
    shapes = [tuple(map(int, tensor.ShapeAsNumpy())) if tensor.ShapeLength() else () for tensor in listed]
    if not all(shape and min(shape) > 0 and names[tensor.Type()] for tensor, shape in zip(listed, shapes, strict=True)):
        return ()
    return tuple(Tensor(t.Name().decode(), shape, names[t.Type()]) for t, shape in zip(listed, shapes, strict=True))


def _fits(shape: tuple[int, ...], fixed: tuple[int, ...]) -> bool:
    return len(shape) == len(fixed) and all(wanted in (-1, extent) for extent, wanted in zip(shape, fixed, strict=True))


def _inputs(
    tflite: Any, path: Path, parsed: Any, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[Tensor, list[int]], ...]:
    """Return the inputs, each with its signature: the shape with -1 for what is open, empty where nothing is."""
    if not parsed.SubgraphsLength():
        raise ModelError(f"{path}: it has no graph; convert the model again")
    graph = parsed.Subgraphs(0)
    names = {value: key for key, value in vars(tflite.TensorType).items() if not key.startswith("_")}
    # Weights are at the end of a file, so a look at every buffer finds a file that was cut short.
    for index in range(parsed.BuffersLength()):
        buffer = parsed.Buffers(index)
        if buffer.DataLength() and buffer.DataAsNumpy().size != buffer.DataLength():
            raise ModelError(f"{path}: buffer {index} ends early; the file was cut short")
    inputs = []
    for position in range(graph.InputsLength()):
        tensor = graph.Tensors(graph.Inputs(position))
        label = tensor.Name().decode()
        shape = tuple(int(extent) for extent in tensor.ShapeAsNumpy())
        signature = [int(extent) for extent in tensor.ShapeSignatureAsNumpy()] if tensor.ShapeSignatureLength() else []
        is_open = any(extent < 1 for extent in shape) or any(extent < 0 for extent in signature[1:])
        if is_open and (label not in shapes or not signature):
            told = f"{path}: input {label} has the open shape {signature or shape}"
            if not signature:
                raise ModelError(f"{told}; convert it with a fixed one")
            shown = ",".join("?" if extent < 0 else str(extent) for extent in signature)
            raise ModelError(
                f'{told}; fix it with `input_shapes` "{label}:[{shown}]", with a number in place of each ?'
            )
        dtype = _DTYPES.get(names[tensor.Type()])
        if dtype is None:
            raise ModelError(f"{path}: input {label} is of type {names[tensor.Type()]}, which is not supported")
        inputs.append((Tensor(label, shape, dtype), signature))
    if not inputs or not graph.OperatorsLength():
        raise ModelError(f"{path}: the graph has no inputs or no operators")
    return tuple(inputs)
