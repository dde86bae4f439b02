"""The backend of onnxruntime's CPU kernels: an engine for models that TVM refuses, and for those that ask for it.

Next: `onnxruntime_model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib.util import find_spec

from tvm_pipeline.backends.cores import processor
from tvm_pipeline.backends.engine import Engine
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError, nearest

TARGET = "cpu"  # onnxruntime's own kernels
# The packages that bring providers; those that replace onnxruntime are marked by a star.
PACKAGES = {
    "CANNExecutionProvider": "onnxruntime-cann*",
    "CoreMLExecutionProvider": "onnxruntime, on macOS",
    "CUDAExecutionProvider": "onnxruntime-gpu*",
    "MIGraphXExecutionProvider": "onnxruntime-migraphx*",
    "NvTensorRTRTXExecutionProvider": "onnxruntime-ep-nv-tensorrt-rtx",
    "OpenVINOExecutionProvider": "onnxruntime-openvino*",
    "QNNExecutionProvider": "onnxruntime-qnn",
    "TensorrtExecutionProvider": "onnxruntime-gpu*",
    "WebGpuExecutionProvider": "onnxruntime-ep-webgpu",
    "ggml": "onnxruntime-ggml",
}


class OnnxruntimeBackend(Engine):
    """onnxruntime on CPU cores of this machine."""

    name = engine = "onnxruntime"
    cuts, format, target = ("onnx",), "ONNX", TARGET
    packages = ("onnxruntime", "onnx")
    fastest_target = "cpu optimization=all"
    models = "tvm_pipeline_onnxruntime.onnxruntime_model:OnnxruntimeModel"
    child = "tvm_pipeline_onnxruntime.sessions:serve"
    takes_narrow = True

    def known_properties(self, device: Device) -> Collection[str]:
        provider, properties = parsed_target(device.target)
        if is_own(device.target):
            if properties.get("optimization") not in (None, "", "all"):
                raise PlatformError(f"device {device.name}: optimization is all, or left out for equal bits in stages")
            return ["optimization"]
        known = self.listed()
        if provider not in known:
            has = ", ".join((TARGET, *known))
            advice = _missing(provider, known)
            raise PlatformError(f"device {device.name}: onnxruntime has no {provider} here, only {has}; {advice}")
        return properties

    def left_out(self) -> Sequence[str]:
        if any(find_spec(package) is None for package in self.packages):
            return ()
        return [f"onnxruntime has {name}: to use it, name it as `target` in a platform file" for name in self.listed()]

    def describe(self, device: Device) -> str:
        return processor() if parsed_target(device.target)[0] == TARGET else ""

    def precision(self, device: Device) -> str:
        return provider_precision(device.target)


def provider_precision(target: str) -> str:
    """Return the type to which a target rounds floats, see `Backend.precision`.

    GPUs and NPUs multiply in float16 or TF32, which has as many digits, unless they are told not to.
    """
    on_cpu = is_own(target) or "CPU" in map(str.upper, parsed_target(target)[1].values())
    return "float32" if on_cpu else "float16"


def is_own(target: str) -> bool:
    """Return whether a target is onnxruntime's own kernels for CPU cores."""
    return parsed_target(target)[0] in ("", TARGET)


def _missing(name: str, known: Sequence[str]) -> str:
    """Return what to do about a provider that onnxruntime has not here."""
    if name not in PACKAGES:
        return nearest(name, [*PACKAGES, *known])
    package = PACKAGES[name]
    replaces = " in an environment of its own, since it replaces onnxruntime" if package.endswith("*") else ""
    return f"it comes with `pip install {package.rstrip('*')}`{replaces}"
