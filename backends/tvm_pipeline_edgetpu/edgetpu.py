"""The Edge TPU backend: detection, stand-ins and compilation.

A device's `target` is its address in libedgetpu (`usb:0`, `pci:1`). If that Edge TPU is not plugged in, TFLite's CPU
kernels stand in for it, and every output says so; `target = "cpu"` requests them. `target = "tflite"` is these kernels
in their own right, as an engine for models that TVM refuses. Both take float models. `target = "tflite
delegate=/usr/lib/libvx_delegate.so"` is what a vendor's delegate of TFLite reaches. Next: `compiled.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tvm_pipeline.backends.contract import CompiledModel, Order
from tvm_pipeline.backends.cores import check_cores
from tvm_pipeline.backends.engine import Engine
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, PlatformError, RunError
from tvm_pipeline_edgetpu.external import ENGINE, check_target, is_external
from tvm_pipeline_edgetpu.interpreter import CPU, is_edge_tpu

if TYPE_CHECKING:
    from tvm_pipeline_edgetpu.compiled import EdgeTpuModel
    from tvm_pipeline_edgetpu.in_parts import TfliteRewriting

_log = logging.getLogger(__name__)

KERNELS = "TFLite's CPU kernels"
SRAM_BYTES = 8 << 20

# Fitted to published rows; `profiles/platforms/coral-*.toml` say where each figure is from, and how far off they are.
_USB = DeviceModel(
    macs_per_s=1.1e12,
    call_s=0.0003,
    operator_s=25e-6,
    input_bytes_per_s=400e6,
    output_bytes_per_s=130e6,
    cached_bytes=7046430,
    refill_bytes_per_s=430e6,
)
_USB_2 = 53.248e6  # bytes a second at most: 13 packets of 512 bytes in each of 8000 microframes (USB 2.0, 5.8.4)
MODELS: Mapping[str, DeviceModel] = MappingProxyType(
    {
        "usb": _USB,
        "usb 2": replace(_USB, input_bytes_per_s=_USB_2, output_bytes_per_s=_USB_2, refill_bytes_per_s=_USB_2),
        "pci": replace(_USB, call_s=0.0001, refill_bytes_per_s=387e6),
    }
)


class EdgeTpuBackend(Engine):
    """The backend of Edge TPUs and of their stand-ins."""

    name = "edgetpu"
    engine = "TFLite"
    cuts = ("tflite",)
    target = ENGINE
    models = "tvm_pipeline_edgetpu.compiled:EdgeTpuModel"
    child = "tvm_pipeline_edgetpu.external:serve"

    def refuses(self, model: Model) -> str:
        if model.format != "tflite":
            return (
                f"{model.name} is {model.format}, an Edge TPU takes .tflite: convert it to int8 TFLite, or leave the "
                "Edge TPUs out of the platform"
            )
        from tvm_pipeline_edgetpu.model import parse_model
        from tvm_pipeline_edgetpu.support import check_quantised

        path = Path(f"{model.name}.tflite")
        try:
            check_quantised(parse_model(path, model.content), path)
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        from tvm_pipeline_edgetpu.delegate import edge_tpus

        return [
            Device(f"tpu{index}", self.name, target=address, cache_bytes=SRAM_BYTES)
            for index, address in enumerate(edge_tpus())
        ]

    def settle(self, device: Device) -> Device:
        if device.cores:  # these cores feed it or stand in for it; without any, the system chooses
            check_cores(device)
        if device.target == ENGINE:
            return device
        if device.target == CPU:
            return replace(device, stand_in=f"{KERNELS} (its target asks for them)")
        if parsed_target(device.target)[0] == ENGINE:
            check_target(device)
            try:
                self._trial.ask(device.target)
            except RunError as error:
                raise PlatformError(f"device {device.name}: {error}") from error
            return device
        if not device.target:
            raise PlatformError(
                f"device {device.name} does not say which Edge TPU it is; give `target`, such as usb:0 or pci:0, or "
                f"{CPU} or {ENGINE} for {KERNELS}"
            )
        from tvm_pipeline_edgetpu.delegate import absence, check_address

        check_address(device.target)
        reason = absence(device.target)
        stand_in = f"{KERNELS} ({reason})" if reason else ""
        return replace(device, model=device.model or _model(device.target), stand_in=stand_in)

    def check_together(self, devices: Sequence[Device]) -> None:
        """Raise PlatformError where two settled devices are one Edge TPU: a plan must not count it twice."""
        from tvm_pipeline_edgetpu.delegate import known_path

        ports: dict[str, Device] = {}
        for device in filter(self.own_process, devices):
            other = ports.setdefault(known_path(device.target), device)
            if other is not device:
                raise PlatformError(
                    f"devices {other.name} ({other.target}) and {device.name} ({device.target}) are one Edge TPU, that "
                    f"at {known_path(device.target)}; leave one of them out, or give each its own address, such as "
                    "usb:0 and usb:1"
                )

    def describe(self, device: Device) -> str:
        """Return how a settled Edge TPU is connected and clocked, on which its speed hangs."""
        from tvm_pipeline_edgetpu.delegate import is_usb_2, performance, usb_mbit_per_s

        if not self.own_process(device):
            return ""
        level, speed = performance(device.target), usb_mbit_per_s(device.target)
        usb = f"USB {2 if is_usb_2(device.target) else 3}, {speed} Mbit/s" if speed else ""
        return ", ".join(filter(None, (usb, level and f"Performance={level}")))

    def state(self, device: Device) -> str:
        from tvm_pipeline_edgetpu.delegate import heat, is_usb_2, known_path

        if not self.own_process(device):
            return ""
        slow = "parameters beyond its cache come slowly by USB 2; plug it into a port of USB 3"
        advice = slow if is_usb_2(device.target) else ""
        return "; ".join(filter(None, (f"at {known_path(device.target)}", heat(device.target), advice)))

    def own_process(self, device: Device) -> bool:
        """Return True for a real Edge TPU: on a USB fault, libedgetpu calls abort() (driver/usb/usb_driver.cc)."""
        return not device.stand_in and is_edge_tpu(device.target)

    def precision(self, device: Device) -> str:
        return "float16" if is_external(device.target) else "float32"

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> EdgeTpuModel:
        from tvm_pipeline_edgetpu.compiled import EdgeTpuModel

        targets = dict.fromkeys(device.target for device in devices)
        if model.format != "tflite" or not targets or any(map(is_edge_tpu, targets)):
            refused = self.refuses(model)
            if refused:
                raise ModelError(refused)
        return EdgeTpuModel.compile(model, order, targets, self._trial)

    def settle_elsewhere(self, device: Device) -> Device:
        if device.target not in (CPU, ENGINE):
            what = "an Edge TPU" if is_edge_tpu(device.target) else "a delegate"
            raise PlatformError(
                f"device {device.name} is {what} ({device.target}) of another machine, whose stages are compiled "
                f"where it is plugged in. Run the command there, or give it the target {ENGINE} for {KERNELS}"
            )
        return device

    def rewriting(self, model: Model) -> TfliteRewriting:
        from tvm_pipeline_edgetpu.in_parts import TfliteRewriting

        _log.info(f"reading {model.name}")
        return TfliteRewriting(model)

    def share(self, residents: Sequence[tuple[CompiledModel, Sequence[Stage]]], platform: Platform) -> None:
        """Co-compile what shares an Edge TPU, so that slices share its parameter cache and do not evict each other.

        Raises:
            ModelError: the compiler refuses them, with its output.
            PlatformError: an Edge TPU is here and the compiler is not.
        """
        from tvm_pipeline_edgetpu.compiled import EdgeTpuModel, co_compile

        models = [(model, stages) for model, stages in residents if isinstance(model, EdgeTpuModel)]
        co_compile(models, [device for device in platform.devices if device.backend == self.name])


def _model(address: str) -> DeviceModel:
    from tvm_pipeline_edgetpu.delegate import is_usb_2

    return MODELS["pci" if address.startswith("pci") else "usb 2" if is_usb_2(address) else "usb"]
