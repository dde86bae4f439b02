"""The backend of onnxruntime's CPU kernels: an engine for models that TVM refuses, and for those that ask for it.

Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tvm_pipeline.backends.contract import Order
from tvm_pipeline.backends.cores import check_cores, processor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.frontends.onnx_engine import OnnxEngine

if TYPE_CHECKING:
    from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

_log = logging.getLogger(__name__)

TARGET = "cpu"


class OnnxruntimeBackend(OnnxEngine):
    """onnxruntime on CPU cores of this machine."""

    name = engine = "onnxruntime"
    packages = ("onnxruntime", "onnx")

    def model_type(self) -> type[OnnxruntimeModel]:
        from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

        return OnnxruntimeModel

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        self.check_installed()
        return [Device(device.name, self.name, device.cores, TARGET) for device in beside]

    def settle(self, device: Device) -> Device:
        self.check_installed()
        check_cores(device)
        if device.target not in ("", TARGET):
            raise PlatformError(
                f"device {device.name}: onnxruntime has no target {device.target!r} here; leave `target` out, or give "
                f"{TARGET!r}, which is its kernels for CPU cores"
            )
        return replace(device, target=TARGET)

    def describe(self, device: Device) -> str:
        return processor()

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> OnnxruntimeModel:
        self.check_format(model)
        _log.info(f"{model.name} for onnxruntime")
        return self.model_type().compile(model, order)
