"""A model compiled for every target of its devices: the CompiledModel of TVM backends.

Next: `build.py`, which compiles, and `slicing.py`, which cuts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Array, Order
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, PlatformError, RunError
from tvm_pipeline.tvm.alignment import Alignment, align
from tvm_pipeline.tvm.relay.build import Library, build_library, load_library
from tvm_pipeline.tvm.relay.executor import Slice
from tvm_pipeline.tvm.relay.slicing import SliceGraph, slice_graph
from tvm_pipeline.tvm.stack_placement import PLACE_OF_NODE, placed

Bind = Callable[[Device], None]
MEMORY_ORDERED = "memory_ordered"  # an empty file of this name marks a saved model with order "memory"


class RelayModel:
    """One library for each target, under one operator graph.

    Args:
        name: the name of the model.
        libraries: one for each target.
        bind: binds the calling thread to a device.
        order: how stages order their kernels.
    """

    def __init__(self, name: str, libraries: Sequence[Library], bind: Bind, order: Order = "listed") -> None:
        self.order: Order = order
        self.libraries = {library.target: library for library in libraries}
        first = libraries[0]
        kernels = [library.kernels for library in libraries]
        self.graph, alignments = align(name, first.inputs, kernels, [library.heads for library in libraries])
        self._alignments = dict(zip(self.libraries, alignments, strict=True))
        self._bind = bind

    def cut(self, operators: Sequence[str], device: Device) -> SliceGraph:
        """Return the operators as a slice of the device's library; raise PlanError where they are none."""
        library, alignment = self._library(device)
        return slice_graph(library, alignment, self.graph, operators, self.order == "memory")

    def stage(self, operators: Sequence[str], device: Device) -> RelayStage:
        return RelayStage(self._library(device)[0], self.cut(operators, device), device, self._bind)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        part = self.cut(operators, device)
        return part.unordered_bytes, part.activation_bytes

    def time_operators(self, device: Device, repeats: int) -> npt.NDArray[np.float64]:
        """Return seconds of every operator (repeats x operators), each kernel timed where it runs in the whole model.

        The debug executor runs one node in each call. The cost of the call itself is measured on input nodes and
        subtracted.
        """
        library, _ = self._library(device)
        names = [operator.name for operator in self.graph.operators]
        part = self.cut(names, device)
        whole = Slice(library, part, debug=True)
        whole.set_buffers([noise(port) for port in part.inputs], [port.buffer() for port in part.outputs])
        column = {name: index for index, name in enumerate(names)}
        execute = placed(whole.executor["execute_node"], PLACE_OF_NODE)
        seconds = np.zeros((repeats, len(names)))
        clock = time.perf_counter
        for row in seconds:
            # A call of the first node restarts the executor; the nodes of inputs run nothing.
            execute(0)
            node = len(part.inputs)
            for position, operator in part.operator_nodes:
                for silent in range(node, position):
                    execute(silent)
                begin = clock()
                execute(position)
                row[column[operator]] += clock() - begin
                node = position + 1
        return np.maximum(seconds - _call_cost(execute), 1e-9)

    def time_transfers(self, device: Device, sizes_bytes: Sequence[int], repeats: int) -> None:
        """Return None: stages compute in host memory."""

    def slicer(self) -> None:
        """Return None: compiled code is cut here, not the model's file."""

    def save(self, folder: Path, stages: Sequence[Stage] = (), platform: Platform | None = None) -> None:
        """Write every library whole, so that it can be cut anywhere; the stages do not matter."""
        (folder / "name").write_text(self.graph.name)
        if self.order == "memory":
            (folder / MEMORY_ORDERED).touch()
        for index, library in enumerate(self.libraries.values()):
            subfolder = folder / str(index)
            subfolder.mkdir()
            library.save(subfolder)

    def close(self) -> None:
        """Do nothing: the libraries are freed with the last stage that uses them."""

    @classmethod
    def load(cls, folder: Path, bind: Bind) -> RelayModel:
        """Read what `save` wrote; raise BundleError where it is damaged."""
        try:
            name = (folder / "name").read_text()
        except OSError as error:
            raise BundleError(f"{folder}: the compiled model is missing; compile it again") from error
        subfolders = sorted(
            (entry for entry in folder.iterdir() if entry.name.isdigit()), key=lambda entry: int(entry.name)
        )
        if not subfolders:
            raise BundleError(f"{folder}: the compiled model is missing; compile it again")
        order: Order = "memory" if (folder / MEMORY_ORDERED).exists() else "listed"
        return cls(name, [load_library(subfolder) for subfolder in subfolders], bind, order)

    @classmethod
    def compile(
        cls,
        model: Model,
        targets: Sequence[str],
        bind: Bind,
        progress: Callable[[str], None],
        order: Order = "listed",
    ) -> RelayModel:
        """Compile once for each distinct target, in the sequence given."""
        libraries = [build_library(model, target, progress) for target in dict.fromkeys(targets)]
        return cls(model.name, libraries, bind, order)

    def _library(self, device: Device) -> tuple[Library, Alignment]:
        library = self.libraries.get(device.target)
        if library is None:
            compiled = ", ".join(repr(target) for target in self.libraries)
            raise PlatformError(
                f"device {device.name} wants target {device.target!r}; the model was compiled for {compiled}"
            )
        return library, self._alignments[device.target]


class RelayStage:
    """A slice on a device: the StageRunner of TVM backends."""

    def __init__(self, library: Library, part: SliceGraph, device: Device, bind: Bind) -> None:
        self._run: Callable[[Sequence[Array], Sequence[Array]], None] | None = Slice(library, part).run
        self.inputs, self.outputs = part.inputs, part.outputs
        self.activation_bytes = part.activation_bytes
        self._device, self._bind_to = device, bind

    def bind(self) -> None:
        self._bind_to(self._device)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if self._run is None:
            raise RunError(f"a stage on {self._device.label} was closed; make a new one")
        self._run(inputs, outputs)

    def close(self) -> None:
        self._run = None  # this frees the executor and its arena, but a run that still goes on keeps them until it ends


def _call_cost(execute: Any) -> float:
    """Return seconds of a call that runs nothing."""
    samples = []
    for _ in range(50):
        begin = time.perf_counter()
        execute(0)
        samples.append(time.perf_counter() - begin)
    return float(np.median(samples))
