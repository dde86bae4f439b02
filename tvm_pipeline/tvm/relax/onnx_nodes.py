"""Nodes of ONNX that TVM 0.27 imports wrongly or not at all, as nodes that it imports rightly.

Each function takes a node and what is known of its inputs, and gives the nodes that stand for it. New tensors have names
below the node's first output. Next: `onnx_importer.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from onnx import helper

from tvm_pipeline.tvm.relax.numpy_table import Array


class Known(NamedTuple):
    """What is known of a tensor: its shape, its dtype, and its value where it is a constant."""

    shape: tuple[int, ...]
    dtype: str
    value: Array | None


Look = Callable[[str], Known]


def nodes_for(node: Any, look: Look) -> list[Any]:
    """Return the nodes to import in the place of one; the node itself where it is imported as it is."""
    rewrite = _REWRITES.get(node.op_type)
    return (rewrite(node, look) if rewrite else None) or [node]


def _attributes(node: Any) -> dict[str, Any]:
    return {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}


_Rewrite = Callable[[Any, Look], "list[Any] | None"]

_REWRITES: dict[str, _Rewrite] = {}
REWRITTEN = frozenset(_REWRITES)
