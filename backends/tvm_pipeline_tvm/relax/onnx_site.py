"""A node of ONNX, and what is known around it: what the rewriting of nodes works on. Next: `onnx_nodes.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from onnx import helper, numpy_helper

from tvm_pipeline_tvm.numpy_rules import Array


class TensorInfo(NamedTuple):
    """What is known of a tensor: its shape, its dtype, and its value where it is a constant."""

    shape: tuple[int, ...]
    dtype: str
    value: Array | None


class NodeSite(NamedTuple):
    """A node that is imported, and what surrounds it.

    Attributes:
        node: the node.
        opset: the version of the operators.
        look: gives what is known of a tensor by its name.
    """

    node: Any
    opset: int
    look: Callable[[str], TensorInfo]

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.node)

    def name(self, suffix: str) -> str:
        """Return the name of a tensor that only the new nodes have."""
        return f"{self.node.output[0]}/{suffix}"

    def constant(self, suffix: str, value: Any) -> Any:
        """Return a node that gives a constant its name."""
        tensor = numpy_helper.from_array(np.asarray(value))
        return helper.make_node("Constant", [], [self.name(suffix)], value=tensor)

    def value(self, index: int) -> Array | None:
        """Return an input that is a constant; None where it is left out, or is none."""
        name = self.input(index)
        return self.look(name).value if name else None

    def input(self, index: int) -> str:
        """Return the name of an input; empty where it is left out."""
        return str(self.node.input[index]) if index < len(self.node.input) else ""


def attributes_of(node: Any) -> dict[str, Any]:
    """Return the attributes of a node by name, text as str."""
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()}


Rewrite = Callable[[NodeSite], "list[Any] | None"]
