"""Seconds of operators that cannot be timed inside the whole model: each runs as a stage of its own.

The stages run on the tensors of a real frame, since some kernels take less time for some values. Of operators that do
the same work on tensors of the same extents one is timed for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cached_property

import numpy as np

from tvm_pipeline.backends.contract import Array, Seconds, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlanError

_LEAST_S = 1e-9  # of an operator that a compiler makes nothing of, such as a reshape


class OperatorTimer:
    """Times the operators of one model; keeps their stages for the next call.

    Args:
        graph: the model's operators.
        make_stage: makes one operator a stage on a device; a PlanError says that the operator is no work there.
        values: every tensor of one frame, by name.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        make_stage: Callable[[list[str], Device], StageRunner],
        values: Callable[[], Mapping[str, Array]],
    ) -> None:
        self._graph, self._make_stage, self._make_values = graph, make_stage, values
        self._runners: dict[Device, list[StageRunner | None]] = {}

    def seconds(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators) on the device, in the calling thread."""
        if device not in self._runners:
            names = [self._graph.operators[indices[0]].name for indices in self._alike]
            self._runners[device] = [self._alone(name, device) for name in names]
        seconds = np.full((repeats, len(self._graph)), _LEAST_S)
        for indices, runner in zip(self._alike, self._runners[device], strict=True):
            if runner is not None:
                seconds[:, indices] = self._samples(runner, repeats)[:, None]
        return seconds

    def close(self) -> None:
        """Close the stages."""
        for runners in self._runners.values():
            for runner in runners:
                if runner is not None:
                    runner.close()
        self._runners.clear()

    def _samples(self, runner: StageRunner, repeats: int) -> Seconds:
        inputs = [port.buffer() for port in runner.inputs]
        for port, array in zip(runner.inputs, inputs, strict=True):
            np.copyto(array, self._values[port.name].reshape(port.shape))
        outputs = [port.buffer() for port in runner.outputs]
        runner.bind()
        runner.run(inputs, outputs)
        samples = np.empty(repeats)
        for index in range(repeats):
            begin = time.perf_counter()
            runner.run(inputs, outputs)
            samples[index] = time.perf_counter() - begin
        return np.maximum(samples, _LEAST_S)

    @cached_property
    def _alike(self) -> list[list[int]]:
        """The indices of operators that take the same time: the same work, on tensors of the same extents."""
        tensors = self._graph.tensors
        groups: dict[object, list[int]] = {}
        for index, operator in enumerate(self._graph.operators):
            extents = tuple((tensors[name].shape, tensors[name].dtype) for name in operator.inputs)
            results = tuple((tensor.shape, tensor.dtype) for tensor in operator.outputs)
            work = operator.kind, operator.macs, operator.param_bytes, extents, results
            groups.setdefault(work, []).append(index)
        return list(groups.values())

    @cached_property
    def _values(self) -> Mapping[str, Array]:
        return self._make_values()

    def _alone(self, operator: str, device: Device) -> StageRunner | None:
        try:
            return self._make_stage([operator], device)
        except PlanError:
            return None
