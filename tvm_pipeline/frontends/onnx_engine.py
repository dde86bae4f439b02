"""The base of backends that are an engine for ONNX files. Next: `onnx_model.py`, the models that they compile."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tvm_pipeline.backends.contract import Backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.frontends.onnx_model import OnnxModel


class OnnxEngine(Backend):
    """An engine that finds no devices by itself, since the same processors are TVM's unless somebody asks for it.

    A platform file asks by `backend`, or `compile` where TVM refuses a model (`engine_devices`).

    Attributes:
        packages: of Python, that it needs; the extra that installs them has its name.
    """

    cuts = ("onnx",)
    packages: Sequence[str] = ()

    @abstractmethod
    def model_type(self) -> type[OnnxModel]:
        """Return the class of its models, whose module is imported now."""

    def refuses(self, model: Model) -> str:
        try:
            self.compile(model, []).close()
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return []

    def settle_elsewhere(self, device: Device) -> Device:
        self.check_installed()
        return device

    def load(self, folder: Path, devices: Sequence[Device]) -> OnnxModel:
        self.check_installed()
        return self.model_type().load(folder)

    def check_installed(self) -> None:
        """Raise PlatformError, with the extra to install, where a package is missing."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise PlatformError(
                f"{' and '.join(missing)} is not installed: run `pip install 'tvm-pipeline[{self.name}]'`"
            )

    def check_format(self, model: Model) -> None:
        """Raise ModelError for a model of another format."""
        if model.format != "onnx":
            raise ModelError(f"{model.name} is {model.format}, {self.name} takes .onnx: export the model to ONNX")
