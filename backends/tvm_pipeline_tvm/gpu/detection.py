"""List the GPUs of this machine as TVM numbers them, without TVM.

Each driver is asked by a process of its own (`probing.py`), all at the same time: one that crashes or hangs costs a
warning and its own devices, and nothing else. The answer is kept for the life of this process. Next: `targets.py`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import msgspec

from tvm_pipeline.processes import Child

_log = logging.getLogger(__name__)

# The library of each kind, and the program of its makers that shows whether it works.
LIBRARIES = {"cuda": ("libcuda.so.1", "nvidia-smi"), "opencl": ("libOpenCL.so.1", "clinfo")}
TIMEOUT_S = 10.0
GRACE_S = 0.5

_PROBING = Path(__file__).with_name("probing.py")
_VERSION = re.compile(r"OpenCL (\d+)\.(\d+)")
_LEAST_VERSION = (1, 2)  # CL_TARGET_OPENCL_VERSION of TVM


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a driver tells of a device.

    Attributes:
        kind: `cuda` or `opencl`.
        index: TVM's number of it among the devices of its kind.
        driver: its version; of CUDA the newest CUDA that the driver runs.
        is_shared: whether its memory is the host's.
        pci: domain, bus and device; empty where the driver does not tell.
        capability: CUDA's compute capability, major and minor.
        platform: position of its OpenCL platform.
        type: `gpu` or `cpu`, of OpenCL.
        version: of OpenCL, such as `OpenCL 3.0 PoCL`.
        most_threads: that an OpenCL work-group may have.
        alignment_bytes: a buffer within another one begins at a multiple of it (OpenCL).
        has_half: whether its OpenCL computes in float16.
    """

    kind: str
    name: str
    index: int = 0
    vendor: str = ""
    driver: str = ""
    memory_bytes: int = 0
    is_shared: bool = False
    pci: str = ""
    capability: tuple[int, int] = (0, 0)
    platform: int = 0
    platform_name: str = ""
    type: str = "gpu"
    version: str = ""
    most_threads: int = 0
    alignment_bytes: int = 0
    has_half: bool = True

    @property
    def address(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def is_software(self) -> bool:
        """Whether the CPU computes what it is given."""
        name = self.name.lower()
        return self.type == "cpu" or any(word in name for word in ("software", "llvmpipe", "oclgrind"))

    @property
    def product(self) -> str:
        """What people call it; PoCL calls its devices after the processor."""
        return "PoCL" if self.is_software and "Portable Computing" in self.platform_name else self.name

    def __str__(self) -> str:
        memory = f", {self.memory_bytes / 1e9:.1f} GB{' shared with the host' if self.is_shared else ''}"
        software = ", software" if self.is_software else ""
        half = "" if self.has_half else ", no float16"
        return f"{self.product} ({self.address}{software}{memory}{half}, driver {self.driver or 'unknown'})"

    def is_same(self, other: Gpu) -> bool:
        """Return whether both are one piece of hardware, which several drivers may reach."""
        if (self.kind, self.platform) == (other.kind, other.platform):
            return self.index == other.index
        if self.pci and other.pci:
            return self.pci == other.pci
        return self.name == other.name


@dataclass(frozen=True, slots=True)
class Survey:
    """The GPUs of a machine.

    Attributes:
        gpus: all that TVM can reach, those of CUDA first; one that several drivers reach is there several times.
        reasons: by kind, why there is none.
    """

    gpus: tuple[Gpu, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def distinct(self) -> list[Gpu]:
        """Each GPU once: by CUDA where it has CUDA, because that is its maker's own way to it."""
        found: list[Gpu] = []
        for gpu in self.gpus:
            if not any(gpu.is_same(other) for other in found):
                found.append(gpu)
        return found


class _Answer(msgspec.Struct):
    """What `probing.py` tells."""

    devices: list[Gpu] = []
    absent: str = ""
    fault: str = ""


@cache
def survey() -> Survey:
    """Ask all drivers, the first time that it is called; warn of those that do not work."""
    probes = {kind: _start(kind) for kind in LIBRARIES}
    deadline = time.monotonic() + TIMEOUT_S
    answers = {kind: _finished(kind, probe, deadline) for kind, probe in probes.items()}
    reasons = {}
    for kind, answer in answers.items():
        if answer.fault:
            _, program = LIBRARIES[kind]
            _log.warning("%s; its GPUs are left out. See whether `%s` shows them", answer.fault, program)
        if not answer.devices:
            reasons[kind] = answer.fault or answer.absent or f"{LIBRARIES[kind][0]} has no device"
    listed = listed_by_tvm(answers["opencl"].devices)
    if answers["opencl"].devices and not listed:
        reasons["opencl"] = "TVM needs OpenCL 1.2, and no device has it"
    return Survey((*answers["cuda"].devices, *listed), reasons)


def listed_by_tvm(devices: Sequence[Gpu]) -> list[Gpu]:
    """Return the OpenCL devices that TVM lists, in its order, with its numbers.

    This is `OpenCLWorkspace::Init` of TVM's opencl_device_api.cc: devices from OpenCL 1.2 on, CPU devices only where no
    platform has a GPU, platform by platform. TVM goes through the platforms by an `unordered_map` of pointers. GCC's
    puts a new key before all others, so the last platform is the first. (Where two of three or more platforms fall
    into one of its 13 buckets, they stay together; `gpu.py` therefore compares names before it uses a device.)
    """
    able = [device for device in devices if _version(device) >= _LEAST_VERSION]
    chosen = [device for device in able if device.type == "gpu"] or able
    ordered = sorted(chosen, key=lambda device: -device.platform)  # within a platform the order stays
    return [replace(device, index=index) for index, device in enumerate(ordered)]


def _version(device: Gpu) -> tuple[int, int]:
    found = _VERSION.match(device.version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _start(kind: str) -> Child | OSError:
    try:
        return Child(f"{_PROBING}:tell", kind.encode(), keeps_words=True, alone=True)
    except OSError as error:
        return error


def _finished(kind: str, probe: Child | OSError, deadline: float) -> _Answer:
    library, _ = LIBRARIES[kind]
    if isinstance(probe, OSError):
        return _Answer(fault=f"{library} cannot be asked for its devices: no process can be started ({probe})")
    try:
        # Some time in any case: another driver may have taken all of it, while this one has long answered.
        if said := probe.receive(max(time.monotonic() + GRACE_S, deadline))[0]:
            return msgspec.json.decode(said, type=_Answer)
        how, last = probe.how(), probe.words.strip().rpartition("\n")[2][-200:]
    except TimeoutError:
        return _Answer(fault=f"{library} did not list its devices in {TIMEOUT_S:g} s")
    finally:
        probe.end()  # one that the kernel holds is left behind
    return _Answer(fault=f"{library} was asked for its devices by a process that {how}{last and f' ({last})'}")
