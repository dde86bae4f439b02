"""Functions of TIR on a device, without a network around them: what tuning compares bit for bit, and times.

Both kinds of devices have run it without a real GPU only: OpenCL on PoCL, CUDA on the device made of software.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tvm

from tvm_pipeline.backends.contract import Seconds
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.files import cache_folder
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.devices.targets import compiler_target, kind_of
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relax.build import gpu_compiler, write_gpu_kernels
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.cuda_kernels import load_cuda_kernels
from tvm_pipeline_tvm.relax.opencl_kernels import OpenCLFunctions

Launch = Callable[[], object]  # gives work to the device, and does not wait for it
Bound = Callable[..., Launch]  # takes the arguments of a function, the result last
_UNWRITTEN = 255  # four such bytes are no number


def device_name(target: str) -> str:
    """Return what its driver calls the device of a target.

    Raises:
        PlatformError: it cannot be used here.
    """
    RelaxModel.ready_to_run(target)
    return str(mirrors_of(target).device.device_name)


class Bench:
    """One device, on which functions run.

    Args:
        target: of the device, with its index.
        host: of the code that launches kernels.

    Attributes:
        compiler: TVM's target.
        failures: what a call, or the wait for it, raises where the device fails.

    Raises:
        PlatformError: the device cannot be used here.
    """

    def __init__(self, target: str, host: str) -> None:
        RelaxModel.ready_to_run(target)
        self.compiler = gpu_compiler(compiler_target(target), host)
        self._target, self._host, self._mirrors = target, host, mirrors_of(target)
        self.failures: tuple[type[Exception], ...] = (*self._mirrors.failures, PipelineError)

    def compiled(self, functions: tvm.IRModule) -> dict[str, Bound]:
        """Compile scheduled functions, each with its `global_symbol`, and return by name what binds their arguments.

        Raises:
            ModelError: the compiler refuses a kernel; a driver of OpenCL compiles it when arguments are bound.
        """
        names = [str(symbol.name_hint) for symbol in functions.functions]
        with tempfile.TemporaryDirectory(dir=cache_folder()) as made:
            folder = Path(made)
            write_gpu_kernels(functions, self.compiler, folder, self._host)
            if kind_of(self._target) == "cuda":
                module = load_cuda_kernels(folder)
                return {name: partial(partial, module[name]) for name in names}
            return {name: partial(self._call, OpenCLFunctions(folder), name) for name in names}

    def _call(self, functions: OpenCLFunctions, name: str, *arrays: Any) -> Launch:
        from tvm_pipeline_tvm.relax.opencl_loop import call_of, ends  # which needs pyopencl

        function, programs = functions[name], functions.programs(self._mirrors.device)
        return call_of(function, arrays, programs, self._mirrors, self._mirrors.empty(ends(function)[-1]))

    def holding(self, array: Any) -> Any:
        """Return a copy of an array of the host on the device; raises one of `failures` where the device is lost."""
        return self._mirrors.holding(array)

    def result(self, shape: Sequence[int], dtype: str) -> Result:
        return Result(shape, dtype, self._mirrors)

    def seconds(self, calls: Sequence[Launch]) -> Seconds:
        """Return the seconds of calls in a row, by the device's clock, or the host's if the device has none."""
        device = self._mirrors.device
        if kind_of(self._target) == "cuda":
            from tvm_pipeline_tvm.relax import cuda_loop

            return cuda_loop.clocked(calls, device, self._target)
        from tvm_pipeline_tvm.relax import opencl_loop

        return opencl_loop.clocked(calls, device)


class Result:
    """An array on a device, which a function writes.

    Attributes:
        on_device: what the function takes.
    """

    def __init__(self, shape: Sequence[int], dtype: str, mirrors: Any) -> None:
        size = tensor_bytes(shape, dtype)
        memory = mirrors.empty(size)
        self._bytes, self._device = aligned_empty((size,), "uint8"), mirrors.device
        self._mirror = mirrors.copied(self._bytes, memory)
        self.on_device = mirrors.part(memory, 0, shape, dtype)

    def bits_of(self, call: Launch) -> bytes:
        """Make a call that writes the array, and return its bytes; what the call leaves out is no number."""
        self._bytes[...] = _UNWRITTEN
        self._mirror.begin(copied=True)
        call()
        self._mirror.end(copied=True)
        self._device.sync()
        return self._bytes.tobytes()
