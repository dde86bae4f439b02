"""An ONNX file as a compiled model: the base for backends that run the operators of the file as they are.

Next: `onnx_graph.py`, which reads and cuts the file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec

from tvm_pipeline.backends.contract import Array, CompiledModel, ModelSlice, Order, Port, StageRunner
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.backends.stage_process import IsolatedStage
from tvm_pipeline.backends.stage_process import Order as StageOrder
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, RunError
from tvm_pipeline.files import temporary_folder
from tvm_pipeline.frontends.onnx_graph import OnnxGraph

_MODEL_FILE, _SETTINGS_FILE = "model.onnx", "settings.json"
MAKING_S = 300.0  # for a child to make a stage
M = TypeVar("M", bound="OnnxModel")


class _Settings(msgspec.Struct):
    """What is saved of a model beside its file."""

    name: str
    inputs: tuple[Tensor, ...]
    order: Order
    joined: list[list[int]] = []


class OnnxModel(CompiledModel):
    """A compiled model that is its file, and cuts it; a backend adds `runner` and `time_operators`.

    Args:
        model: of the format onnx; its inputs fix what the file leaves open.
        order: is kept and changes nothing, since the runtime of the backend orders operators itself.
        joined: nodes that are one operator each, as `OnnxGraph` takes them.

    Raises what `OnnxGraph` raises.
    """

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        self.file = OnnxGraph(model, joined)
        self.graph, self.order = self.file.graph, order
        self._opened = ExitStack()
        self._saved: Path | None = None

    @abstractmethod
    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> StageRunner:
        """Return what runs a part of the file, which is an ONNX file, on a device; raise ModelError if it is refused.

        A device without cores and target is a CPU core that the system chooses.
        """

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        check_stage(self.graph, operators)
        content = self.file.part(operators).SerializeToString()
        taken, given = (tuple(map(Port.of, tensors)) for tensors in slice_ends(self.graph, operators))
        return self.runner(content, taken, given, device)

    def isolated_stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make a stage in a process of its own, which has the device's cores alone."""
        if self._saved is None:
            self._saved = self._opened.enter_context(temporary_folder())
            self.save(self._saved, (), Platform("here", (device,)))
        return IsolatedStage(StageOrder((device.backend,), str(self._saved), tuple(operators), device), MAKING_S)

    def values(self) -> Mapping[str, Array]:
        """Return every tensor of one frame of noise, by name."""
        names = [operator.name for operator in self.graph.operators]
        inner = [tensor for operator in self.graph.operators for tensor in operator.outputs]
        content = self.file.part(names, inner).SerializeToString()
        taken, given = tuple(map(Port.of, slice_ends(self.graph, names)[0])), tuple(map(Port.of, inner))
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
        try:
            found = msgspec.json.decode((folder / _SETTINGS_FILE).read_bytes(), type=_Settings)
            model = Model(found.name, "onnx", (folder / _MODEL_FILE).read_bytes(), found.inputs)
            return cls(model, found.order, found.joined)
        except (OSError, msgspec.DecodeError, ModelError, ValueError) as error:
            raise BundleError(f"{folder}: damaged compiled model ({error}); compile it again") from error

    def forget_source(self) -> None:
        del self.file  # the file, and the same parsed

    def close(self) -> None:
        self._opened.close()
