"""Slots: the buffers of one frame, or of the frames of one call, on their way through the pipeline.

A slot holds every tensor that crosses a boundary, the model's inputs and outputs among them, each once. A
stage writes into the slot and a later one reads from it, so nothing is copied however many stages a tensor skips, and
frames may overtake each other between replicas. The number of slots bounds the pipeline: without a free one no frame
enters.

A tensor stands in the slot as the first device that writes it lays it out. A worker that needs another layout gets a
buffer of its own and converts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.tensor_layout import logical_shape, primal, relayout, to_logical
from tvm_pipeline.errors import PlanError, StageError


@dataclass(slots=True)
class Slot:
    """The buffers of a call by tensor name, reused for call after call. Most models compute one frame a call.

    Attributes:
        layouts: how each tensor lies in its buffer; empty for the logical order.
        batch: how many frames a call computes at most.
        call: the number of the call that it carries.
        frame: index of its first frame; the others follow.
        tags: of each frame that it carries, whatever the caller wants back with its result.
        entered_s: the clock time of the submission of each frame, or of when host work took it from outside.
        done_s: the clock time of the end of its last stage.
        joinable: whether more frames may join, since no stage has begun with it.
    """

    number: int
    buffers: dict[str, Array]
    layouts: dict[str, str]
    batch: int = 1
    call: int = -1
    frame: int = -1
    tags: list[Any] = field(default_factory=list)
    entered_s: list[float] = field(default_factory=list)
    done_s: float = 0.0
    joinable: bool = False

    def logical(self, name: str) -> Array:
        """Return a tensor in logical order; of an input of the model that is the buffer itself, to be written to."""
        array: Array = to_logical(self.buffers[name], self.layouts[name])
        return array

    def part(self, index: int, name: str) -> Array:
        """Return what `logical` returns of one of the frames that it carries."""
        array = self.logical(name)
        if self.batch == 1:
            return array
        extent = len(array) // self.batch
        return array[index * extent : (index + 1) * extent]


@dataclass(frozen=True, slots=True)
class Conversion:
    """A tensor that a worker reads or writes in another layout than the slot's."""

    slot: Array
    slot_layout: str
    own: Array
    own_layout: str

    def receive(self) -> None:
        relayout(self.slot, self.slot_layout, self.own, self.own_layout)

    def send(self) -> None:
        relayout(self.own, self.own_layout, self.slot, self.slot_layout)


@dataclass(slots=True)
class Binding:
    """A slot as one worker sees it: the conversions before, the arrays to run on, the conversions after."""

    inputs: list[Array] = field(default_factory=list)
    outputs: list[Array] = field(default_factory=list)
    receive: list[Conversion] = field(default_factory=list)
    send: list[Conversion] = field(default_factory=list)


def slot_ports(graph: OperatorGraph, runners: Sequence[Sequence[StageRunner]]) -> dict[str, Port]:
    """Return how each tensor stands in a slot: inputs and states of the model in logical order, others as written.

    Raises:
        StageError: a stage in a process of its own could not be made there.
    """
    states = (state for operator in graph.operators for state, _ in operator.carried)
    ports = {tensor.name: Port.of(tensor.times(graph.batch)) for tensor in (*graph.inputs, *states)}
    for index, stage in enumerate(runners):
        for runner in stage:
            try:
                outputs = runner.outputs
            except StageError as error:  # which does not know which stage of the plan it is
                cause = error.__cause__ or error
                raise StageError(index, error.device, -1, cause) from cause
            for port in outputs:
                ports.setdefault(port.name, port)
    return ports


def new_slot(number: int, ports: Mapping[str, Port], batch: int = 1) -> Slot:
    """Return a slot with a buffer for every tensor."""
    layouts = {name: port.layout for name, port in ports.items()}
    return Slot(number, {name: port.buffer() for name, port in ports.items()}, layouts, batch)


def bind_slots(slots: Sequence[Slot], ports: Mapping[str, Port], runner: StageRunner) -> list[Binding]:
    """Return how `runner` sees each slot; its own buffers serve all slots.

    Raises:
        PlanError: a tensor cannot be converted between the layouts of two devices.
    """
    scratch: dict[Port, Array] = {}
    return [_bind_slot(slot, ports, runner, scratch) for slot in slots]


def _bind_slot(slot: Slot, ports: Mapping[str, Port], runner: StageRunner, scratch: dict[Port, Array]) -> Binding:
    binding = Binding()
    for requested, arrays, conversions in (
        (runner.inputs, binding.inputs, binding.receive),
        (runner.outputs, binding.outputs, binding.send),
    ):
        for port in requested:
            if port.name not in ports:
                raise PlanError(f"tensor {port.name} is needed by a stage and written by none before it")
            stands, buffer = ports[port.name], slot.buffers[port.name]
            if stands.dtype != port.dtype or math.prod(stands.shape) != math.prod(port.shape):
                raise PlanError(f"tensor {port.name} is {stands} on one device and {port} on another")
            if stands.layout == port.layout and (not port.layout or stands.shape == port.shape):
                arrays.append(buffer.reshape(port.shape))
                continue
            if stands.layout and port.layout and _logical(stands) != _logical(port):
                raise PlanError(f"tensor {port.name}: no way from layout {stands.layout} to {port.layout}")
            if port not in scratch:
                scratch[port] = port.buffer()
            own = scratch[port]
            arrays.append(own)
            conversions.append(Conversion(buffer, stands.layout, own, port.layout))
    return binding


def keep_on_devices(
    stages: Sequence[Stage],
    runners: Sequence[Sequence[StageRunner]],
    bindings: Sequence[Sequence[Sequence[Binding]]],
    outputs: Collection[str],
    room: Mapping[str, float],
) -> None:
    """Have tensors stay on a device between two of its stages, where the backend can (`StageRunner.keep`).

    A tensor that only stages on one device read is not copied into the slots at all. A stage with replicas keeps
    nothing, because the next stage may meet a frame of another replica.

    Args:
        bindings: of each runner to each slot.
        outputs: the tensors of the model that the host reads.
        room: the bytes that may be kept on each device, for all frames inside together.
    """
    left = dict(room)
    alone = [
        (stage.devices[0], runner, bound)
        for stage, (runner, *others), (bound, *_) in zip(stages, runners, bindings, strict=True)
        if not others
    ]
    readers = Counter(port.name for stage in runners for runner in stage for port in runner.inputs)
    for device, writer, bound in alone:
        for index, name in enumerate(port.name for port in writer.outputs):
            written = [binding.outputs[index] for binding in bound]
            there = [
                (reader, arrays)
                for where, reader, bound_there in alone
                if where == device and (arrays := _read(reader, bound_there, name, written))
            ]
            kept_bytes = sum(array.nbytes for array in written)
            if not there or kept_bytes > left[device]:
                continue
            if writer.keep(name, written, copied=name in outputs or readers[name] > len(there)):
                left[device] -= kept_bytes
                for reader, arrays in there:
                    reader.keep(name, arrays, copied=False)


def _read(runner: StageRunner, bound: Sequence[Binding], name: str, written: Sequence[Array]) -> list[Array]:
    """Return the arrays in which a runner reads a tensor; none where it does not, or converts it from `written`."""
    names = [port.name for port in runner.inputs]
    if name not in names:
        return []
    arrays = [binding.inputs[names.index(name)] for binding in bound]
    return arrays if all(map(np.may_share_memory, arrays, written)) else []


def _logical(port: Port) -> tuple[str, tuple[int, ...]]:
    """Return the axes of a blocked port, and how long they are."""
    return primal(port.layout), logical_shape(port.shape, port.layout)
