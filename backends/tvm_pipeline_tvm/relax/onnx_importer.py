"""TVM's importer of ONNX, node by node: constants folded in numpy, shapes known, errors with the node's name.

TVM's own loop converts all nodes and leaves what depends on shapes to passes. It prints to the terminal where it fails,
and names no node. Here each node is converted alone:

    Shape(x: (1, 3, 8, 8))                  the constant [1, 3, 8, 8]
    a node of constants                     its value, as onnx's own implementation computes it
    a node that `onnx_nodes.py` rewrites    the nodes that stand for it
    any other                               what TVM's converter makes of it, whose shape must be fixed

Next: `onnx_nodes.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import ONNXGraphImporter, _get_convert_map, onnx_input

from tvm_pipeline_tvm.numpy_rules import Array
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.numpy_table import constant, static_shape
from tvm_pipeline_tvm.relax.onnx_converters import CONVERTERS
from tvm_pipeline_tvm.relax.onnx_functions import expanded
from tvm_pipeline_tvm.relax.onnx_nodes import REWRITES
from tvm_pipeline_tvm.relax.onnx_quantized import QUANTISED
from tvm_pipeline_tvm.relax.onnx_recurrent import RECURRENT
from tvm_pipeline_tvm.relax.onnx_resizing import RESIZING
from tvm_pipeline_tvm.relax.onnx_site import NodeSite, Rewrite, TensorInfo

_WITHOUT_VALUE = ("Random", "Bernoulli", "Multinomial", "Sequence", "Optional", "ConcatFromSequence", "SplitToSequence")
_TUPLES = frozenset(
    (
        *("Optional", "OptionalGetElement", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert"),
        *("ConcatFromSequence", "SplitToSequence"),
    )
)


_REWRITES: dict[str, Rewrite] = {**REWRITES, **QUANTISED, **RECURRENT, **RESIZING}


class RefusedNode(Exception):  # noqa: N818  it never leaves `importer.py`
    """The importer refuses a node; the message names its operator, the node and the reason."""


class OnnxImporter(ONNXGraphImporter):
    """Imports one model.

    Args:
        shapes: of the inputs, by name.
        proto: the model.
    """

    def __init__(self, shapes: Mapping[str, list[int]], proto: Any) -> None:
        super().__init__(dict(shapes), None, sanitize=False)
        self._proto = proto

    def module(self) -> tvm.IRModule:
        """Return the module, whose constants and shapes are known.

        Raises:
            RefusedNode: a node cannot be imported.
        """
        domains = ("", "ai.onnx")
        opset = next((each.version for each in self._proto.opset_import if each.domain in domains), 1)
        try:
            mod = self.from_onnx(self._proto.graph, opset)
        except RefusedNode:
            self.bb._end_block()  # an open one is told on the terminal
            raise
        return lowerable(mod)

    def _check_for_unsupported_ops(self, graph: Any) -> None:
        pass  # `importer.obstacles` has told them all

    def _construct_nodes(self, graph: Any) -> None:
        for node in graph.node:
            self._import_or_expand(node)

    def _import_or_expand(self, node: Any) -> None:
        """Import a node; where it is refused, the nodes by which ONNX defines it."""
        try:
            self._import(node)
        except Exception as error:  # the importer raises any type
            parts = self._expanded(node)
            if not parts:
                raise (
                    error if isinstance(error, RefusedNode) else RefusedNode(f"{label(node)}: {reason(error)}")
                ) from error
            try:
                for part in parts:
                    self._import_or_expand(part)
            except RefusedNode as inner:
                raise RefusedNode(f"{label(node)}: {reason(error)}; of what ONNX defines it by, {inner}") from error

    def _expanded(self, node: Any) -> list[Any]:
        opsets = {each.domain: each.version for each in self._proto.opset_import}
        read = [self._nodes[name] if name else None for name in node.input]
        if any(expr is not None and not isinstance(expr.ty, relax.TensorType) for expr in read):
            return []
        types = []
        for name in node.input:
            known = self._known(name) if name else None
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(known.dtype)) if known else TensorProto.UNDEFINED
            types.append(helper.make_tensor_type_proto(kind, known.shape if known else None))
        return expanded(node, opsets.get(node.domain) or self.opset or 1, types)

    def _import(self, node: Any) -> None:
        """Import a node, or what stands for it."""
        value = self._value(node)
        if value is not None:
            for name, array in zip(node.output, value, strict=False):
                self._nodes[name] = constant(array)
            return
        site = NodeSite(node, self.opset, self._known)
        rewrite = _REWRITES.get(node.op_type)
        parts = rewrite(site) if rewrite else None
        if parts is None:
            self._convert(site)
            return
        for part in parts:  # a part of the same kind is not rewritten again
            if part.op_type == node.op_type:
                self._convert(NodeSite(part, self.opset, self._known))
            else:
                self._import(part)

    def _known(self, name: str) -> TensorInfo:
        """Return what is known of a tensor for rewriting the node that reads it."""
        expr = self._nodes[name]
        value = expr.value.numpy() if _is_constant(expr) else None
        return TensorInfo(static_shape(expr.ty) or (), str(expr.ty.dtype), value)

    def _value(self, node: Any) -> list[Array] | None:
        """Return the outputs of a node that depends on nothing but constants; None where they are not known."""
        kind = node.op_type
        if kind in ("Shape", "Size"):
            shape = static_shape(self._nodes[node.input[0]].ty)
            if shape is None:
                return None
            if kind == "Size":
                return [np.array(math.prod(shape), "int64")]
            ends = {attribute.name: attribute.i for attribute in node.attribute}
            return [np.array(shape[ends.get("start", 0) : ends.get("end")], "int64")]
        if kind == "Constant" and node.attribute[0].name == "value":
            return [numpy_helper.to_array(node.attribute[0].t)]
        read = {name: self._nodes[name] for name in node.input if name}
        if kind.startswith(_WITHOUT_VALUE) or not all(map(_is_constant, read.values())):
            return None
        return self._evaluated(node, {name: expr.value.numpy() for name, expr in read.items()})

    def _evaluated(self, node: Any, read: Mapping[str, Array]) -> list[Array] | None:
        inputs = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in read.items()
        ]
        outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "one node", inputs, outputs)
        try:
            model = helper.make_model(graph, opset_imports=list(self._proto.opset_import))
            found = ReferenceEvaluator(model).run(None, dict(read))
        except Exception:  # onnx's own implementation raises any type for what it has not; TVM's converter may have it
            return None
        if len(outputs) != len(node.output) or not all(isinstance(array, (np.ndarray, np.generic)) for array in found):
            return None
        return [np.asarray(array) for array in found]

    def _convert(self, site: NodeSite) -> None:
        """Make an expression of a node, by TVM's converter or ours, and give its outputs their names."""
        node = site.node
        inputs = onnx_input()
        inputs.extend(self._nodes[name] if name else None for name in node.input)
        attributes = self._parse_attr(node.attribute)
        attributes["tvm_custom"] = {"name": node.name, "num_outputs": len(node.output)}
        own = CONVERTERS.get(node.op_type)
        found = own(site, inputs) if own else None
        if found is None:
            found = self._convert_operator(node.op_type, inputs, attributes, self.opset)
        else:
            found = self.bb.normalize(found)
        if isinstance(found.ty, relax.TupleType) and node.op_type not in _TUPLES:
            fields = [
                found.fields[index]
                if isinstance(found, relax.Tuple)
                else self.bb.emit(relax.TupleGetItem(found, index))
                for index in range(len(found.ty.fields))
            ]
        else:
            fields = [found]
        if len(fields) < len(node.output):
            raise ValueError(f"TVM computes {len(fields)} of its {len(node.output)} outputs")
        for name, expr in zip(node.output, fields, strict=False):
            expr = self._tensor(expr)
            if node.op_type not in _TUPLES:
                _check_static(node, expr)
            self._nodes[name] = expr

    def _tensor(self, expr: Any) -> Any:
        """Return a shape of numbers as a constant; other expressions as they are."""
        if isinstance(expr, relax.ShapeExpr) and all(isinstance(e, tvm.tirx.IntImm) for e in expr.values):
            return constant(np.array([int(extent) for extent in expr.values], "int64"))
        return expr


def lowerable(mod: tvm.IRModule) -> tvm.IRModule:
    """Return the module with operators that LegalizeOps makes kernels of; TVM sorts and scans by passes of its own.

    Raises:
        RefusedNode: an operator of Relax has no such rule.
    """
    for scanned in (False, True):
        kinds = {name_of(binding.value) for binding in mod["main"].body.blocks[0].bindings}
        lacking = sorted(kind for kind in kinds if kind and not _has_rule(kind))
        if not lacking:
            return mod
        if scanned:
            raise RefusedNode(f"TVM makes no kernel of {', '.join(lacking)}; export the model without it")
        with tvm.target.Target("llvm"):
            mod = relax.backend.DispatchSortScan()(mod)
    return mod


def _has_rule(kind: str) -> bool:
    if kind.startswith(("relax.call_", "relax.shape_")):  # shapes are folded
        return True
    return tvm.ir.Op.get(kind).get_attr("FLegalize") is not None


def _check_static(node: Any, expr: Any) -> None:
    shape = static_shape(expr.ty)
    if shape is None:
        raise RefusedNode(
            f"{label(node)}: its shape depends on data; export the model with fixed shapes and without what follows it "
            "(a selection of boxes, for instance)"
        )
    if min(shape, default=0) < 0:
        raise RefusedNode(f"{label(node)}: its input is too small, so that it would give {list(shape)}")


def _is_constant(expr: Any) -> bool:
    return isinstance(expr, tvm.ir.GenericConst)


def label(node: Any) -> str:
    """Return a node's operator and name; where it has no name, its first output."""
    name = f"node {node.name}" if node.name else f"output {next(iter(node.output), '?')}"
    return f"operator {node.op_type} ({name})"


def reason(error: BaseException) -> str:
    """Return the reason in TVM's message without its stack of frames."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(("File", "[", "Stack trace", "Traceback"))]
    text = (telling or [type(error).__name__])[-1]
    return text.removeprefix("InternalError: ").removeprefix("ValueError: ")[:300]


def converters() -> frozenset[str]:
    """Return the operators that can be imported, whatever their domain."""
    return frozenset(_get_convert_map()) | frozenset(_REWRITES) | {"Constant"}
