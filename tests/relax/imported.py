"""ONNX files imported, compiled by TVM alone, and run beside onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import helper
from tvm import relax

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.frontends.onnx_walk import obstacles
from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified

TARGET = tvm.target.Target({"kind": "llvm", "opt-level": 0})


def model_of(content: bytes, name: str = "net") -> Model:
    """Return a file as the frontend does, which has settled shapes and named obstacles."""
    proto = onnx.load_from_string(content)
    weights = {tensor.name for tensor in proto.graph.initializer}
    inputs = tuple(
        Tensor(
            value.name,
            tuple(extent.dim_value for extent in value.type.tensor_type.shape.dim),
            str(np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))),
        )
        for value in proto.graph.input
        if value.name not in weights
    )
    outputs = tuple(value.name for value in proto.graph.output)
    return Model(name, "onnx", content, inputs, outputs=outputs, obstacles=tuple(obstacles(proto)))


def noise(shape: Sequence[int], dtype: str = "float32", seed: int = 0) -> Array:
    draw = np.random.default_rng(seed)
    if dtype.startswith("float"):
        return draw.standard_normal(shape).astype(dtype)
    return draw.integers(0, 120, shape).astype(dtype)


def kinds(mod: tvm.IRModule) -> list[str]:
    values = (binding.value for binding in mod["main"].body.blocks[0].bindings)
    return [name_of(value).removeprefix("relax.") for value in values if name_of(value)]


def computed(model: Model, frame: Mapping[str, Array]) -> list[Array]:
    """Return the outputs of a model, imported and simplified."""
    machine = relax.VirtualMachine(tvm.compile(simplified(import_model(model)), TARGET), tvm.cpu())
    found = machine["main"](*(tvm.runtime.tensor(frame[tensor.name]) for tensor in model.inputs))
    return [each.numpy() for each in ([found] if hasattr(found, "numpy") else found)]


def compared(content: bytes, frame: Mapping[str, Array] | None = None) -> tuple[list[Array], list[Array]]:
    """Return the outputs of a file, imported and simplified, and those of onnxruntime."""
    model = model_of(content)
    frame = frame or {tensor.name: noise(tensor.shape, tensor.dtype) for tensor in model.inputs}
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return computed(model, frame), session.run(None, dict(frame))


def assert_as_onnxruntime(content: bytes, frame: Mapping[str, Array] | None = None) -> None:
    found, wanted = compared(content, frame)
    for name, own, other in zip(model_of(content).outputs, found, wanted, strict=True):
        assert own.dtype == other.dtype, name
        np.testing.assert_allclose(own, other, rtol=2e-5, atol=2e-6, err_msg=name)
