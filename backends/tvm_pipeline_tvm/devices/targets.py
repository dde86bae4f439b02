"""The target of a device, as a platform has it: a TVM target, with the index of the device behind the kind.

    llvm -mcpu=x86-64-v3       CPU cores
    cuda -arch=sm_87           the first CUDA device
    opencl:1 -device=mali      the second OpenCL device

Devices with the same target but for the index run the same compiled code.
"""

from __future__ import annotations

import re

_TARGET = re.compile(r"(?P<kind>\w+)(?::(?P<index>\d+))?(?P<options>.*)", re.DOTALL)
# Kinds whose devices compute in memory of their own, each with its number in DLPack.
DEVICE_TYPES = {"cuda": 2, "opencl": 4}
# An array within another one on such a device begins at a multiple of this many bytes. CL_DEVICE_MEM_BASE_ADDR_ALIGN is
# 128 bytes on PoCL and Mali and 512 on NVIDIA; CUDA allocates at multiples of 256.
ALIGNMENT = 512


def kind_of(target: str) -> str:
    """Return the kind of a target.

    >>> kind_of("opencl:1 -device=mali")
    'opencl'
    """
    found = _TARGET.match(target)
    return found["kind"] if found else ""


def index_of(target: str) -> int:
    """Return which of the devices of its kind a target means.

    >>> index_of("opencl:1 -device=mali"), index_of("cuda -arch=sm_87")
    (1, 0)
    """
    found = _TARGET.match(target)
    return int((found and found["index"]) or 0)


def compiler_target(target: str) -> str:
    """Return the target that TVM compiles for: without the index.

    >>> compiler_target("opencl:1 -device=mali")
    'opencl -device=mali'
    """
    found = _TARGET.match(target)
    return found["kind"] + found["options"] if found else target


def has_own_memory(target: str) -> bool:
    """Return whether the devices of a target compute in memory of their own."""
    return kind_of(target) in DEVICE_TYPES


def plain_target(target: str) -> str:
    """Return the target with the schedules that TVM has for every OpenCL device, without those of one vendor.

    A vendor's schedules lack some operators: those of Mali have no grouped convolution.

    >>> plain_target("opencl -device=mali -max_num_threads=256")
    'opencl -max_num_threads=256'
    """
    return re.sub(r" -(device|thread_warp_size)=\S+", "", target) if kind_of(target) == "opencl" else target
