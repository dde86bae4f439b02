"""Devices with one fault each, which their `target` names; onnxruntime computes for them.

FAULTS says what each does. A stage of a pipeline runs often, and one of a check of the contract a few times, so that
faults of frames begin at the run LATE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.crashes import hangs, segfault
from tvm_pipeline.backends.contract import Array, CompiledModel, Delegating, Model, Order, StageRunner
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_onnxruntime import OnnxruntimeBackend

FAULTS = {
    "none": "it has no fault",
    "missing": "its library is not there",
    "computes": "a convolution has one wrong value",
    "changes": "a transfer flips one bit",
    "slices": "one bit of a slice differs from the whole model's",
    "crashes": "it ends the process when it computes",
    "hangs": "it never answers when it computes",
    "loses": "late, it gives a former frame in place of the one that it was given",
    "fails": "late, it raises an error",
    "unplugged": "late, it ends a process that has loaded the model, each time that it is used",
}
LATE = 100


class _Runner(StageRunner):
    def __init__(self, inner: StageRunner, model: _Model, operators: Sequence[str], fault: str) -> None:
        self._inner, self._fault, self._runs, self._is_loaded = inner, fault, 0, model.is_loaded
        self._network, self._is_whole = model.graph.name, len(operators) == len(model.graph)
        self.inputs, self.outputs = inner.inputs, inner.outputs

    def bind(self) -> None:
        self._inner.bind()

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        self._runs += 1
        fault, late = self._fault, self._runs - LATE
        if self._network == "convolution" and fault in ("crashes", "hangs"):
            {"crashes": segfault, "hangs": hangs}[fault]()
        if fault == "unplugged" and late >= 0 and self._is_loaded:
            segfault()
        if fault == "fails" and late >= 0:
            raise OSError("the driver is gone")
        before = [array.copy() for array in outputs]
        self._inner.run(inputs, outputs)
        if fault == "loses" and late == 0:
            for array, value in zip(outputs, before, strict=True):
                array[...] = value
        first = outputs[0].reshape(-1)
        if fault == "computes" and self._network == "convolution":
            first[5] += 1
        if (fault == "changes" and self._network == "addition") or (fault == "slices" and not self._is_whole):
            first.view(np.uint8)[4] ^= 1

    def close(self) -> None:
        self._inner.close()


class _Model(Delegating):
    def __init__(self, inner: CompiledModel, *, is_loaded: bool = False) -> None:
        super().__init__(inner)
        self.is_loaded = is_loaded

    def stage(self, operators: Sequence[str], device: Device) -> _Runner:
        return _Runner(self.inner.stage(operators, _on_cpu([device])[0]), self, operators, device.target)

    def time_operators(self, device: Device, repeats: int) -> Any:
        return self.inner.time_operators(_on_cpu([device])[0], repeats)


class FaultyBackend(OnnxruntimeBackend):
    """The backend `faulty`."""

    name = "faulty"
    engine = ""

    def settle(self, device: Device) -> Device:
        if device.target == "missing":
            raise PlatformError("libfaulty.so.1 cannot be loaded; install the package faulty")
        return device

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> Any:
        return _Model(super().compile(model, _on_cpu(devices), order))

    def load(self, folder: Path, devices: Sequence[Device]) -> Any:
        return _Model(super().load(folder, _on_cpu(devices)), is_loaded=True)


def _on_cpu(devices: Sequence[Device]) -> list[Device]:
    return [replace(device, target="cpu") for device in devices]


backend = FaultyBackend()
