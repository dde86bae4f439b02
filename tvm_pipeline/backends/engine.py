"""What engines have in common: the bases of an engine's backend, of its compiled models and of its stages.

An engine compiles files that are parts of a model, and runs them. Next: `trial.py`, the child that loads it first, and
`frontends/onnx_model.py`, for engines of ONNX.
"""

from __future__ import annotations

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Array, Backend, CompiledModel, Order, Port, Refused, Seconds, StageRunner
from tvm_pipeline.backends.cores import bind, check_cores
from tvm_pipeline.backends.engine_targets import check_properties, parsed_target
from tvm_pipeline.backends.operator_timing import OperatorTimer, alike_operators
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.stage_process import IsolatedStage, StageRequest
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlanError, PlatformError, RunError
from tvm_pipeline.files import temporary_folder

_log = logging.getLogger(__name__)

MAKING_S = 300.0  # for a child to make a stage
# The cores of this process before any thread is bound to some of them: those of the device where a stage is isolated,
# since `stage_process.py` binds its process before it imports an engine.
CORES = frozenset(os.sched_getaffinity(0))
LEAST_COUNTED_S = 1e-7  # engines count microseconds; this is what they show as 0


class Engine(Backend):
    """An engine that finds no devices by itself, since the same processors are TVM's unless somebody asks for it.

    A platform file asks by `backend`, or `compile` where TVM refuses a model (`engine_devices`).

    Attributes:
        format: what it calls the format that it cuts.
        target: that of CPU cores.
        packages: the Python packages that it needs; the extra that installs them has its name.
        models: where the class of its models is, `module:name`, which is imported when there is one. Its `load` takes a
            folder, and its `compile` a model, an order, the targets of devices, and the Trial that tries these first.
        child: the function of the child that tries models first (`Trial`); asked [], it lists what the engine finds.
    """

    format = target = models = child = ""
    packages: Sequence[str] = ()

    def __init__(self) -> None:
        self._trial = Trial(self.child)
        self._listed: Any = None

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> EngineModel:
        [own] = self.cuts
        if model.format != own:
            raise ModelError(
                f"{model.name} is {model.format}, {self.name} takes .{own}: export the model to {self.format}"
            )
        self.check_installed()
        _log.info(f"{model.name} for {self.engine}")
        targets = dict.fromkeys(device.target for device in devices) or [self.target]
        found: EngineModel = resolve_name(self.models).compile(model, order, targets, self._trial)
        return found

    def refuses(self, model: Model) -> str:
        try:
            self.compile(model, []).close()
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return []

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        self.check_installed()
        return [Device(device.name, self.name, device.cores, self.target) for device in beside]

    def known_properties(self, device: Device) -> Collection[str]:
        """Return the properties that a target may have; raise PlatformError where the engine has no such target."""
        return ()

    def settle(self, device: Device) -> Device:
        self.check_installed()
        device = replace(device, target=device.target or (self.target if device.cores else ""))
        known = self.known_properties(device)
        if device.cores or parsed_target(device.target)[0] in ("", self.target):
            check_cores(device)
        check_properties(device, known)
        return device

    def settle_elsewhere(self, device: Device) -> Device:
        self.check_installed()
        return device

    def load(self, folder: Path, devices: Sequence[Device]) -> EngineModel:
        self.check_installed()
        found: EngineModel = resolve_name(self.models).load(folder)
        return found

    def listed(self) -> Any:
        """Return what the engine finds on this machine; raise PlatformError where it cannot be used."""
        self.check_installed()
        try:
            if self._listed is None:
                self._listed = self._trial.ask([])
        except RunError as error:
            raise PlatformError(f"{self.engine} cannot list its devices: {error}") from error
        return self._listed

    def close(self) -> None:
        self._trial.close()

    def check_installed(self) -> None:
        """Raise PlatformError, with the extra to install, where a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise PlatformError(
                f"{' and '.join(missing)} is not installed: run `pip install 'tvm-pipeline[{self.name}]'`"
            )


class EngineModel(CompiledModel):
    """A compiled model whose parts are files that an engine runs.

    Attributes:
        refused: by target, the operators that the engine does not compute there, each with the reason.
    """

    def __init__(self, graph: OperatorGraph, order: Order) -> None:
        self.graph, self.order = graph, order
        self.refused: dict[str, Mapping[str, str]] = {}
        self._timer = OperatorTimer(graph, self.stage_here, self.values, self.time_transfers)
        self._opened = ExitStack()
        self._saved: Path | None = None

    @abstractmethod
    def content(self, operators: Sequence[str], device: Device) -> bytes:
        """Return operators as a file for a device."""

    @abstractmethod
    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> StageRunner:
        """Return what runs a file of `content` on a device; raise ModelError if it is refused.

        A device without cores and target is a CPU core that the system chooses.
        """

    @abstractmethod
    def values(self) -> Mapping[str, Array]:
        """Return every tensor of one frame of noise, by name."""

    def has_own_threads(self, device: Device) -> bool:
        """Return whether threads without fixed cores compute a stage; a process on the device's cores runs it then."""
        return False

    def counted_s(self, device: Device, repeats: int) -> Seconds | None:
        """Return seconds of operators as the engine counts them within the model; None where it counts none."""
        return None

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        if self.has_own_threads(device) and device.cores and set(device.cores) != CORES:
            return self.isolated_stage(operators, device)
        return self.stage_here(operators, device)

    def stage_here(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make a stage in this process."""
        self.check(operators, device)
        return self.runner(self.content(operators, device), *self.ends(operators), device)

    def isolated_stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make a stage in a process of its own, which has the device's cores alone."""
        self.check(operators, device)
        if self._saved is None:
            self._saved = self._opened.enter_context(temporary_folder())
            self.save(self._saved, (), Platform("here", (device,)))
        return IsolatedStage(StageRequest((device.backend,), str(self._saved), tuple(operators), device), MAKING_S)

    def ends(self, operators: Sequence[str] = ()) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
        """Return what operators, or all, read from outside, and what they hand on."""
        taken, given = slice_ends(self.graph, operators or self.graph.operator_names)
        return tuple(map(Port.of, taken)), tuple(map(Port.of, given))

    def refusals(self, device: Device) -> Mapping[str, str]:
        """Return the operators that the engine does not compute on a device, each with the reason."""
        return self.refused.get(device.target, {})

    def refuse(self, refused: Refused) -> None:
        self.refused |= refused

    def leave(self, target: str, refused: Mapping[str, str]) -> None:
        """Leave operators to other devices than those of a target; a warning names the first with the reason."""
        self.refuse({target: refused})
        _warn(self.graph, target, refused)

    def computes(self, device: Device) -> list[str]:
        refused = self.refusals(device)
        return [operator.name for operator in self.graph.operators if operator.name not in refused]

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), counted or as stages of their own.

        Those that `computes` lacks are NaN.
        """
        counted = self.counted_s(device, repeats)
        seconds = self._timer.seconds(device, repeats) if counted is None else np.maximum(counted, LEAST_COUNTED_S)
        seconds[:, [self.graph.edges.index[name] for name in self.refusals(device)]] = np.nan
        return seconds

    def close(self) -> None:
        self._timer.close()
        self._opened.close()

    def check(self, operators: Sequence[str], device: Device) -> None:
        """Raise PlanError where operators are no legal stage, or one is refused on a device."""
        check_stage(self.graph, operators)
        for name, reason in self.refusals(device).items():
            if name in operators:
                raise PlanError(f"device {device.name} cannot compute operator {name} of {self.graph.name}: {reason}")


class EngineStage(StageRunner):
    """A stage that computes with an object of an engine.

    Args:
        made: the object, which is released when the stage is closed and no run uses it any more.
        cores: to which `bind` binds.
    """

    def __init__(self, made: Any, inputs: Sequence[Port], outputs: Sequence[Port], cores: Sequence[int]) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.made, self._cores = made, cores

    @abstractmethod
    def compute(self, made: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Do what `run` does."""

    def bind(self) -> None:
        bind(self._cores)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        made = self.made
        if made is None:
            raise RunError("the stage was closed; make a new one")
        self.compute(made, inputs, outputs)

    def close(self) -> None:
        self.made = None


def refused_alone(graph: OperatorGraph, tried: Callable[[str], object]) -> dict[str, str]:
    """Return the operators for which `tried` raises ModelError or RunError, each with the reason.

    Of operators that do the same work on tensors of the same extents, one is tried for all.
    """
    refused: dict[str, str] = {}
    for group in alike_operators(graph):
        names = [graph.operators[index].name for index in group]
        try:
            tried(names[0])
        except (ModelError, RunError) as error:
            refused |= dict.fromkeys(names, str(error))
    return refused


def refused_operators(graph: OperatorGraph, tried: Callable[[str], object], what: str) -> dict[str, str]:
    """Return what `refused_alone` does, after a warning of `what` that names the first; ModelError if that is all."""
    refused = refused_alone(graph, tried)
    if len(refused) == len(graph):
        raise ModelError(f"{what} runs none of its operators: {next(iter(refused.values()))}")
    _warn(graph, what, refused)
    return refused


def _warn(graph: OperatorGraph, what: str, refused: Mapping[str, str]) -> None:
    if refused:
        first, reason = next(iter(refused.items()))
        _log.warning(
            f"{graph.name}: {what} runs {len(graph) - len(refused)} of {len(graph)} operators, and leaves others to "
            f"other devices: {first}, since {reason}"
        )


def seconds_of_noise(stage: StageRunner, repeats: int) -> Iterator[float]:
    """Yield the seconds of each of some runs of a stage on noise, after a first run, which allocates.

    Raises:
        ModelError: the engine cannot compute the frame.
    """
    inputs, outputs = list(map(noise, stage.inputs)), [port.buffer() for port in stage.outputs]
    for index in range(repeats + 1):
        begin = time.perf_counter()
        try:
            stage.run(inputs, outputs)
        except RunError as error:
            raise ModelError(f"{error}; it was a frame of noise") from error
        if index:
            yield time.perf_counter() - begin
