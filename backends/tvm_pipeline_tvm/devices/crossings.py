"""Tensors that cross the cut of a slice on a device: which array of the device stands for which array of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm.compiled_model import RunnableSlice
from tvm_pipeline_tvm.devices.mirrors import Mirror, Mirrors

MOST_KNOWN = 64  # arrays of the host for one tensor; a pipeline has one for each frame inside


class Crossing:
    """A tensor that crosses the cut, and what stands for it on the device.

    Args:
        shape: as the executor has it.
        tie: makes the executor use an array of the device; None where the executor has its own, `own`.

    Attributes:
        kept: whether the tensor stays on the device, for another stage there.
        copied: whether its values are brought to the device before a run, or back after it.
        mirror: of the array that was used last.
    """

    mirror: Mirror

    def __init__(
        self, shape: Sequence[int], dtype: str, mirrors: Mirrors, tie: Callable[[Any], object] | None, own: Any = None
    ) -> None:
        self.kept, self.copied = False, True
        self._shape, self._dtype, self._mirrors, self._tie, self._own = tuple(shape), dtype, mirrors, tie, own
        self._known: dict[int, tuple[Array, Mirror, Any]] = {}
        self._tied: Any = None

    def keep(self, arrays: Sequence[Array], copied: bool) -> bool:
        """Have the tensor stay on the device, for all these arrays of the host; return whether it can."""
        if self._tie is not None:
            self.kept, self.copied = True, copied
            self._known = {id(array): self._stand_in(array) for array in arrays}
        return self.kept

    def use(self, array: Array) -> None:
        """Make the executor use the mirror of an array of the host."""
        known = self._known.get(id(array))
        if known is None:
            if len(self._known) > MOST_KNOWN and not self.kept:
                self._known.clear()
            known = self._known[id(array)] = self._stand_in(array)
        _, self.mirror, view = known
        if self._tie is not None and view is not self._tied:
            self._tie(view)
            self._tied = view

    def _stand_in(self, array: Array) -> tuple[Array, Mirror, Any]:
        """Return the array, its mirror, and what the executor is to use."""
        mirror = self._mirror(array)
        return array, mirror, self._mirrors.part(mirror.on_device, 0, self._shape, self._dtype) if self._tie else None

    def _mirror(self, array: Array) -> Mirror:
        shared = self._mirrors.shared(array, kept=self.kept) if self._tie is not None else None
        if shared is not None:
            return shared
        if self._own is None:  # serves all arrays that are copied
            self._own = self._mirrors.empty(array.nbytes)
        return self._mirrors.copied(array, self._own)


class SliceOnDevice(RunnableSlice):
    """What slices on a device share, whatever runs them: their tensors cross the cut in the same way."""

    _device: Any
    _received: list[Crossing]
    _sent: list[Crossing]

    def keep(self, tensor: str, arrays: Sequence[Array], *, copied: bool) -> bool:
        """Have a tensor that crosses the cut stay on the device, as `StageRunner.keep` describes."""
        names = [port.name for port in (*self.inputs, *self.outputs)]
        return (*self._received, *self._sent)[names.index(tensor)].keep(arrays, copied)

    def set_buffers(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Use these arrays, and give them to the device."""
        for crossing, array in zip((*self._received, *self._sent), (*inputs, *outputs), strict=True):
            crossing.use(array)
        self.give_to_device()

    def give_to_device(self) -> None:
        """Give the arrays of `set_buffers` to the device, the inputs with their values."""
        for received in self._received:
            received.mirror.begin(copied=received.copied)
        for sent in self._sent:
            sent.mirror.begin(copied=False)

    def give_to_host(self) -> None:
        """Wait until the run has ended, and the host has the outputs."""
        for received in self._received:
            received.mirror.end(copied=False)
        for sent in self._sent:
            sent.mirror.end(copied=sent.copied)
        self._device.sync()
