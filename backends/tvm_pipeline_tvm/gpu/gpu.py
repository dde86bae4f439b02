"""The GPU backend: it detects and settles GPUs, compiles for them and for the CPU cores beside them, and binds threads.

It uses the TVM that is installed (`installed_ir.py`). With Relax, OpenCL needs pyopencl beside it.

A platform of GPUs and CPU cores has this backend alone (`serves`): TVM compiles the model once for each target, and the
libraries share one operator graph. A device's `target` is a TVM target with the index of the device: `cuda`, `cuda:1`,
`opencl -device=mali`. No other device stands in for a GPU that is not here. A device that is computed by software, such
as PoCL, is used only where a platform file names it, and is marked as a stand-in. Next: `detection.py`, `targets.py`,
then `compiled_model.py`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_pipeline.backends.contract import Backend, Guide, Order, Rewriting, TuningReport
from tvm_pipeline.backends.cores import check_cores
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, core_ranges
from tvm_pipeline.errors import PlatformError
from tvm_pipeline_tvm.devices.targets import ALIGNMENT, compiler_target, kind_of
from tvm_pipeline_tvm.gpu.detection import LIBRARIES, Gpu, survey
from tvm_pipeline_tvm.gpu.targets import address_of, completed, foreign_schedules, mismatch, target_for
from tvm_pipeline_tvm.installed_ir import described_version, installed_ir, installed_model, lacks
from tvm_pipeline_tvm.kernel_sets import installed_kernels
from tvm_pipeline_tvm.target_text import tvm_target

if TYPE_CHECKING:
    from tvm_pipeline_tvm.compiled_model import TvmModel

HOST = "host"
_NO_TVM = "GPUs are used through TVM, which is not installed: run `pip install 'tvm-pipeline[tvm]'`"
# The cores of this process before any thread is bound to some of them.
_CORES = frozenset(os.sched_getaffinity(0))
_POCL_THREADS = "POCL_MAX_PTHREAD_COUNT"

_log = logging.getLogger(__name__)


class GpuBackend(Backend):
    """GPUs of this machine, by CUDA and OpenCL."""

    name = "gpu"
    serves = (HOST,)
    can_tune = True

    def detect(self) -> Sequence[Device]:
        """Return the GPUs; none without TVM, and none that is software, which is slower than the CPU itself."""
        if find_spec("tvm") is None:
            return []
        for line in self.left_out():
            _log.info(line)
        real = [gpu for gpu in survey().distinct if not gpu.is_software and not lacks(gpu.kind)]
        names = [self.name] if len(real) == 1 else [f"{self.name}{index}" for index in range(len(real))]
        return [
            _filled(Device(name, self.name, target=target_for(gpu)), gpu) for name, gpu in zip(names, real, strict=True)
        ]

    def left_out(self) -> Sequence[str]:
        """Return what `detect` leaves out, a line each: why, and how it can be used nevertheless."""
        if find_spec("tvm") is None:
            return []
        how = "the CPU computes what it is given. To use it, name it in a platform file with"
        return [
            f"{gpu} is left out: " + (lacking or f'{how} backend = "gpu" and target = "{gpu.address}"')
            for gpu, lacking in ((gpu, lacks(gpu.kind)) for gpu in survey().distinct)
            if gpu.is_software or lacking
        ]

    def settle(self, device: Device) -> Device:
        if device.cores:  # these feed it, or compute where it is software; without any, the system chooses
            check_cores(device)
        if find_spec("tvm") is None:
            raise PlatformError(f"device {device.name}: {_NO_TVM}")
        gpu = _meant(device)
        if lacking := lacks(gpu.kind):
            raise PlatformError(f"device {device.name}: {lacking}")
        device = _filled(replace(device, target=completed(device.target, gpu)), gpu)
        reason = mismatch(device.target, gpu)
        if reason:
            raise PlatformError(f"device {device.name} is for {device.target!r}, which does not fit {gpu}: {reason}")
        _check_known(device, gpu)
        own = foreign_schedules(device.target, gpu) if installed_ir() == "relay" else ""  # Relax has one for all
        if own:
            _log.warning(
                "device %s: %s was made for other hardware than %s, whose own is %s; it runs, perhaps slowly",
                device.name,
                device.target,
                gpu,
                own,
            )
        return device

    def check_together(self, devices: Sequence[Device]) -> None:
        """Raise PlatformError where two settled devices are one GPU: a plan must not count its one queue twice."""
        meant = [(device, _meant(device)) for device in devices]
        for (first, gpu), (second, other) in combinations(meant, 2):
            if gpu.is_same(other):
                raise PlatformError(
                    f"devices {first.name} ({gpu.address}) and {second.name} ({other.address}) are one GPU, "
                    f"{gpu.product}, which does one thing at a time; leave one of them out of the platform file"
                )

    def describe(self, device: Device) -> str:
        """Return what its driver calls a settled device, with its memory."""
        return str(_meant(device))

    def compile(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> TvmModel[Any]:
        """Compile for GPUs, and for CPU cores where `devices` has some.

        Raises:
            PlatformError: TVM cannot use such GPUs here.
        """
        return self._compiled(model, devices, order)

    def compile_untuned(self, model: Model, devices: Sequence[Device], order: Order = "listed") -> TvmModel[Any]:
        return self._compiled(model, devices, order, tuned=False)

    def settle_elsewhere(self, device: Device) -> Device:
        _check_target(device, "")
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
        """Compile for GPUs of another machine, and the CPU cores beside them.

        Raises:
            PlatformError: there are no such cores, so that nothing says for which processor kernels are launched.
        """
        if all(device.backend == self.name for device in devices):
            raise PlatformError(
                f"device {devices[0].name}: kernels of a GPU are launched by code for CPU cores of its own machine; "
                "name some of them in the platform, too"
            )
        host: Any = find_backend(HOST)
        elsewhere = {
            compiler_target(device.target): "it is for a GPU of another machine"
            if device.backend == self.name
            else host.not_run_here(device)
            for device in devices
        }
        return self._compiled(
            model,
            devices,
            order,
            {target: why for target, why in elsewhere.items() if why},
            tuned=tuned,
            processor=processor,
        )

    def _compiled(
        self,
        model: Model,
        devices: Sequence[Device],
        order: Order,
        elsewhere: Mapping[str, str] | None = None,
        *,
        tuned: bool = True,
        processor: str = "",
    ) -> TvmModel[Any]:
        """Compile; `elsewhere` is None where all devices are of this machine, else as `TvmModel` has it."""
        from tvm_pipeline_tvm.agreement import check_agreement

        is_here = elsewhere is None
        if is_here:
            _keep_software_on_its_cores(devices)
        targets, host, others = [device.target for device in devices], _host_target(devices), elsewhere or {}
        compiled = installed_model().compile(
            model, targets, bind, order, host, others, tuned=tuned, processor=processor
        )
        if not is_here:  # what runs here, on cores of this machine
            own = [device for device in devices if compiler_target(device.target) not in others]
            devices = [replace(device, cores=tuple(sorted(_CORES))) for device in own]
        check_agreement(compiled, devices)
        return compiled

    def rewriting(self, model: Model) -> Rewriting:
        return installed_model().rewriting(model)

    def tune(self, model: Model, device: Device, seconds: float, guide: Guide | None = None) -> TuningReport:
        """Search for faster kernels on a GPU; see `Backend.tune`.

        The search is another process's, so a guide is asked once, before it: for what it is to search.

        Raises:
            RunError: the GPU does not run the model, or too many candidates end the process that tries them.
            PlatformError: the kernels that are installed cannot be tuned.
        """
        kernels = installed_kernels()
        only = None if guide is None else guide({})
        with _threads_of_pocl(device) if device.stand_in and device.cores else nullcontext():
            return kernels.tune_gpu(model, device, _host_target([]), seconds, _meant(device).name, only)

    def load(self, folder: Path, devices: Sequence[Device]) -> TvmModel[Any]:
        _keep_software_on_its_cores(devices)
        return installed_model().load(folder, bind)

    def versions(self) -> Mapping[str, str]:
        # A driver is not among them: it compiles what a library holds, PTX or OpenCL C, for itself.
        return {"tvm": described_version()}


def bind(device: Device) -> None:
    """Bind the calling thread to a device of this backend, or of the host's.

    A thread that feeds a GPU runs on the cores that the device names, otherwise on any: it may have been bound to one
    before. PoCL's own threads run where the thread was bound that used PoCL first.
    """
    if device.backend == HOST:
        host: Any = find_backend(HOST)
        host.bind(device)
        return
    os.sched_setaffinity(0, device.cores or _CORES)
    _check_order(device)


def _meant(device: Device) -> Gpu:
    """Return the GPU that a device of a platform means; raise PlatformError where it is not here."""
    found = survey()
    here = "; ".join(map(str, found.gpus))
    advice = "Mend `target` in the platform file, or see `tvm-pipeline devices`"
    if not device.target:
        real = [gpu for gpu in found.distinct if not gpu.is_software]
        if len(real) == 1:
            return real[0]
        if real:
            raise PlatformError(f"device {device.name} does not say which GPU it is; give `target`. Here: {here}")
        address = None
    else:
        address = address_of(device.target)
        if address is None:
            raise PlatformError(
                f"device {device.name}: {device.target!r} is no target of a GPU, whose kind is one of "
                f"{', '.join(LIBRARIES)}. {advice}"
            )
    for gpu in found.gpus:
        if (gpu.kind, gpu.index) == address:
            return gpu
    wanted = f"{address[0]}:{address[1]}" if address else "a GPU"
    kinds = [address[0]] if address else list(LIBRARIES)
    reasons = "; ".join(found.reasons[kind] for kind in kinds if kind in found.reasons)
    told = f" ({reasons})" if reasons else ""
    if here:
        raise PlatformError(f"device {device.name}: {wanted} was not found{told}. Found: {here}. {advice}")
    raise PlatformError(
        f"device {device.name}: no GPU was found{told}. Install the driver of the GPU, or leave the device out of the "
        "platform file"
    )


def _filled(device: Device, gpu: Gpu) -> Device:
    """Return the device with the memory of its GPU where it states none, and what stands in for one.

    A GPU that shares the host's memory, as on a Jetson, tells all of it: stages on the CPU take from the same bytes.
    Only the user knows how to divide them, by `memory_bytes` in the platform file.
    """
    cores = ", ".join(core_ranges(device.cores or _CORES))
    return replace(
        device,
        memory_bytes=device.memory_bytes or gpu.memory_bytes or None,
        stand_in=f"{gpu.product} (software, CPU cores {cores})" if gpu.is_software else "",
    )


def _check_target(device: Device, example: str) -> None:
    """Raise PlatformError where TVM does not know the target."""
    try:
        tvm_target(compiler_target(device.target))
    except (ValueError, TypeError, RuntimeError) as error:  # what TVM's own error is one of
        said = str(error).rpartition("Error: ")[2].partition(" Target creation")[0].strip()
        raise PlatformError(
            f"device {device.name}: TVM does not know the target {device.target!r} ({said}). A target is a kind with "
            f"options of TVM's{example and f', such as {example!r}'}; mend `target` in the platform file"
        ) from error


def _check_known(device: Device, gpu: Gpu) -> None:
    """Raise PlatformError where TVM does not know the target, or lays memory out more densely than the GPU can."""
    _check_target(device, target_for(gpu))
    if gpu.alignment_bytes and ALIGNMENT % gpu.alignment_bytes:
        raise PlatformError(
            f"device {device.name}: {gpu} wants buffers at multiples of {gpu.alignment_bytes} bytes, and tensors are "
            f"laid at multiples of {ALIGNMENT}. Leave it out of the platform, and report this"
        )


def _host_target(devices: Sequence[Device]) -> str:
    """Return the target of the code that launches kernels: that of the CPU cores, here or on the platform."""
    cores = [device for device in devices if device.backend == HOST] or find_backend(HOST).detect()
    return cores[0].target


def _keep_software_on_its_cores(devices: Sequence[Device]) -> None:
    """Make the context of each software device on the cores that it names: PoCL's threads stay where it was made."""
    for device in devices:
        if device.backend == GpuBackend.name and device.stand_in and device.cores:
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_ready_on, device).result()


def _ready_on(device: Device) -> None:
    os.sched_setaffinity(0, device.cores)
    with _threads_of_pocl(device):
        installed_model().ready_to_run(device.target)


@contextmanager
def _threads_of_pocl(device: Device) -> Iterator[None]:
    """Let PoCL, if it is loaded in the block, start a thread for each core that a software device names."""
    before = os.environ.get(_POCL_THREADS)
    if kind_of(device.target) == "opencl" and before is None:
        os.environ[_POCL_THREADS] = str(len(device.cores))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_POCL_THREADS, None)


def _check_order(device: Device) -> None:
    """Raise PlatformError where what runs numbers several OpenCL devices otherwise than `detection.py` does."""
    gpu = _meant(device)
    listed = [other for other in survey().gpus if other.kind == gpu.kind]
    if gpu.kind != "opencl" or len(listed) == 1:
        return
    from tvm_pipeline_tvm.devices.mirrors import mirrors_of

    named = mirrors_of(gpu.address).device.device_name
    if named != gpu.name:
        raise PlatformError(
            f"device {device.name}: {named} is {gpu.address} in this process, not {gpu.name}, because devices of "
            "several OpenCL drivers are numbered anew in each; set OCL_ICD_VENDORS to the driver of the GPU that is "
            "meant"
        )
