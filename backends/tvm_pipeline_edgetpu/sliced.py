"""A TFLite model compiled for a platform: any of its operators as a runnable stage on any of the devices.

A stage is a slice of the file (`slicer.py`). On an Edge TPU it goes through edgetpu_compiler, on a stand-in it runs on
TFLite's CPU kernels, and for a device of another backend that backend compiles it, as it would any other .tflite.
Tensors keep the names, types and scales of the file, so stages of all kinds fit one another.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import (
    MEMORY_ORDERED,
    Array,
    CompiledModel,
    Port,
    Progress,
    StageRunner,
    find_backend,
    noise,
)
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError
from tvm_pipeline_edgetpu.compiler import Report, compile_parts, find_compiler
from tvm_pipeline_edgetpu.interpreter import CPU, InterpreterStage, every_tensor
from tvm_pipeline_edgetpu.model import parse_model
from tvm_pipeline_edgetpu.ordering import arena_bytes, memory_ordered
from tvm_pipeline_edgetpu.slicer import Slice, slice_operators
from tvm_pipeline_edgetpu.support import unsupported

_log = logging.getLogger(__name__)

# What another backend compiled: backend, target, digest of the slice.
Key = tuple[str, str, str]

_LEAST_S = 1e-9


class SlicedModel:
    """What the Edge TPU backend returns as its CompiledModel.

    Args:
        model: a .tflite.
        tell: is told what is being compiled.
        parts: what edgetpu_compiler made of slices, by their digest.
        compiled: what other backends made of slices, by backend, target and digest.
        memory_ordered: TFLite and edgetpu_compiler are given the operators of a slice in the order of least memory.
    """

    def __init__(
        self,
        model: Model,
        tell: Progress = lambda _: None,
        parts: Mapping[str, bytes] | None = None,
        compiled: Mapping[Key, CompiledModel] | None = None,
        memory_ordered: bool = False,
    ) -> None:
        self.memory_ordered = memory_ordered
        self._model = model
        self._parsed = parse_model(Path(f"{model.name}.tflite"), model.content)
        self.graph = self._parsed.graph
        self._tell = tell
        self._parts = dict(parts or {})
        self._compiled = dict(compiled or {})
        self._alone: dict[Device, list[StageRunner | None]] = {}

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """The operators as one stage on `device`.

        Raises:
            ModelError: a compiler or TFLite refuses the stage, with its output.
            PlanError: they are no legal stage, or hold nothing that the device would compute.
            PlatformError: the Edge TPU or its compiler cannot be used.
        """
        part = self._slice(operators)
        if device.backend != "edgetpu":
            return self._elsewhere(part, device)
        if device.stand_in:
            return InterpreterStage(self._content(part), part.inputs, part.outputs, CPU, device.cores)
        try:
            return InterpreterStage(self._for_edge_tpu(part), part.inputs, part.outputs, device.target, device.cores)
        except PlatformError as error:
            raise PlatformError(f"device {device.name}: {error}") from error

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """As the contract says; of an Edge TPU, whose compiler does not say it, what TFLite would take for the stage.

        Raises as `stage` does.
        """
        part = self._slice(operators)
        if device.backend == "edgetpu":
            return arena_bytes(part.content), arena_bytes(self._content(part))
        compiled = self._compiled_elsewhere(part, device)
        return compiled.activation_bytes([operator.name for operator in compiled.graph.operators], device)

    def time_operators(self, device: Device, repeats: int) -> npt.NDArray[np.float64]:
        """Seconds of every operator (repeats x operators), each as a stage of its own, on the values of a real frame.

        Of operators that do the same work on tensors of the same extents one is timed for all. One that the device's
        compiler makes nothing of, such as a reshape, takes no time.
        """
        if device not in self._alone:
            names = [self.graph.operators[places[0]].name for places in self._alike]
            self._alone[device] = [self._alone_on(name, device) for name in names]
        values = self._values
        seconds = np.full((repeats, len(self.graph)), _LEAST_S)
        for places, runner in zip(self._alike, self._alone[device], strict=True):
            if runner is None:
                continue
            inputs = [port.buffer() for port in runner.inputs]
            for port, array in zip(runner.inputs, inputs, strict=True):
                np.copyto(array, values[port.name].reshape(port.shape))
            outputs = [port.buffer() for port in runner.outputs]
            runner.run(inputs, outputs)
            for row in range(repeats):
                begin = time.perf_counter()
                runner.run(inputs, outputs)
                seconds[row, places] = time.perf_counter() - begin
        return seconds

    def unsupported(self) -> dict[str, list[str]]:
        """The operators that no Edge TPU takes, by the reason."""
        reasons: dict[str, list[str]] = {}
        for operator, reason in unsupported(self._parsed).items():
            reasons.setdefault(reason, []).append(operator)
        return reasons

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """The file itself, and what compilers made of the slices of `stages`.

        Slices for Edge TPUs are compiled even where those are not here, if the compiler is: the board may lack it.
        """
        (folder / "model.tflite").write_bytes(self._model.content)
        keys: list[Key] = []
        for stage in stages:
            part = self._slice(stage.operators)
            for device in map(platform.device, stage.devices):
                if device.backend == "edgetpu":
                    if _is_compiled_for(device):
                        (folder / f"{_digest(part)}_edgetpu.tflite").write_bytes(self._for_edge_tpu(part))
                elif (key := _key(part, device)) not in keys:
                    place = folder / str(len(keys))
                    place.mkdir()
                    self._compiled_elsewhere(part, device).save(place, (), platform)
                    keys.append(key)
        if self.memory_ordered:
            (folder / MEMORY_ORDERED).touch()
        (folder / "index.json").write_bytes(msgspec.json.encode((self._model.name, keys)))

    @classmethod
    def load(cls, folder: Path) -> SlicedModel:
        """Reads what `save` wrote; raises BundleError where it is damaged."""
        try:
            name, keys = msgspec.json.decode((folder / "index.json").read_bytes(), type=tuple[str, list[Key]])
            content = (folder / "model.tflite").read_bytes()
            parts = {file.name.split("_")[0]: file.read_bytes() for file in folder.glob("*_edgetpu.tflite")}
        except (OSError, msgspec.DecodeError) as error:
            raise BundleError(f"{folder}: damaged compiled model ({error}); compile it again") from error
        compiled = {key: find_backend(key[0]).load(folder / str(place)) for place, key in enumerate(keys)}
        ordered = (folder / MEMORY_ORDERED).exists()
        return cls(Model(name, "tflite", content), parts=parts, compiled=compiled, memory_ordered=ordered)

    def _slice(self, operators: Sequence[str]) -> Slice:
        names = {operator.name for operator in self.graph.operators}
        for name in operators:
            if name not in names:
                raise PlanError(f"the stage names operator {name}, which {self.graph.name} does not have")
        return slice_operators(self._parsed, operators)

    def _content(self, part: Slice) -> bytes:
        """The file of a slice as it is run or compiled; the slice itself, as cut, is what it is known by."""
        return memory_ordered(part.content) if self.memory_ordered else part.content

    def _for_edge_tpu(self, part: Slice) -> bytes:
        digest = _digest(part)
        if digest not in self._parts:
            [(content, report)] = compile_parts([self._content(part)], [self.graph.name], tell=self._tell)
            self._keep(part, content, report)
        return self._parts[digest]

    def _keep(self, part: Slice, content: bytes, report: Report) -> None:
        """Takes what edgetpu_compiler made of a slice, and says what it would not."""
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

    def _compiled_elsewhere(self, part: Slice, device: Device) -> CompiledModel:
        key = _key(part, device)
        if key not in self._compiled:
            model = Model(f"{self.graph.name}_{key[2][:8]}", "tflite", part.content, part.inputs)
            try:
                self._compiled[key] = find_backend(device.backend).compile(model, [device], self._tell)
            except ModelError as error:
                raise ModelError(f"device {device.name} cannot run {self._described(part)}: {error}") from error
        self._compiled[key].memory_ordered = self.memory_ordered
        return self._compiled[key]

    def _elsewhere(self, part: Slice, device: Device) -> StageRunner:
        compiled = self._compiled_elsewhere(part, device)
        computed = {tensor.name for operator in compiled.graph.operators for tensor in operator.outputs}
        # The outputs of the slice are those of what was compiled, in order, but bear the names of the file.
        outputs = dict(zip((tensor.name for tensor in part.outputs), compiled.graph.outputs, strict=True))
        for name, output in outputs.items():
            if output not in computed:
                raise PlanError(
                    f"device {device.name} computes nothing for {name}, which only shows another tensor under "
                    "another shape or order; put the operator that makes it into a stage with those that read it"
                )
        return _Renamed(compiled.stage([operator.name for operator in compiled.graph.operators], device), outputs)

    def _described(self, part: Slice) -> str:
        return f"the stage of {self.graph.name} that makes {part.outputs[0].name}"

    @cached_property
    def _alike(self) -> list[list[int]]:
        """The places of operators that take the same time: the same work, on tensors of the same extents."""
        tensors = self.graph.tensors
        found: dict[object, list[int]] = {}
        for place, operator in enumerate(self.graph.operators):
            extents = tuple((tensors[name].shape, tensors[name].dtype) for name in operator.inputs)
            results = tuple((tensor.shape, tensor.dtype) for tensor in operator.outputs)
            work = operator.kind, operator.macs, operator.param_bytes, extents, results
            found.setdefault(work, []).append(place)
        return list(found.values())

    @cached_property
    def _values(self) -> dict[str, Array]:
        """Every tensor of one frame of noise, by name."""
        frame = {tensor.name: noise(Port(tensor.name, tensor.shape, tensor.dtype)) for tensor in self.graph.inputs}
        return every_tensor(self._model.content, frame)

    def _alone_on(self, operator: str, device: Device) -> StageRunner | None:
        try:
            return self.stage([operator], device)
        except PlanError:
            return None


def co_compile(residents: Sequence[tuple[SlicedModel, Sequence[Stage]]], devices: Sequence[Device]) -> None:
    """Compiles the slices of several models that share a device in one call, so that they share its cache.

    Only where an Edge TPU is meant, by its address; where none is here and no compiler either, nothing is done.
    """
    for device in devices:
        if not _is_compiled_for(device):
            continue
        parts = [
            (model, model._slice(stage.operators))
            for model, stages in residents
            for stage in stages
            if device.name in stage.devices
        ]
        if len(parts) > 1:
            contents = [model._content(part) for model, part in parts]
            made = compile_parts(contents, [model.graph.name for model, _ in parts])
            for (model, part), (content, report) in zip(parts, made, strict=True):
                model._keep(part, content, report)


def _is_compiled_for(device: Device) -> bool:
    """Whether slices for it go through edgetpu_compiler; for one that is not here, if the compiler is."""
    return device.target != CPU and (not device.stand_in or find_compiler() is not None)


class _Renamed:
    """A runner whose outputs bear other names.

    Several names may be one output, since compilers compute what two operators have in common only once.
    """

    def __init__(self, runner: StageRunner, outputs: Mapping[str, str]) -> None:
        ports = {port.name: port for port in runner.outputs}
        self.inputs, self.bind, self._run = runner.inputs, runner.bind, runner.run
        self.outputs = tuple(
            Port(name, ports[output].shape, ports[output].dtype, ports[output].layout)
            for name, output in outputs.items()
        )
        places: dict[str, list[int]] = {name: [] for name in ports}
        for place, output in enumerate(outputs.values()):
            places[output].append(place)
        self._written = [first for first, *_ in places.values()]
        self._copied = [(first, other) for first, *others in places.values() for other in others]

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._run(inputs, [outputs[place] for place in self._written])
        for place, other in self._copied:
            np.copyto(outputs[other], outputs[place])


def _key(part: Slice, device: Device) -> Key:
    return device.backend, device.target, _digest(part)


def _digest(part: Slice) -> str:
    return hashlib.sha256(part.content).hexdigest()[:32]
