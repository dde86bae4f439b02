"""The contract of a backend: a plug-in that knows one hardware family.

A backend finds devices, compiles a model for them, and gives runnable stages of what it compiled. It is an object
named by an entry point of the group `tvm_pipeline.backends`; the core imports none. One without hardware is
`tests/support/fake_backend.py`.

Tensors cross stages as contiguous host arrays, 64-byte aligned. A backend may keep them in a layout of its own;
`Port.layout` says which, and two ports with equal `shape` and `layout` hand arrays over as they are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import PlatformError

_log = logging.getLogger(__name__)
Array = npt.NDArray[Any]
Progress = Callable[[str], None]
MEMORY_ORDERED = "memory_ordered"


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor as a stage wants it: the physical shape and the layout (empty for the logical one)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str = ""

    def buffer(self) -> Array:
        """A new array for this port, 64-byte aligned as compiled kernels require."""
        return aligned_empty(self.shape, self.dtype)


class StageRunner(Protocol):
    """A runnable stage. All calls come from the one thread that called `bind`."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def bind(self) -> None:
        """Ties the calling thread to the device: cores, thread pool, context."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Computes `outputs` from `inputs`, both in the order of the ports; returns when they are complete."""


class CompiledModel(Protocol):
    """A model compiled for every device it may run on, to be cut anywhere."""

    graph: OperatorGraph
    memory_ordered: bool  # whether stages run their operators in the order that needs the least memory; may be set

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """The operators as one stage on `device`; raises PlanError where they are no legal stage."""

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """What the activations of a stage take, as its allocator plans them: in the usual order, and as it runs."""

    def time_operators(self, device: Device, repeats: int) -> npt.NDArray[np.float64]:
        """Seconds of every operator, `repeats` x operators, timed in place from a bound thread."""

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Writes all that `Backend.load` needs into an existing folder, so that `stages` run with no compilation.

        The empty file MEMORY_ORDERED says that `memory_ordered` is set.
        """


class Backend(Protocol):
    """One hardware family."""

    name: str
    leads: bool  # whether it compiles for devices of other backends too, each of which is then given its part

    def refuses(self, model: Model) -> str:
        """Why it cannot compile the model, with what would help; empty where it can."""

    def detect(self) -> Sequence[Device]:
        """The devices of this machine; empty where there are none."""

    def settle(self, device: Device) -> Device:
        """The device with what its platform left open filled in, a stand-in told where it is not here.

        Raises PlatformError where it cannot be used on this machine, with the reason.
        """

    def compile(self, model: Model, devices: Sequence[Device], progress: Progress) -> CompiledModel:
        """Compiles once for each distinct target of `devices`; what was compiled before comes from the cache."""

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        """Prepares models for living on the same devices at the same time, each with the stages of its plan."""

    def load(self, folder: Path) -> CompiledModel:
        """Reads what `CompiledModel.save` wrote."""

    def versions(self) -> Mapping[str, str]:
        """The software whose version decides whether a saved model still loads."""


def aligned_empty(shape: Sequence[int], dtype: str) -> Array:
    """An uninitialised C-contiguous array whose data begins at a multiple of 64 bytes."""
    item = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * item.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(item).reshape(shape)


def noise(port: Port) -> Array:
    """Input for measuring: seeded noise, since zeros take short cuts in some kernels and denormals are slow."""
    array = port.buffer()
    draw = np.random.default_rng(0)
    if np.issubdtype(array.dtype, np.floating):
        array[...] = draw.standard_normal(array.shape)
    else:
        array[...] = draw.integers(0, 100, array.shape)
    return array


def find_backend(name: str) -> Backend:
    """The backend that an installed package registered as `name`."""
    found = {entry.name: entry for entry in entry_points(group="tvm_pipeline.backends")}
    if name not in found:
        known = ", ".join(sorted(found)) or "none: install the package with `pip install .`"
        raise PlatformError(f"no backend is called {name}; installed backends: {known}")
    try:
        backend: Backend = found[name].load()
    except ImportError as error:
        raise PlatformError(f"the backend {name} cannot be used: {error}; see the extras in the README") from error
    return backend


def detect_platform(model: Model | None = None) -> Platform:
    """This machine: the devices of every installed backend, or of those that can compile `model`.

    What is left out is logged with the reason.

    Raises:
        PlatformError: nothing is left.
    """
    devices: list[Device] = []
    reasons: list[str] = []
    for name in sorted(entry.name for entry in entry_points(group="tvm_pipeline.backends")):
        try:
            backend = find_backend(name)
        except PlatformError as error:
            reasons.append(str(error))
            continue
        found = backend.detect()
        refused = backend.refuses(model) if model and found else ""
        if refused:
            reasons.append(f"{', '.join(device.name for device in found)} left out: {refused}")
        else:
            devices += found
    for reason in reasons:
        _log.warning(reason)
    if not devices:
        raise PlatformError("; ".join(reasons) or "no backend finds a device on this machine; give --platform")
    return Platform("this machine", tuple(devices))


def settle_platform(platform: Platform) -> tuple[Backend, Platform]:
    """The backend that compiles for a platform, and the platform with each device settled on this machine.

    Raises:
        PlatformError: a device cannot be used here, or its backends cannot work together.
    """
    lead = leading_backend(platform)
    devices = tuple(find_backend(device.backend).settle(device) for device in platform.devices)
    return lead, replace(platform, devices=devices)


def leading_backend(platform: Platform) -> Backend:
    """The backend that compiles for all devices: their own, or of several the one that leads.

    Raises:
        PlatformError: none of several leads.
    """
    names = dict.fromkeys(device.backend for device in platform.devices)
    backends = [find_backend(name) for name in names]
    leading = backends if len(backends) == 1 else [backend for backend in backends if backend.leads]
    if not leading:
        raise PlatformError(
            f"platform {platform.name} mixes the backends {', '.join(names)}, and none of them compiles for the "
            "others; split the platform file"
        )
    return leading[0]


def check_cores(device: Device) -> None:
    """Raises PlatformError where the device names no cores, or some that this process may not use."""
    here = sorted(os.sched_getaffinity(0))
    if not device.cores or not set(device.cores) <= set(here):
        raise PlatformError(
            f"device {device.name} names cores {list(device.cores)}; this process may use "
            f"{', '.join(map(str, here))}. Mend `cores` in the platform file, or see `tvm-pipeline devices`"
        )
