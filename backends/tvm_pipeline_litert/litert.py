"""The backend of LiteRT's CompiledModel: CPU cores, and the GPU and the NPU that LiteRT reaches.

A device's `target` is `CPU`, `GPU` or `NPU`, with properties of LiteRT behind it. Next: `litert_model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec

from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.backends.engine import Engine
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.registry import engine_for
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError

CPU, GPU, NPU = "CPU", "GPU", "NPU"
AHEAD = "soc_model"  # the property of an NPU for which stages are compiled ahead of time


class LitertBackend(Engine):
    """LiteRT on this machine."""

    name, engine, target = "litert", "LiteRT", CPU
    cuts, format = ("tflite",), "TFLite"
    models = "tvm_pipeline_litert.litert_model:LitertModel"
    child = "tvm_pipeline_litert.litert_model:serve"

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        """Return a device on the cores of each of `beside`, and the GPU and the NPU where LiteRT has them."""
        others = [self.settle(Device(target.lower(), self.name, (), target)) for target in self._here()[1:]]
        return [*super().engine_devices(beside), *(device for device in others if not device.stand_in)]

    def known_properties(self, device: Device) -> Collection[str]:
        if fault := self._try(device.target)[1]:
            raise PlatformError(f"device {device.name}: {fault}; LiteRT here has {', '.join(self._here())}")
        return parsed_target(device.target)[1]

    def settle(self, device: Device) -> Device:
        device = super().settle(device)
        about = self.describe(device)
        return replace(device, stand_in=f"the CPU ({about})" if "CPU" in about else "")  # so of SwiftShader

    def settle_elsewhere(self, device: Device) -> Device:
        if device.target.startswith(CPU) or AHEAD in device.target:
            return device
        return Backend.settle_elsewhere(self, device)

    def describe(self, device: Device) -> str:
        return self._try(device.target)[0]

    def precision(self, device: Device) -> str:
        return target_precision(device.target)

    def check_installed(self) -> None:
        cutter()

    def _here(self) -> list[str]:
        """Return the targets, without properties, on which LiteRT runs a model."""
        return [target for target in (CPU, GPU, NPU) if not self._try(target)[1]]

    def _try(self, target: str) -> tuple[str, str]:
        """Return what computes a small model on a target, as LiteRT calls it, and why nothing does."""
        self.check_installed()
        return ("", "") if target == CPU else self._trial.known(target)


def target_precision(target: str) -> str:
    """Return the type to which a target rounds floats, see `Backend.precision`."""
    return "float32" if target.startswith(CPU) or "enforce_f32=true" in target else "float16"


def cutter() -> Backend:
    """Return the engine that cuts files; raise PlatformError where LiteRT is missing, or too old."""
    engine, _ = engine_for(Model("", "tflite", b""), ())
    if find_spec("ai_edge_litert.options") is None:
        raise PlatformError("LiteRT is too old for its backend: run `pip install -U 'ai-edge-litert>=2.2,<3'`")
    return engine
