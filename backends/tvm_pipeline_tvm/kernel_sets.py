"""The door for kernels that are faster than TVM's own: entry points `tvm_pipeline.kernels`, one object for each IR.

    [project.entry-points."tvm_pipeline.kernels"]
    relay = "tvm_pipeline_kernels.relay.kernel_set:kernels"
    relax = "tvm_pipeline_kernels.relax.kernel_set:kernels"

The entry is named after the IR, and its object is a `RelayKernels` or a `RelaxKernels`. These base classes are TVM's
own schedules: whatever a guest does not override stays TVM's. Without a guest models are compiled correctly, and run
more slowly. A child process finds the same entry points, so nothing but `Choices` goes from process to process.

Libraries in the cache are kept apart by `key`. A compiled library needs no guest: it is code.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.plugins import entry_points
from tvm_pipeline_tvm.installed_ir import installed_ir

if TYPE_CHECKING:
    from tvm_pipeline.backends.contract import Guide, TuningReport
    from tvm_pipeline.core.platform import Device
    from tvm_pipeline_tvm.installed_ir import Ir

GROUP = "tvm_pipeline.kernels"
OWN = "TVM's own"
MISSING = "the package tvm_pipeline_kernels, a part of tvm-pipeline, is not installed"

# What a kernel computes and how, as the guest writes it: text, numbers and tuples of these.
Choices: TypeAlias = Mapping[Any, Any]
# Takes a call, and returns what computes it (`relax.transform.LegalizeOps`).
Legalization: TypeAlias = Callable[[Any, Any], Any]
# Takes a function of TIR and the target, and returns it scheduled with the name of the rule; None if it is none's.
GpuRule: TypeAlias = Callable[[Any, Any], "tuple[Any, str] | None"]


class Kernels:
    """What kernels of both IRs have: tuning, of which TVM's own have none.

    Attributes:
        key: of the cache. It changes whenever the guest compiles kernels otherwise.
    """

    key = OWN

    def recorded(self, target: str, *, tolerance: float = 0.0, measured_on: str = "") -> Choices:
        """Return what tuning recorded for a target, with the index of its device if it is a GPU's.

        Args:
            tolerance: with 0, only choices that keep each sum as it is.
            measured_on: the processor of a CPU's target; this machine's without it.

        Raises:
            PlatformError: TVM cannot use such a GPU here.
        """
        return {}

    def digest_of(self, choices: Choices) -> str:
        """Return a digest of choices for the cache, whatever their order is."""
        return ""

    def tune(self, model: Model, target: str, seconds: float, guide: Guide | None = None) -> TuningReport:
        """Search on the core that the thread is bound to; see `Backend.tune`."""
        _refuse_to_tune(model)

    def tune_gpu(
        self,
        model: Model,
        device: Device,
        host: str,
        seconds: float,
        known_as: str,
        only: Collection[Any] | None = None,
    ) -> TuningReport:
        """Search on a GPU.

        Args:
            host: the target of the code that launches kernels.
            known_as: what the driver calls the device.
            only: the workloads to search; None for all.
        """
        _refuse_to_tune(model)

    def tuning_records(self, target: str) -> list[bytes]:
        """Return what tuning recorded for a target on this processor, for another machine that compiles for it."""
        return []

    def take_tuning_records(self, target: str, measured_on: str, lines: Iterable[bytes]) -> int:
        """Keep what tuning recorded on another processor; return how many lines are new."""
        return 0


class RelayKernels(Kernels):
    """Schedules for what Relay compiles; this class itself is TVM's own."""

    def building(self, choices: Choices, tolerance: float = 0.0) -> AbstractContextManager[None]:
        """Return a context in which `relay.build` uses the guest's schedules, with what tuning chose of them.

        Args:
            tolerance: the error that an algorithm of other sums may have in a layer, over its largest output; with 0
                there is none. The engine measures the error of the whole model, and builds anew if that is too large.
        """
        return nullcontext()

    def lowering_passes(self) -> Sequence[tuple[int, Any]]:
        """Return passes of TIR, each with the phase of TVM's lowering that it follows (`tir.add_lower_pass`)."""
        return ()

    def prepared(self, mod: Any, target: Any, params: Mapping[str, Any] | None) -> Any:
        """Return a module of the same values as `relay.build` is to get it."""
        return mod

    def workload_of(self, function: Any, target: Any) -> Any | None:
        """Return what tuning calls a fused function; None if tuning cannot make the function faster."""
        return None

    def is_winograd(self, function: Any) -> bool:
        """Return whether a fused function is computed by Winograd's algorithm, whose rounding errors are its own."""
        return False


class RelaxKernels(Kernels):
    """Schedules for what Relax compiles; this class itself is TVM's own.

    Attributes:
        tir_pipeline: the name of the pipeline that compiles scheduled functions.
    """

    tir_pipeline = "default"

    def computes_integers(self, target: Any) -> bool:
        """Return whether there are kernels of int8 for CPU cores; quantised layers stay in float32 elsewhere."""
        return False

    def refuses_weights(self, storage: str, target: str) -> str:
        """Return why kernels for CPU cores cannot read weights of 16 bits, with what would help; empty if they can.

        Args:
            storage: the type of the weights; see `Model.weights`.
        """
        return f"{MISSING}, and TVM's own schedules read float32 alone; install it (`pip install tvm-pipeline`)"

    def layouts(self, target: Any, tolerance: float, choices: Choices, storage: str = "float32") -> Sequence[Any]:
        """Return passes over a simplified module before its operators are legalised.

        Args:
            tolerance: as in `RelayKernels.building`.
            choices: of tuning.
            storage: the type of the weights of convolutions in memory; kernels compute in float32.
        """
        return ()

    def legalizations(self, target: Any, storage: str = "float32") -> Mapping[str, Legalization]:
        """Return by operator what LegalizeOps is to make of it in the place of TVM's.

        Args:
            storage: the type of the weights of matrix products in memory.
        """
        return {}

    def scheduled(self, function: Any, target: Any) -> tuple[Any, str]:
        """Return a fused function scheduled for CPU cores, and the name of the rule that did it."""
        return function, "default"

    def workload_of(self, function: Any) -> Any | None:
        """Return what tuning calls a function of TIR; None if tuning cannot make it faster.

        It is a function for CPU cores before it is scheduled, or one for GPUs that a rule has scheduled.
        """
        return None

    def is_winograd(self, rule: str) -> bool:
        """Return whether the rule of this name computes a convolution by Winograd's algorithm."""
        return False

    def gpu_rules(self, choices: Choices) -> Sequence[GpuRule]:
        """Return rules of fused functions for GPUs, which precede those of dlight, TVM's collection.

        Args:
            choices: of tuning.
        """
        return ()


def relay_kernels() -> RelayKernels:
    """Return the kernels that are installed for Relay, else TVM's own; raise PlatformError where there are several."""
    kernels: RelayKernels = _installed("relay") or _OWN_OF_RELAY
    return kernels


def relax_kernels() -> RelaxKernels:
    """Return the kernels that are installed for Relax, else TVM's own; raise as `relay_kernels`."""
    kernels: RelaxKernels = _installed("relax") or _OWN_OF_RELAX
    return kernels


def installed_kernels() -> Kernels:
    """Return the kernels of the IR that is installed; raise as `relay_kernels`."""
    return relay_kernels() if installed_ir() == "relay" else relax_kernels()


def hashable(value: Any) -> Any:
    """Return what JSON makes of a workload or a choice as it was: lists are tuples.

    Raises:
        ValueError: it is neither text, nor a number, nor a list of these.
    """
    if isinstance(value, (list, tuple)):
        return tuple(map(hashable, value))
    if not isinstance(value, (str, int, float)):
        raise ValueError(f"{str(value)[:100]} is no workload and no choice of tuning")
    return value


def choices_of(pairs: Iterable[Collection[Any]]) -> dict[Any, Any]:
    """Return choices from the pairs that JSON makes of them; raise ValueError where they are none."""
    return dict(hashable(list(pairs)))


_OWN_OF_RELAY, _OWN_OF_RELAX = RelayKernels(), RelaxKernels()


@cache
def _installed(ir: Ir) -> Any:
    found = {entry.value: entry for entry in entry_points(group=GROUP) if entry.name == ir}
    if len(found) > 1:
        raise PlatformError(
            f"two packages bring kernels for {ir}: {' and '.join(sorted(found))}; uninstall one of them"
        )
    for entry in found.values():
        try:
            return entry.load()
        except ModuleNotFoundError as error:
            if error.name != entry.module.partition(".")[0]:  # the guest is there, and misses something
                raise
    return None


def _refuse_to_tune(model: Model) -> NoReturn:
    raise PlatformError(
        f"{model.name} cannot be tuned: {MISSING}, and TVM's own schedules leave nothing to choose; install it "
        "(`pip install tvm-pipeline`), or compile without tuning"
    )
