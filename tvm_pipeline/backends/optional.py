"""What a backend, its models and its stages may have beside the contract, and how the core asks for it.

Besides what is here, and the engines of `engines.py`, a backend may have `describe(device)`, `left_out()` and
`check_together(devices)`; `registry.py` asks for these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from tvm_pipeline.backends.contract import Array, Backend, CompiledModel, Order, Progress
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device


@runtime_checkable
class Keeper(Protocol):
    """What a StageRunner has as well if tensors can stay on its device between two stages of a model."""

    def keep(self, tensor: str, arrays: Sequence[Array], *, copied: bool) -> bool:
        """Have the tensor of a port stay on the device, for another stage there; return whether it can.

        It is called before the first `run`: of the stage that writes the tensor, and then of each stage on the device
        that reads it. The tensor stays until all of them are closed.

        Args:
            arrays: all arrays that `run` will be given for it. Those of the stages are the same memory.
            copied: whether that memory is to have the tensor as well; false for a stage that reads it.
        """


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


@runtime_checkable
class ArenaTeller(Protocol):
    """What a CompiledModel has as well if it knows which concatenations of a stage are copies."""

    def stage_arena(self, operators: Sequence[str], device: Device) -> StageArena:
        """Return the memory of a stage; errors are those of `stage`."""


@runtime_checkable
class Comparing(Protocol):
    """What a CompiledModel has as well if one of its devices may compute something else than the others.

    Attributes:
        refused: by target, the operators that its devices must not compute, with the reason.
    """

    refused: Mapping[str, Mapping[str, str]]

    def compare(self, devices: Sequence[Device], progress: Progress) -> None:
        """Run every operator on a device of each target, all of this machine, and set `refused`.

        `Backend.compile` has done so; of a model that was compiled elsewhere nobody has.

        Raises:
            ModelError: a device computes nothing as the others do.
        """


@runtime_checkable
class Elsewhere(Protocol):
    """What a Backend has as well if it compiles for devices of another machine, such as a board.

    Its models are cut and saved as others are. What they have for a device that cannot be used here is not loaded, and
    `stage` of it raises PlatformError.
    """

    def settle_elsewhere(self, device: Device) -> Device:
        """Return a device that was settled on its own machine, if it can be compiled for here.

        Raises:
            PlatformError: it cannot; the message says why, and what to do.
        """

    def compile_elsewhere(
        self,
        model: Model,
        devices: Sequence[Device],
        progress: Progress,
        order: Order = "listed",
        *,
        tuned: bool = True,
        processor: str = "",
    ) -> CompiledModel:
        """Compile as `Backend.compile` does, for devices that `settle_elsewhere` returned.

        Args:
            tuned: False leaves out what tuning has found.
            processor: of the other machine (`cores.processor`), by which what tuning has found there is known.
        """


def served_by(backend: Backend) -> Sequence[str]:
    """Return the names of the others that it serves; a backend of before there was this attribute serves none."""
    names: Sequence[str] = getattr(backend, "serves", ())
    return names


def refusal_of_slice(backend: Backend, part: Model) -> str:
    """Return why a backend cannot compile a slice of a model; empty where it can, or cannot tell before it tries.

    A backend tells by `refuses_slice(model)`, which may take as long as it takes to read a slice of one operator.
    """
    refuses = getattr(backend, "refuses_slice", None)
    return str(refuses(part)) if refuses else ""


def computed_by(compiled: CompiledModel, device: Device) -> list[str]:
    """Return the operators that a device computes, in the graph's order: all where the model has no `computes`.

    Examples:
        >>> from tvm_pipeline.testing import example_model
        >>> computed_by(example_model(), Device("d0", "fake"))
        ['double', 'increment']
    """
    names = [operator.name for operator in compiled.graph.operators]
    computes = getattr(compiled, "computes", None)
    computed = names if computes is None else set(computes(device))
    return [name for name in names if name in computed]


def forget_source(compiled: CompiledModel) -> None:
    """Have a model let go of all that only making stages needs, such as its file; nothing where it has no such method.

    A compiled model does so by `forget_source()`. Nothing but `close` follows, and the stages that were made run on.
    """
    forget = getattr(compiled, "forget_source", None)
    if forget:
        forget()


def slow_operators(compiled: CompiledModel, device: Device) -> list[str]:
    """Return the operators that a device computes without a fast schedule; none where the model has no such method.

    A compiled model tells by `slow_operators(device)`. They are right, and a profile names them with their times.
    """
    found = getattr(compiled, "slow_operators", None)
    return list(found(device)) if found else []
