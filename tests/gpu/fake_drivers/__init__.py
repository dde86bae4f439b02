"""Drivers that detection asks, built from C by the tests: which devices they have, FAKE_CUDA and FAKE_OPENCL say.

A process of its own finds them by LD_LIBRARY_PATH; `Drivers` sets all three. They compute nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.parts import needs
from tvm_pipeline_tvm.gpu.detection import survey

_HERE = Path(__file__).parent
_FOLDER = tempfile.TemporaryDirectory(prefix="fake-drivers-")

# Lines of FAKE_OPENCL as real devices give them; only the bus is added where a test needs one.
POCL = (
    "platform|Portable Computing Language\n"
    "device|cpu|cpu-haswell-Intel(R) N150|GenuineIntel|OpenCL 3.0 PoCL HSTR: cpu-x86_64-pc-linux-gnu-haswell|6.0+debian"
    "|14327742464|1|4096|1024|cl_khr_byte_addressable_store cl_khr_fp64|"
)
MALI = (
    "platform|ARM Platform\n"
    "device|gpu|Mali-G52|ARM|OpenCL 3.0 v1.r32p1-00pxl0|3.0|4112596992|1|384|1024|cl_khr_fp16 cl_arm_core_id|"
)
INTEL = (
    "platform|Intel(R) OpenCL Graphics\n"
    "device|gpu|Intel(R) UHD Graphics 770|Intel(R) Corporation|OpenCL 3.0 NEO|25.18.33578.6|26582675456|1|512|1024"
    "|cl_khr_fp16 cl_khr_pci_bus_info|0"
)
GEFORCE = (
    "platform|NVIDIA CUDA\n"
    "device|gpu|NVIDIA GeForce RTX 3080|NVIDIA Corporation|OpenCL 3.0 CUDA|570.86.15|10501292032|0|1024|4096"
    "|cl_khr_fp64 cl_khr_pci_bus_info|1"
)
# Lines of FAKE_CUDA.
CUDA_GEFORCE = "NVIDIA GeForce RTX 3080|8|6|10501292032|0|1"
CUDA_ORIN = "Orin|8|7|7990480896|1|0"


@cache
def built() -> Path:
    """Return the folder of both libraries, built once; skip the test where there is no C compiler."""
    needs("C compiler")
    compiler = shutil.which("cc") or str(shutil.which("gcc"))
    for name in ("libcuda", "libOpenCL"):
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", f"{_FOLDER.name}/{name}.so.1", f"{_HERE}/{name}.c"]
        subprocess.run(command, check=True)
    return Path(_FOLDER.name)


class Drivers:
    """The drivers of this machine, for as long as a test lasts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def have(self, cuda: str = "", opencl: str = "", folder: Path | None = None) -> None:
        """Set the devices from now on; `folder` holds other libraries, or none."""
        self._monkeypatch.setenv("LD_LIBRARY_PATH", str(folder or built()))
        self._monkeypatch.setenv("FAKE_CUDA", cuda)
        self._monkeypatch.setenv("FAKE_OPENCL", opencl)
        survey.cache_clear()
