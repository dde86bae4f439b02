"""The TVM target of a GPU, from what its driver tells, and whether a target that a platform file names fits it.

CUDA: the architecture is the compute capability. NVIDIA's table (https://developer.nvidia.com/cuda-gpus) and TVM's tags
(`nvidia/jetson-tx2` and others in tvm/src/target/tag.cc) agree where both know a device:

    Jetson                      those of `plugins/tvm_pipeline_boards/modules.py`, from sm_53 (Nano) to sm_110 (Thor)
    GeForce, RTX, data centre   by capability, such as sm_61 (1080), sm_75 (2080, T4), sm_86 (3080), sm_90 (H100)

OpenCL: the name of a `-device` chooses TVM's schedules. `mali`, `bifrost` and `intel_graphics` are those of
`tvm.target.mali`, `bifrost` and `intel_graphics`, which also gives the warp of 16; without a name TVM takes the
schedules of its CUDA, which every OpenCL GPU runs. Nothing was measured on these devices yet.
"""

from __future__ import annotations

import re

from tvm_pipeline_tvm.devices.targets import DEVICE_TYPES, compiler_target, index_of, kind_of
from tvm_pipeline_tvm.gpu.detection import Gpu

# TVM's schedules launch no more than so many threads in a work-group, unless a target says another number.
MOST_THREADS = 256

# The first line whose pattern is found in "vendor, name" of an OpenCL device gives the options.
_SCHEDULES: tuple[tuple[str, str], ...] = (
    (r"mali-t\d", "-device=mali"),  # Midgard: Mali-T600 to T880
    (r"mali|immortalis|^arm\b", "-device=bifrost"),  # Bifrost and Valhall; a Mali-G610 may call itself Mali-LODX
    (r"intel", "-device=intel_graphics -thread_warp_size=16"),
    # Adreno: the schedules of `-device=adreno` put tensors into textures, and what is in textures cannot be cut.
    # AMD, NVIDIA and all others: none of their own in TVM.
)
# PoCL and other CPUs: measured on PoCL, three to five times as fast as the schedules of CUDA.
_SOFTWARE = "-device=intel_graphics"

_ARCH = re.compile(r"-arch=(\S+)")
_SM = re.compile(r"sm_(\d+)([af]?)")
_DEVICE = re.compile(r"-device=(\S+)")
_THREADS = re.compile(r"-max_num_threads=(\d+)")


def target_for(gpu: Gpu) -> str:
    """Return the target of a GPU, with its index.

    >>> target_for(Gpu("cuda", "Orin", capability=(8, 7)))
    'cuda -arch=sm_87'
    >>> target_for(Gpu("opencl", "Mali-G52", index=1, vendor="ARM", most_threads=384))
    'opencl:1 -device=bifrost -max_num_threads=256'
    """
    where = gpu.kind if gpu.index == 0 else gpu.address
    if gpu.kind == "cuda":
        return f"{where} {_arch_option(gpu)}"
    schedules = _own_schedules(gpu)
    return " ".join(part for part in (where, schedules, _threads_option(gpu)) if part)


def completed(target: str, gpu: Gpu) -> str:
    """Return a target of the platform file with what it leaves open filled in.

    >>> gpu = Gpu("opencl", "Mali-G52", vendor="ARM", most_threads=128)
    >>> completed("opencl", gpu), completed("opencl -device=mali", gpu)
    ('opencl -device=bifrost -max_num_threads=128', 'opencl -device=mali -max_num_threads=128')
    """
    if compiler_target(target).strip() in ("", gpu.kind):
        return target_for(gpu)
    if gpu.kind == "cuda":
        return target if _ARCH.search(target) else f"{target} {_arch_option(gpu)}"
    return target if _THREADS.search(target) else f"{target} {_threads_option(gpu)}"


def address_of(target: str) -> tuple[str, int] | None:
    """Return the kind and the index that a target names; None where it is no target of a GPU."""
    kind = kind_of(target)
    return (kind, index_of(target)) if kind in DEVICE_TYPES else None


def mismatch(target: str, gpu: Gpu) -> str:
    """Return why code for a complete target cannot run on the GPU, with what would help; empty where it can.

    What is asked of CUDA's architectures holds for PTX. Machine code is checked when it is first used
    (`check_code` in `devices/cuda_compiler.py`), since only a library tells which of them it holds.
    """
    if gpu.kind == "cuda":
        return _arch_mismatch(target, gpu)
    named = _DEVICE.search(target)
    if named and named[1] == "adreno":
        return "TVM's schedules for `-device=adreno` use textures, which cannot be cut; leave that option out"
    threads = _THREADS.search(target)
    if threads and int(threads[1]) > gpu.most_threads > 0:
        return f"it has at most {gpu.most_threads} threads in a work-group, and the target {threads[1]}"
    return ""


def foreign_schedules(target: str, gpu: Gpu) -> str:
    """Return the options of the GPU's own schedules, where a target has those of other hardware; else nothing."""
    named, own = _DEVICE.search(target), _own_schedules(gpu)
    if gpu.kind == "cuda" or gpu.is_software or not named or f"-device={named[1]}" in own.split():
        return ""
    return own or "no `-device`"


def _own_schedules(gpu: Gpu) -> str:
    if gpu.is_software:
        return _SOFTWARE
    described = f"{gpu.vendor}, {gpu.name}".lower()
    return next((options for pattern, options in _SCHEDULES if re.search(pattern, described)), "")


def _arch_option(gpu: Gpu) -> str:
    major, minor = gpu.capability
    return f"-arch=sm_{major}{minor}"


def _threads_option(gpu: Gpu) -> str:
    return f"-max_num_threads={min(MOST_THREADS, gpu.most_threads or MOST_THREADS)}"


def _arch_mismatch(target: str, gpu: Gpu) -> str:
    """Compare architectures: PTX for an older one runs on a newer GPU, unless it is for one (`a`) or a family (`f`)."""
    written = _ARCH.search(target)
    found = _SM.fullmatch(written[1]) if written else None
    if not found:
        return f"CUDA has no architecture {written[1] if written else ''!r}; write one such as {_arch_option(gpu)}"
    major, minor = gpu.capability
    asked, here = int(found[1]), 10 * major + minor
    own = f"it is sm_{here}; use {_arch_option(gpu)}, and compile the model again"
    if asked > here:
        return own
    if found[2] == "a" and asked != here:
        return f"code for {written[1] if written else ''} runs on that architecture alone; {own}"
    if found[2] == "f" and asked // 10 != major:
        return f"code for {written[1] if written else ''} runs on that family alone; {own}"
    return ""
