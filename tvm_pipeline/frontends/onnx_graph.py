"""An ONNX file as an operator graph, and parts of it as ONNX files: for backends that compile ONNX.

An operator is a node of the file. Tensors whose extents depend on data, and values that are no tensors, cannot cross
from one stage to another, so the nodes around them are one operator. Next: `core/partition.py`, which says what a
stage may be, and `backends/sliced.py`, where the parts go to other backends.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import ModelSlice
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import NARROW, type_fault
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.topology import find_cycle, successors, topological_order
from tvm_pipeline.errors import GraphError, ModelError
from tvm_pipeline.frontends.onnx_magnitudes import magnitudes
from tvm_pipeline.frontends.onnx_types import numpy_name, onnx_type

_MOST_ELEMENTS = 1024  # of a weight whose values may say a shape
_BOUND = "tvm_pipeline.magnitude."  # and the name of an input: a key of the metadata of a part
_NO_WORK = ("reshape", "squeeze", "unsqueeze", "flatten", "identity", "shape")


class OnnxGraph:
    """An ONNX file that can be cut.

    Args:
        model: of the format onnx; its inputs fix what the file leaves open.
        joined: nodes, by their indices in the file, that are one operator each, since an engine computes them as one.
        narrow: whether tensors of the types of ml_dtypes cross a cut. Where not, or without ml_dtypes, the nodes around
            such a tensor are one operator, and no input or output of the model is one.

    Attributes:
        graph: the operator graph; operators are called by the kind and the index of their first node, `conv_7`.
        indices: of the nodes of each operator, in the order of the file.
        magnitudes: bounds on the absolute values of tensors of int32 and int64. A part has those of its inputs in its
            metadata, so that an engine refuses an operator alone for the reason for which it does so in the whole.

    Raises:
        ModelError: onnx cannot infer the file's types, or an output has no fixed extents or is no tensor.
    """

    def __init__(self, model: Model, joined: Sequence[Sequence[int]] = (), narrow: bool = True) -> None:
        import onnx

        self.source, self.joined = model, joined
        try:
            proto = _with_types(_with_written_outputs(with_fixed_inputs(model)))
        except (onnx.shape_inference.InferenceError, onnx.checker.ValidationError, ValueError, RuntimeError) as error:
            raise ModelError(f"{model.name}: its types cannot be inferred: {error}") from error
        self._proto = proto
        self._constants = {constant.name: constant for constant in proto.graph.initializer}
        listed = (*proto.graph.value_info, *proto.graph.output, *proto.graph.input)
        tensors = [tensor for value in listed if (tensor := _fixed(value)) is not None]
        crossing = [one for one in tensors if one.dtype not in NARROW or (narrow and not type_fault(one.dtype))]
        self._tensors = {tensor.name: tensor for tensor in crossing}
        self._dtypes = {value.name: numpy_name(value.type.tensor_type.elem_type) for value in listed}
        self._dtypes |= {name: numpy_name(constant.data_type) for name, constant in self._constants.items()}
        self.indices: dict[str, list[int]] = {}
        self.graph = self._read()

    @cached_property
    def magnitudes(self) -> dict[str, float]:
        bounds = {one.key.removeprefix(_BOUND): one.value for one in self._proto.metadata_props if _BOUND in one.key}
        known = {name: float(bound) for name, bound in bounds.items() if bound.replace(".", "", 1).isdecimal()}
        return magnitudes(self, known)

    def nodes(self, operator: str) -> list[Any]:
        """Return the nodes that an operator stands for, in the order of the file."""
        return [self._proto.graph.node[index] for index in self.indices[operator]]

    def dtype(self, name: str) -> str:
        """Return the type of a tensor outside of the bodies of control flow; empty where nobody knows it."""
        return self._dtypes.get(name, "")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a constant, or of a tensor that can cross a cut; empty for others, as for a scalar."""
        if name in self._constants:
            return tuple(self._constants[name].dims)
        return self._tensors[name].shape if name in self._tensors else ()

    def constant(self, name: str) -> Any:
        """Return the array of a constant; None for other tensors."""
        from onnx import numpy_helper

        return numpy_helper.to_array(self._constants[name]) if name in self._constants else None

    def fused(self, layers: Iterable[Sequence[int]], bound: Collection[int] = ()) -> list[Sequence[int]]:
        """Return which nodes are one operator each where an engine computes such layers: `joined` of another graph.

        A node that no layer has was folded into the one that reads it, or only shows what it reads in another way.

        Args:
            bound: nodes that go with what they read, since they depend on how the engine lays it out.
        """
        groups = [layer for layer in layers if layer]
        named = {node for layer in groups for node in layer}
        nodes = self._proto.graph.node
        writer = {name: index for index, node in enumerate(nodes) for name in node.output if name}
        sources = [[writer[name] for name in _reads(node) if name in writer] for node in nodes]
        for index in range(len(nodes)) if named else ():
            if index not in named:
                readers = [reader for reader, read in enumerate(sources) if index in read]
                groups += [[index, other] for other in (readers if len(readers) == 1 else sources[index][:1])]
        return [*groups, *([node, other] for node in bound for other in sources[node][:1])]

    def cut(self, operators: Collection[str]) -> ModelSlice:
        """Return the operators as a model of their own; raise PlanError where they are no legal stage."""
        from onnx import helper

        check_stage(self.graph, operators)
        inputs, outputs = slice_ends(self.graph, operators)
        first = next(operator.name for operator in self.graph.operators if operator.name in operators)
        part, read = self.part(operators), [tensor.name for tensor in inputs]
        bounds = {f"{_BOUND}{name}": str(self.magnitudes[name]) for name in read if name in self.magnitudes}
        helper.set_model_props(part, bounds)
        content = part.SerializeToString(deterministic=True)
        return ModelSlice(Model(f"{self.source.name}_from_{first}", "onnx", content, inputs), outputs)

    def part(self, operators: Collection[str], outputs: Sequence[Tensor] | None = None) -> Any:
        """Return some operators as an ONNX model, with the tensors that they read and hand on as its ends.

        Args:
            outputs: what it gives in place of what they hand on.
        """
        from onnx import helper

        inputs, given = slice_ends(self.graph, operators)
        outputs = given if outputs is None else outputs
        nodes = [
            node
            for operator in self.graph.operators
            if operator.name in operators
            for node in self.nodes(operator.name)
        ]
        constants = dict.fromkeys(name for node in nodes for name in _reads(node) if name in self._constants)
        graph = helper.make_graph(
            nodes,
            self.source.name,
            [_value(tensor) for tensor in inputs],
            [_value(tensor) for tensor in outputs],
            [self._constants[name] for name in constants],
        )
        return helper.make_model(
            graph,
            opset_imports=self._proto.opset_import,
            ir_version=self._proto.ir_version,
            functions=list(self._proto.functions),
        )

    def _read(self) -> OperatorGraph:
        proto, name = self._proto.graph, self.source.name
        for value in (*proto.input, *proto.output):
            dtype = numpy_name(value.type.tensor_type.elem_type)
            if value.name not in self._tensors and dtype in NARROW:
                fault = type_fault(dtype) or f"{dtype}, which this engine is not given: run it on onnxruntime"
                raise ModelError(f"{name}: {value.name} is of {fault}")
        for value in proto.output:
            if value.name not in self._tensors:
                raise ModelError(
                    f"{name}: output {value.name} has extents that depend on data, or is no tensor of numbers; a stage "
                    "hands on arrays of one size: cut the model before it, and compute that part outside"
                )
        writer = {written: index for index, node in enumerate(proto.node) for written in node.output if written}
        inputs = tuple(self._tensors[value.name] for value in proto.input if value.name not in self._constants)
        known = {tensor.name for tensor in inputs}.union(writer)
        reads = [[read for read in _reads(node) if read in known] for node in proto.node]
        operators = []
        for group in _groups(reads, writer, self._tensors, self.joined):
            nodes = [proto.node[index] for index in group]
            label = f"{nodes[0].op_type.lower()}_{group[0]}"
            self.indices[label] = group
            operators.append(self._operator(label, nodes, group, reads, writer))
        try:
            return OperatorGraph(name, inputs, tuple(operators), tuple(value.name for value in proto.output))
        except GraphError as error:
            raise ModelError(f"{name}: it cannot be cut: {error}") from error

    def _operator(
        self, label: str, nodes: list[Any], group: list[int], reads: list[list[str]], writer: Mapping[str, int]
    ) -> Operator:
        inside = set(group)
        taken = dict.fromkeys(read for index in group for read in reads[index] if writer.get(read) not in inside)
        kept = {value.name for value in self._proto.graph.output}
        read_outside = {read for index, names in enumerate(reads) if index not in inside for read in names} | kept
        written = [name for node in nodes for name in node.output if name in read_outside]
        constants = dict.fromkeys(name for node in nodes for name in _reads(node) if name in self._constants)
        return Operator(
            label,
            "+".join(dict.fromkeys(node.op_type.lower() for node in nodes)),
            tuple(taken),
            tuple(self._tensors[written_name] for written_name in written),
            sum(_constant_bytes(self._constants[constant]) for constant in constants),
            sum(self._macs(node) for node in nodes),
        )

    def _macs(self, node: Any) -> int:
        """Return the multiply-accumulates of a node; one for each element where there is nothing to multiply."""
        kind, result = node.op_type.lower(), self._elements(node.output)
        shapes = [self.shape(name) for name in node.input]
        match kind:
            case "conv" if len(shapes) > 1 and shapes[1]:
                return result * math.prod(shapes[1][1:])
            case "gemm" | "matmul" if shapes[0]:
                columns = shapes[1][-1] if len(shapes) > 1 and shapes[1] else 1
                return result * math.prod(shapes[0]) // max(result // max(columns, 1), 1)
        return 0 if kind in _NO_WORK else result

    def _elements(self, names: Iterable[str]) -> int:
        return sum(math.prod(self._tensors[name].shape) for name in names if name in self._tensors)


def with_fixed_inputs(model: Model) -> Any:
    """Return an ONNX model whose inputs are those of `model`, parsed; constants are no inputs any more.

    Files of before IR 4 list constants among their inputs, which keeps others from folding them.

    Raises:
        ModelError: it is no ONNX file, or a damaged one.
    """
    import onnx
    from google.protobuf.message import DecodeError

    try:
        proto = onnx.load_from_string(model.content)
    except DecodeError as error:
        raise ModelError(f"{model.name}: not a valid ONNX file, perhaps cut short: {error}") from error
    constants = {constant.name for constant in proto.graph.initializer}
    fixed = {tensor.name: tensor for tensor in model.inputs}
    kept = [value for value in proto.graph.input if value.name not in constants]
    for value in kept:
        if value.name in fixed:
            value.CopyFrom(_value(fixed[value.name]))
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    if model.shaped:  # the file's other shapes follow from the inputs that it has
        del proto.graph.value_info[:]
        for value in proto.graph.output:
            value.type.tensor_type.ClearField("shape")
    proto.ir_version = max(proto.ir_version, 4)
    return proto


def _with_written_outputs(proto: Any) -> Any:
    """Return an ONNX model that has a node for each output: an output that is a constant is copied by one.

    before: initializer y; output y
    after:  initializer y/1; y = Identity(y/1)
    """
    from onnx import helper

    from tvm_pipeline.frontends.onnx_inlining import Names, renamed, replace_nodes

    results = {value.name for value in proto.graph.output}
    constants = [constant for constant in proto.graph.initializer if constant.name in results]
    if constants:
        names = Names(proto.graph)
        inside = {constant.name: names.free(constant.name) for constant in constants}
        copies = [helper.make_node("Identity", [inside[constant.name]], [constant.name]) for constant in constants]
        replace_nodes(proto.graph, [*(renamed(node, inside) for node in proto.graph.node), *copies])
        for constant in constants:
            constant.name = inside[constant.name]
    return proto


def _with_types(proto: Any) -> Any:
    """Return an ONNX model with the types of all its tensors; raise as onnx does.

    onnx copies what it infers from several times, so it is given large weights as inputs, without their values.
    """
    import onnx
    from onnx import helper

    for value in (*proto.graph.value_info, *proto.graph.output):
        for extent in value.type.tensor_type.shape.dim:
            if extent.HasField("dim_value") and extent.dim_value < 1:  # some programs write 0 for an open extent
                extent.Clear()
    weights = {w.name: w for w in proto.graph.initializer if math.prod(w.dims) > _MOST_ELEMENTS}
    kept = [value for value in proto.graph.initializer if value.name not in weights]
    values = [helper.make_tensor_value_info(name, w.data_type, w.dims) for name, w in weights.items()]
    graph = helper.make_graph(
        proto.graph.node,
        proto.graph.name,
        [*proto.graph.input, *values],
        proto.graph.output,
        kept,
        value_info=proto.graph.value_info,
    )
    light = helper.make_model(
        graph, opset_imports=proto.opset_import, ir_version=proto.ir_version, functions=list(proto.functions)
    )
    found = onnx.shape_inference.infer_shapes(light, data_prop=True).graph
    del proto.graph.value_info[:], proto.graph.output[:]
    proto.graph.value_info.extend(found.value_info)
    proto.graph.output.extend(found.output)
    return proto


def _groups(
    reads: list[list[str]], writer: Mapping[str, int], fixed: Collection[str], joined: Sequence[Sequence[int]] = ()
) -> list[list[int]]:
    """Return the nodes that are one operator each, in a topological order.

    Nodes that are `joined` are one, and a tensor that is not `fixed` joins its writer with its readers. A path that
    leaves such nodes and comes back joins what it goes through.

    Examples:
        >>> _groups([["x"], ["a"], ["a"], ["b", "c"]], {"a": 0, "b": 1, "c": 2}, ["x", "b", "c"])
        [[0, 1, 2], [3]]
        >>> _groups([["x"], ["a"], ["a", "b"]], {"a": 0, "b": 1}, ["x", "b"])
        [[0, 1, 2]]
        >>> _groups([["x"], ["a"], ["b"]], {"a": 0, "b": 1}, ["x", "a", "b"], [[0, 1]])
        [[0, 1], [2]]
    """
    home = list(range(len(reads)))

    def root(node: int) -> int:
        while home[node] != node:
            node = home[node]
        return node

    for first, *others in joined:
        for other in others:
            home[root(other)] = root(first)
    sources = [{writer[name] for name in names if name in writer} for names in reads]
    for node, names in enumerate(reads):
        for name in names:
            if name in writer and name not in fixed:
                home[root(node)] = root(writer[name])
    while True:
        roots = sorted({root(node) for node in range(len(reads))})
        position = {node: index for index, node in enumerate(roots)}
        before: list[set[int]] = [set() for _ in roots]
        for node, needed in enumerate(sources):
            own = position[root(node)]
            before[own].update(position[root(source)] for source in needed)
            before[own].discard(own)
        order = topological_order(before, successors(before))
        if len(order) == len(roots):
            break
        first, *others = find_cycle([sorted(needed) for needed in before], order)
        for other in others:
            home[roots[other]] = roots[first]
    members: list[list[int]] = [[] for _ in roots]
    for node in range(len(reads)):
        members[position[root(node)]].append(node)
    return [members[group] for group in order]


def _reads(node: Any) -> Iterator[str]:
    """Yield the tensors that a node reads, and those that its subgraphs (of If, Loop, Scan) take from outside."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (attribute.g, *attribute.graphs):
            own = {value.name for value in (*graph.input, *graph.initializer)}
            own.update(name for inner in graph.node for name in inner.output)
            yield from (name for inner in graph.node for name in _reads(inner) if name not in own)
            yield from (value.name for value in graph.output if value.name not in own)


def _fixed(value: Any) -> Tensor | None:
    """Return a value of fixed extents; None where an extent is open or it is no tensor of numbers."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or not kind.HasField("shape"):
        return None
    extents = tuple(int(extent.dim_value) for extent in kind.shape.dim)
    are_known = all(extent.HasField("dim_value") for extent in kind.shape.dim) and min(extents, default=0) >= 0
    dtype = numpy_name(kind.elem_type) if are_known else ""
    return Tensor(value.name, extents, dtype) if dtype else None


def _value(tensor: Tensor) -> Any:
    from onnx import helper

    return helper.make_tensor_value_info(tensor.name, onnx_type(tensor.dtype), tensor.shape)


def _constant_bytes(constant: Any) -> int:
    from onnx import helper

    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(constant.data_type))
    size: int = math.prod(constant.dims) * dtype.itemsize
    return size
