"""Candidates of fused functions on a GPU: compiled, loaded, run on the device, compared bit for bit and timed.

Seconds are those of the wall, since a GPU does nothing else meanwhile: calls one after the other, and one wait at their
end. A candidate whose results differ from those of TOPI's default in one bit has failed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relay

from tvm_pipeline.files import cache_folder
from tvm_pipeline_kernels.relay.schedules.device_choices import DEFAULT, DeviceChoice, DeviceWorkload
from tvm_pipeline_kernels.relay.tuning.emitter import lowered, shapes_of
from tvm_pipeline_kernels.tuning.candidates import Shapes
from tvm_pipeline_kernels.tuning.device_child import DeviceLostError
from tvm_pipeline_tvm.machine_code import load_kernels
from tvm_pipeline_tvm.relay.fold import building
from tvm_pipeline_tvm.tvm_errors import reason

SAMPLES = 3  # of a kernel; the fastest counts
SAMPLE_S = 2e-3  # calls are repeated for as long
_MOST_CALLS = 50
_SLOW_S = 0.2  # a kernel that takes longer is timed once
HOPELESS = 3.0  # times as slow as the best: one call tells enough


@dataclass(slots=True)
class DeviceCandidate:
    """One choice for a workload.

    Attributes:
        functions: that hold the workload, each with its calls in the network.
        seconds: of all calls in a run of the network; infinite where it failed.
        why: it failed.
    """

    workload: DeviceWorkload
    choice: DeviceChoice
    functions: Sequence[tuple[relay.Function, int]]
    seconds: float = float("inf")
    why: str = ""
    kernels: list[tuple[Any, Shapes]] = field(default_factory=list)


class Bench:
    """Compiles candidates for a device, and times them there.

    Args:
        target: with the target of the host.
    """

    def __init__(self, target: tvm.target.Target, device: Any) -> None:
        self._target, self._device = target, device
        limits = {
            "max_threads_per_block": device.max_threads_per_block,
            "max_shared_memory_per_block": device.max_shared_memory_per_block,
        }
        told = {name: int(value) for name, value in limits.items() if value}
        for name, key in (("max_threads_per_block", "max_num_threads"), ("max_shared_memory_per_block",) * 2):
            if target.attrs.get(key):
                told[name] = min(told.get(name, 1 << 30), int(target.attrs[key]))
        self._limits = told
        self._arrays: dict[Shapes, list[Any]] = {}
        self._expected: dict[tuple[DeviceWorkload, int], bytes] = {}

    @property
    def most_threads(self) -> int:
        """How many threads a block may have."""
        return self._limits.get("max_threads_per_block", 256)

    def compile(self, candidates: Sequence[DeviceCandidate]) -> None:
        """Give candidates their kernels; those that cannot have any say why."""
        made = {id(candidate): self._lowered(candidate) for candidate in candidates}
        able = [candidate for candidate in candidates if not candidate.why]
        try:
            self._build(able, made)
        except RuntimeError:  # TVM's errors are RuntimeErrors; one of them spoils it for all
            for candidate in able:
                try:
                    self._build([candidate], made)
                except RuntimeError as error:
                    candidate.why = reason(error)

    def time(self, candidate: DeviceCandidate, best_s: float = float("inf")) -> None:
        """Run a compiled candidate; tell its seconds, or why it failed.

        Args:
            best_s: of the best candidate so far: one that is far slower is not timed further.

        Raises:
            DeviceLostError: the device does no more work for this process.
        """
        total = 0.0
        for index, ((kernel, shapes), (_, calls)) in enumerate(
            zip(candidate.kernels, candidate.functions, strict=True)
        ):
            try:
                total += calls * self._seconds(candidate, index, kernel, shapes, best_s / calls)
            except _OtherBitsError as error:
                candidate.why = str(error)
                return
            except tvm.TVMError as error:
                candidate.why = reason(error)
                self._check_answers(candidate.why)
                return
        candidate.seconds = total

    def _check_answers(self, why: str) -> None:
        """Raise DeviceLostError where the device does not even copy."""
        try:
            tvm.nd.array(np.ones(1, "float32"), self._device).numpy()
        except tvm.TVMError as error:
            raise DeviceLostError(why) from error

    def forget(self) -> None:
        """Free the arrays of what was timed; results of defaults are kept."""
        self._arrays.clear()

    def _lowered(self, candidate: DeviceCandidate) -> list[tvm.tir.PrimFunc]:
        choices = {} if candidate.choice == DEFAULT else {candidate.workload: candidate.choice}
        try:
            made = [lowered(function, choices, self._target) for function, _ in candidate.functions]
        except Exception as error:  # schedules raise whatever their author had at hand
            candidate.why = reason(error)
            return []
        # TOPI's default is never refused: it is what runs without tuning.
        if choices and not all(tvm.tir.analysis.verify_gpu_code(function, self._limits) for function in made):
            candidate.why = "it needs more threads or shared memory than the device has"
        return made

    def _build(self, candidates: Sequence[DeviceCandidate], made: dict[int, list[tvm.tir.PrimFunc]]) -> None:
        if not candidates:
            return
        parts: list[tuple[DeviceCandidate, str, Shapes]] = []
        functions: dict[tvm.ir.GlobalVar, tvm.tir.PrimFunc] = {}
        for candidate in candidates:
            candidate.kernels = []
            for function in made[id(candidate)]:
                name = f"candidate_{len(functions)}"
                functions[tvm.ir.GlobalVar(name)] = function.with_attr("global_symbol", name)
                parts.append((candidate, name, shapes_of(function)))

        with building():
            built = tvm.build(tvm.IRModule(functions), target=self._target)
        module = self._loaded(built)
        for candidate, name, shapes in parts:
            candidate.kernels.append((module.get_function(name, True), shapes))

    def _loaded(self, module: Any) -> Any:
        """Return the module as a library has it: code for a device runs only after it was saved."""
        with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
            path = Path(folder) / "kernels.so"
            module.export_library(str(path))
            return load_kernels(path, alone=True)

    def _seconds(
        self, candidate: DeviceCandidate, index: int, kernel: Callable[..., Any], shapes: Shapes, best_s: float
    ) -> float:
        """Return the seconds of a call."""
        arrays = self._arrays_for(shapes)
        result = arrays[-1]
        result.copyfrom(
            np.full((*result.shape, tvm.DataType(result.dtype).bits // 8), 255, "uint8").view(result.dtype)[..., 0]
        )
        kernel(*arrays)  # drivers of OpenCL compile it now
        bits = result.numpy().tobytes()
        expected = self._expected.setdefault((candidate.workload, index), bits)
        if bits != expected:
            raise _OtherBitsError("its results have other bits than those of TOPI's default")
        fastest = self._sample(kernel, arrays, 1)
        if fastest > min(HOPELESS * best_s, _SLOW_S):
            return fastest
        calls = int(min(max(SAMPLE_S / max(fastest, 1e-6), 1), _MOST_CALLS))
        return min(fastest, *(self._sample(kernel, arrays, calls) for _ in range(SAMPLES)))

    def _sample(self, kernel: Callable[..., Any], arrays: Sequence[Any], calls: int) -> float:
        begin = time.perf_counter()
        for _ in range(calls):
            kernel(*arrays)
        self._device.sync()
        return (time.perf_counter() - begin) / calls

    def _arrays_for(self, shapes: Shapes) -> list[Any]:
        if shapes not in self._arrays:
            draw = np.random.default_rng(0)
            self._arrays[shapes] = [
                tvm.nd.array(draw.standard_normal(shape).astype(dtype), self._device) for shape, dtype in shapes
            ]
        return self._arrays[shapes]


class _OtherBitsError(Exception):
    """A choice changes values."""
