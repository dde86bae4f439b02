"""The backend of OpenVINO: CPU cores, and Intel's GPUs and NPUs that its drivers reach. Next: `openvino_model.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tvm_pipeline.backends.engine import Engine
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError

CPU = "CPU"
_DRIVERS = {
    "GPU": "Intel's compute runtime and libOpenCL.so.1 (apt install intel-opencl-icd ocl-icd-libopencl1)",
    "NPU": "Intel's NPU driver (github.com/intel/linux-npu-driver)",
}


class OpenvinoBackend(Engine):
    """OpenVINO on this machine."""

    name, engine, target = "openvino", "OpenVINO", CPU
    cuts, format = ("onnx",), "ONNX"
    packages = ("openvino", "onnx")
    models = "tvm_pipeline_openvino.openvino_model:OpenvinoModel"
    child = "tvm_pipeline_openvino.stages:serve"

    def refuses(self, model: Model) -> str:
        return super().refuses(model) or self.refuses_slice(model)

    def refuses_slice(self, part: Model) -> str:
        """Return which operator OpenVINO would compute otherwise than ONNX says, and why; empty if none."""
        from tvm_pipeline.frontends.onnx_folding import folded
        from tvm_pipeline.frontends.onnx_graph import OnnxGraph
        from tvm_pipeline_openvino.refused import refusals

        try:
            return next(iter(refusals(OnnxGraph(folded(part), narrow=False)).values()), "")
        except ModelError as error:
            return str(error)

    def engine_devices(self, beside: Sequence[Device]) -> Sequence[Device]:
        """Return a device on the cores of each of `beside`, and the GPUs and NPUs that OpenVINO finds."""
        found = self.listed()
        cores = [Device(device.name, self.name, device.cores, CPU) for device in beside if CPU in found]
        return [*cores, *(Device(name.lower(), self.name, (), name) for name in found if name != CPU)]

    def known_properties(self, device: Device) -> Collection[str]:
        return [key for _, properties in self._known(device).values() for key in properties]

    def describe(self, device: Device) -> str:
        """Return what OpenVINO calls the devices of a target."""
        return ", ".join(name for name, _ in self._known(device).values())

    def precision(self, device: Device) -> str:
        return "float16" if "f16" in device.target or device.target.startswith("NPU") else "float32"

    def _known(self, device: Device) -> dict[str, tuple[str, list[str]]]:
        """Return full names and properties of the devices that a target names, such as `HETERO:GPU,CPU` two.

        Raises:
            PlatformError: OpenVINO finds no such device.
        """
        target, _ = parsed_target(device.target)
        known, found = {}, self.listed()
        for name in target.rpartition(":")[2].split(","):
            # It calls the only GPU `GPU`, and the first of several `GPU.0`.
            here = [key for key in (name, f"{name}.0", name.removesuffix(".0")) if key in found]
            if not here:
                driver = _DRIVERS.get(name.partition(".")[0])
                advice = f"{name} needs {driver}" if driver else "give one of these as `target`"
                raise PlatformError(
                    f"device {device.name}: target {target!r}; OpenVINO finds only {', '.join(found)}; {advice}"
                )
            known[here[0]] = found[here[0]]
        return known
