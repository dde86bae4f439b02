"""An ONNX model compiled for the modelled device: a kernel for each operator, and stages that upload and download."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from modelled_device.device import ModelledDevice
from modelled_device.onnx_file import OnnxFile
from tvm_pipeline.backends.contract import Array, Order, Port, Seconds
from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.partition import check_stage, slice_ends
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import RunError

MODEL_FILE, SETTINGS_FILE = "model.onnx", "settings.json"


class ModelledModel:
    """The CompiledModel. Numpy decides where activations are, so `order` changes nothing."""

    def __init__(self, file: OnnxFile, device: ModelledDevice, order: Order) -> None:
        self.graph, self.order = file.graph, order
        self._file, self._device = file, device

    def stage(self, operators: Sequence[str], device: Device) -> ModelledStage:
        check_stage(self.graph, operators)
        return ModelledStage(self._file, self._device, operators)

    def activation_bytes(self, operators: Sequence[str], device: Device) -> tuple[int, int]:
        chosen = (operator for operator in self.graph.operators if operator.name in operators)
        size = sum(operator.output_bytes for operator in chosen)
        return size, size

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Time each kernel while its inputs are on the device; `time_transfers` times the transfers."""
        seconds = np.empty((repeats, len(self.graph)))
        tensors = self._file.values()

        def clocked(operator: Operator) -> float:
            began = time.perf_counter()
            self._file.compute(operator, tensors)
            return max(time.perf_counter() - began, 1e-9)

        for row in seconds:
            row[:] = [self._device.run(lambda op=operator: clocked(op)) for operator in self.graph.operators]
        return seconds

    def time_transfers(self, device: Device, sizes_bytes: Sequence[int], repeats: int) -> tuple[Seconds, Seconds]:
        return self._device.time_copies(sizes_bytes, repeats)

    def slicer(self) -> OnnxFile:
        return self._file

    def save(self, folder: Path, stages: Sequence[Stage], platform: Platform) -> None:
        inputs = [(tensor.name, tensor.shape, tensor.dtype) for tensor in self.graph.inputs]
        settings = {"name": self.graph.name, "inputs": inputs, "order": self.order}
        (folder / MODEL_FILE).write_bytes(self._file.source.content)
        (folder / SETTINGS_FILE).write_text(json.dumps(settings))

    def close(self) -> None:
        """Do nothing: the device's buffers belong to stages."""


class ModelledStage:
    """The StageRunner: each of its inputs and outputs has a buffer in the device's memory."""

    def __init__(self, file: OnnxFile, device: ModelledDevice, operators: Sequence[str]) -> None:
        self._file, self._device = file, device
        self._operators = [operator for operator in file.graph.operators if operator.name in operators]
        taken, given = slice_ends(file.graph, operators)
        self.inputs = tuple(Port(tensor.name, tensor.shape, tensor.dtype) for tensor in taken)
        self.outputs = tuple(Port(tensor.name, tensor.shape, tensor.dtype) for tensor in given)
        self._buffers: dict[str, Array] | None = {
            port.name: device.allocate(port.shape, port.dtype) for port in (*self.inputs, *self.outputs)
        }

    def bind(self) -> None:
        """Do nothing: the device has a thread of its own, and any thread may copy."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        buffers = self._buffers
        if buffers is None:
            raise RunError("the stage was closed; make a new one")
        for port, array in zip(self.inputs, inputs, strict=True):
            self._device.upload(array, buffers[port.name])
        self._device.run(lambda: self._compute(buffers))
        for port, array in zip(self.outputs, outputs, strict=True):
            self._device.download(buffers[port.name], array)

    def close(self) -> None:
        self._buffers = None  # a run that still goes on keeps them until it ends

    def _compute(self, buffers: dict[str, Array]) -> None:
        """Run the kernels on the device's thread; their results stay in the device's memory."""
        tensors = dict(buffers)
        for operator in self._operators:
            tensors.update(self._file.compute(operator, tensors))
        for port in self.outputs:
            np.copyto(buffers[port.name], tensors[port.name])
