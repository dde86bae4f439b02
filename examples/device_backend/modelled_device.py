"""A modelled accelerator as a backend of tvm-pipeline: numpy on a thread of the CPU plays the device.

`Memory` is the driver, `ModelledModel` the compiler, `ModelledBackend` the detection. The README says what to replace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from onnx.reference import ReferenceEvaluator

from tvm_pipeline.backends import Array, Backend, Order, Port, Seconds, StageRunner
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_model import OnnxModel

_log = logging.getLogger(__name__)

TARGET = "modelled:0"
QUEUE = Lock()  # the device does one piece of work after the other


class Memory:
    """Memory of the device, which stages of the host never see; the copies to and from it are really made."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.tensors = {port.name: np.zeros(port.shape, port.dtype) for port in ports}

    def upload(self, port: Port, array: Array) -> None:
        np.copyto(self.tensors[port.name], array)

    def download(self, port: Port, array: Array) -> None:
        np.copyto(array, self.tensors[port.name])


class ModelledModel(OnnxModel):
    """An ONNX file with a kernel for each operator."""

    def __init__(self, model: Model, order: Order = "listed") -> None:
        super().__init__(model, order)
        names = [operator.name for operator in self.graph.operators]
        try:
            self._kernels = {name: ReferenceEvaluator(self.file.part([name])) for name in names}
        except Exception as error:  # onnx raises errors of many kinds, without a common root
            raise ModelError(f"{model.name}: the modelled device cannot run it: {error}") from error
        self._timer = OperatorTimer(self.graph, self.stage, self.values, self.time_transfers)

    def compute(self, operators: Sequence[str], tensors: dict[str, Array]) -> dict[str, Array]:
        """Run operators on tensors by name; return these with what the operators write."""
        for operator in (operator for operator in self.graph.operators if operator.name in operators):
            kernel = self._kernels[operator.name]
            results = kernel.run(None, {name: tensors[name] for name in operator.inputs})
            tensors |= zip(kernel.output_names, map(np.asarray, results), strict=True)
        return tensors

    def values(self) -> Mapping[str, Array]:
        return self.compute(list(self._kernels), frame_of_noise(self.graph))

    def stage(self, operators: Sequence[str], device: Device) -> ModelledStage:
        check_stage(self.graph, operators)
        return ModelledStage(self, operators)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        return self._timer.seconds(device, repeats)

    def time_transfers(self, device: Device, sizes_bytes: Sequence[int], repeats: int) -> tuple[Seconds, Seconds]:
        received, sent = np.empty((2, repeats, len(sizes_bytes)))
        for column, size in enumerate(sizes_bytes):
            port = Port("tensor", (size,), "uint8")
            memory, array = Memory([port]), np.ones(size, np.uint8)
            memory.upload(port, array)
            for row in range(repeats):
                began = time.perf_counter()
                memory.upload(port, array)
                uploaded = time.perf_counter()
                memory.download(port, array)
                received[row, column] = uploaded - began
                sent[row, column] = time.perf_counter() - uploaded
        return received, sent

    def close(self) -> None:
        self._timer.close()


class ModelledStage(StageRunner):
    """Uploads its inputs, runs its kernels, and downloads its outputs."""

    def __init__(self, model: ModelledModel, operators: Sequence[str]) -> None:
        self.inputs, self.outputs = (tuple(map(Port.of, ends)) for ends in slice_ends(model.graph, operators))
        self._model, self._operators = model, operators
        self._memory: Memory | None = Memory(self.inputs)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        memory = self._memory
        if memory is None:
            raise RunError("the stage was closed; make a new one")
        for port, array in zip(self.inputs, inputs, strict=True):
            memory.upload(port, array)
        with QUEUE:
            memory.tensors = self._model.compute(self._operators, memory.tensors)
        for port, array in zip(self.outputs, outputs, strict=True):
            memory.download(port, array)

    def close(self) -> None:
        self._memory = None  # a run that still goes on keeps it until it ends


class ModelledBackend(Backend):
    """One modelled accelerator."""

    name = "modelled"
    cuts = ("onnx",)

    def refuses(self, model: Model) -> str:
        if model.format != "onnx":
            return f"{model.name} is {model.format}, the modelled device takes .onnx: convert it"
        try:
            ModelledModel(model)
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        told = "numpy on a thread of the CPU (an example, which has no hardware)"
        return [Device("accelerator", self.name, target=TARGET, stand_in=told)]

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> ModelledModel:
        _log.info(f"{model.name} for {TARGET}")
        return ModelledModel(model, order)

    def load(self, folder: Path, devices: Sequence[Device]) -> ModelledModel:
        return ModelledModel.load(folder)


backend = ModelledBackend()
