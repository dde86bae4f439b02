"""Engines: backends that run, on CPU cores, models that the backend of these cores refuses.

onnxruntime runs ONNX models, and TFLite's own kernels run TFLite models. An engine takes no cores by itself: a platform
file names it, or `compile` turns to it where TVM refuses a model and nobody said what is to run it. An engine cuts
files of its format, so that it and TVM share a model (`sliced.py`). Next: `workflow/engine_fallback.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError

# The backend that is the engine for a format.
ENGINES = MappingProxyType({"onnx": "onnxruntime", "tflite": "edgetpu"})


@runtime_checkable
class Engine(Protocol):
    """What a backend has as well if it is an engine."""

    @property
    def engine(self) -> str:
        """What runs the model, as a user knows it."""

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        """Return a device of this engine, of the same name and cores, for each device of another backend."""


def engine_for(model: Model, cores: Sequence[Device]) -> tuple[Engine, tuple[Device, ...]]:
    """Return the engine for a model's format, with its devices on the cores of others.

    Raises:
        PlatformError: there is no engine for the format, or it is not installed; the message says what to install.
    """
    if model.format not in ENGINES:
        raise PlatformError(f"there is no other engine for {model.format} models")
    engine = find_backend(ENGINES[model.format])
    if not isinstance(engine, Engine):
        raise PlatformError(f"the backend {engine.name} that is installed is no engine; upgrade it")
    return engine, tuple(engine.engine_devices(cores))
