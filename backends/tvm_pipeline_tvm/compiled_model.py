"""A model compiled for every target of its devices, whatever the IR: the base of the CompiledModel of TVM backends.

One library for each target stands under one operator graph (`alignment.py`), and a stage is a slice of a library
(`slice_plan.py`). An IR derives its own model from TvmModel, as `relay/compiled.py` does, and adds how a model is
imported and compiled, how a library is read, and how a slice runs. `installed_ir.installed_model` returns the one of
the installed TVM. No IR and no TVM is imported here.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import (
    Array,
    CompiledModel,
    Order,
    Refused,
    Rewriting,
    Seconds,
    StageArena,
    StageRunner,
)
from tvm_pipeline.backends.ports import input_for_timing, narrow_fault
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import longest_stages
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError, PlatformError, RunError
from tvm_pipeline.memory.arena import ALIGNMENT as HOST_ALIGNMENT
from tvm_pipeline_tvm.alignment import Alignment, align
from tvm_pipeline_tvm.devices.targets import ALIGNMENT, compiler_target, has_own_memory
from tvm_pipeline_tvm.installed_ir import RELEASES, Ir
from tvm_pipeline_tvm.kernels import KernelLibrary
from tvm_pipeline_tvm.slice_plan import SlicePlan, plan_slice

Bind = Callable[[Device], None]
MEMORY_ORDERED = "memory_ordered"  # an empty file of this name marks a saved model with order "memory"
IR = "ir"  # a file of a saved model: the IR that compiled it
REFUSED = "refused.json"  # of a saved model: what `TvmModel.refused` says, where that is anything


class SavedLibrary(KernelLibrary, Protocol):
    """A library that can be kept in files.

    Attributes:
        outputs: the names of the model's outputs, in order; none where its file does not tell.
        folder: where the cache has it; None where it was never there.
    """

    @property
    def outputs(self) -> tuple[str, ...]: ...

    @property
    def folder(self) -> Path | None: ...

    def save(self, folder: Path) -> None:
        """Write the library into an existing folder."""


class RefusedKernelError(PlatformError):
    """A driver does not compile a kernel; `why` is the reason alone."""

    def __init__(self, message: str, why: str) -> None:
        super().__init__(message)
        self.why = why


class RunnableSlice(StageRunner):
    """A slice that runs; one thread at a time calls `run`."""

    activation_bytes: int


L = TypeVar("L", bound=SavedLibrary)
M = TypeVar("M", bound="TvmModel[Any]")


class TvmModel(CompiledModel, Generic[L]):
    """One library for each target, under one operator graph.

    A model of an IR names it (`ir`) and gives `check`, `build`, `rewriting`, `read_library`, `ready_to_run`,
    `runnable_plan` and `time_stage`. It may override `prepare`, which does nothing here: CPU cores need none of it.

    Args:
        name: the name of the model.
        libraries: one for each target.
        bind: binds the calling thread to a device.
        order: how stages order their kernels.

    Attributes:
        refused: what its devices must not compute; `agreement.py` finds it.
        elsewhere: by target of the compiler, why its code, which runs on another machine, does not run on this one.
    """

    ir: ClassVar[Ir]

    def __init__(self, name: str, libraries: Sequence[L], bind: Bind, order: Order = "listed") -> None:
        self.order: Order = order
        self.refused: Refused = {}
        self.elsewhere: Mapping[str, str] = {}
        self.libraries = {library.target: library for library in libraries}
        first = libraries[0]
        kernels = [library.kernels for library in libraries]
        heads = [library.heads for library in libraries]
        self.graph, alignments = align(name, first.inputs, kernels, heads, first.outputs)
        self._alignments = dict(zip(self.libraries, alignments, strict=True))
        self._bind = bind

    @staticmethod
    @abstractmethod
    def check(model: Model) -> None:
        """Raise ModelError where the IR cannot import the model."""

    @staticmethod
    @abstractmethod
    def build(
        model: Model, targets: Sequence[str], host: str, elsewhere: Mapping[str, str], *, tuned: bool, processor: str
    ) -> list[L]:
        """Compile the model once for each distinct target, in the sequence given, or take it from the cache.

        The arguments are those of `compile`, also for what is raised.
        """

    @classmethod
    def compile(
        cls: type[M],
        model: Model,
        targets: Sequence[str],
        bind: Bind,
        order: Order = "listed",
        host: str = "",
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        *,
        tuned: bool = True,
        processor: str = "",
    ) -> M:
        """Compile a model.

        Args:
            targets: of the devices; equal ones share a library.
            host: the target of the code that launches the kernels of GPUs.
            elsewhere: see the class.
            tuned: False leaves out what tuning has found.
            processor: the one that it was found on; this machine's without it.

        Raises:
            ModelError: the IR cannot import or compile the model.
            PlatformError: TVM does not know a target, or cannot use such devices here.
        """
        libraries = cls.build(model, targets, host, elsewhere, tuned=tuned, processor=processor)
        compiled = cls(model.name, libraries, bind, order)
        if fault := narrow_fault(compiled.graph.tensors.values(), "TVM"):
            raise ModelError(f"{model.name}: {fault}")
        if not compiled.graph.operators:
            raise ModelError(f"{model.name}: its outputs are its inputs as they are, and nothing is to compile")
        compiled.elsewhere = elsewhere
        if len(libraries) == 1:
            for target in targets:
                compiled.prepare(target)
        return compiled

    @staticmethod
    @abstractmethod
    def rewriting(model: Model) -> Rewriting:
        """Return what does concatenations in parts; raise ModelError where the model cannot be imported."""

    @staticmethod
    @abstractmethod
    def read_library(folder: Path, runs_here: Callable[[str], bool]) -> L:
        """Read what `save` of a library wrote; raise BundleError where it is damaged.

        Args:
            runs_here: whether code for a target runs on this machine; else it is not loaded.
        """

    @staticmethod
    @abstractmethod
    def ready_to_run(target: str) -> None:
        """Make TVM able to run on a device with memory of its own.

        The context of a device is made by the thread that calls this first: PoCL's workers run on its cores.

        Raises:
            PlatformError: it cannot; the message says what is missing.
        """

    @abstractmethod
    def runnable_plan(self, plan: SlicePlan, device: Device) -> RunnableSlice:
        """Return a planned slice of the device's library as what runs there; raise RunError where it has no room."""

    @abstractmethod
    def time_stage(self, operators: Sequence[str], device: Device, repeats: int) -> Seconds:
        """Return seconds of the operators of a stage (repeats x operators), each kernel timed where it runs in it."""

    def plan_slice(self, operators: Sequence[str], device: Device, *, share: bool = True) -> SlicePlan:
        """Return the operators as a slice of the device's library; without `share` each tensor has bytes of its own.

        Raises:
            PlanError: they are no legal stage, or the device must not compute one of them.
            PlatformError: the model was not compiled for the device's target.
        """
        library, alignment = self._library(device)
        refused = self.refused.get(library.target, {})
        for name in operators:
            if name in refused:
                raise PlanError(
                    f"device {device.label} cannot compute operator {name} of {self.graph.name}: {refused[name]}; put "
                    "it into a stage on another device, or plan again"
                )
        apart = has_own_memory(library.target)  # a device may use a copy of an output, which begins elsewhere each time
        aligned_to = ALIGNMENT if apart else HOST_ALIGNMENT
        in_order = self.order == "memory"
        return plan_slice(
            library, alignment, self.graph, operators, in_order, aligned_to, share=share, into_outputs=not apart
        )

    def computes(self, device: Device) -> list[str]:
        refused = self.refused.get(compiler_target(device.target), {})
        return [operator.name for operator in self.graph.operators if operator.name not in refused]

    def compare(self, devices: Sequence[Device]) -> Refused:
        from tvm_pipeline_tvm.agreement import check_agreement  # which knows this class

        check_agreement(self, devices, remember=False)
        return self.refused

    def refuse(self, refused: Refused) -> None:
        self.refused = refused

    def stage(self, operators: Sequence[str], device: Device) -> SliceStage:
        return SliceStage(self.runnable_plan(self.plan_slice(operators, device), device), device, self._bind)

    def prepare(self, target: str) -> None:
        """Make a device ready to run the model, once all is known of what it must not compute."""

    def run_once(self, target: str) -> None:
        """Run what a device computes, whose driver compiles kernels when they first run.

        Raises:
            ModelError: it does not run there.
        """
        device = Device("", target=target)
        try:
            for names in longest_stages(self.graph, self.computes(device)):
                with closing(self.stage(names, device)) as runner:
                    inputs = [input_for_timing(self.graph, port) for port in runner.inputs]
                    runner.run(inputs, [port.buffer() for port in runner.outputs])
        except RunError as error:
            raise ModelError(
                f"{self.graph.name}: it compiles for {target!r} and does not run there: {error}; leave that device out "
                "of the platform"
            ) from error

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        plan = self.plan_slice(operators, device)
        return plan.unordered_bytes, plan.activation_bytes

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena:
        plan, apart = self.plan_slice(operators, device), self.plan_slice(operators, device, share=False)
        return StageArena(plan.activation_bytes, apart.activation_bytes, *plan.concatenations)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), each kernel timed where it runs in the whole model.

        They tell how the time of a whole pass is shared out, and the profile scales them to whole passes. Operators
        that the device does not compute have NaN; then the others are timed in the longest stages of them.
        """
        column = {operator.name: index for index, operator in enumerate(self.graph.operators)}
        seconds = np.full((repeats, len(column)), np.nan)
        for names in longest_stages(self.graph, self.computes(device)):
            seconds[:, [column[name] for name in names]] = self.time_stage(names, device, repeats)
        return seconds

    def save(self, folder: Path, stages: Sequence[Stage] = (), platform: Platform | None = None) -> None:
        """Write the library of each device of the platform, or every one without a platform.

        Each is whole, so that it can be cut anywhere, and the stages do not matter.
        """
        (folder / "name").write_text(self.graph.name)
        (folder / IR).write_text(self.ir)
        if self.order == "memory":
            (folder / MEMORY_ORDERED).touch()
        if self.refused:
            (folder / REFUSED).write_bytes(msgspec.json.encode(self.refused))
        wanted = {compiler_target(device.target) for device in platform.devices} if platform else self.libraries.keys()
        saved = [library for target, library in self.libraries.items() if target in wanted]
        for index, library in enumerate(saved):
            subfolder = folder / str(index)
            subfolder.mkdir()
            library.save(subfolder)

    @classmethod
    def load(cls: type[M], folder: Path, bind: Bind, not_run_here: Callable[[str], str] = lambda _: "") -> M:
        """Read what `save` wrote.

        Args:
            bind: as of the class.
            not_run_here: returns why code for a target does not run on this machine, empty where it does.

        Raises:
            BundleError: it is damaged, or was compiled by another IR.
        """
        try:
            name = (folder / "name").read_text()
        except OSError as error:
            raise BundleError(f"{folder}: the compiled model is missing; compile it again") from error
        made_by = _made_by(folder)
        if made_by != cls.ir:
            other, here = RELEASES[made_by].title, RELEASES[cls.ir].title
            raise BundleError(
                f"{folder}: compiled with {other}, and this environment has {here}: compile the model again here, or "
                f"run it where tvm-pipeline[{made_by}] is installed"
            )
        subfolders = sorted(
            (entry for entry in folder.iterdir() if entry.name.isdecimal()), key=lambda entry: int(entry.name)
        )
        if not subfolders:
            raise BundleError(f"{folder}: the compiled model is missing; compile it again")
        order: Order = "memory" if (folder / MEMORY_ORDERED).exists() else "listed"
        why_not = cache(not_run_here)
        libraries = [cls.read_library(subfolder, lambda target: not why_not(target)) for subfolder in subfolders]
        model = cls(name, libraries, bind, order)
        model.refused = _read_refused(folder / REFUSED)
        model.elsewhere = {target: why for target in model.libraries if (why := why_not(target))}
        return model

    def library_here(self, device: Device) -> L:
        """Return the library for a device, to run; raise PlatformError where there is none, or none that runs here."""
        library, _ = self._library(device)
        if why := self.elsewhere.get(library.target):
            raise PlatformError(
                f"a stage of {self.graph.name} on device {device.label} cannot run here: {why}. Run it where the "
                "device is, from here by `remote`"
            )
        return library

    def _library(self, device: Device) -> tuple[L, Alignment]:
        """Return the library for a device, and its alignment; raise PlatformError where there is none."""
        target = compiler_target(device.target)
        library = self.libraries.get(target)
        if library is None:
            compiled = ", ".join(repr(target) for target in self.libraries)
            raise PlatformError(
                f"device {device.name} wants target {device.target!r}; the model was compiled for {compiled}"
            )
        return library, self._alignments[target]


class SliceStage(StageRunner):
    """A slice on a device: the StageRunner of TVM backends."""

    def __init__(self, part: RunnableSlice, device: Device, bind: Bind) -> None:
        self._part: RunnableSlice | None = part
        self.inputs, self.outputs = part.inputs, part.outputs
        self.activation_bytes = part.activation_bytes
        self._device, self._bind_to = device, bind

    def bind(self) -> None:
        self._bind_to(self._device)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        part = self._part
        if part is None:
            raise RunError(f"a stage on {self._device.label} was closed; make a new one")
        part.run(inputs, outputs)

    def keep(self, tensor: str, arrays: Sequence[Array], *, copied: bool) -> bool:
        return self._part is not None and self._part.keep(tensor, arrays, copied=copied)

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        return self._part is not None and self._part.take_turns(turn)

    def close(self) -> None:
        self._part = None  # frees the executor and its arena; a run that still goes on keeps them until it ends


def _made_by(folder: Path) -> str:
    """Return the IR that compiled a saved model: Relay where no file tells, as before there was another."""
    file = folder / IR
    made_by = file.read_text().strip() if file.exists() else "relay"
    if made_by not in RELEASES:
        raise BundleError(f"{file}: {made_by!r} is none of {', '.join(RELEASES)}; compile the model again")
    return made_by


def _read_refused(file: Path) -> dict[str, dict[str, str]]:
    """Read `TvmModel.refused`; nothing is refused where there is no file. Raise BundleError where it is damaged."""
    if not file.exists():
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, str]])
    except (OSError, msgspec.DecodeError) as error:
        raise BundleError(f"{file}: {error}; compile the model again") from error
