"""The backend of onnxruntime's CPU kernels: an engine for models that TVM refuses, and for those that ask for it.

It finds no devices by itself, because the host's cores are TVM's unless somebody asks: a platform file by `backend =
"onnxruntime"` and `cores`, or `compile`, where TVM refuses the model (`engine_devices`). Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_pipeline.backends.contract import Backend, Order
from tvm_pipeline.backends.cores import check_cores, processor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError

if TYPE_CHECKING:
    from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

_log = logging.getLogger(__name__)

TARGET = "cpu"


class OnnxruntimeBackend(Backend):
    """onnxruntime on CPU cores of this machine."""

    name = engine = "onnxruntime"
    cuts = ("onnx",)

    def refuses(self, model: Model) -> str:
        from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

        try:
            OnnxruntimeModel.compile(model, "listed").close()
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return []

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        _check_installed()
        return [Device(device.name, self.name, device.cores, TARGET) for device in beside]

    def settle(self, device: Device) -> Device:
        _check_installed()
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
        from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

        _log.info(f"{model.name} for onnxruntime")
        return OnnxruntimeModel.compile(model, order)

    def settle_elsewhere(self, device: Device) -> Device:
        _check_installed()
        return device

    def load(self, folder: Path, devices: Sequence[Device]) -> OnnxruntimeModel:
        _check_installed()
        from tvm_pipeline_onnxruntime.onnxruntime_model import OnnxruntimeModel

        return OnnxruntimeModel.load(folder)


def _check_installed() -> None:
    missing = [package for package in ("onnxruntime", "onnx") if find_spec(package) is None]
    if missing:
        raise PlatformError(f"{' and '.join(missing)} is not installed: run `pip install 'tvm-pipeline[onnxruntime]'`")
