"""Read an ONNX file as an operator graph, and cut it into ONNX files that any backend can compile.

Next: `compiled.py`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import Port, noise
from tvm_pipeline.backends.sliced import ModelSlice, slice_ends
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.errors import GraphError, ModelError


class OnnxFile:
    """A Slicer of an ONNX file with the shapes of all its tensors; it raises ModelError where they are not known."""

    def __init__(self, model: Model) -> None:
        self.model = model
        try:
            proto = onnx.load_from_string(model.content)
            for value, tensor in zip(_inputs(proto), model.inputs, strict=False):  # the caller may have fixed shapes
                value.CopyFrom(_value(tensor))
            proto = shape_inference.infer_shapes(proto, strict_mode=True)
            self._proto, self.graph = proto, self._read(proto)
            self.kernels = {name: ReferenceEvaluator(self._part([name])) for name in self._nodes}
        except Exception as error:  # onnx raises errors of many kinds, without a common root
            raise ModelError(f"{model.name}: the modelled device cannot run it: {error}") from error

    def cut(self, operators: Collection[str]) -> ModelSlice:
        check_stage(self.graph, operators)
        inputs, outputs = slice_ends(self.graph, operators)
        first = next(operator.name for operator in self.graph.operators if operator.name in operators)
        content = self._part(operators).SerializeToString(deterministic=True)
        return ModelSlice(Model(f"{self.model.name}_from_{first}", "onnx", content, inputs), outputs)

    def values(self) -> dict[str, Array]:
        tensors = {t.name: noise(Port(t.name, t.shape, t.dtype)) for t in self.graph.inputs}
        for operator in self.graph.operators:
            tensors.update(self.compute(operator, tensors))
        return tensors

    def compute(self, operator: Operator, tensors: dict[str, Array]) -> dict[str, Array]:
        """Run one operator on tensors by name; return what it writes."""
        results = self.kernels[operator.name].run(None, {name: tensors[name] for name in operator.inputs})
        return {t.name: np.asarray(r, t.dtype) for t, r in zip(operator.outputs, results, strict=True)}

    def _read(self, proto: Any) -> OperatorGraph:
        self._constants = {constant.name: constant for constant in proto.graph.initializer}
        known = {value.name: value for value in (*proto.graph.value_info, *proto.graph.output, *_inputs(proto))}
        self._nodes: dict[str, Any] = {}
        operators = []
        for index, node in enumerate(proto.graph.node):
            name = f"{node.op_type.lower()}_{index}"
            self._nodes[name] = node
            if not any(read in known for read in node.input):
                raise GraphError(f"operator {name} reads constants alone; fold it, for instance with onnx-simplifier")
            weights = [self._constants[read] for read in node.input if read in self._constants]
            operators.append(
                Operator(
                    name,
                    node.op_type.lower(),
                    tuple(dict.fromkeys(read for read in node.input if read and read not in self._constants)),
                    tuple(_tensor(known[written]) for written in node.output if written),
                    sum(numpy_helper.to_array(weight).nbytes for weight in weights),
                )
            )
        inputs = tuple(_tensor(value) for value in _inputs(proto))
        return OperatorGraph(self.model.name, inputs, tuple(operators), tuple(v.name for v in proto.graph.output))

    def _part(self, operators: Collection[str]) -> Any:
        """Return the operators as an ONNX model."""
        inputs, outputs = slice_ends(self.graph, operators)
        nodes = [node for name, node in self._nodes.items() if name in operators]
        read = dict.fromkeys(name for node in nodes for name in node.input if name in self._constants)
        graph = helper.make_graph(
            nodes,
            self.model.name,
            [_value(tensor) for tensor in inputs],
            [_value(tensor) for tensor in outputs],
            [self._constants[name] for name in read],
        )
        opsets = self._proto.opset_import
        return helper.make_model(graph, opset_imports=opsets, ir_version=self._proto.ir_version)


def _inputs(proto: Any) -> list[Any]:
    constants = {constant.name for constant in proto.graph.initializer}
    return [value for value in proto.graph.input if value.name not in constants]


def _tensor(value: Any) -> Tensor:
    kind = value.type.tensor_type
    shape = tuple(extent.dim_value for extent in kind.shape.dim)
    return Tensor(value.name, shape, str(helper.tensor_dtype_to_np_dtype(kind.elem_type)))


def _value(tensor: Tensor) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(tensor.name, kind, tensor.shape)
