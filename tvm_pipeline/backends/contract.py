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
    >>> compiled = backend.compile(Model("doubling", "onnx", b""), devices, progress=print)
    doubling for d0
    >>> stage = compiled.stage(["double"], devices[0])
    >>> inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
    >>> inputs[0][:] = 3
    >>> stage.bind()
    >>> stage.run(inputs, outputs)
    >>> outputs[0].tolist()
    [6.0, 6.0]
    >>> stage.close(), compiled.close(), backend.close()
    (None, None, None)

`tvm_pipeline.testing.check_backend` says whether a backend keeps the contract, and `examples/device_backend` is one to
start from. Tensors cross stages as contiguous host arrays, 64-byte aligned. A backend may keep them in a layout of its
own: `Port.layout` says which, and two ports with equal `shape` and `layout` hand arrays over as they are. A port
without a layout holds the tensor's elements in their logical order, under a shape of its own if need be.
Next: `registry.py` (which backends are installed) and `sliced.py` (several of them on one platform).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.ports import Array, Port
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform

if TYPE_CHECKING:
    from tvm_pipeline.backends.sliced import Slicer

__all__ = ["Array", "Backend", "CompiledModel", "Order", "Port", "Progress", "Seconds", "StageRunner"]

Progress = Callable[[str], None]
Seconds = npt.NDArray[np.float64]
# The order of a stage's operators: that of the model, or the one of least memory if that takes less.
Order = Literal["listed", "memory"]


class StageRunner(Protocol):
    """A runnable stage. `bind` and `run` are called by one thread at a time, and `run` by the thread that is bound."""

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    def bind(self) -> None:
        """Bind the calling thread to the device: cores, thread pool, context. Another thread may be bound later."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute `outputs` from `inputs`, both in the order of the ports; return when they are complete."""

    def close(self) -> None:
        """Release the resources of the stage. No other call follows, except a second `close`.

        Any thread may call it, even while `run` computes a frame that was given up. Then end `run` if that is
        possible, and release nothing that it still uses.
        """


class CompiledModel(Protocol):
    """A model compiled for every device it may run on, to be cut anywhere.

    Where a device cannot compute some operators, the model also has `computes(device)`, the names of those that it can:
    of others `stage` raises PlanError, and `time_operators` gives NaN. See `optional.py`.
    """

    @property
    def graph(self) -> OperatorGraph: ...

    @property
    def order(self) -> Order:
        """How stages order their operators, as `Backend.compile` was told."""

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make one stage of the operators on `device`; raise PlanError where they are no legal stage."""

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        """Return the bytes that the allocator plans for a stage's activations: in the listed order, and in `order`."""

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), timed in place from a bound thread.

        They contain no transfers where `time_transfers` returns figures.
        """

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        """Time how the device receives and sends tensors of these sizes, from a bound thread.

        Returns:
            Seconds of receiving and of sending (each repeats x sizes). None where stages compute in host memory and
            so have no transfers; a device with memory of its own implements this.
        """

    def slicer(self) -> Slicer | None:
        """Return what cuts the model's file for other backends; None where `Backend.cuts` lacks its format."""

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Write all that `Backend.load` needs, `order` included, into an existing folder.

        `stages` then run on the platform with no compilation.
        """

    def close(self) -> None:
        """Release libraries and device memory after every stage is closed. A second call does nothing."""


class Backend(Protocol):
    """One hardware family. A device is known by its target and cores; its name is the platform's to give."""

    @property
    def name(self) -> str: ...

    @property
    def cuts(self) -> Sequence[str]:
        """Formats of model files that it cuts, so that other backends can compile the slices; see `sliced.py`."""

    @property
    def serves(self) -> Sequence[str]:
        """Names of other backends whose devices it compiles for as well, such as host; usually none."""

    def refuses(self, model: Model) -> str:
        """Return why it cannot compile the model, with what would help; empty where it can."""

    def detect(self) -> Sequence[Device]:
        """Return the devices of this machine; none where it has none."""

    def settle(self, device: Device) -> Device:
        """Return the device with what its platform left open filled in; `stand_in` where it is not here itself.

        Raises PlatformError, with the reason, where it cannot be used on this machine.
        """

    def compile(
        self, model: Model, devices: Sequence[Device], progress: Progress, order: Order = "listed"
    ) -> CompiledModel:
        """Compile once for each distinct target of `devices`; use the cache for what was compiled before."""

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        """Prepare models for use on the same devices at the same time, each with the stages of its plan."""

    def load(self, folder: Path, devices: Sequence[Device]) -> CompiledModel:
        """Read what `CompiledModel.save` wrote, to run on settled devices; raise BundleError where it is damaged."""

    def versions(self) -> Mapping[str, str]:
        """Return the software whose version decides whether a saved model still loads."""

    def close(self) -> None:
        """Release what is kept between models, such as a device's context; the next `compile` acquires it again."""
