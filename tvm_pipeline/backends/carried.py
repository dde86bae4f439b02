"""A compiled model whose state goes from frame to frame: the CompiledModel of any backend, with its loops as operators.

The model is compiled and cut as without a state. Only the graph that is planned differs (core/state_loops.py): each
loop is one ordered operator there, and stands for operators of the compiled model here. Next:
runtime/carried_state.py, which gives a loop its state.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel, Delegating, Seconds
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.state_loops import Carry, with_loops


class CarriedModel(Delegating):
    """A model with loops: the CompiledModel. `stage` gives the states of a loop as inputs and outputs of the stage.

    `save` writes the model as without loops; whoever loads it joins them again (`with_carry`). Raises what `with_loops`
    raises.
    """

    def __init__(self, inner: CompiledModel, carry: Carry) -> None:
        super().__init__(inner)
        self.graph, self._members = with_loops(inner.graph, carry)

    def inner_operators(self, operators: Sequence[str]) -> list[str]:
        """Return the operators of the compiled model, in its order; names that are none of these stay."""
        index = self.inner.graph.edges.index
        own = [part for name in operators for part in self._members.get(name, (name,))]
        return sorted(own, key=lambda name: index.get(name, -1))

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators); a loop takes as long as its operators together."""
        index = self.inner.graph.edges.index
        seconds = self.inner.time_operators(device, repeats)
        columns = [seconds[:, [index[name] for name in own]].sum(axis=1) for own in self._members.values()]
        return np.stack(columns, axis=1)

    def computes(self, device: Device) -> list[str]:
        computed = set(self.inner.computes(device))
        return [name for name, own in self._members.items() if computed.issuperset(own)]

    def slow_operators(self, device: Device) -> list[str]:
        slow = set(self.inner.slow_operators(device))
        return [name for name, own in self._members.items() if not slow.isdisjoint(own)]

    def kernels_to_tune(self, device: Device) -> Mapping[str, Sequence[Hashable]]:
        found = self.inner.kernels_to_tune(device)
        own = {name: [k for part in parts for k in found.get(part, ())] for name, parts in self._members.items()}
        return {name: kernels for name, kernels in own.items() if kernels}

    def slicer(self) -> None:
        """Return None: the model was cut before its loops were joined."""


def with_carry(compiled: CompiledModel, carry: Carry) -> CompiledModel:
    """Return the model with its loops joined; the model itself where nothing is carried. Raise as `with_loops` does."""
    return CarriedModel(compiled, carry) if carry else compiled


def without_carry(compiled: CompiledModel, stages: Sequence[Stage]) -> tuple[CompiledModel, Sequence[Stage]]:
    """Return the model as its backend compiled it, and the stages with its operators."""
    return (compiled.inner, compiled.inner_stages(stages)) if isinstance(compiled, CarriedModel) else (compiled, stages)
