"""Several backends on one platform: one cuts the model's file, and each compiles the slices for its own devices.

A backend that can cut files of a format lists it in `Backend.cuts`, and its compiled models give a Slicer. A slice is a
whole model of the same format, so any other backend compiles it as it would any other file. Tensors keep the names and
types of the file, so stages of all backends fit one another. The backend that cuts compiles the whole model for its own
devices, and cuts it in the same way as without other backends.

Read `SlicedModel.stage` first. `registry.py` says which backends come together here.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import (
    Array,
    Backend,
    CompiledModel,
    Delegating,
    ModelSlice,
    Order,
    Port,
    Refused,
    Rewriting,
    Seconds,
    StageArena,
    StageRunner,
    loading,
)
from tvm_pipeline.backends.engine_agreement import disagreement
from tvm_pipeline.backends.operator_timing import LEAST_S, OperatorTimer
from tvm_pipeline.backends.ports import narrow_fault
from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError

# The key of a compiled slice: backend, target, digest of the slice.
Key = tuple[str, str, str]
_INDEX, _WHOLE = "sliced.json", "whole"


def cutting_backends(backends: Iterable[Backend], model_format: str) -> list[Backend]:
    """Return those that cut files of this format for the others."""
    return [backend for backend in backends if model_format in backend.cuts]


class SlicedBackend(Backend):
    """Several backends as one; it compiles for a platform that has devices of each."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends = {backend.name: backend for backend in backends}
        self.name = "+".join(sorted(self.backends))

    def refuses(self, model: Model) -> str:
        return "; ".join(reason for backend in self.backends.values() if (reason := backend.refuses(model)))

    def detect(self) -> Sequence[Device]:
        return [device for backend in self.backends.values() for device in backend.detect()]

    def settle(self, device: Device) -> Device:
        return self.backends[device.backend].settle(device)

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> SlicedModel:
        """Compile for the devices of the backend that cuts the file; slices for others are compiled as they are cut.

        Raises:
            PlatformError: no backend cuts files of this format, or several do.
        """
        lead = self._cutting(model)
        own = [device for device in devices if device.backend == lead.name]
        whole = lead.compile(model, own, order)
        return SlicedModel(self.backends, lead.name, whole)

    def rewriting(self, model: Model) -> Rewriting:
        """Read a model for the backend that cuts its file; slices for the others are those of the rewritten file."""
        return self._cutting(model).rewriting(model)

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        for name, backend in self.backends.items():
            parts = [
                part
                for model, stages in residents
                if isinstance(model, SlicedModel)
                for part in model.parts(name, stages, platform)
            ]
            backend.share(parts, platform)

    def load(self, folder: Path, devices: Sequence[Device]) -> SlicedModel:
        with loading(folder):
            lead, keys = msgspec.json.decode((folder / _INDEX).read_bytes(), type=tuple[str, list[Key]])
        return self._loaded(lead, folder / _WHOLE, folder, keys, devices)

    def load_first_layout(self, lead: str, folder: Path, devices: Sequence[Device]) -> SlicedModel:
        """Read what was saved before several backends had an index of their own.

        The files of the backend that cut lay in the folder itself, and its `index.json` listed the slices.
        """
        with loading(folder):
            _, keys = msgspec.json.decode((folder / "index.json").read_bytes(), type=tuple[str, list[Key]])
        return self._loaded(lead, folder, folder, keys, devices)

    def versions(self) -> Mapping[str, str]:
        return {key: version for backend in self.backends.values() for key, version in backend.versions().items()}

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()

    def _loaded(
        self, lead: str, whole: Path, folder: Path, keys: Sequence[Key], devices: Sequence[Device]
    ) -> SlicedModel:
        for name in (lead, *(key[0] for key in keys)):
            if name not in self.backends:
                raise BundleError(f"{folder}: the compiled model needs the backend {name}; compile it again")
        slices = {key: self.backends[key[0]].load(folder / str(index), devices) for index, key in enumerate(keys)}
        return SlicedModel(self.backends, lead, self.backends[lead].load(whole, devices), compiled=slices)

    def _cutting(self, model: Model) -> Backend:
        """Return the backend that cuts the model's file."""
        cutting = cutting_backends(self.backends.values(), model.format)
        names = ", ".join(self.backends)
        if not cutting:
            raise PlatformError(
                f"the platform mixes the backends {names}, and none of them cuts {model.format} files for the others; "
                "split the platform file, or convert the model to a format that one of them cuts"
            )
        if all(backend.engine for backend in cutting):  # they all cut the file as it is
            return min(cutting, key=lambda backend: backend.name)
        if len(cutting) > 1:
            both = " and ".join(backend.name for backend in cutting)
            raise PlatformError(
                f"the platform mixes the backends {names}, and {both} each cut {model.format} files: which one is to "
                f"cut {model.name} is not said. Leave the devices of all but one of {both} out of the platform file"
            )
        return cutting[0]


class SlicedModel(Delegating):
    """A model whose stages are compiled by the backends of their devices: the CompiledModel of a SlicedBackend.

    Args:
        backends: by name; all that the platform names.
        lead: the backend that cuts the file.
        whole: the model as that backend compiled it for its own devices.
        compiled: the slices that other backends compiled.
    """

    def __init__(
        self,
        backends: Mapping[str, Backend],
        lead: str,
        whole: CompiledModel,
        compiled: Mapping[Key, CompiledModel] | None = None,
    ) -> None:
        slicer = whole.slicer()
        if slicer is None:
            raise ModelError(
                f"the backend {lead} says that it cuts files like that of {whole.graph.name}, and does not"
            )
        super().__init__(whole)
        self._backends, self._lead = backends, lead
        self._slicer = slicer
        self._compiled = dict(compiled or {})
        self._timer = OperatorTimer(self.graph, self.stage, lambda: self._slicer.values(), self.time_transfers)
        self._refused: dict[str, dict[str, str]] = {}  # by backend: operators, with the reason
        self._differing: dict[tuple[str, str], dict[str, str]] = {}  # by backend and target: operators, and how

    def computes(self, device: Device) -> list[str]:
        refused = self.refusals(device)
        able = super().computes(device) if device.backend == self._lead else self.graph.operator_names
        return [name for name in able if name not in refused]

    def refusals(self, device: Device) -> Mapping[str, str]:
        """Return the operators that a device cannot compile, or computes otherwise, each with the reason."""
        differing = self._differing.get((device.backend, device.target), {})
        if device.backend == self._lead:
            return differing
        if device.backend not in self._refused:
            backend = self._backends[device.backend]
            reasons = {operator.name: self._refusal(operator, backend) for operator in self.graph.operators}
            self._refused[device.backend] = {name: reason for name, reason in reasons.items() if reason}
        return {**self._refused[device.backend], **differing}

    def _refusal(self, operator: Operator, backend: Backend) -> str:
        """Return why a backend cannot compile an operator; empty if it can."""
        read = (self.graph.tensors[name] for name in operator.inputs)
        fault = "" if backend.takes_narrow else narrow_fault((*read, *operator.outputs), backend.name)
        part = self._slicer.cut([operator.name])
        return fault or backend.refuses_slice(part.model)

    def check_engines(self, devices: Sequence[Device]) -> list[str]:
        """Run operators on a device of each backend and target from the tensors of the backend that cuts.

        Each operator runs. Of a backend that compiles each by itself, one runs of each group that do the same work.
        Then the whole model runs.
        """
        lines: list[str] = []
        for device in {(each.backend, each.target): each for each in reversed(devices)}.values():
            with ThreadPoolExecutor(1) as pool:  # a stage binds its thread
                lines += pool.submit(self._checked, device).result()
        return lines

    def _checked(self, device: Device) -> list[str]:
        precision = self._backends[device.backend].precision(device)
        values = self._timer.values
        found: dict[str, str] = {}
        for names, runner in self._alone(device):
            try:
                with runner as stage:
                    reason = disagreement(self.graph, names[:1], stage, values, precision)
            except PlanError:
                continue  # there is no work for it
            except ModelError as error:
                reason = str(error)
            found |= dict.fromkeys(names, reason) if reason else {}
        self._differing[device.backend, device.target] = found
        what = f"{self.graph.name} on {device.name} ({device.backend} {device.target})"
        lines = [f"{what}: {name} stays elsewhere, since {reason}" for name, reason in found.items()]
        if not found and self.computes(device) == self.graph.operator_names:
            with closing(self.stage(self.graph.operator_names, device)) as whole:
                if reason := disagreement(self.graph, self.graph.operator_names, whole, values, precision):
                    lines.append(f"{what}: its operators compute what they should, but of the whole model {reason}")
        return lines

    def _alone(self, device: Device) -> Iterator[tuple[list[str], AbstractContextManager[StageRunner]]]:
        """Yield stages of one operator on a device, each with the operators that it stands for."""
        if device.backend == self._lead or self._whole_on(device) is not None:
            for name in self.computes(device):
                yield [name], self._opened([name], device)
            return
        for indices, runner in self._timer.runners(device):
            if runner is not None:
                yield [self.graph.operators[index].name for index in indices], nullcontext(runner)

    @contextmanager
    def _opened(self, operators: Sequence[str], device: Device) -> Iterator[StageRunner]:
        with closing(self.stage(operators, device)) as stage:
            yield stage

    def slow_operators(self, device: Device) -> list[str]:
        return super().slow_operators(device) if device.backend == self._lead else []

    def kernels_to_tune(self, device: Device) -> Mapping[str, Sequence[Hashable]]:
        return super().kernels_to_tune(device) if device.backend == self._lead else {}

    def compare(self, devices: Sequence[Device]) -> Refused:
        """Compare the devices of the backend that cuts; others have no libraries of the whole model."""
        return super().compare([device for device in devices if device.backend == self._lead])

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make one stage of the operators on `device`.

        Raises:
            ModelError: a compiler refuses the stage, with its output.
            PlanError: they are no legal stage, or hold nothing that the device would compute.
            PlatformError: the device or its compiler cannot be used.
        """
        refused = {**self._refused.get(device.backend, {}), **self._differing.get((device.backend, device.target), {})}
        for name, reason in refused.items():
            if name in operators:
                raise PlanError(f"device {device.name} cannot compute operator {name} of {self.graph.name}: {reason}")
        if device.backend == self._lead:
            return super().stage(operators, device)
        part = self._slicer.cut(operators)
        compiled = self._compile_slice(part, device)
        computed = {tensor.name for operator in compiled.graph.operators for tensor in operator.outputs}
        # The outputs of the slice are those of what was compiled, in order, but have the names of the whole model.
        outputs = dict(zip((tensor.name for tensor in part.outputs), compiled.graph.outputs, strict=True))
        for name, output in outputs.items():
            if output not in computed:
                raise PlanError(
                    f"device {device.name} computes nothing for {name}, which only shows another tensor under "
                    "another shape or order; put the operator that makes it into a stage with those that read it"
                )
        return RenamedStage(compiled.stage(compiled.graph.operator_names, device), outputs)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """Return the bytes that the contract describes; raise as `stage` does."""
        compiled, own = self._compiled_on(operators, device)
        return compiled.activation_bytes(own, device)

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena | None:
        compiled, own = self._compiled_on(operators, device)
        return compiled.stage_arena(own, device)

    def _compiled_on(self, operators: Sequence[str], device: Device) -> tuple[CompiledModel, Sequence[str]]:
        """Return the model that has a stage on a device, and what it calls the stage's operators."""
        if device.backend == self._lead:
            return self.inner, operators
        compiled = self._compile_slice(self._slicer.cut(operators), device)
        return compiled, compiled.graph.operator_names

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators).

        On devices of backends that do not cut the file, each operator is timed as a stage of its own, or inside of the
        whole where the backend knows the file's tensors; those that `computes` lacks are NaN.
        """
        if device.backend == self._lead:
            seconds = super().time_operators(device, repeats)
        elif (whole := self._whole_on(device)) is not None:
            return self._timed_within(whole, device, repeats)
        else:
            seconds = self._timer.seconds(device, repeats)
        seconds[:, [self.graph.edges.index[name] for name in self.refusals(device)]] = np.nan
        return seconds

    def has_operator_times(self, device: Device) -> bool:
        if device.backend == self._lead:
            return super().has_operator_times(device)
        return (whole := self._whole_on(device)) is None or whole.has_operator_times(device)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        if device.backend == self._lead:
            return super().time_transfers(device, sizes_bytes, repeats)
        # A device moves the tensors of every model in the same way, so any slice serves.
        known = (compiled for key, compiled in self._compiled.items() if key[:2] == (device.backend, device.target))
        compiled = next(known, None) or self._compile_slice(self._slicer.cut(self.graph.operator_names[:1]), device)
        return compiled.time_transfers(device, sizes_bytes, repeats)

    def _whole_on(self, device: Device) -> CompiledModel | None:
        """Return the whole model as the device's backend compiles it; None where its tensors are not the file's."""
        if self.refusals(device):
            return None
        whole = self._compile_slice(self._slicer.cut(self.graph.operator_names), device)
        known = self.graph.edges.writer
        return whole if all(t.name in known for o in whole.graph.operators for t in o.outputs) else None

    def _timed_within(self, whole: CompiledModel, device: Device, repeats: int) -> Seconds:
        """Return seconds of the operators; of those that the device computes as one, the last one has all."""
        found = whole.time_operators(device, repeats)
        seconds = np.full((repeats, len(self.graph)), LEAST_S)
        for index, operator in enumerate(whole.graph.operators):
            last = max(self.graph.edges.writer[tensor.name] for tensor in operator.outputs)
            seconds[:, last] = found[:, index]
        return seconds

    def slicer(self) -> None:
        """Return None: its slices are cut already."""

    def parts(
        self, backend: str, stages: Sequence[Stage], platform: Platform
    ) -> list[tuple[CompiledModel, Sequence[Stage]]]:
        """Return the compiled models of one backend that these stages need, each with its stages."""
        own = list(_stages_of(backend, stages, platform))
        if backend == self._lead:
            return [(self.inner, own)]
        parts: list[tuple[CompiledModel, Sequence[Stage]]] = []
        for stage in own:
            for device in stage.devices:
                compiled = self._compile_slice(self._slicer.cut(stage.operators), platform.device(device))
                parts.append((compiled, [Stage((device,), tuple(compiled.graph.operator_names))]))
        return parts

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Write the whole model as its backend does, and the slices of `stages` that other backends compiled."""
        (folder / _WHOLE).mkdir()
        self.inner.save(folder / _WHOLE, list(_stages_of(self._lead, stages, platform)), platform)
        keys: list[Key] = []
        for stage in stages:
            for device in map(platform.device, stage.devices):
                if device.backend == self._lead:
                    continue
                part = self._slicer.cut(stage.operators)
                key = _key(part, device)
                if key not in keys:
                    subfolder = folder / str(len(keys))
                    subfolder.mkdir()
                    compiled = self._compile_slice(part, device)
                    compiled.save(subfolder, [Stage((device.name,), tuple(compiled.graph.operator_names))], platform)
                    keys.append(key)
        (folder / _INDEX).write_bytes(msgspec.json.encode((self._lead, keys)))

    def forget_source(self) -> None:
        for compiled in (self.inner, *self._compiled.values()):
            compiled.forget_source()
        del self._slicer

    def close(self) -> None:
        self._timer.close()
        for compiled in self._compiled.values():
            compiled.close()
        self._compiled.clear()
        super().close()

    def _compile_slice(self, part: ModelSlice, device: Device) -> CompiledModel:
        key = _key(part, device)
        if key not in self._compiled:
            backend = self._backends.get(device.backend)
            if backend is None:
                raise PlatformError(
                    f"device {device.name} is of the backend {device.backend}; {self.graph.name} was compiled for "
                    f"{', '.join(self._backends)}"
                )
            try:
                self._compiled[key] = backend.compile(part.model, [device], self.order)
            except ModelError as error:
                made = f"the stage of {self.graph.name} that makes {part.outputs[0].name}"
                raise ModelError(f"device {device.name} cannot run {made}: {error}") from error
        return self._compiled[key]


class RenamedStage(StageRunner):
    """A stage whose outputs have other names.

    Several names may be one output, since compilers compute what two operators have in common only once.
    """

    def __init__(self, runner: StageRunner, outputs: Mapping[str, str]) -> None:
        ports = {port.name: port for port in runner.outputs}
        self._runner = runner
        self.inputs = runner.inputs
        self.outputs = tuple(
            Port(name, ports[output].shape, ports[output].dtype, ports[output].layout)
            for name, output in outputs.items()
        )
        indices: dict[str, list[int]] = {name: [] for name in ports}
        for index, output in enumerate(outputs.values()):
            indices[output].append(index)
        self._written = [first for first, *_ in indices.values()]
        self._copied = [(first, other) for first, *others in indices.values() for other in others]

    def bind(self) -> None:
        self._runner.bind()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._runner.run(inputs, [outputs[index] for index in self._written])
        for index, other in self._copied:
            np.copyto(outputs[other], outputs[index])

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        return self._runner.take_turns(turn)

    def close(self) -> None:
        self._runner.close()


def _stages_of(backend: str, stages: Sequence[Stage], platform: Platform) -> Iterable[Stage]:
    """Return the stages that run on devices of one backend, with these devices alone."""
    for stage in stages:
        devices = tuple(name for name in stage.devices if platform.device(name).backend == backend)
        if devices:
            yield Stage(devices, stage.operators)


def _key(part: ModelSlice, device: Device) -> Key:
    return device.backend, device.target, part.digest
