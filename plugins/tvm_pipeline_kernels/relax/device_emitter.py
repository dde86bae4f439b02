"""What tuning asks of Relax for a GPU: what `emitter.py` is for CPU cores, with kernels that run and are timed there.

A candidate whose results differ in one bit from those of the untuned kernel has failed, as one that its device refuses.
Seconds are those of the device's clock, which counts nothing else. Before anything that may hang, `trying` is called.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import tvm
from tvm import tirx

from tvm_pipeline import Device, Model
from tvm_pipeline.errors import PlatformError, RunError
from tvm_pipeline_kernels.choices import Choices, Workload, macs_of, static_choice
from tvm_pipeline_kernels.relax import gpu_rules
from tvm_pipeline_kernels.relax.emitter import Runner, functions_by_workload, shapes_of
from tvm_pipeline_kernels.tuning.candidates import Candidate, Kernel, Stopwatch, Task
from tvm_pipeline_kernels.tuning.device_child import CANDIDATE_S, PASS_S, DeviceLostError, Tried
from tvm_pipeline_kernels.tuning.race import Seconds
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.relax import gpu_schedules, kernel_passes
from tvm_pipeline_tvm.relax.build import Library, build_library, prepared
from tvm_pipeline_tvm.relax.device_bench import Bench
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.tvm_errors import reason

SHORT_S = 1e-3  # a kernel that takes less is called so often again
SHORT_CALLS = 8
_log = logging.getLogger(__name__)

# Takes what is about to run, but for what the rule chooses, and the seconds within which it is called again; 0 for any.
Trying = Callable[[Tried, float], None]


class DeviceEmitter:
    """A model and a GPU; see `tuner.Emitter`.

    Args:
        host: the target of the code that launches kernels.
        trying: is called before what may hang, and behind it.

    Raises:
        PlatformError: the device cannot be used here.
    """

    def __init__(self, model: Model, device: Device, host: str, trying: Trying) -> None:
        self.network, self.target = replace(model, tolerance=0.0), device.target
        self._model, self._device, self._host, self._trying = model, device, host, trying
        self._bench = Bench(device.target, host)
        self.cores = gpu_rules.gpu_of_target(self._bench.compiler)

    def build(self, choices: Choices) -> Library:
        return build_library(self._model, compiler_target(self.target), self._host, choices)

    @staticmethod
    def workloads(library: Library) -> Mapping[str, Workload]:
        return library.workloads

    def tasks(self) -> list[Task[Workload]]:
        mod = prepared(simplified(import_model(self._model)), False)
        plain = kernel_passes.unscheduled(gpu_schedules.gpu_fused(mod, self._bench.compiler), self._bench.compiler)
        functions = functions_by_workload(plain, lambda function: gpu_rules.workload_of(self._scheduled(function, {})))
        return [Task(workload, macs_of(workload), own) for workload, own in functions.items()]

    @staticmethod
    def reference() -> None:
        """Nobody knows what a GPU does at its peak."""

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Give all candidates their kernels; those of one that is refused raise RunError when they are called."""
        self._trying(self._tried(candidates), 0)  # the device has no part in it
        try:
            self._compile(candidates)
        except PlatformError:
            raise
        except Exception as error:  # of TVM's passes, or of the compiler; one candidate spoils it for all
            for candidate in candidates if len(candidates) > 1 else ():
                self.compile([candidate])
            if len(candidates) == 1:
                refuse = partial(_refuse, reason(error))
                candidates[0].kernels = [Kernel(refuse, shapes_of(each)) for each, _ in candidates[0].functions]
        self._trying((), 0)

    def _compile(self, candidates: Sequence[Candidate]) -> None:
        functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        for candidate in candidates:
            candidate.kernels = []
            for function, _ in candidate.functions:
                name = f"candidate_{len(functions)}"
                made = self._scheduled(function, {candidate.workload: candidate.choice})
                functions[tvm.ir.GlobalVar(name)] = made.with_attr("global_symbol", name)
                candidate.kernels.append(Kernel(name, shapes_of(function)))
        bound = self._bench.compiled(tvm.IRModule(functions))
        for candidate in candidates:
            for kernel in candidate.kernels:
                kernel.call = bound[kernel.call]

    def stopwatch(self) -> DeviceStopwatch:
        return DeviceStopwatch(self._bench, self._about_to_run)

    def runner(self, library: Library) -> Runner:
        choices = tuple((json.dumps(workload), json.dumps(choice)) for workload, choice in library.choices.items())
        return _DeviceRunner(self._model.name, library, self._device, choices, self._trying)

    def _scheduled(self, function: tirx.PrimFunc, choices: Choices) -> tirx.PrimFunc:
        return gpu_schedules.gpu_scheduled(function, self._bench.compiler, choices)[0]

    def _about_to_run(self, candidates: Sequence[Candidate]) -> None:
        """Say that these run now, for which a driver of OpenCL also compiles them; without any, that they ran."""
        tried = self._tried(candidates)
        self._trying(tried, (CANDIDATE_S if tried else PASS_S) if candidates else 0)

    def _tried(self, candidates: Sequence[Candidate]) -> Tried:
        others = [c for c in candidates if c.choice != static_choice(c.workload, self.cores, winograd=False)]
        return tuple((json.dumps(each.workload), json.dumps(each.choice)) for each in others)


def _refuse(why: str, *_: Any) -> NoReturn:
    raise RunError(why)


class DeviceStopwatch(Stopwatch):
    """Times kernels on a device, on arrays of random numbers, and compares their results with those of the first one.

    Args:
        about_to_run: is called with a candidate before each of its kernels runs, and without one behind them.
    """

    def __init__(self, bench: Bench, about_to_run: Callable[[Sequence[Candidate]], None]) -> None:
        super().__init__(bench.holding)
        self._bench, self._about_to_run = bench, about_to_run
        self._expected: dict[int, tuple[Any, bytes]] = {}  # by function, which is kept so that its number stays its own

    def time(self, candidate: Candidate, *, evicts: bool = True) -> None:
        """Run each kernel, and note its seconds; one that fails has infinitely many, and its call is taken away.

        Raises:
            RunError: an untuned kernel fails.
            DeviceLostError: the device does no more work for this process.
        """
        for kernel, (function, _) in zip(candidate.kernels, candidate.functions, strict=True):
            self._about_to_run([candidate])
            try:
                if kernel.call is not None:
                    kernel.seconds = min(kernel.seconds, self._seconds(kernel, function))
            except self._bench.failures as error:
                if id(function) not in self._expected:
                    raise RunError(f"{candidate.workload} fails without tuning: {reason(error)}") from error
                _log.info(f"tile {candidate.choice} of {candidate.workload} is left out: {reason(error)}")
                kernel.call, kernel.seconds = None, float("inf")
                self._check_answers()
        self._about_to_run([])

    def _seconds(self, kernel: Kernel, function: tirx.PrimFunc) -> float:
        """Return the seconds of a call; raise RunError where its result has other bits than the untuned kernel's."""
        *inputs, result = self._arrays_for(kernel)
        launch = kernel.call(*inputs, result.on_device)
        bits = result.bits_of(launch)
        if bits != self._expected.setdefault(id(function), (function, bits))[1]:
            raise RunError("its results have other bits than those of the untuned kernel")
        fastest = float(self._bench.seconds([launch])[0])
        if fastest < SHORT_S:
            fastest = min(fastest, *map(float, self._bench.seconds([launch] * SHORT_CALLS)))
        return max(fastest, 1e-9)

    def _arrays_for(self, kernel: Kernel) -> list[Any]:
        if kernel.arguments not in self._arrays:
            draw, result = np.random.default_rng(0), self._bench.result(*kernel.arguments[-1])
            inputs = [draw.standard_normal(shape).astype(dtype) for shape, dtype in kernel.arguments[:-1]]
            self._arrays[kernel.arguments] = [*map(self._bench.holding, inputs), result]
        return self._arrays[kernel.arguments]

    def _check_answers(self) -> None:
        """Raise DeviceLostError where the device does not even take an array."""
        try:
            self._bench.holding(np.ones(1, "float32"))
        except self._bench.failures as error:
            raise DeviceLostError(reason(error)) from error


class _DeviceRunner(Runner):
    """A whole network in one slice, whose kernels are timed by the device.

    Args:
        tried: the choices of the library.
    """

    def __init__(self, name: str, library: Library, device: Device, tried: Tried, trying: Trying) -> None:
        super().__init__(name, library, device)
        self._tried, self._trying = tried, trying

    def run(self) -> Seconds:
        self._trying(self._tried, PASS_S)
        seconds: Seconds = np.maximum(self._slice.timed(*self._buffers), 1e-9)
        self._trying((), 0)
        return seconds
