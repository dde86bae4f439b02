"""A TFLite model compiled for Edge TPUs: any of its operators as a runnable stage on any of them.

A stage is a slice of the file (`slicer.py`). On an Edge TPU it goes through edgetpu_compiler, on a stand-in it runs on
TFLite's CPU kernels. Devices of other backends have their slices compiled by those: `tvm_pipeline/backends/sliced.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tvm_pipeline.backends.contract import Array, Order, Port, StageArena, StageRunner, loading
from tvm_pipeline.backends.engine import EngineModel, refused_operators
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_edgetpu.compiler import Report, compile_parts, find_compiler
from tvm_pipeline_edgetpu.external import ENGINE, is_external
from tvm_pipeline_edgetpu.interpreter import CPU, InterpreterStage, is_edge_tpu
from tvm_pipeline_edgetpu.model import parse_for_kernels
from tvm_pipeline_edgetpu.ordering import arena_bytes, concatenations, memory_ordered
from tvm_pipeline_edgetpu.slicer import Slice, TfliteSlicer
from tvm_pipeline_edgetpu.support import unsupported
from tvm_pipeline_edgetpu.versions import for_compiler

_log = logging.getLogger(__name__)

MEMORY_ORDERED = "memory_ordered"  # an empty file of this name marks a saved model with order "memory"


class EdgeTpuModel(EngineModel):
    """The CompiledModel of the Edge TPU backend.

    It times no transfers: a stand-in computes in host memory, and the driver does not tell those of an Edge TPU apart,
    whose model prices them (`DeviceModel.transfer_s`).

    Args:
        model: a .tflite; `EdgeTpuBackend.compile` checks that an Edge TPU takes it, where it is to run on one.
        order: how TFLite and edgetpu_compiler are given the operators of a slice.
        parts: the files that edgetpu_compiler made of slices, by the digest of the slice.

    Attributes:
        uncut: why the model is one operator; empty where it can be cut.
    """

    def __init__(self, model: Model, order: Order = "listed", parts: Mapping[str, bytes] | None = None) -> None:
        self._model = model
        self._parsed = parse_for_kernels(Path(f"{model.name}.tflite"), model.content)
        self.uncut = self._parsed.uncut
        self._slicer = TfliteSlicer(model, self._parsed)
        self._parts = dict(parts or {})
        super().__init__(self._parsed.graph, order)

    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> EdgeTpuModel:
        compiled, targets = cls(model, order), list(targets)
        if compiled.uncut:
            _log.warning("%s is one stage, because it cannot be cut: %s", model.name, compiled.uncut)
        if any(map(is_edge_tpu, targets)):
            for reason, operators in compiled.unsupported().items():
                _log.warning("an Edge TPU leaves %s of %s to the CPU: %s", ", ".join(operators), model.name, reason)
        for target in filter(is_external, targets):
            compiled._leave_refused(Device("", target=target), trial)
        return compiled

    def _leave_refused(self, device: Device, trial: Trial) -> None:
        """Leave to others what a delegate refuses; raise ModelError where it computes nothing."""
        target = device.target
        refused = refused_operators(self.graph, lambda one: trial.ask(target, self.content([one], device)), target)
        self.refuse({target: refused})

    def content(self, operators: Sequence[str], device: Device) -> bytes:
        part = self._slicer.slice(operators)
        if _address(device) == CPU or is_external(device.target):
            return self._content(part)
        return self._for_edge_tpu(part, operators)

    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> StageRunner:
        return InterpreterStage(content, inputs, outputs, _address(device), device.cores)

    def stage_here(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make one stage of the operators on `device`.

        Raises:
            ModelError: the compiler or TFLite refuses the stage, with its output.
            PlanError: they are no legal stage, or the device does not compute one of them.
            PlatformError: the Edge TPU or its compiler cannot be used, or the delegate.
        """
        try:
            return super().stage_here(operators, device)
        except PlatformError as error:
            if _address(device) == CPU:
                raise
            raise PlatformError(f"device {device.name}: {error}") from error

    def values(self) -> Mapping[str, Array]:
        return self._slicer.values()

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """Return what TFLite would allocate for the stage, because the Edge TPU's compiler does not report it.

        Raises as `stage` does.
        """
        part = self._slicer.slice(operators)
        return arena_bytes(part.content), arena_bytes(self._content(part))

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena:
        """Return what TFLite has for the stage; what it would be without shared bytes TFLite does not tell."""
        content = self._content(self._slicer.slice(operators))
        return StageArena(arena_bytes(content), None, *concatenations(content))

    def has_operator_times(self, device: Device) -> bool:
        """Return whether TFLite's own kernels compute the operators: a delegate computes what it takes as one."""
        return not is_external(device.target)

    def slicer(self) -> TfliteSlicer:
        return self._slicer

    def unsupported(self) -> dict[str, list[str]]:
        """Return the operators that no Edge TPU takes, grouped by the reason."""
        reasons: dict[str, list[str]] = {}
        for operator, reason in unsupported(self._parsed).items():
            reasons.setdefault(reason, []).append(operator)
        return reasons

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Write the file itself, and the compiled slices of `stages`.

        If the compiler is here, slices are compiled for absent Edge TPUs as well, because their board may lack it.
        """
        (folder / "model.tflite").write_bytes(self._model.content)
        for stage in stages:
            if any(_is_compiled_for(platform.device(name)) for name in stage.devices):
                part = self._slicer.slice(stage.operators)
                (folder / f"{_digest(part)}_edgetpu.tflite").write_bytes(self._for_edge_tpu(part, stage.operators))
        if self.order == "memory":
            (folder / MEMORY_ORDERED).touch()
        # The empty list once named the slices of other backends; `sliced.py` now keeps an index of those.
        (folder / "index.json").write_bytes(msgspec.json.encode((self._model.name, [])))

    @classmethod
    def load(cls, folder: Path) -> EdgeTpuModel:
        """Read what `save` wrote; raise BundleError where it is damaged."""
        with loading(folder):
            name, _ = msgspec.json.decode((folder / "index.json").read_bytes(), type=tuple[str, list[object]])
            content = (folder / "model.tflite").read_bytes()
            parts = {file.name.split("_")[0]: file.read_bytes() for file in folder.glob("*_edgetpu.tflite")}
        order: Order = "memory" if (folder / MEMORY_ORDERED).exists() else "listed"
        return cls(Model(name, "tflite", content), order=order, parts=parts)

    def forget_source(self) -> None:
        del self._model, self._parsed, self._slicer
        self._parts.clear()

    def _content(self, part: Slice) -> bytes:
        """Return the file of a slice as it runs or is compiled; its digest is that of the slice as it was cut."""
        return memory_ordered(part.content) if self.order == "memory" and not self.uncut else part.content

    def _for_compiler(self, part: Slice, operators: Sequence[str]) -> bytes:
        return for_compiler(self._parsed, operators, self._content(part))

    def _for_edge_tpu(self, part: Slice, operators: Sequence[str]) -> bytes:
        digest = _digest(part)
        if digest not in self._parts:
            [(content, report)] = compile_parts([self._for_compiler(part, operators)], [self.graph.name])
            self._keep(part, content, report)
        return self._parts[digest]

    def _keep(self, part: Slice, content: bytes, report: Report) -> None:
        """Take what edgetpu_compiler made of a slice, and log what it left to the CPU."""
        self._parts[_digest(part)] = content
        if report.on_cpu:
            left = [f"{count} {kind} ({status})" for kind, count, status in report.operators if "Mapped" not in status]
            _log.warning(
                "edgetpu_compiler leaves %d of %d operators of a stage of %s to the CPU: %s",
                report.on_cpu,
                report.mapped + report.on_cpu,
                self.graph.name,
                ", ".join(left) or "it does not say which",
            )


def co_compile(residents: Sequence[tuple[EdgeTpuModel, Sequence[Stage]]], devices: Sequence[Device]) -> None:
    """Compile the slices of several models that share a device in one call, so that they share its cache.

    Only devices with the address of an Edge TPU count. If neither the Edge TPU nor the compiler is here, do nothing.
    """
    for device in devices:
        if not _is_compiled_for(device):
            continue
        parts = [
            (model, model._slicer.slice(stage.operators), stage.operators)
            for model, stages in residents
            for stage in stages
            if device.name in stage.devices
        ]
        if len(parts) > 1:
            contents = [model._for_compiler(part, operators) for model, part, operators in parts]
            made = compile_parts(contents, [model.graph.name for model, _, _ in parts])
            for (model, part, _), (content, report) in zip(parts, made, strict=True):
                model._keep(part, content, report)


def _is_compiled_for(device: Device) -> bool:
    """Return whether slices for the device go through edgetpu_compiler; for an absent one, if the compiler is here."""
    return is_edge_tpu(device.target) and (not device.stand_in or find_compiler() is not None)


def _address(device: Device) -> str:
    """Return what runs the stages of a device, as `make_interpreter` is told."""
    return CPU if device.stand_in or device.target == ENGINE else device.target


def _digest(part: Slice) -> str:
    return hashlib.sha256(part.content).hexdigest()[:32]
