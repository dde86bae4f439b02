"""ONNX files rewritten before a compiler sees them, one function for each rewriting. Next: `onnx_control_flow.py`.

Each changes the model in place. What the user has not asked for it returns a line about.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper, version_converter

from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends.onnx_inlining import renamed, replace_nodes

Values = Mapping[str, Any]
MOST_INPUT_BYTES = 64 << 20  # of an input that becomes a constant


def raise_ir_version(model: Any) -> list[str]:
    """Let a file of IR version 3 have weights that are no inputs of its graph, as onnxruntime does.

    before: ir_version 3, inputs x and initializer w
    after:  ir_version 4, the same
    """
    listed = {value.name for value in model.graph.input}
    if model.ir_version >= 4 or all(tensor.name in listed for tensor in model.graph.initializer):
        return []
    before, model.ir_version = model.ir_version, 4
    return [f"read as IR version 4, since it has weights that are no inputs, which its own version {before} forbids"]


def raised_opset(model: Any) -> Any:
    """Return a file of an opset that engines have dropped (before 7, of 2017) as one of opset 7; others as they are.

    onnx does not know that a PRelu of before had its slopes along the channels.
    """
    is_old = any(not opset.domain and opset.version < 7 for opset in model.opset_import)
    if not is_old or any(node.op_type == "PRelu" for node in model.graph.node):
        return model
    try:
        return version_converter.convert_version(model, 7)
    except (RuntimeError, ValueError):  # the engine names what it does not take of the old one
        return model


def bind_inputs(model: Any, values: Values, path: Any) -> None:
    """Make constants of inputs.

        before: inputs x and sr;  If(sr == 16000)
        after:  input x, initializer sr = 16000

    Args:
        values: numbers or arrays by input; a number fills an input of a fixed shape.
        path: the file, for messages.

    Raises:
        OptionError: there is no such input, or it cannot hold the value.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = {value.name: value for value in model.graph.input if value.name not in weights}
    for name, value in values.items():
        if name not in inputs:
            raise OptionError(f"`input_values`: {path} has no input {name}; its inputs are {', '.join(inputs)}")
        model.graph.initializer.append(numpy_helper.from_array(_array(inputs[name], value, path), name))
    kept = [value for value in model.graph.input if value.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _array(declared: Any, value: Any, path: Any) -> Any:
    """Return a value in the type and the shape of an input."""
    kind = declared.type.tensor_type
    if kind.elem_type == TensorProto.STRING or kind.elem_type not in helper.get_all_tensor_dtypes():
        raise OptionError(f"`input_values`: {path}: input {declared.name} is not a tensor of numbers")
    dtype, given = helper.tensor_dtype_to_np_dtype(kind.elem_type), np.asarray(value)
    extents: list[int] = [max(extent.dim_value, 0) for extent in kind.shape.dim]  # 0 stands for an open extent
    with np.errstate(over="ignore"):  # what is too large is infinite
        array = given.astype(dtype)
    if math.prod(extents) * array.itemsize > MOST_INPUT_BYTES:
        raise OptionError(
            f"`input_values`: {path}: input {declared.name} has the shape {extents}, which is more than "
            f"{MOST_INPUT_BYTES >> 20} MiB as a constant; leave it an input"
        )
    if given.ndim == 0 and all(extents):
        array = np.full(extents, array)
    if not np.array_equal(array, np.broadcast_to(given, array.shape)) and np.dtype(dtype).kind != "f":
        raise OptionError(f"`input_values`: {path}: input {declared.name} is of {np.dtype(dtype)}, not {value}")
    if array.ndim != len(extents) or any(e not in (0, n) for e, n in zip(extents, array.shape, strict=True)):
        shown = [extent or "?" for extent in extents]
        raise OptionError(
            f"`input_values`: {path}: input {declared.name} has the shape {shown}, the value {list(given.shape)}"
        )
    return array


def drop_dropout(model: Any) -> list[str]:
    """Take out what only training does.

    before: a = Dropout(x, ratio, training_mode=False);  y = Relu(a)
    after:  y = Relu(x)
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    constants |= {
        node.output[0]: attribute.t
        for node in model.graph.node
        if node.op_type == "Constant"
        for attribute in node.attribute
        if attribute.HasField("t")
    }
    results = {value.name for value in model.graph.output}
    read = {name for node in model.graph.node for name in node.input}
    replaced: dict[str, str] = {}
    nodes, count = [], 0
    for node in model.graph.node:
        node = renamed(node, replaced) if replaced else node
        training = node.input[2] if len(node.input) > 2 else ""
        off = not training or (training in constants and not numpy_helper.to_array(constants[training]).any())
        mask = [name for name in node.output[1:] if name in read or name in results]
        if node.op_type != "Dropout" or node.domain or not off or mask:
            nodes.append(node)
            continue
        count += 1
        if node.output[0] in results:
            nodes.append(helper.make_node("Identity", [node.input[0]], [node.output[0]]))
        else:
            replaced[node.output[0]] = node.input[0]
    if count:
        replace_nodes(model.graph, nodes)
    return [f"Dropout left out ({count})" if count > 1 else "Dropout left out"] if count else []
