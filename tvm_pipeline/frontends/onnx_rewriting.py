"""ONNX files rewritten before a compiler sees them, one function for each rewriting. Next: `onnx_control_flow.py`.

Each changes the model in place. What the user has not asked for it returns a line about.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from onnx import helper, inliner, numpy_helper, shape_inference, version_converter

from tvm_pipeline.core.number_types import dtype_of, is_float, type_fault, widened
from tvm_pipeline.errors import OptionError
from tvm_pipeline.frontends.onnx_inlining import renamed, replace_nodes
from tvm_pipeline.frontends.onnx_types import constant, numpy_name

Values = Mapping[str, Any]
OLDEST = 21  # opset as which a file that an engine refuses is tried; of 2024
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
    """Return a file of an opset that engines have dropped (before 7, of 2017) as one of opset 7; others as they are."""
    if all(opset.domain or opset.version >= 7 for opset in model.opset_import):
        return model
    try:
        made = version_converter.convert_version(model, 7)
        _turn_slopes(made)
    except (version_converter.ConvertError, RuntimeError, ValueError):
        return model  # the engine names what it does not take of the old one
    return made


def _turn_slopes(model: Any) -> None:
    """Give slopes the shape that they have since opset 7, which onnx does not; raise ValueError where it is unknown.

    before: y = PRelu(x [1, 4, 8, 8], slope [4]), along the channels
    after:  y = PRelu(x [1, 4, 8, 8], slope [4, 1, 1]), along the last axes, as numpy broadcasts
    """
    found = shape_inference.infer_shapes(model).graph
    listed = (*found.input, *found.output, *found.value_info)
    kinds = {value.name: value.type.tensor_type for value in listed}
    ranks = {name: len(kind.shape.dim) for name, kind in kinds.items() if kind.HasField("shape")}
    slopes = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "PRelu":
            name = node.input[1]
            is_shared = sum(name in one.input for one in model.graph.node) > 1
            if is_shared or name not in slopes or node.input[0] not in ranks:
                raise ValueError(name)
            slopes[name].dims.extend([1] * (ranks[node.input[0]] - 1 - len(slopes[name].dims)))
            for value in model.graph.input:
                if value.name == name:
                    value.CopyFrom(helper.make_tensor_value_info(name, slopes[name].data_type, slopes[name].dims))


def other_forms(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield a file in other words, and which, for an engine that lacks an operator of it.

    First with the operators expanded that ONNX itself defines by others, then as one of each older opset, where onnx
    knows how: an engine may know a kind of operator, and only not its newest version.
    """
    with suppress(TypeError, RuntimeError, ValueError):  # onnx before 1.18 expands functions of files alone
        yield (
            "with ONNX's own functions expanded",
            inliner.inline_selected_functions(model, [], exclude=True, inline_schema_functions=True),
        )
    newest = max((opset.version for opset in model.opset_import if not opset.domain), default=0)
    for version in range(newest - 1, OLDEST - 1, -1):
        with suppress(version_converter.ConvertError, RuntimeError, ValueError):
            yield f"as one of opset {version}", version_converter.convert_version(model, version)


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
        model.graph.initializer.append(constant(_array(inputs[name], value, path), name))
    kept = [value for value in model.graph.input if value.name not in values]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _array(declared: Any, value: Any, path: Any) -> Any:
    """Return a value in the type and the shape of an input."""
    kind = declared.type.tensor_type
    dtype = numpy_name(kind.elem_type)
    if not dtype:
        raise OptionError(f"`input_values`: {path}: input {declared.name} is not a tensor of numbers")
    if fault := type_fault(dtype):
        raise OptionError(f"`input_values`: {path}: input {declared.name} is of {fault}")
    given = np.asarray(value)
    extents: list[int] = [max(extent.dim_value, 0) for extent in kind.shape.dim]  # 0 stands for an open extent
    with np.errstate(over="ignore"):  # what is too large is infinite
        array = given.astype(dtype_of(dtype))
    if math.prod(extents) * array.itemsize > MOST_INPUT_BYTES:
        raise OptionError(
            f"`input_values`: {path}: input {declared.name} has the shape {extents}, which is more than "
            f"{MOST_INPUT_BYTES >> 20} MiB as a constant; leave it an input"
        )
    if given.ndim == 0 and all(extents):
        array = np.full(extents, array)
    if not is_float(dtype) and not np.array_equal(widened(array), np.broadcast_to(widened(given), array.shape)):
        raise OptionError(f"`input_values`: {path}: input {declared.name} is of {dtype}, not {value}")
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
