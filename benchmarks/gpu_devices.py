"""The devices and networks of gpu.py: a real GPU where there is one, else software that takes its place.

A software device shows that what is built for a GPU works, and nothing about speed. There are two: PoCL, which is
OpenCL on CPU cores, with the schedules of two kinds of GPU, and the software CUDA device of the tests, which also
counts what is allocated and copied.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from networks import load, load_lively
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # for tests.support

from tests.support import software_cuda
from tests.support.networks import NETWORKS, as_model
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import Written, as_written, random_frame
from tvm_pipeline import Device, Plan, Platform, Prediction, Problem, Stage, settle_platform
from tvm_pipeline.backends.contract import Array, Backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.tensor_layout import to_logical
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.files import cache_folder
from tvm_pipeline.report import TextTable
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.targets import target_for
from tvm_pipeline_tvm.host.detection import host_target
from tvm_pipeline_tvm.relay.compiled import RelayModel

CONSOLE = Console(width=150)
SMALL = tuple(name for name in NETWORKS if name != "int8")  # GPUs and CPUs share no operators of int8 networks
CORES = sorted(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Gpu:
    """A GPU, or what stands for one.

    Attributes:
        is_real: whether its times say anything.
        counter: counts the memory and the copies of the software CUDA device.
    """

    label: str
    target: str
    is_real: bool = False
    counter: SoftwareCuda | None = None

    def settled(self, cpus: int = 1, *, cores: bool = True) -> tuple[Backend, Platform]:
        """Return a platform of `cpus` devices of one core each, and the GPU.

        With `cores`, PoCL computes on the last core. Without, a plan may use the GPU and each core at the same time.
        """
        own = tuple(CORES[-1:]) if cores and "opencl" in self.target and not self.is_real else ()
        devices = [Device(f"cpu{core}", "host", (core,), host_target()) for core in CORES[:cpus]]
        return settle_platform(Platform("benchmark", (*devices, Device("gpu", "gpu", own, self.target))))

    def compiled(self, model: Model, cpus: int = 1, *, cores: bool = True) -> tuple[Backend, RelayModel, Platform]:
        backend, platform = self.settled(cpus, cores=cores)
        compiled: Any = backend.compile(model, platform.devices)
        return backend, compiled, platform


SOFTWARE = ("pocl", "pocl-mali", "software-cuda")
_SCHEDULES = {"pocl": "intel_graphics", "pocl-mali": "mali"}


def find(wanted: str) -> Gpu | str:
    """Return `gpu`, the first real one, or one of `SOFTWARE`; or why it is not here."""
    if wanted == "software-cuda":
        return _software_cuda()
    if wanted == "gpu":
        real = [gpu for gpu in survey().distinct if not gpu.is_software]
        return Gpu(str(real[0]), target_for(real[0]), is_real=True) if real else "no real GPU is here"
    for gpu in survey().gpus:
        if gpu.kind == "opencl" and gpu.is_software:
            schedules = _SCHEDULES[wanted]
            return Gpu(f"PoCL, schedules of {schedules}", f"{gpu.address} -device={schedules}")
    return "PoCL is not installed (Debian and Ubuntu: apt install pocl-opencl-icd), or hidden by a GPU of OpenCL"


_loaded: list[SoftwareCuda] = []


def _software_cuda() -> Gpu | str:
    """Make the software device this process's CUDA, until it ends."""
    if any(gpu.kind == "cuda" and not gpu.is_software for gpu in survey().gpus):
        return "the software CUDA device is not used beside a real one"
    if not _loaded:
        if software_cuda.compiler() is None:
            return "the software CUDA device needs g++, which is not installed"
        folder = _built()
        os.environ.update({**software_cuda.environment(folder), "CUDA_HOME": str(folder)})
        _loaded.append(software_cuda.load(folder))
        survey.cache_clear()
    return Gpu("software CUDA", "cuda -arch=sm_72 -max_num_threads=256", counter=_loaded[0])


def _built() -> Path:
    """Return the folder of the libraries, which are built again when their sources change."""
    sources = sorted(path for path in Path(software_cuda.__file__).parent.rglob("*") if path.is_file())
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources if path.suffix != ".pyc")).hexdigest()
    folder = cache_folder() / "software_cuda" / digest[:16]
    if not (folder / "built").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        software_cuda.build(folder)
        (folder / "built").touch()
    return folder


def model_of(described: str) -> Model:
    """Load a network: one of `SMALL`, a built-in one with its side (`squeezenet@64`), or what `networks.load` knows.

    Built-in networks get weights under which values differ: as they come, all classes are about equally likely.
    """
    return load_lively(described) if "@" in described or described in SMALL else load(described)


def given(model: RelayModel) -> Written:
    """Return noise for the inputs of the model."""
    return as_written(model.graph.inputs, random_frame(model.graph.inputs))


def logical(tensors: Written, name: str) -> Array:
    port, array = tensors[name]
    return to_logical(array, port.layout)


def one_kernel(floats: int) -> Model:
    """Return a model of one operator on so many numbers."""
    from tvm import IRModule, relay

    data = relay.var("data", shape=(1, floats))
    body = relay.nn.relu(relay.add(data, relay.const(1.0)))
    module = relay.transform.InferType()(IRModule.from_expr(relay.Function([data], body)))
    return as_model(f"one_kernel_{floats}", module, {})


def two_stages(problem: Problem, first: str, second: str, names: list[str], cut: int) -> Plan:
    """Return the plan of the operators before `cut` on the first device, and the others on the second."""
    stages = Stage((first,), tuple(names[:cut])), Stage((second,), tuple(names[cut:]))
    return judged(problem, Plan(problem.graph.name, "by hand", "throughput", stages, Prediction()))


def apart(found: Array, expected: Array) -> float:
    """Return the largest difference of two tensors, over the largest value that is expected."""
    if np.array_equal(found, expected, equal_nan=True):
        return 0.0
    difference = float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), 1e-30)
    return float("inf") if np.isnan(difference) else difference


def show(gpu: Gpu, title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table under the device that it is about."""
    kind = "a real GPU" if gpu.is_real else "software: proves function, not speed"
    CONSOLE.print(f"{gpu.label} ({kind}; load average {os.getloadavg()[0]:.1f})", highlight=False)
    CONSOLE.print(TextTable(title, tuple(columns), tuple(tuple(map(str, row)) for row in rows)))


def told(row: Sequence[object]) -> None:
    """Print a row as soon as it is known, since a table takes minutes."""
    CONSOLE.print("  ", *row, style="dim", highlight=False)
