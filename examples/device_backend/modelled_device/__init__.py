"""A modelled accelerator as a backend of tvm-pipeline: numpy on a thread plays the device.

Read `compiled.py` next; the contract is `tvm_pipeline/backends/contract.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from modelled_device.compiled import MODEL_FILE, SETTINGS_FILE, ModelledModel
from modelled_device.device import ModelledDevice
from modelled_device.onnx_file import OnnxFile
from tvm_pipeline.backends.contract import CompiledModel, Order, Progress
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlatformError

TARGET = "modelled:0"


class ModelledBackend:
    """One modelled accelerator."""

    name = "modelled"
    cuts = ("onnx",)
    serves: tuple[str, ...] = ()

    def __init__(self) -> None:
        self._device = ModelledDevice()

    def refuses(self, model: Model) -> str:
        if model.format != "onnx":
            return f"{model.name} is {model.format}, the modelled device takes .onnx: convert it"
        try:
            OnnxFile(model)
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return [self.settle(Device("accelerator", self.name, target=TARGET))]

    def settle(self, device: Device) -> Device:
        if device.target not in ("", TARGET):
            raise PlatformError(f"device {device.name}: there is no {device.target}, only {TARGET}")
        told = "numpy on a thread of the CPU (an example, which has no hardware)"
        return replace(device, target=TARGET, stand_in=told)

    def compile(
        self, model: Model, devices: Sequence[Device], progress: Progress, order: Order = "listed"
    ) -> ModelledModel:
        progress(f"{model.name} for {TARGET}")
        return ModelledModel(OnnxFile(model), self._device, order)

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        """Do nothing: every stage has buffers of its own."""

    def load(self, folder: Path, devices: Sequence[Device]) -> ModelledModel:
        try:
            settings = json.loads((folder / SETTINGS_FILE).read_text())
            inputs = tuple(Tensor(name, tuple(shape), dtype) for name, shape, dtype in settings["inputs"])
            model = Model(settings["name"], "onnx", (folder / MODEL_FILE).read_bytes(), inputs)
            return ModelledModel(OnnxFile(model), self._device, settings["order"])
        except (OSError, ValueError, KeyError, ModelError) as error:
            raise BundleError(f"{folder}: damaged compiled model ({error}); compile it again") from error

    def versions(self) -> Mapping[str, str]:
        return {}  # an .onnx file runs on every version

    def close(self) -> None:
        self._device.close()


backend = ModelledBackend()
