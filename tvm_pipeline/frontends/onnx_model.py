"""An ONNX file as a compiled model: the base for backends that run the operators of the file as they are.

Next: `onnx_graph.py`, which reads and cuts the file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tvm_pipeline.backends.contract import Array, CompiledModel, ModelSlice, Order
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.errors import BundleError, ModelError
from tvm_pipeline.frontends.onnx_graph import OnnxGraph

_MODEL_FILE, _SETTINGS_FILE = "model.onnx", "settings.json"
M = TypeVar("M", bound="OnnxModel")


class _Settings(msgspec.Struct):
    """What is saved of a model beside its file."""

    name: str
    inputs: tuple[Tensor, ...]
    order: Order
    joined: list[list[int]] = []


class OnnxModel(CompiledModel):
    """A compiled model that is its file, and cuts it; a backend adds `stage`, `time_operators` and `values`.

    Args:
        model: of the format onnx; its inputs fix what the file leaves open.
        order: is kept and changes nothing, since the runtime of the backend orders operators itself.
        joined: nodes that are one operator each, as `OnnxGraph` takes them.

    Attributes:
        takes_narrow: as that of `Backend`.

    Raises what `OnnxGraph` raises.
    """

    takes_narrow = False

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        self.file = OnnxGraph(model, joined, self.takes_narrow)
        self.graph, self.order = self.file.graph, order

    @abstractmethod
    def values(self) -> Mapping[str, Array]:
        """Return every tensor of one frame of noise, by name."""

    def slicer(self) -> OnnxModel:
        return self

    def cut(self, operators: Collection[str]) -> ModelSlice:
        return self.file.cut(operators)

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        source = self.file.source
        settings = _Settings(source.name, source.inputs, self.order, [list(nodes) for nodes in self.file.joined])
        (folder / _MODEL_FILE).write_bytes(source.content)
        (folder / _SETTINGS_FILE).write_bytes(msgspec.json.encode(settings))

    @classmethod
    def load(cls: type[M], folder: Path) -> M:
        """Read what `save` wrote; raise BundleError if it is damaged."""
        try:
            found = msgspec.json.decode((folder / _SETTINGS_FILE).read_bytes(), type=_Settings)
            model = Model(found.name, "onnx", (folder / _MODEL_FILE).read_bytes(), found.inputs)
            return cls(model, found.order, found.joined) if found.joined else cls(model, found.order)
        except (OSError, msgspec.DecodeError, ModelError, ValueError) as error:
            raise BundleError(f"{folder}: damaged compiled model ({error}); compile it again") from error

    def forget_source(self) -> None:
        del self.file  # the file, and the same parsed
