"""What is known of an ONNX graph's tensors before it runs: shapes, and small values that depend on nothing but shapes.

A condition such as `Size(Shape(x)) == 3` is settled once the inputs have fixed shapes; control flow that hangs on it
can then be taken out of the graph. Next: `onnx_control_flow.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array: TypeAlias = npt.NDArray[Any]

MOST_ELEMENTS = 1024  # of a value that is followed, and of a weight whose value may matter
# They compute shapes and conditions; none makes a large tensor of small ones, but by broadcasting or by its arguments.
_FOLLOWED = {
    *("Abs", "Add", "And", "Cast", "Ceil", "Concat", "Constant", "ConstantOfShape", "Div", "Equal", "Expand"),
    *("Flatten", "Floor", "Gather", "Range"),
    *("Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or"),
    *("ReduceMax", "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Shape", "Sign", "Size", "Slice", "Split"),
    *("Sqrt", "Squeeze", "Sub", "Transpose", "Unsqueeze", "Where", "Xor"),
}


class Known:
    """Shapes of the tensors of a graph, and the values of some.

    Shapes tell values (of `Shape`), and values shapes (of `Reshape`), so both are found in turns.

    Attributes:
        shapes: extents by tensor, for tensors whose rank is known; None for an extent that is not.
        values: of up to MOST_ELEMENTS elements.
    """

    def __init__(self, model: Any) -> None:
        self._opsets = list(model.opset_import)
        self.values: dict[str, Array] = {
            tensor.name: numpy_helper.to_array(tensor)
            for tensor in model.graph.initializer
            if math.prod(tensor.dims) <= MOST_ELEMENTS
        }
        self.shapes: dict[str, list[int | None]] = {}
        before = -1
        while before < len(self.values):
            before = len(self.values)
            self._infer(model)
            for node in model.graph.node:
                if node.output and node.output[0] not in self.values:
                    self.learn(node)

    def _infer(self, model: Any) -> None:
        inferred = _inferred(model, self.values)
        self.shapes = {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}
        self.shapes |= {name: list(array.shape) for name, array in self.values.items()}
        for value in (*inferred.input, *inferred.value_info, *inferred.output):
            if value.type.tensor_type.HasField("shape"):
                extents = value.type.tensor_type.shape.dim
                self.shapes.setdefault(value.name, [e.dim_value if e.HasField("dim_value") else None for e in extents])

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None where an extent is not known."""
        extents = self.shapes.get(name)
        if extents is None:
            return None
        fixed = tuple(extent for extent in extents if extent is not None)
        return fixed if len(fixed) == len(extents) else None

    def learn(self, node: Any) -> None:
        """Add the values of a node's outputs, where they are known."""
        if node.op_type not in _FOLLOWED or node.domain not in ("", "ai.onnx"):
            return
        if node.op_type in ("Shape", "Size") and node.input[0] not in self.values:
            shape = self.shape(node.input[0])
            if shape is None:
                return
            if node.op_type == "Size":
                self.values[node.output[0]] = np.array(math.prod(shape), "int64")
            else:
                ends = {attribute.name: attribute.i for attribute in node.attribute}
                self.values[node.output[0]] = np.array(shape[ends.get("start", 0) : ends.get("end")], "int64")
            return
        if all(not name or name in self.values for name in node.input):
            self._evaluate(node)

    def _evaluate(self, node: Any) -> None:
        read = {name: self.values[name] for name in node.input if name}
        attached = sum(math.prod(attribute.t.dims) for attribute in node.attribute if attribute.HasField("t"))
        if attached > MOST_ELEMENTS or math.prod(array.size or 1 for array in read.values()) > MOST_ELEMENTS**2:
            return
        outputs = [name for name in node.output if name]
        graph = helper.make_graph(
            [node],
            "one node",
            [],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in read.items()],
        )
        try:
            if _made_elements(node.op_type, list(read.values())) > MOST_ELEMENTS:
                return
            found = ReferenceEvaluator(helper.make_model(graph, opset_imports=self._opsets)).run(None, {})
        except Exception:  # onnx's own implementation raises any type for what it has not, and then nothing is known
            return
        for name, array in zip(outputs, found, strict=True):
            if isinstance(array, (np.ndarray, np.generic)) and array.size <= MOST_ELEMENTS:
                self.values[name] = np.asarray(array)


def _made_elements(kind: str, read: list[Array]) -> float:
    """Return how many elements the arguments of an operator ask for."""
    if kind in ("ConstantOfShape", "Expand"):
        return math.prod(float(extent) for extent in read[-1].ravel())
    if kind == "Range":
        start, limit, step = (float(array) for array in read)
        return (limit - start) / step if step else math.inf
    return 0


def _inferred(model: Any, values: Mapping[str, Array]) -> Any:
    """Return the graph with the shapes that onnx infers; weights that are large are inputs of it, which costs less."""
    light = onnx.ModelProto()
    light.ir_version = max(model.ir_version, 4)
    light.opset_import.extend(model.opset_import)
    light.functions.extend(model.functions)
    light.graph.name = model.graph.name
    light.graph.node.extend(node for node in model.graph.node if not all(name in values for name in node.output))
    light.graph.input.extend(model.graph.input)
    for output in model.graph.output:  # its shape in the file may be another than the inputs' now lead to
        light.graph.output.add(name=output.name)
        light.graph.output[-1].type.tensor_type.elem_type = output.type.tensor_type.elem_type
    listed = {value.name for value in model.graph.input}
    light.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in values.items())
    for tensor in model.graph.initializer:
        if tensor.name not in values and tensor.name not in listed:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    try:
        return onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return light.graph
