"""A model whose calls compute several frames together: each input has their first axes in a row.

`workflow/batches.py` compares its results, which tell whether frames stay apart. Next: `onnx.py`, `tflite.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import onnx
from tvm_pipeline.frontends.tflite_resizing import resized


def batched(model: Model, inputs: Sequence[Tensor], batch: int) -> Model:
    """Return the model for so many frames a call.

    Args:
        inputs: of the model as it is, which it may leave to its importer.

    Raises:
        ModelError: its format fixes the shapes, or an input has no axis for frames.
    """
    for tensor in inputs:
        if not tensor.shape:
            raise ModelError(f"{model.name}: input {tensor.name} is one number, so frames cannot share a call")
    shapes = {tensor.name: (batch * tensor.shape[0], *tensor.shape[1:]) for tensor in inputs}
    wide = tuple(replace(tensor, shape=shapes[tensor.name]) for tensor in inputs)
    if model.format == "relay.testing":
        return replace(model, inputs=wide)
    if model.format == "tflite":
        content = resized(Path(model.name), model.content, shapes)
        return replace(model, content=content, inputs=wide)
    if model.format != "onnx":
        raise ModelError(
            f"{model.name}: a module of TVM fixes its shapes itself; import it with the first axes {batch} times as "
            "long, or give the file that it was imported from"
        )
    whole = onnx.read(model.name, Path(model.name), _reshaped(model, batch), shapes, {})
    return replace(whole, tolerance=model.tolerance, weights=model.weights, metadata=model.metadata)


def _reshaped(model: Model, batch: int) -> bytes:
    """Return an ONNX file whose shapes leave room for more frames.

        before: Reshape(features, [1, 255, 400]), output boxes: [1, 8400, 85]
        after:  Reshape(features, [4, 255, 400]), output boxes: [?, ?, ?]

    The first extent of a constant shape to which a tensor of the frame is reshaped or expanded is that of the frame.
    """
    from onnx import load_from_string, numpy_helper

    proto = load_from_string(model.content)
    graph = proto.graph
    constants: dict[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
    frames = {value.name for value in graph.input if value.name not in constants}  # tensors that depend on the frame
    for node in graph.node:
        if node.op_type == "Constant":
            constants.update((node.output[0], one.t) for one in node.attribute if one.name == "value")
        if frames.isdisjoint(node.input):
            continue
        frames.update(node.output)
        if node.op_type not in ("Reshape", "Expand") or node.input[0] not in frames or node.input[1] not in constants:
            continue
        shape = numpy_helper.to_array(constants[node.input[1]]).copy()
        if shape.size and shape[0] > 0:
            shape[0] *= batch
            graph.initializer.append(numpy_helper.from_array(shape, f"{node.output[0]}/shape of {batch}"))
            node.input[1] = graph.initializer[-1].name
    del graph.value_info[:]
    for value in graph.output:
        for extent in value.type.tensor_type.shape.dim:
            extent.Clear()  # it follows
    return bytes(proto.SerializeToString())
