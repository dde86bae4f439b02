"""A modelled accelerator as a backend of tvm-pipeline: numpy on a thread of the CPU plays the device.

`Memory` is the driver, `ModelledModel` the compiler, `ModelledBackend` the detection. The README says what to replace.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import numpy as np
from onnx.reference import ReferenceEvaluator

from tvm_pipeline.backends import Array, Backend, Order, Port, Seconds
from tvm_pipeline.backends.engine import EngineStage
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError
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
    """An ONNX file, any part of which the device computes."""

    def __init__(self, model: Model, order: Order = "listed") -> None:
        super().__init__(model, order)
        self.stage(self.graph.operator_names, Device("accelerator", "modelled"))

    def runner(self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> ModelledStage:
        try:
            kernels = ReferenceEvaluator(content)
        except Exception as error:  # onnx raises errors of many kinds, without a common root
            raise ModelError(f"{self.graph.name}: the modelled device cannot run it: {error}") from error
        return ModelledStage((kernels, Memory(inputs)), inputs, outputs, ())

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


class ModelledStage(EngineStage):
    """Uploads its inputs, runs its kernels, and downloads its outputs."""

    def compute(
        self, made: tuple[ReferenceEvaluator, Memory], inputs: Sequence[Array], outputs: Sequence[Array]
    ) -> None:
        kernels, memory = made
        for port, array in zip(self.inputs, inputs, strict=True):
            memory.upload(port, array)
        with QUEUE:
            results = kernels.run(None, {port.name: memory.tensors[port.name] for port in self.inputs})
        memory.tensors |= zip(kernels.output_names, map(np.asarray, results), strict=True)
        for port, array in zip(self.outputs, outputs, strict=True):
            memory.download(port, array)


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
