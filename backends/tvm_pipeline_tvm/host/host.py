"""The host backend: it detects CPU clusters, compiles by TVM, and binds threads to cores.

It uses the TVM that is installed, with Relay or with Relax (`installed_ir.py`), and imports it when a model comes.
Next: `detection.py`, then `compiled_model.py`.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pipeline.backends.contract import Backend, Guide, Order, Rewriting, TuningReport
from tvm_pipeline.backends.cores import check_cores
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline_tvm.host.detection import (
    available_cores,
    described,
    host_devices,
    host_target,
    left_out_cores,
    missing_features,
    not_run_here,
)
from tvm_pipeline_tvm.installed_ir import RELEASES, described_version, installed_ir, installed_model
from tvm_pipeline_tvm.installed_ir import described as described_tvm
from tvm_pipeline_tvm.kernel_sets import installed_kernels
from tvm_pipeline_tvm.target_text import other_processor

if TYPE_CHECKING:
    from tvm_pipeline_tvm.compiled_model import TvmModel

_log = logging.getLogger(__name__)

installed_ir()  # without a TVM that fits, its ImportError says why this backend is left out


class HostBackend(Backend):
    """CPU clusters of this machine."""

    name = "host"
    can_tune = True

    def refuses_weights(self) -> str:
        if installed_ir() == "relax":  # which then asks its kernels for each target
            return ""
        here, other = RELEASES["relay"].title, RELEASES["relax"].title
        return (
            f"weights in 16 bits need {other}, and the TVM that is installed has {here}: leave `weights` out, or run "
            "`pip install 'tvm-pipeline[tvm]'` in another environment"
        )

    def refuses_slice(self, model: Model) -> str:
        try:
            installed_model().check(model)
        except ModelError as error:
            return str(error)
        return ""

    def detect(self) -> Sequence[Device]:
        return host_devices(available_cores(), host_target())

    def describe(self, device: Device) -> str:
        """Return the kinds of a device's cores, on Arm where they are known."""
        return described(device)

    def left_out(self) -> list[str]:
        """Return a line where cores are switched off."""
        return left_out_cores()

    def settle(self, device: Device) -> Device:
        check_cores(device)
        device = replace(device, target=device.target or host_target())
        try:
            other, missing = other_processor(device.target), missing_features(device.target)
        except ValueError as error:
            raise PlatformError(f"device {device.name}: TVM does not know the target {device.target!r}") from error
        if other:
            raise PlatformError(
                f"device {device.name} is for {device.target!r}, which is code for {other}, and this machine is "
                f"{platform.machine()}: compile the model on the machine that has the device"
            )
        if missing:
            raise PlatformError(
                f"device {device.name} is for {device.target!r}, whose code may use {', '.join(missing)}; this "
                f"processor has none of that. Use {host_target()!r}, and compile the model again"
            )
        return device

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> TvmModel[Any]:
        return _compiled(model, devices, order)

    def not_run_here(self, device: Device) -> str:
        """Return why a device's code does not run on this machine, empty where it does: for backends that serve it."""
        return not_run_here(device.target)

    def settle_elsewhere(self, device: Device) -> Device:
        try:
            not_run_here(device.target)
        except ValueError as error:
            raise PlatformError(
                f"device {device.name}: the TVM of this machine does not know the target {device.target!r}; give the "
                "device another `target` in a platform file"
            ) from error
        return device

    def compile_elsewhere(
        self,
        model: Model,
        devices: Sequence[Device],
        order: Order = "listed",
        *,
        tuned: bool = True,
        processor: str = "",
    ) -> TvmModel[Any]:
        return _compiled(model, devices, order, is_tuned=tuned, is_elsewhere=True, processor=processor)

    def compile_untuned(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> TvmModel[Any]:
        return _compiled(model, devices, order, is_tuned=False)

    def rewriting(self, model: Model) -> Rewriting:
        return installed_model().rewriting(model)

    def tune(self, model: Model, device: Device, seconds: float, guide: Guide | None = None) -> TuningReport:
        """Search for faster kernels on the first core of a device; see `Backend.tune`."""
        kernels = installed_kernels()
        from tvm_pipeline_tvm.child_process import stoppable_pool

        def search() -> TuningReport:
            bind(replace(device, cores=device.cores[:1]))
            return kernels.tune(model, device.target, seconds, guide)

        with stoppable_pool(1) as submit:  # a thread of its own, which is bound to the core
            report: TuningReport = submit(search).result()
            return report

    def tuning_records(self, device: Device) -> list[str]:
        return [line.decode(errors="replace") for line in installed_kernels().tuning_records(device.target)]

    def take_tuning_records(self, device: Device, processor: str, lines: Sequence[str]) -> int:
        return installed_kernels().take_tuning_records(device.target, processor, [line.encode() for line in lines])

    def bind(self, device: Device) -> None:
        """Bind the calling thread to the device's cores: for a backend that serves this one's devices."""
        bind(device)

    def load(self, folder: Path, devices: Sequence[Device]) -> TvmModel[Any]:
        return installed_model().load(folder, bind, not_run_here)

    def versions(self) -> Mapping[str, str]:
        return {"tvm": described_version()}

    def compiler(self) -> str:
        return described_tvm()


def _compiled(
    model: Model,
    devices: Sequence[Device],
    order: Order,
    *,
    is_tuned: bool = True,
    is_elsewhere: bool = False,
    processor: str = "",
) -> TvmModel[Any]:
    from tvm_pipeline_tvm.agreement import check_agreement

    targets = [device.target for device in devices]
    reasons = {target: not_run_here(target) for target in targets} if is_elsewhere else {}
    elsewhere = {target: why for target, why in reasons.items() if why}
    compiled = installed_model().compile(
        model, targets, bind, order, elsewhere=elsewhere, tuned=is_tuned, processor=processor
    )
    if is_elsewhere:  # what runs here, on cores of this machine
        devices = [replace(device, cores=available_cores()) for device in devices if device.target not in elsewhere]
    check_agreement(compiled, devices)
    return compiled


def bind(device: Device) -> None:
    """Bind the calling thread to the device's first core; give it a TVM thread pool with a thread on each other one.

    The pool belongs to the thread, so two stages never share a pool (two pools on the same cores run at half speed).
    TVM lets the calling thread, which computes a share of each kernel, move among all cores of the pool. At times the
    system puts this thread on the core of another one. Both then wait for each other until the system moves one.
    """
    import tvm

    os.sched_setaffinity(0, device.cores)
    cores = [str(core) for core in device.cores]
    tvm.get_global_func("runtime.config_threadpool")(-2, len(cores), cores)
    os.sched_setaffinity(0, device.cores[:1])
