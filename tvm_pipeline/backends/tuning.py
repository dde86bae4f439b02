"""What a backend has as well if it can make its kernels faster by measuring: `tune`, and what that reports.

Next: `contract.py`; the package `tvm_pipeline_kernels` for CPU cores and GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

from tvm_pipeline.backends.contract import CompiledModel, Order, Progress
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device

__all__ = ["Guide", "TunedKernels", "Tuner", "TuningRecords", "TuningReport", "kernels_to_tune", "tuned_kernels"]

# Says which kernels a search takes next. Told how many times faster each of those before has become, it returns some of
# `kernels_to_tune` that it has not returned before, or none, which ends the search. It is told at the end, too.
Guide: TypeAlias = Callable[[Mapping[Any, float]], Collection[Hashable]]


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
        winograd: those of them that Winograd's algorithm computes.
    """

    target: str
    tuned: int
    kernels: int
    winograd: int = 0

    def __str__(self) -> str:
        by = f", {self.winograd} of them by Winograd's algorithm" if self.winograd else ""
        return f"tuned for {self.target}: {self.tuned} of {self.kernels} distinct kernels{by}"


@runtime_checkable
class Tuner(Protocol):
    """What a Backend has as well if it can tune."""

    def tune(
        self, model: Model, device: Device, seconds: float, progress: Progress, guide: Guide | None = None
    ) -> TuningReport:
        """Search for faster kernels of the model for the target of a device, on its first core, or on the GPU.

        What is found is kept for later compilations on this machine. What was measured before is not measured again.
        Results stay the same bit for bit, unless the model allows other values (`Model.winograd`).

        Args:
            seconds: that the search may take, with the comparison at its end, after the model was compiled once.
            guide: which kernels are searched; all of them without one.
        """

    def compile_untuned(
        self, model: Model, devices: Sequence[Device], progress: Progress, order: Order = "listed"
    ) -> CompiledModel:
        """Compile as `Backend.compile` does, without what tuning has found."""


@runtime_checkable
class TuningRecords(Protocol):
    """What a Tuner has as well if what it found on one machine serves another that compiles for it."""

    def tuning_records(self, device: Device) -> list[str]:
        """Return what tuning has found on this machine for the target of a device, a line each."""

    def take_tuning_records(self, device: Device, processor: str, lines: Sequence[str]) -> int:
        """Keep what tuning found on another machine, of which `processor` is the processor; return how much is new."""


def tuned_kernels(compiled: CompiledModel) -> list[TunedKernels]:
    """Return what is tuned in a model, for each target where anything is; a backend need not tell (`tuned`)."""
    tell = getattr(compiled, "tuned", None)
    return list(tell()) if tell else []


def kernels_to_tune(compiled: CompiledModel, device: Device) -> Mapping[str, Sequence[Hashable]]:
    """Return the kernels of each operator that tuning can make faster on a device; equal ones are tuned together."""
    tell = getattr(compiled, "kernels_to_tune", None)
    return dict(tell(device)) if tell else {}
