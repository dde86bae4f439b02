"""A compiled model whose state goes from frame to frame: the CompiledModel of any backend, with its loops as operators.

The model is compiled and cut as without a state. Only the graph that is planned differs (core/state_loops.py): each
loop is one ordered operator there, and stands for operators of the compiled model here. Next:
runtime/carried_state.py, which gives a loop its state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel, Order, Seconds, StageRunner
from tvm_pipeline.backends.optional import computed_by
from tvm_pipeline.backends.tuning import TunedKernels, kernels_to_tune, tuned_kernels
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.state_loops import Carry, with_loops


class CarriedModel:
    """A model with loops: the CompiledModel. `stage` gives the states of a loop as inputs and outputs of the stage.

    Raises what `with_loops` raises.
    """

    def __init__(self, compiled: CompiledModel, carry: Carry) -> None:
        self.compiled = compiled
        self.graph, self._members = with_loops(compiled.graph, carry)

    @property
    def order(self) -> Order:
        return self.compiled.order

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        return self.compiled.stage(self._own(operators), device)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        return self.compiled.activation_bytes(self._own(operators), device)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators); a loop takes as long as its operators together."""
        index = self.compiled.graph.edges.index
        seconds = self.compiled.time_operators(device, repeats)
        columns = [seconds[:, [index[name] for name in own]].sum(axis=1) for own in self._members.values()]
        return np.stack(columns, axis=1)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        return self.compiled.time_transfers(device, sizes_bytes, repeats)

    def computes(self, device: Device) -> list[str]:
        computed = set(computed_by(self.compiled, device))
        return [name for name, own in self._members.items() if computed.issuperset(own)]

    def tuned(self) -> list[TunedKernels]:
        return tuned_kernels(self.compiled)

    def kernels_to_tune(self, device: Device) -> Mapping[str, Sequence[Hashable]]:
        found = kernels_to_tune(self.compiled, device)
        own = {name: [k for part in parts for k in found.get(part, ())] for name, parts in self._members.items()}
        return {name: kernels for name, kernels in own.items() if kernels}

    def slicer(self) -> None:
        """Return None: the model was cut before its loops were joined."""

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        """Write the model as without loops; whoever loads it joins them again (`with_carry`)."""
        self.compiled.save(folder, self.own_stages(stages), platform)

    def close(self) -> None:
        self.compiled.close()

    def own_stages(self, stages: Sequence[Stage]) -> list[Stage]:
        """Return the stages with the operators of the compiled model."""
        return [replace(stage, operators=tuple(self._own(stage.operators))) for stage in stages]

    def _own(self, operators: Sequence[str]) -> list[str]:
        """Return the operators of the compiled model, in its order; names that are none of these stay."""
        index = self.compiled.graph.edges.index
        own = [part for name in operators for part in self._members.get(name, (name,))]
        return sorted(own, key=lambda name: index.get(name, -1))


def with_carry(compiled: CompiledModel, carry: Carry) -> CompiledModel:
    """Return the model with its loops joined; the model itself where nothing is carried. Raise as `with_loops` does."""
    return CarriedModel(compiled, carry) if carry else compiled


def without_carry(compiled: CompiledModel, stages: Sequence[Stage]) -> tuple[CompiledModel, Sequence[Stage]]:
    """Return the model as its backend compiled it, and the stages with its operators."""
    return (
        (compiled.compiled, compiled.own_stages(stages)) if isinstance(compiled, CarriedModel) else (compiled, stages)
    )
