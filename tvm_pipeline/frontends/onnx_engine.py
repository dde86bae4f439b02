"""The bases of a backend that is an engine for ONNX files, and of its models. Next: `onnx_model.py`."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tvm_pipeline.backends.contract import Array, Backend, Order, Port, StageRunner
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.backends.stage_process import IsolatedStage
from tvm_pipeline.backends.stage_process import StageRequest as StageOrder
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlanError, PlatformError, RunError
from tvm_pipeline.files import temporary_folder
from tvm_pipeline.frontends.onnx_model import OnnxModel

_log = logging.getLogger(__name__)

MAKING_S = 300.0  # for a child to make a stage


class OnnxEngine(Backend):
    """An engine that finds no devices by itself, since the same processors are TVM's unless somebody asks for it.

    A platform file asks by `backend`, or `compile` where TVM refuses a model (`engine_devices`).

    Attributes:
        title: the engine's own name.
        target: that of CPU cores.
        packages: of Python, that it needs; the extra that installs them has its name.
        models: where the class of its models is, `module:name`, which is imported when there is one.
        child: the function of the child that tries models first (`Trial`); asked [], it lists what the engine finds.
    """

    cuts = ("onnx",)
    title = target = models = child = ""
    packages: Sequence[str] = ()

    def __init__(self) -> None:
        self._trial = Trial(self.child)
        self._listed: Any = None

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> EngineModel:
        self.check_format(model)
        _log.info(f"{model.name} for {self.title}")
        targets = dict.fromkeys(device.target for device in devices) or [self.target]
        return self._model_type().compile(model, order, targets, self._trial)

    def refuses(self, model: Model) -> str:
        try:
            self.compile(model, []).close()
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return []

    def settle_elsewhere(self, device: Device) -> Device:
        self.check_installed()
        return device

    def load(self, folder: Path, devices: Sequence[Device]) -> EngineModel:
        self.check_installed()
        return self._model_type().load(folder)

    def listed(self) -> Any:
        """Return what the engine finds on this machine; raise PlatformError where it cannot be used."""
        self.check_installed()
        try:
            if self._listed is None:
                self._listed = self._trial.ask([])
        except RunError as error:
            raise PlatformError(f"{self.title} cannot list its devices: {error}") from error
        return self._listed

    def close(self) -> None:
        self._trial.close()

    def _model_type(self) -> type[EngineModel]:
        found: type[EngineModel] = resolve_name(self.models)
        return found

    def check_installed(self) -> None:
        """Raise PlatformError, with the extra to install, where a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise PlatformError(
                f"{' and '.join(missing)} is not installed: run `pip install 'tvm-pipeline[{self.name}]'`"
            )

    def check_format(self, model: Model) -> None:
        """Raise ModelError for a model of another format."""
        if model.format != "onnx":
            raise ModelError(f"{model.name} is {model.format}, {self.name} takes .onnx: export the model to ONNX")


class EngineModel(OnnxModel):
    """A compiled model whose parts are ONNX files that an engine runs; a backend adds `runner` and `time_operators`."""

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(model, order, joined)
        self._opened = ExitStack()
        self._saved: Path | None = None

    @classmethod
    @abstractmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> EngineModel:
        """Return any ONNX model for stages on devices of these targets, which `trial` tries first.

        What the engine does not compute, or computes otherwise than ONNX says, is left out of `computes`.

        Raises:
            ModelError: the engine refuses it, or it cannot be cut.
        """

    @abstractmethod
    def refusals(self, device: Device) -> Mapping[str, str]:
        """Return the operators that the engine does not compute on a device, each with the reason."""

    def computes(self, device: Device) -> list[str]:
        refused = self.refusals(device)
        return [operator.name for operator in self.graph.operators if operator.name not in refused]

    @abstractmethod
    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> StageRunner:
        """Return what runs a part of the file, which is an ONNX file, on a device; raise ModelError if it is refused.

        A device without cores and target is a CPU core that the system chooses.
        """

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        self._check(operators, device)
        return self.runner(self.file.part(operators).SerializeToString(), *self.ends(operators), device)

    def ends(self, operators: Sequence[str] = ()) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Return what operators, or all, read from outside, and what they hand on."""
        taken, given = slice_ends(self.graph, operators or [operator.name for operator in self.graph.operators])
        return tuple(map(Port.of, taken)), tuple(map(Port.of, given))

    def numbered(self, operators: Sequence[str] = (), prefix: str = "") -> bytes:
        """Return operators, or all, as a file whose nodes are named by their indices in the whole file."""
        names = [one.name for one in self.graph.operators if not operators or one.name in operators]
        part = self.file.part(names)
        indices = (index for name in names for index in self.file.indices[name])
        for index, node in zip(indices, part.graph.node, strict=True):
            node.name = f"{prefix}{index}"
        content: bytes = part.SerializeToString()
        return content

    def isolated_stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make a stage in a process of its own, which has the device's cores alone."""
        self._check(operators, device)
        if self._saved is None:
            self._saved = self._opened.enter_context(temporary_folder())
            self.save(self._saved, (), Platform("here", (device,)))
        return IsolatedStage(StageOrder((device.backend,), str(self._saved), tuple(operators), device), MAKING_S)

    def values(self) -> Mapping[str, Array]:
        """Return every tensor of one frame of noise, by name."""
        names = [operator.name for operator in self.graph.operators]
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

    def close(self) -> None:
        self._opened.close()

    def _check(self, operators: Sequence[str], device: Device) -> None:
        check_stage(self.graph, operators)
        for name, reason in self.refusals(device).items():
            if name in operators:
                raise PlanError(f"device {device.name} cannot compute operator {name} of {self.graph.name}: {reason}")
