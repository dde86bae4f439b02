"""A model compiled by Relax for every target of its devices; what is no IR's is in `compiled_model.py`.

Next: `build.py`, which compiles, and `call_loop.py` and `device_loop.py`, which run slices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tvm_pipeline.backends.contract import Order, Rewriting, Seconds, StoredWeights, TunedKernels
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.model import FLOAT32, Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError, RunError
from tvm_pipeline_tvm.compiled_model import Bind, TvmModel
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.devices.targets import compiler_target, has_own_memory, kind_of
from tvm_pipeline_tvm.devices.transfer_times import time_transfers
from tvm_pipeline_tvm.installed_ir import lacks
from tvm_pipeline_tvm.kernel_sets import relax_kernels
from tvm_pipeline_tvm.relax import cuda_kernels
from tvm_pipeline_tvm.relax.build import Library, build_library, in_integers, load_library
from tvm_pipeline_tvm.relax.call_loop import Slice
from tvm_pipeline_tvm.relax.cuda_loop import CudaSlice
from tvm_pipeline_tvm.relax.device_loop import DeviceSlice
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.rewrite_concat import RelaxRewriting
from tvm_pipeline_tvm.slice_plan import SlicePlan
from tvm_pipeline_tvm.tvm_errors import reason

_log = logging.getLogger(__name__)


class RelaxModel(TvmModel[Library]):
    """A model compiled by Relax; see `TvmModel`."""

    ir = "relax"

    def __init__(self, name: str, libraries: Sequence[Library], bind: Bind, order: Order = "listed") -> None:
        super().__init__(name, libraries, bind, order)
        self._weights: dict[str, DeviceParams] = {}  # by the target of the device, with its index

    @staticmethod
    def check(model: Model) -> None:
        import_model(model)

    @staticmethod
    def rewriting(model: Model) -> Rewriting:
        return RelaxRewriting(model)

    @staticmethod
    def build(
        model: Model, targets: Sequence[str], host: str, elsewhere: Mapping[str, str], *, tuned: bool, processor: str
    ) -> list[Library]:
        """Compile for each target; see `TvmModel.build`."""
        distinct = dict.fromkeys(map(compiler_target, targets))
        for one in distinct if model.weights != FLOAT32 else ():
            gpu = "kernels for GPUs read float32 alone; leave the device out, or leave `weights` out"
            if why := gpu if has_own_memory(one) else relax_kernels().refuses_weights(model.weights, one):
                raise PlatformError(f"`weights` {model.weights} for the target `{one}`: {why}")
        for target in targets:
            if has_own_memory(target) and compiler_target(target) not in elsewhere:
                RelaxModel.ready_to_run(target)
        recorded = partial(relax_kernels().recorded, tolerance=model.tolerance, measured_on=processor)
        first = {compiler_target(target): target for target in reversed(targets)}
        known = {one for one in distinct if tuned and not (has_own_memory(one) and one in elsewhere)}
        choices = {one: recorded(first[one]) if one in known else {} for one in distinct}
        integers = in_integers(distinct)
        return [
            build_library(model, one, host, choices[one], elsewhere=one in elsewhere, integers=integers)
            for one in distinct
        ]

    @staticmethod
    def read_library(folder: Path, runs_here: Callable[[str], bool]) -> Library:
        return load_library(folder, runs_here)

    @staticmethod
    def ready_to_run(target: str) -> None:
        if kind_of(target) == "opencl":
            if why := lacks("opencl"):
                raise PlatformError(why)
            mirrors_of(target)
        else:
            cuda_kernels.ready_to_run()

    def runnable_plan(self, plan: SlicePlan, device: Device) -> Slice | DeviceSlice:
        library = self.library_here(device)
        if not has_own_memory(library.target):
            return Slice(library, plan)
        weights = self._weights_on(device.target, library)
        try:
            if kind_of(device.target) == "opencl":
                from tvm_pipeline_tvm.relax.opencl_loop import OpenCLSlice  # which needs pyopencl

                return OpenCLSlice(library, plan, weights, device.concurrent_copies)
            return CudaSlice(library, plan, weights, device.concurrent_copies, device.target)
        except weights.mirrors.failures as error:
            raise RunError(
                f"device {device.label} cannot hold a stage of {self.graph.name} with {plan.activation_bytes} bytes of "
                f"activations beside {len(weights)} weights: {reason(error)}; give it fewer operators, or state its "
                "`memory_bytes` in the platform file"
            ) from error

    def _weights_on(self, target: str, library: Library) -> DeviceParams:
        """Return a library's weights on a device, for all its slices there; each is copied when it is first used.

        Raises:
            PlatformError: the device cannot be used here, or does not run the library's kernels.
        """
        weights = self._weights.get(target)
        if weights is None:
            self.ready_to_run(target)
            if kind_of(target) == "cuda":
                cuda_kernels.check_code(target)
            made = DeviceParams(dict(enumerate(library.constants)), mirrors_of(target))
            weights = self._weights.setdefault(target, made)
        return weights

    def prepare(self, target: str) -> None:
        """Run once what an OpenCL device computes, and keep its programs: other drivers keep theirs by themselves."""
        if kind_of(target) != "opencl" or compiler_target(target) in self.elsewhere:
            return
        programs = self.libraries[compiler_target(target)].module.programs(mirrors_of(target).device)
        if not programs.were_kept:
            _log.info(f"preparing {self.graph.name} on {target}")
            self.run_once(target)
            programs.keep()

    def tuned(self) -> list[TunedKernels]:
        """Return what is tuned or computed by Winograd's algorithm, for each target where anything is."""
        found = [(target, library, library.winograd()) for target, library in self.libraries.items()]
        return [
            TunedKernels(target, len(one.choices), len(set(one.workloads.values())), winograd, one.error)
            for target, one, winograd in found
            if one.choices or winograd
        ]

    def stored_weights(self) -> list[StoredWeights]:
        return [library.weights for library in self.libraries.values() if library.weights]

    def kernels_to_tune(self, device: Device) -> dict[str, list[Any]]:
        """Return the workloads of the operators that tuning can make faster."""
        library, alignment = self._library(device)
        found: dict[str, list[Any]] = {}
        for name, kernels in alignment.kernels.items():
            workloads = [library.workloads.get(library.calls[kernel].function) for kernel in kernels]
            if known := [workload for workload in workloads if workload is not None]:
                found[name] = known
        return found

    def slow_operators(self, device: Device) -> list[str]:
        """Return the operators with much work that no fast schedule serves, in the graph's order."""
        library, alignment = self._library(device)
        slow = library.slow_kernels()
        return [name for name, kernels in alignment.kernels.items() if slow.intersection(kernels)]

    def time_stage(self, operators: Sequence[str], device: Device, repeats: int) -> Seconds:
        plan = self.plan_slice(operators, device)
        runner = self.runnable_plan(plan, device)
        inputs = [input_for_timing(self.graph, port) for port in plan.inputs]
        outputs = [port.buffer() for port in plan.outputs]
        column = {name: index for index, name in enumerate(operators)}
        columns = [column[call.operator] for call in plan.calls if not call.is_view]
        seconds = np.zeros((repeats, len(operators)))
        for row in seconds:
            np.add.at(row, columns, runner.timed(inputs, outputs))
        return np.maximum(seconds, 1e-9)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        if has_own_memory(device.target):
            self.ready_to_run(device.target)
        return time_transfers(device.target, sizes_bytes, repeats)

    def close(self) -> None:
        """Release the weights on devices; the libraries are freed with the last stage that uses them."""
        self._weights.clear()
