"""Read ONNX files, which the package onnx parses and checks. Next: `core/model.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.graph_limits import MOST_OPERATORS
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import type_fault
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends import onnx_shapes, onnx_types
from tvm_pipeline.frontends.model_metadata import onnx_metadata, stated_shape


def read(
    name: str, path: Path, content: bytes, shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Any]
) -> Model:
    """Return a checked Model of an ONNX file, rewritten where compilers would not take it as it is.

    Args:
        name: the model's name.
        path: the file, for messages alone.
        content: the bytes of the file.
        shapes: shapes by input name; an input that is not in it must have a fixed shape in the file.
        values: numbers or arrays by input name, for inputs that become constants.

    Raises:
        ModelError: the package onnx is missing, or the file is damaged, keeps its weights elsewhere or leaves a
            shape open.
        OptionError: `shapes` or `values` names an unknown input, or gives it what it cannot hold.
    """
    try:
        import onnx
    except ImportError as error:
        install = "pip install 'tvm-pipeline[tvm]'"
        raise ModelError(f"{path}: reading ONNX needs the package onnx: {install}") from error
    from google.protobuf.message import DecodeError

    from tvm_pipeline.frontends import onnx_control_flow, onnx_inlining, onnx_rewriting, onnx_walk

    try:
        proto = onnx.load_from_string(content)
        notes = onnx_rewriting.raise_ir_version(proto)
        if any(constant.data_location == onnx.TensorProto.EXTERNAL for constant in proto.graph.initializer):
            raise ModelError(
                f"{path}: its weights lie in another file; make it one with onnx.save(onnx.load(path), new_path)"
            )
        if not proto.graph.node:  # newer checkers say something else of it
            raise ModelError(f"{path}: the graph has no inputs or no operators")
        count = onnx_inlining.expanded_nodes(proto)
        if count > MOST_OPERATORS:
            raise ModelError(
                f"{path}: it has {_shown(count)} operators, with those of its functions at each call, and up to "
                f"{MOST_OPERATORS} are planned for; export the model without functions, or in parts"
            )
        onnx.checker.check_model(proto)
    except (DecodeError, onnx.checker.ValidationError, ValueError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"{path}: not a valid ONNX file, perhaps cut short: {reason}") from error

    onnx_rewriting.bind_inputs(proto, values, path)
    metadata = onnx_metadata(proto)
    stated = _stated(proto, metadata, shapes)
    shapes = {**stated, **shapes}
    constants = {initializer.name for initializer in proto.graph.initializer}
    declared = [value for value in proto.graph.input if value.name not in constants]
    if not declared and values:
        raise OptionError(f"`input_values`: {path} has no other input than {', '.join(values)}; leave one an input")
    if not declared:
        raise ModelError(f"{path}: the graph has no inputs or no operators")
    _check_names(path, shapes, [value.name for value in declared])
    open_ = {v.name: v.type.tensor_type.shape.dim for v in declared if v.name not in shapes and not all(_extents(v))}
    if open_:
        raise ModelError(f"{path}: {onnx_shapes.advice(open_)}")
    inputs = tuple(_input(path, value, shapes) for value in declared)
    shaped = tuple(t.name for value, t in zip(declared, inputs, strict=True) if _extents(value) != t.shape)
    for value, tensor in zip(declared, inputs, strict=True):
        _fix_shape(value, tensor.shape)
    try:
        notes += onnx_control_flow.without_control_flow(proto, path)
        notes += onnx_rewriting.drop_dropout(proto)
        if notes or values:
            content = proto.SerializeToString()
            onnx.checker.check_model(proto)
    except (onnx.checker.ValidationError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelError(f"{path}: its control flow cannot be read: {error}") from error
    notes += [_note(name, shape) for name, shape in stated.items()]
    outputs = tuple(value.name for value in proto.graph.output)
    return Model(
        name,
        "onnx",
        content,
        inputs,
        outputs=outputs,
        obstacles=tuple(onnx_walk.obstacles(proto)),
        shaped=shaped,
        metadata=metadata,
        notes=tuple(notes),
    )


def _shown(count: float) -> str:
    return f"{count:.6g}" if count < float("inf") else "endlessly many"


def _stated(proto: Any, metadata: dict[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shape of the one input that is left open, where the metadata states the size of its pictures."""
    constants = {initializer.name for initializer in proto.graph.initializer}
    declared = [value for value in proto.graph.input if value.name not in constants]
    if len(declared) != 1 or declared[0].name in shapes:
        return {}
    shape = stated_shape(metadata, list(_extents(declared[0])))
    return {declared[0].name: shape} if shape else {}


def _note(name: str, shape: tuple[int, ...]) -> str:
    shown = ",".join(map(str, shape))
    return f"{name}:[{shown}] by the file's metadata (imgsz), which leaves it open; `input_shapes` gives another"


def _extents(value: Any) -> tuple[int, ...]:
    """Return the shape of an input in the file; 0 stands for an open extent."""
    return tuple(max(extent.dim_value, 0) for extent in value.type.tensor_type.shape.dim)


def _fix_shape(value: Any, shape: tuple[int, ...]) -> None:
    """Write the shape of an input into the file, where conditions on it are then known."""
    for extent, known in zip(value.type.tensor_type.shape.dim, shape, strict=True):
        extent.dim_value = known


def _input(path: Path, value: Any, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    kind = value.type.tensor_type
    dtype = onnx_types.numpy_name(kind.elem_type)
    if not dtype:
        raise ModelError(f"{path}: input {value.name} is not a tensor of numbers that numpy knows")
    if fault := type_fault(dtype):
        raise ModelError(f"{path}: input {value.name} is of {fault}")
    extents = _extents(value)
    shape = shapes.get(value.name)
    if shape is None:
        shape = extents
    elif len(shape) != len(extents):
        raise OptionError(f"`input_shapes`: {path}: input {value.name} has {len(extents)} dimensions, not {len(shape)}")
    return Tensor(value.name, shape, dtype)


def _check_names(path: Path, shapes: Mapping[str, tuple[int, ...]], known: list[str]) -> None:
    for name in shapes:
        if name not in known:
            raise OptionError(f"`input_shapes`: {path} has no input {name}; its inputs are {', '.join(known)}")
