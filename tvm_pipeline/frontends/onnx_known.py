"""What is known of an ONNX graph's tensors before it runs: shapes, and small values that depend on nothing but shapes.

A condition such as `Size(Shape(x)) == 3` is settled once the inputs have fixed shapes; control flow that hangs on it
can then be taken out of the graph. Next: `onnx_control_flow.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tvm_pipeline.frontends.onnx_inlining import reads

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


class KnownTensors:
    """Shapes of the tensors of a graph, and the values of some.

    onnx infers the types of the whole graph once. `learn` then goes on node by node, in the order of the graph, since
    shapes tell values (of `Shape`), and values shapes (of `Reshape`).

    Attributes:
        values: of up to MOST_ELEMENTS elements.
    """

    def __init__(self, model: Any) -> None:
        self._opsets, self._ir_version = list(model.opset_import), max(model.ir_version, 4)
        self._types = {value.name: value.type for value in _inferred(model)}
        self.values: dict[str, Array] = {}
        for tensor in model.graph.initializer:
            self.add(tensor)

    def add(self, weight: Any) -> None:
        """Add what an initializer tells."""
        self._types[weight.name] = helper.make_tensor_type_proto(weight.data_type, weight.dims)
        if math.prod(weight.dims) <= MOST_ELEMENTS:
            self.values[weight.name] = numpy_helper.to_array(weight)

    def extents(self, name: str) -> list[int | None] | None:
        """Return the extents of a tensor, None for one that is not known; None where not even their number is."""
        if name in self.values:
            return list(self.values[name].shape)
        if name not in self._types or not self._types[name].tensor_type.HasField("shape"):
            return None
        dims = self._types[name].tensor_type.shape.dim
        return [extent.dim_value if extent.HasField("dim_value") else None for extent in dims]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None where an extent is not known."""
        extents = self.extents(name)
        if extents is None:
            return None
        fixed = tuple(extent for extent in extents if extent is not None)
        return fixed if len(fixed) == len(extents) else None

    def learn(self, node: Any) -> None:
        """Add the shapes and the values of a node's outputs, where they follow from those of its inputs."""
        if any(name and self.shape(name) is None for name in node.output):
            self._infer(node)
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

    def learn_loop(self, node: Any, turns: int) -> list[Any]:
        """Add the shapes of what a Loop of so many turns gives, where no turn changes those of its states.

        Returns:
            The outputs whose shapes are known so, with their types: onnx itself takes them for open.
        """
        body, states = node.attribute[0].g, list(node.input[2:])
        outer = [self._type(name) for name in states]
        if None in outer:
            return []
        scalars = (helper.make_tensor_type_proto(kind, ()) for kind in (TensorProto.INT64, TensorProto.BOOL))
        self._types |= zip((value.name for value in body.input), (*scalars, *outer), strict=True)
        for inner in body.node:
            self.learn(inner)
        made = [self._type(value.name) for value in body.output[1:]]
        if made[: len(states)] != outer:
            return []
        for index, type_ in enumerate(made[len(states) :], len(states)):
            if type_ is not None:
                extents = (turns, *(extent.dim_value for extent in type_.tensor_type.shape.dim))
                made[index] = helper.make_tensor_type_proto(type_.tensor_type.elem_type, extents)
        found = {name: type_ for name, type_ in zip(node.output, made, strict=False) if name and type_ is not None}
        self._types |= found
        return [helper.make_value_info(name, type_) for name, type_ in found.items()]

    def _type(self, name: str) -> Any | None:
        """Return the type of a tensor whose extents are all known; None for any other."""
        if name in self.values:
            kind = helper.np_dtype_to_tensor_dtype(self.values[name].dtype)
            return helper.make_tensor_type_proto(kind, self.values[name].shape)
        shape = self.shape(name)
        return None if shape is None else helper.make_tensor_type_proto(self._types[name].tensor_type.elem_type, shape)

    def _infer(self, node: Any) -> None:
        """Have onnx infer the types of a node's outputs."""
        alone = onnx.ModelProto(ir_version=self._ir_version, opset_import=self._opsets)
        alone.graph.node.append(node)
        for name in dict.fromkeys(reads(node)):
            if name in self.values:
                alone.graph.initializer.append(numpy_helper.from_array(np.asarray(self.values[name], order="C"), name))
            elif name in self._types:
                alone.graph.input.add(name=name, type=self._types[name])
        self._types |= {value.name: value.type for value in _with_types(alone).value_info}

    def _evaluate(self, node: Any) -> None:
        read = {name: self.values[name] for name in node.input if name}
        attached = sum(math.prod(attribute.t.dims) for attribute in node.attribute if attribute.HasField("t"))
        elements = math.prod(float(read[name].size or 1) for name in node.input if name)
        if attached > MOST_ELEMENTS or elements > MOST_ELEMENTS**2:
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


def _inferred(model: Any) -> Iterator[Any]:
    """Yield the tensors of a graph with the types that onnx infers; it is given large weights as inputs, to be fast."""
    light = onnx.ModelProto(ir_version=max(model.ir_version, 4), opset_import=model.opset_import)
    light.functions.extend(model.functions)
    light.graph.node.extend(model.graph.node)
    light.graph.input.extend(model.graph.input)
    listed = {value.name for value in model.graph.input}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= MOST_ELEMENTS:
            light.graph.initializer.append(tensor)
        elif tensor.name not in listed:
            light.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    yield from (*light.graph.input, *_with_types(light).value_info)


def _with_types(model: Any) -> Any:
    """Return the graph of a model with the types that onnx infers; as it is where onnx finds fault with it.

    onnx would also follow values (`data_prop`), of any size: it joins what a few nodes double until no memory is left.
    """
    try:
        return onnx.shape_inference.infer_shapes(model).graph
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return model.graph
