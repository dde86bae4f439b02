"""The backend of LiteRT's CompiledModel: CPU cores, and the GPU and the NPU that LiteRT reaches.

A device's `target` is `CPU`, `GPU` or `NPU`, with properties of LiteRT behind it. Next: `litert_model.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tvm_pipeline.backends.contract import Backend, CompiledModel, Order
from tvm_pipeline.backends.cores import check_cores
from tvm_pipeline.backends.registry import engine_for
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError

CPU, GPU, NPU = "CPU", "GPU", "NPU"
AHEAD = "soc_model"  # the property of an NPU for which stages are compiled ahead of time


class LitertBackend(Backend):
    """LiteRT on this machine. It finds no devices by itself, since the same processors are TVM's unless asked for."""

    name, engine, cuts = "litert", "LiteRT", ("tflite",)

    def __init__(self) -> None:
        self._trial = Trial("tvm_pipeline_litert.litert_model:serve")

    def detect(self) -> Sequence[Device]:
        return []

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        """Return a device on the cores of each of `beside`, and the GPU and the NPU where LiteRT has them."""
        cores = [Device(device.name, self.name, device.cores, CPU) for device in beside]
        others = [self.settle(Device(target.lower(), self.name, (), target)) for target in self._here()[1:]]
        return [*cores, *(device for device in others if not device.stand_in)]

    def settle(self, device: Device) -> Device:
        device = replace(device, target=device.target or (CPU if device.cores else ""))
        if device.cores or device.target.startswith(CPU):
            check_cores(device)
        about, fault = self._try(device.target)
        if fault:
            raise PlatformError(f"device {device.name}: {fault}; LiteRT here has {', '.join(self._here())}")
        return replace(device, stand_in=f"the CPU ({about})" if "CPU" in about else "")  # so of SwiftShader

    def settle_elsewhere(self, device: Device) -> Device:
        return device if device.target.startswith(CPU) or AHEAD in device.target else super().settle_elsewhere(device)

    def describe(self, device: Device) -> str:
        return self._try(device.target)[0]

    def precision(self, device: Device) -> str:
        return "float32" if device.target.startswith(CPU) or "enforce_f32=true" in device.target else "float16"

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> CompiledModel:
        if model.format != "tflite":
            raise ModelError(f"{model.name} is {model.format}, LiteRT takes .tflite: convert the model to TFLite")
        cutter = _cutter()
        from tvm_pipeline_litert.litert_model import LitertModel

        compiled = LitertModel(cutter.compile(model, cutter.engine_devices([Device("cpu", self.name)])), order)
        for device in {one.target: one for one in devices if not one.target.startswith(CPU)}.values():
            # Stages may be compiled here for a device of another machine, which runs nothing here.
            compiled.try_on(device, self.precision(device), None if self._try(device.target)[1] else self._trial)
        return compiled

    def load(self, folder: Path, devices: Sequence[Device]) -> CompiledModel:
        cutter = _cutter()
        from tvm_pipeline_litert.litert_model import LitertModel

        return LitertModel.load(folder, cutter)

    def close(self) -> None:
        self._trial.close()

    def _here(self) -> list[str]:
        """Return the targets, without properties, on which LiteRT runs a model."""
        return [target for target in (CPU, GPU, NPU) if not self._try(target)[1]]

    def _try(self, target: str) -> tuple[str, str]:
        """Return what computes a small model on a target, as LiteRT calls it, and why nothing does."""
        _cutter()  # which raises where LiteRT is missing
        return ("", "") if target == CPU else self._trial.known(target)


def _cutter() -> Backend:
    """Return the engine that cuts files; raise PlatformError where LiteRT is missing, or too old."""
    engine, _ = engine_for(Model("", "tflite", b""), ())
    if find_spec("ai_edge_litert.options") is None:
        raise PlatformError("LiteRT is too old for its backend: run `pip install -U 'ai-edge-litert>=2.2,<3'`")
    return engine
