"""An ONNX file as a compiled model: the base for backends that run parts of the file as they are.

Next: `onnx_graph.py`, which reads and cuts the file, and `backends/engine.py`, which runs what is cut.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tvm_pipeline.backends.contract import Array, ModelSlice, Order, Port, loading
from tvm_pipeline.backends.engine import EngineModel
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_graph import OnnxGraph

_MODEL_FILE, _SETTINGS_FILE = "model.onnx", "settings.json"
M = TypeVar("M", bound="OnnxModel")


class _Settings(msgspec.Struct):
    """What is saved of a model beside its file."""

    name: str
    inputs: tuple[Tensor, ...]
    order: Order
    joined: list[list[int]] = []


class OnnxModel(EngineModel):
    """A compiled model that is its file, and cuts it; a backend adds `runner`.

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
        super().__init__(self.file.graph, order)

    def content(self, operators: Sequence[str], device: Device) -> bytes:
        return bytes(self.file.part(operators).SerializeToString())

    def numbered(self, operators: Sequence[str] = (), prefix: str = "") -> bytes:
        """Return operators, or all, as a file whose nodes are named by their indices in the whole file."""
        names = [one.name for one in self.graph.operators if not operators or one.name in operators]
        part = self.file.part(names)
        indices = (index for name in names for index in self.file.indices[name])
        for index, node in zip(indices, part.graph.node, strict=True):
            node.name = f"{prefix}{index}"
        return bytes(part.SerializeToString())

    def values(self) -> Mapping[str, Array]:
        names = self.graph.operator_names
        inner = [tensor for operator in self.graph.operators for tensor in operator.outputs]
        content = self.file.part(names, inner).SerializeToString()
        taken, given = self.ends()[0], tuple(map(Port.of, inner))
        frame, found = frame_of_noise(self.graph), {port.name: port.buffer() for port in given}
        made = self.runner(content, taken, given, Device(self.graph.name, cores=()))
        try:
            made.run([frame[port.name] for port in taken], list(found.values()))
        except RunError as error:
            raise ModelError(f"{error}; it was a frame of noise") from error
        finally:
            made.close()
        return {**frame, **found}

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
        with loading(folder):
            found = msgspec.json.decode((folder / _SETTINGS_FILE).read_bytes(), type=_Settings)
            model = Model(found.name, "onnx", (folder / _MODEL_FILE).read_bytes(), found.inputs)
            return cls(model, found.order, found.joined) if found.joined else cls(model, found.order)

    def forget_source(self) -> None:
        del self.file  # the file, and the same parsed
