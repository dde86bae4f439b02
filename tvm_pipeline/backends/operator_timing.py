"""Seconds of operators that cannot be timed inside the whole model: each operator runs as a stage of its own.

The stages run on the tensors of a real frame, because some kernels take less time for some values. If the device has
transfers, those of the stage's tensors are timed as well and subtracted. Of operators that do the same work on tensors
of the same extents, one is timed for all. Its caller is `sliced.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np

from tvm_pipeline.backends.contract import Array, Seconds, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlanError

TransferTimer = Callable[[Device, Sequence[int], int], "tuple[Seconds, Seconds] | None"]

LEAST_S = 1e-9  # The time of an operator for which a compiler emits no code, such as a reshape.


class OperatorTimer:
    """Times the operators of one model, and keeps their stages for the next call.

    Args:
        graph: the model's operators.
        make_stage: makes one operator a stage on a device; a PlanError says that the operator is no work there.
        values: returns every tensor of one frame, by name.
        time_transfers: is the method of the same name of the CompiledModel; None where no device has transfers.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        make_stage: Callable[[list[str], Device], StageRunner],
        values: Callable[[], Mapping[str, Array]],
        time_transfers: TransferTimer | None = None,
    ) -> None:
        self._graph, self._make_stage, self._make_values = graph, make_stage, values
        self._alike = alike_operators(graph)
        self._time_transfers = time_transfers
        self._runners: dict[Device, list[StageRunner | None]] = {}

    def seconds(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators) on the device, in the calling thread."""
        seconds = np.full((repeats, len(self._graph)), LEAST_S)
        for indices, runner in self.runners(device):
            if runner is not None:
                seconds[:, indices] = self._samples(device, runner, repeats)[:, None]
        return seconds

    def runners(self, device: Device) -> list[tuple[list[int], StageRunner | None]]:
        """Return the stage of one of each group of equal operators, with their indices; None is no work there."""
        if device not in self._runners:
            names = [self._graph.operators[indices[0]].name for indices in self._alike]
            self._runners[device] = [self._alone(name, device) for name in names]
        return list(zip(self._alike, self._runners[device], strict=True))

    def close(self) -> None:
        """Close the stages."""
        for runners in self._runners.values():
            for runner in runners:
                if runner is not None:
                    runner.close()
        self._runners.clear()

    def _samples(self, device: Device, runner: StageRunner, repeats: int) -> Seconds:
        """Return the seconds of runs of one stage without its transfers, after a first run that does not count."""
        inputs = [port.buffer() for port in runner.inputs]
        for port, array in zip(runner.inputs, inputs, strict=True):
            np.copyto(array, self.values[port.name].reshape(port.shape))
        outputs = [port.buffer() for port in runner.outputs]
        runner.bind()
        runner.run(inputs, outputs)
        samples = np.empty(repeats)
        for index in range(repeats):
            begin = time.perf_counter()
            runner.run(inputs, outputs)
            samples[index] = time.perf_counter() - begin
        return np.maximum(samples - self._moved_s(device, inputs, outputs, repeats), LEAST_S)

    def _moved_s(self, device: Device, inputs: Sequence[Array], outputs: Sequence[Array], repeats: int) -> float:
        """Return the median seconds in which the device receives these inputs and sends these outputs."""
        if self._time_transfers is None:
            return 0.0
        sizes = [sum(array.nbytes for array in arrays) for arrays in (inputs, outputs)]
        self._time_transfers(device, sizes, 1)  # The first transfers of a size may be slow.
        samples = self._time_transfers(device, sizes, repeats)
        if samples is None:
            return 0.0
        received, sent = samples
        return float(np.median(received[:, 0]) + np.median(sent[:, 1]))

    @cached_property
    def values(self) -> Mapping[str, Array]:
        """Every tensor of one frame, by name."""
        return self._make_values()

    def _alone(self, operator: str, device: Device) -> StageRunner | None:
        """Return one operator as a stage; None where the device has no work for it."""
        try:
            return self._make_stage([operator], device)
        except PlanError:
            return None


def alike_operators(graph: OperatorGraph) -> list[list[int]]:
    """Return groups of operators, as indices, that take the same time: same work, tensors of the same extents."""
    tensors = graph.tensors
    groups: dict[object, list[int]] = {}
    for index, operator in enumerate(graph.operators):
        extents = tuple((tensors[name].shape, tensors[name].dtype) for name in operator.inputs)
        results = tuple((tensor.shape, tensor.dtype) for tensor in operator.outputs)
        work = operator.kind, operator.macs, operator.param_bytes, extents, results
        groups.setdefault(work, []).append(index)
    return list(groups.values())
