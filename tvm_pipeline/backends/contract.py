"""The contract of a backend: a plug-in that knows one hardware family.

A backend finds devices, compiles a model for them, and makes runnable stages of what it compiled. It is an object that
an entry point of the group `tvm_pipeline.backends` names; the core imports none. In short, of one device:

    >>> import numpy as np
    >>> from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
    >>> from tvm_pipeline.core.model import Model
    >>> from tvm_pipeline.core.platform import Device
    >>> from tvm_pipeline.testing import FakeBackend, FakeModel
    >>> x, y = Tensor("x", (2,)), Tensor("y", (2,))
    >>> graph = OperatorGraph("doubling", (x,), (Operator("double", "multiply", ("x",), (y,)),), ("y",))
    >>> backend = FakeBackend([Device("d0", "fake")], [FakeModel(graph, {"double": lambda x: [2 * x]})])
    >>> devices = [backend.settle(device) for device in backend.detect()]
    >>> compiled = backend.compile(Model("doubling", "onnx", b""), devices)
    >>> stage = compiled.stage(["double"], devices[0])
    >>> inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
    >>> inputs[0][:] = 3
    >>> stage.bind()
    >>> stage.run(inputs, outputs)
    >>> outputs[0].tolist()
    [6.0, 6.0]
    >>> stage.close(), compiled.close(), backend.close()
    (None, None, None)

A new backend derives from `Backend`, `CompiledModel` and `StageRunner`, and writes twelve members: the abstract
methods, and the attributes that have no value here. Every other member has a default; a backend overrides it if it can
do more. `tvm_pipeline.testing.check_backend` says whether a backend keeps the contract, and `examples/device_backend`
is one to start from.

Tensors cross stages as contiguous host arrays, 64-byte aligned. A backend may keep them in a layout of its own:
`Port.layout` says which, and two ports with equal `shape` and `layout` hand arrays over as they are. A port without a
layout holds the tensor's elements in their logical order, under a shape of its own if need be.
Next: `registry.py` (which backends are installed) and `sliced.py` (several of them on one platform).
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.ports import Array as Array
from tvm_pipeline.backends.ports import Port as Port
from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.documents import blamed
from tvm_pipeline.errors import BundleError, OptionError, PlatformError

Seconds = npt.NDArray[np.float64]
# The order of a stage's operators: that of the model, or the one of least memory if that takes less.
Order = Literal["listed", "memory"]
# By target, the operators that its devices must not compute, each with the reason.
Refused: TypeAlias = Mapping[str, Mapping[str, str]]
# Says which kernels a search takes next. Told how many times faster each of those before has become, it returns some of
# `kernels_to_tune` that it has not returned before, or none, which ends the search. It is told at the end, too.
Guide: TypeAlias = Callable[[Mapping[Any, float]], Collection[Hashable]]


class StageRunner(ABC):
    """A runnable stage. `bind` and `run` are called by one thread at a time, and `run` by the thread that is bound."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @abstractmethod
    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`, both in the order of the ports; return when they are complete."""

    def bind(self) -> None:
        """Bind the calling thread to the device: cores, thread pool, context. Another thread may be bound later."""

    def keep(self, tensor: str, arrays: Sequence[Array], *, copied: bool) -> bool:
        """Keep the tensor of a port on the device, for another stage there; return whether the stage can.

        It is called before the first `run`: of the stage that writes the tensor, and then of each stage on the device
        that reads it. The tensor stays until all of them are closed.

        Args:
            arrays: all arrays that `run` will be given for it. Those of the stages are the same memory.
            copied: whether that memory is to have the tensor as well; false for a stage that reads it.
        """
        return False

    def take_turns(self, turn: AbstractContextManager[object]) -> bool:
        """Hold `turn` in each `run` while the device computes, but not while it copies; return whether the stage can.

        A pipeline calls it before the first `run`, for two stages of the same operators on a device with
        `concurrent_copies`. Both stages run at the same time: one copies while the other computes.
        """
        return False

    def close(self) -> None:
        """Release the resources of the stage. No other call follows, except a second `close`.

        Any thread may call it, even while `run` computes a frame that was given up. Then end `run` if that is
        possible, and release nothing that it still uses.
        """


class CompiledModel(ABC):
    """A model compiled for every device it may run on, to be cut anywhere.

    Attributes:
        graph: the operators, by the names that plans use.
        order: how stages order their operators, as `Backend.compile` was told.
    """

    graph: OperatorGraph
    order: Order

    @abstractmethod
    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make one stage of the operators on `device`; raise PlanError if they are no legal stage."""

    @abstractmethod
    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), timed in place from a bound thread.

        They contain no transfers if `time_transfers` returns figures. NaN stands for operators that `computes` lacks.
        `operator_timing.OperatorTimer` times each operator as a stage of its own.
        """

    @abstractmethod
    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Write all that `Backend.load` needs, `order` included, into an existing folder.

        `stages` then run on the platform with no compilation.
        """

    def computes(self, device: Device) -> list[str]:
        """Return the operators that a device can compute, in the graph's order; `stage` raises PlanError for others."""
        return self.graph.operator_names

    def has_operator_times(self, device: Device) -> bool:
        """Return whether `time_operators` tells what operators take within a stage; by default it does.

        If not, because a device computes a stage as one, a profile follows from whole stages and never calls it.
        """
        return True

    def slow_operators(self, device: Device) -> list[str]:
        """Return the operators that a device computes without a fast schedule; a profile shows their times."""
        return []

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        """Time how the device receives and sends tensors of these sizes, from a bound thread.

        Returns:
            Seconds of receiving and of sending (each repeats x sizes). None if stages compute in host memory and so
            have no transfers; the model of a device with memory of its own overrides this.
        """
        return None

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """Return the bytes that the allocator plans for a stage's activations: in the listed order, and in `order`.

        By default the most bytes of tensors that are alive at one time, for a backend that does not know its allocator.
        """
        from tvm_pipeline.memory import memory_graph, peak_bytes

        memory = memory_graph(self.graph, operators, pin_inputs=True)
        peak = peak_bytes(memory, range(len(memory.operators)))
        return peak, peak

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena | None:
        """Return the memory of a stage and its concatenations; None if nobody knows. Errors are those of `stage`."""
        return None

    def slicer(self) -> Slicer | None:
        """Return what cuts the model's file for other backends; None if `Backend.cuts` lacks its format."""
        return None

    def compare(self, devices: Sequence[Device]) -> Refused:
        """Run every operator on a device of each target, all of this machine; return what some must not compute.

        `Backend.compile` has done so for devices of this machine. By default all targets compute the same.

        Raises:
            ModelError: a device computes nothing as the others do.
        """
        return {}

    def check_engines(self, devices: Sequence[Device]) -> list[str]:
        """Compare what devices of several engines compute, before they are timed; return a line for each that differs.

        `computes` then lacks the operators that differ by more than they may. By default one engine has all devices.
        """
        return []

    def refuse(self, refused: Refused) -> None:
        """Take what `compare` returned on the machine of the devices: from now on `computes` lacks these operators."""

    def tuned(self) -> list[TunedKernels]:
        """Return what is tuned in the model, for each target where anything is."""
        return []

    def stored_weights(self) -> list[StoredWeights]:
        """Return how weights are stored, for each target where they have 16 bits."""
        return []

    def kernels_to_tune(self, device: Device) -> Mapping[str, Sequence[Hashable]]:
        """Return the kernels of each operator that tuning can make faster on a device; equal kernels are tuned once."""
        return {}

    def forget_source(self) -> None:
        """Release all that only making stages needs, such as the model's file. Stages run on; only `close` follows."""

    def close(self) -> None:
        """Release libraries and device memory after every stage is closed. A second call does nothing."""


class Backend(ABC):
    """One hardware family. A device is known by its target and cores; its name is the platform's to give.

    Attributes:
        name: one word, by which platform files name it.
        cuts: formats of model files that it cuts, so that other backends can compile the slices; see `sliced.py`.
        serves: names of other backends whose devices it compiles for as well, such as host.
        engine: what runs its models, as a user knows it, if it is an engine (`registry.engine_for`).
        fastest_target: of an engine, the target for CPU cores whose stages are fastest, although the last bits of their
            results depend on where a model is cut; empty where that of `engine_devices` is.
        can_tune: whether `tune` searches for faster kernels.
        takes_narrow: whether its stages take and give tensors of the types of ml_dtypes, such as bfloat16.
    """

    name: str
    cuts: Sequence[str] = ()
    serves: Sequence[str] = ()
    engine: str = ""
    fastest_target: str = ""
    can_tune: bool = False
    takes_narrow: bool = False

    @abstractmethod
    def detect(self) -> Sequence[Device]:
        """Return the devices of this machine; none if it has none."""

    @abstractmethod
    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> CompiledModel:
        """Compile once for each distinct target of `devices`; use the cache for what was compiled before."""

    @abstractmethod
    def load(self, folder: Path, devices: Sequence[Device]) -> CompiledModel:
        """Read what `CompiledModel.save` wrote, to run on settled devices; raise BundleError if it is damaged."""

    def settle(self, device: Device) -> Device:
        """Return the device with what its platform left open filled in; `stand_in` if it is not here itself.

        By default it is one of those that `detect` finds, by its target. A device without a target is the only one.

        Raises:
            PlatformError: it cannot be used on this machine; the message has the reason.
        """
        found = {own.target: own for own in self.detect() if device.target in ("", own.target)}
        if len(found) != 1:
            targets = ", ".join(sorted(own.target for own in self.detect())) or "none"
            raise PlatformError(
                f"device {device.name}: {device.target or 'no target'} does not say which device of the backend "
                f"{self.name} it is; targets of this machine: {targets}"
            )
        [own] = found.values()
        return replace(device, target=own.target, stand_in=own.stand_in)

    def refuses(self, model: Model) -> str:
        """Return why it cannot compile the model, with what would help; empty if it can."""
        return ""

    def refuses_weights(self) -> str:
        """Return why it cannot store weights in 16 bits (`Model.weights`), with what would help; empty if it can."""
        return f"the backend {self.name} stores weights in float32 alone; leave its devices out, or leave `weights` out"

    def refuses_slice(self, part: Model) -> str:
        """Return why it cannot compile a slice of a model; empty if it can, or cannot tell before it tries.

        It may take as long as it takes to read a slice of one operator.
        """
        return ""

    def describe(self, device: Device) -> str:
        """Return what a settled device is, as a user knows it."""
        return ""

    def own_process(self, device: Device) -> bool:
        """Return whether a run is to put all stages on a settled device into one process, apart from all others.

        So for a device whose driver ends the process when it fails, and that one process at a time may open.
        """
        return False

    def state(self, device: Device) -> str:
        """Return where a settled device is plugged in and how it is now, in a line; empty where nobody can tell."""
        return ""

    def precision(self, device: Device) -> str:
        """Return the type to which a device rounds floats, float32 or float16, where results may be less exact."""
        return "float32"

    def left_out(self) -> Sequence[str]:
        """Return a line for each device of this machine that `detect` does not offer, with the reason."""
        return ()

    def check_together(self, devices: Sequence[Device]) -> None:
        """Raise PlatformError if one platform cannot have all these settled devices of the backend."""

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        """Prepare models for use on the same devices at the same time, each with the stages of its plan."""

    def versions(self) -> Mapping[str, str]:
        """Return the software whose version decides whether a saved model still loads."""
        return {}

    def compiler(self) -> str:
        """Return what compiles, with its version, for people and without loading it; empty where nothing is told."""
        return ""

    def close(self) -> None:
        """Release what is kept between models, such as a device's context; the next `compile` acquires it again."""

    def settle_elsewhere(self, device: Device) -> Device:
        """Return a device that was settled on its own machine, such as a board, if it can be compiled for here.

        Raises:
            PlatformError: it cannot; the message says why, and what to do.
        """
        raise PlatformError(
            f"device {device.name}: the backend {self.name} compiles on the machine that has the device alone. Run the "
            "command there, or give `platform` with a file of the board's other devices"
        )

    def compile_elsewhere(
        self,
        model: Model,
        devices: Sequence[Device],
        order: Order = "listed",
        *,
        tuned: bool = True,
        processor: str = "",
    ) -> CompiledModel:
        """Compile as `compile` does, for devices that `settle_elsewhere` returned.

        The model is cut and saved as others are. What it has for a device that cannot be used here is not loaded, and
        `stage` of it raises PlatformError. By default as `compile`: models of many backends run on every machine.

        Args:
            tuned: False leaves out what tuning has found.
            processor: of the other machine (`cores.processor`), by which what tuning has found there is known.
        """
        return self.compile(model, devices, order)

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        """Return a device of this engine, of the same name and cores, for each device of another backend."""
        return ()

    def tune(self, model: Model, device: Device, seconds: float, guide: Guide | None = None) -> TuningReport:
        """Search for faster kernels of the model for the target of a device, on its first core, or on the GPU.

        What is found is kept for later compilations on this machine. What was measured before is not measured again.
        Results stay the same bit for bit, unless the model allows other values (`Model.tolerance`).

        Args:
            seconds: that the search may take, with the comparison at its end, after the model was compiled once.
            guide: which kernels are searched; all of them without one.
        """
        raise PlatformError(f"device {device.name} cannot be tuned for: the backend {self.name} tunes no kernels")

    def compile_untuned(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> CompiledModel:
        """Compile as `compile` does, without what tuning has found."""
        return self.compile(model, devices, order)

    def tuning_records(self, device: Device) -> list[str]:
        """Return what tuning has found on this machine for the target of a device, a line each."""
        return []

    def take_tuning_records(self, device: Device, processor: str, lines: Sequence[str]) -> int:
        """Keep what tuning found on another machine, of which `processor` is the processor; return how much is new."""
        return 0

    def rewriting(self, model: Model) -> Rewriting:
        """Read a model whose operators may be done in parts before it is compiled; `workflow/rewriting_trial.py` asks.

        Raises:
            ModelError: it cannot be read.
            OptionError: the backend rewrites no models of this format.
        """
        raise OptionError(
            f"`memory_rewrite`: the backend {self.name} cannot rewrite {model.name}, which is {model.format}; compile "
            "without it, or for devices of TVM or of TFLite",
            option="memory_rewrite",
        )


class Delegating(CompiledModel):
    """A model that hands every member on to another one: the base of wrappers, which override what they change.

    A wrapper whose devices or operators are others than those of `inner` overrides `inner_device` or `inner_operators`.
    """

    def __init__(self, inner: CompiledModel) -> None:
        self.inner = inner
        self.graph, self.order = inner.graph, inner.order

    def inner_device(self, device: Device) -> Device:
        """Return a device as `inner` knows it."""
        return device

    def inner_operators(self, operators: Sequence[str]) -> Sequence[str]:
        """Return the operators of `inner` that some operators stand for."""
        return operators

    def inner_stages(self, stages: Sequence[Stage]) -> list[Stage]:
        return [replace(stage, operators=tuple(self.inner_operators(stage.operators))) for stage in stages]

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        return self.inner.stage(self.inner_operators(operators), self.inner_device(device))

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        return self.inner.time_operators(self.inner_device(device), repeats)

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        own = replace(platform, devices=tuple(map(self.inner_device, platform.devices)))
        self.inner.save(folder, self.inner_stages(stages), own)

    def computes(self, device: Device) -> list[str]:
        return self.inner.computes(self.inner_device(device))

    def has_operator_times(self, device: Device) -> bool:
        return self.inner.has_operator_times(self.inner_device(device))

    def slow_operators(self, device: Device) -> list[str]:
        return self.inner.slow_operators(self.inner_device(device))

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        return self.inner.time_transfers(self.inner_device(device), sizes_bytes, repeats)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        return self.inner.activation_bytes(self.inner_operators(operators), self.inner_device(device))

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena | None:
        return self.inner.stage_arena(self.inner_operators(operators), self.inner_device(device))

    def slicer(self) -> Slicer | None:
        return self.inner.slicer()

    def compare(self, devices: Sequence[Device]) -> Refused:
        return self.inner.compare([self.inner_device(device) for device in devices])

    def check_engines(self, devices: Sequence[Device]) -> list[str]:
        return self.inner.check_engines([self.inner_device(device) for device in devices])

    def refuse(self, refused: Refused) -> None:
        self.inner.refuse(refused)

    def tuned(self) -> list[TunedKernels]:
        return self.inner.tuned()

    def stored_weights(self) -> list[StoredWeights]:
        return self.inner.stored_weights()

    def kernels_to_tune(self, device: Device) -> Mapping[str, Sequence[Hashable]]:
        return self.inner.kernels_to_tune(self.inner_device(device))

    def forget_source(self) -> None:
        self.inner.forget_source()

    def close(self) -> None:
        self.inner.close()


def loading(folder: Path) -> AbstractContextManager[None]:
    """Raise BundleError where the block, which reads what `CompiledModel.save` wrote into a folder, fails."""
    return blamed(f"{folder}: damaged compiled model", BundleError, "compile it again")


# ------------------------------------------------------------------------------------- what members take and return


@dataclass(frozen=True, slots=True)
class ModelSlice:
    """Some operators of a model as a model of their own.

    `model.inputs` are the tensors that the slice reads, and `outputs` those that it writes, in the order of the slice's
    file; both have the names of the whole model.
    """

    model: Model
    outputs: tuple[Tensor, ...]

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.model.content + self.model.params).hexdigest()[:32]


class Slicer(Protocol):
    """Cuts one model's file; `slice_ends` and `check_stage` of core/partition.py serve every format."""

    def cut(self, operators: Collection[str]) -> ModelSlice:
        """Return the operators as a model of their own; raise PlanError where they are no legal stage."""

    def values(self) -> Mapping[str, Array]:
        """Return every tensor of one frame of noise, by name; single operators are timed on these."""


@dataclass(frozen=True, slots=True)
class StageArena:
    """The memory of the activations of a compiled stage.

    Attributes:
        arena_bytes: of the stage as it runs.
        apart_bytes: if each tensor had bytes of its own, so that a concatenation is a copy; None where nobody tells.
        in_place: concatenations whose parts are written where they belong.
        copied: those that run, and copy at least one of their parts.
    """

    arena_bytes: int
    apart_bytes: int | None
    in_place: int
    copied: int


@dataclass(frozen=True, slots=True)
class TuningReport:
    """What a run of `tune` did for one target.

    Attributes:
        kernels: distinct kernels of the model that can be tuned.
        tuned: those of them that now run otherwise than without tuning.
        measured: those that this run searched.
        candidates: compiled and timed in this run.
        seconds: that it took.
        default_s, tuned_s: time of the model without and with what is tuned, side by side: processor time of one
            core, or time of a GPU with its copies; None where nothing new was to be compared.
        ratio: default over tuned, the median of several comparisons; `spread` is the least and the largest of them.
        stopped: why the search ended.
    """

    model: str
    target: str
    kernels: int
    tuned: int
    measured: int
    candidates: int
    seconds: float
    stopped: str
    default_s: float | None = None
    tuned_s: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class TunedKernels:
    """How many distinct kernels of a model are tuned for a target, of those that can be.

    Attributes:
        winograd: how many Winograd's algorithm computes.
        error: of the model's outputs then against float64, over the largest of each; None where it was not measured.
    """

    target: str
    tuned: int
    kernels: int
    winograd: int = 0
    error: float | None = None

    def __str__(self) -> str:
        tuned = [f"{self.tuned} of {self.kernels} tuned"] if self.tuned else []
        error = "estimated from the weights alone" if self.error is None else f"{self.error:.1e} of the largest output"
        by = [f"{self.winograd} by Winograd's algorithm (error against float64: {error})"] if self.winograd else []
        return f"kernels for {self.target}: {', '.join(tuned + by)}"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What weights in 16 bits save and cost on a target; see `Model.weights`.

    Attributes:
        storage: the type of the weights of convolutions and matrix products.
        bytes: of all constants of the model, as they are stored.
        float32_bytes: of all constants, were these weights float32.
        error: of the model's outputs against float64 of the weights before they were rounded, over the largest of each;
            None where it was not measured.
    """

    target: str
    storage: str
    bytes: int
    float32_bytes: int
    error: float | None = None

    def __str__(self) -> str:
        error = "not measured" if self.error is None else f"{self.error:.1e} of the largest output"
        return (
            f"weights in {self.storage} for {self.target}: {self.float32_bytes:,} -> {self.bytes:,} bytes "
            f"(error against float64 of the weights that were given: {error})"
        )


class Rewriting(Protocol):
    """A model, and what of it can be done in parts."""

    @property
    def names(self) -> Sequence[str]:
        """The operators that can be done in parts; a concatenation stands for all that reads it."""

    @property
    def refused(self) -> Mapping[str, str]:
        """The operators that cannot although the model's shape allows it, with the reason."""

    @property
    def is_quantized(self) -> bool:
        """Whether the model computes in integers, so that its outputs must stay equal bit for bit."""

    def peak_bytes(self, chosen: Sequence[str]) -> int:
        """Return the least peak of activations if these operators, in the sequence of `names`, are done in parts."""

    def rewritten(self, chosen: Sequence[str]) -> Model:
        """Return the model with these operators done in parts; it has the same inputs and outputs."""


@dataclass(frozen=True, slots=True)
class MemoryRewriting:
    """What was done in parts to a model, and what that saves.

    Attributes:
        operators: those that are done in parts; none where nothing is gained.
        left_out: those that could be, and are not, with the reason.
        peak_bytes: of the whole model's activations in the order of least memory, before and after.
        arena_bytes: what the allocator of `device` plans for the whole model, before and after.
        device: the first device, on which outputs were compared and arenas planned.
        difference: the greatest one of the outputs, as a share of the largest output; 0 where all bits are equal.
        tolerance: the difference that was allowed; 0 for a model that computes in integers.
        why: why the model stays as it is; empty where it was rewritten.
    """

    operators: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    peak_bytes: tuple[int, int] = (0, 0)
    arena_bytes: tuple[int, int] = (0, 0)
    device: str = ""
    difference: float = 0.0
    tolerance: float = 0.0
    why: str = ""

    @property
    def omissions(self) -> list[str]:
        """What was left out as lines, those of one reason together."""
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        return [f"not done in parts: {', '.join(of)}: {reason}" for reason, of in names.items()]
