"""A model compiled by Relay for every target of its devices; what is no IR's is in `compiled_model.py`.

Next: `build.py`, which compiles, and `slicing.py`, which cuts.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from tvm_pipeline.backends.contract import Order, Rewriting, Seconds, TunedKernels
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import RunError
from tvm_pipeline_tvm.child_process import stoppable_pool
from tvm_pipeline_tvm.compiled_model import Bind, TvmModel
from tvm_pipeline_tvm.devices import runtimes
from tvm_pipeline_tvm.devices.cuda_compiler import check_code
from tvm_pipeline_tvm.devices.cuda_events import device_clock
from tvm_pipeline_tvm.devices.device_arrays import DeviceParams
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.devices.programs import load_programs, save_programs
from tvm_pipeline_tvm.devices.targets import compiler_target, has_own_memory, index_of, kind_of
from tvm_pipeline_tvm.devices.transfer_times import time_transfers
from tvm_pipeline_tvm.kernel_sets import Choices, relay_kernels
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.device_executor import DeviceSlice
from tvm_pipeline_tvm.relay.executor import Slice
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library, load_library
from tvm_pipeline_tvm.relay.rewrite_concat import RelayRewriting
from tvm_pipeline_tvm.relay.slicing import SliceGraph, as_graph
from tvm_pipeline_tvm.slice_plan import SlicePlan
from tvm_pipeline_tvm.tvm_errors import reason

WORTH_A_CHILD = 1 << 20  # bytes of a model that takes longer to compile than a child to start

_log = logging.getLogger(__name__)


class RelayModel(TvmModel[Library]):
    """A model compiled by Relay; see `TvmModel`."""

    ir = "relay"

    def __init__(self, name: str, libraries: Sequence[Library], bind: Bind, order: Order = "listed") -> None:
        super().__init__(name, libraries, bind, order)
        self._on_device: dict[str, DeviceParams] = {}  # by the target of the device, with its index
        self._with_programs: set[str] = set()

    @staticmethod
    def check(model: Model) -> None:
        import_model(model)

    @staticmethod
    def rewriting(model: Model) -> Rewriting:
        return RelayRewriting(model)

    @staticmethod
    def build(
        model: Model, targets: Sequence[str], host: str, elsewhere: Mapping[str, str], *, tuned: bool, processor: str
    ) -> list[Library]:
        """Compile for each target; see `TvmModel.build`.

        A large model is compiled for as many targets at once as this process has cores, each in a child. A small one is
        compiled before a child has started.
        """
        first = {compiler_target(target): target for target in reversed(targets)}
        kernels, distinct = relay_kernels(), dict.fromkeys(map(compiler_target, targets))
        choices: dict[str, Choices] = {
            one: kernels.recorded(first[one], tolerance=model.tolerance, measured_on=processor) if tuned else {}
            for one in distinct
        }
        if len(choices) == 1 or len(model.content) + len(model.params) < WORTH_A_CHILD:
            return [build_library(model, one, host, choices[one], elsewhere=one in elsewhere) for one in choices]
        with stoppable_pool(min(len(choices), len(os.sched_getaffinity(0)))) as submit:
            made = [
                submit(build_library, model, one, host, choices[one], apart=True, elsewhere=one in elsewhere)
                for one in choices
            ]
            return [future.result() for future in made]

    @staticmethod
    def read_library(folder: Path, runs_here: Callable[[str], bool]) -> Library:
        return load_library(folder, runs_here)

    @staticmethod
    def ready_to_run(target: str) -> None:
        runtimes.ready_to_run(kind_of(target))

    def cut(self, operators: Sequence[str], device: Device) -> SliceGraph:
        """Return the operators as graph JSON; errors are those of `plan_slice`."""
        return as_graph(self._library(device)[0], self.plan_slice(operators, device))

    def runnable_plan(self, plan: SlicePlan, device: Device) -> Slice | DeviceSlice:
        return self.runnable(as_graph(self._library(device)[0], plan), device)

    def runnable(self, part: SliceGraph, device: Device, *, debug: bool = False) -> Slice | DeviceSlice:
        """Return a slice of `cut` that can run, for `pass_timer` where it is made with `debug`."""
        library = self.library_here(device)
        if not has_own_memory(library.target):
            return Slice(library, part, debug=debug)
        params = self._on(device.target, library)
        try:
            return DeviceSlice(library, part, params, debug=debug)
        except tvm.TVMError as error:
            raise RunError(
                f"device {device.label} cannot hold a stage of {self.graph.name} with {part.activation_bytes} bytes of "
                f"activations beside {len(params)} parameters: {reason(error)}; give it fewer operators, or state its "
                "`memory_bytes` in the platform file"
            ) from error

    def _on(self, target: str, library: Library) -> DeviceParams:
        """Return the library's parameters on a device; at its first use there, take the programs that were kept.

        Raises:
            PlatformError: the device does not take the library's kernels.
        """
        params = self._on_device.get(target)
        if params is None:
            index = index_of(target)
            if kind_of(target) == "cuda":
                check_code(library.module, target)
            if library.folder and load_programs(library.module, library.folder, index):
                self._with_programs.add(target)
            made = DeviceParams(library.params, mirrors_of(target))
            params = self._on_device.setdefault(target, made)
        return params

    def prepare(self, target: str) -> None:
        """Run once what a device computes, where its driver compiles kernels when they first run; keep its programs.

        `compile` does this for one target. Of several, `agreement.py` first finds what each of them computes.
        """
        if not has_own_memory(target) or compiler_target(target) in self.elsewhere:
            return
        _log.info(f"preparing {self.graph.name} on {target}")
        library = self.libraries[compiler_target(target)]
        self._on(target, library)
        if kind_of(target) != "opencl" or target in self._with_programs or library.folder is None:
            return
        self.run_once(target)
        with suppress(tvm.TVMError):  # The driver cannot compile an operator that is refused: then no program is kept.
            save_programs(library.module, library.folder, index_of(target))

    def time_stage(self, operators: Sequence[str], device: Device, repeats: int) -> Seconds:
        """Return seconds of the operators of a stage (repeats x operators).

        CUDA devices are timed by their own clock where it is at hand (`devices/cuda_events.py`), others by the host's.
        """
        part = self.cut(operators, device)
        whole = self.runnable(part, device, debug=True)
        whole.set_buffers(
            [input_for_timing(self.graph, p) for p in part.inputs], [port.buffer() for port in part.outputs]
        )
        column = {name: index for index, name in enumerate(operators)}
        columns = [column[operator] for _, operator in part.operator_nodes]
        time_pass = pass_timer(whole, device.target)
        seconds = np.zeros((repeats, len(operators)))
        for row in seconds:
            np.add.at(row, columns, time_pass())
        return np.maximum(seconds, 1e-9)

    def time_transfers(
        self, device: Device, sizes_bytes: Sequence[int], repeats: int
    ) -> tuple[Seconds, Seconds] | None:
        return time_transfers(device.target, sizes_bytes, repeats)

    def tuned(self) -> list[TunedKernels]:
        """Return what is tuned or computed by Winograd's algorithm, for each target where anything is."""
        found = [(target, library.tuning) for target, library in self.libraries.items()]
        return [
            TunedKernels(target, tuning.tuned, tuning.convolutions, tuning.winograd, tuning.error)
            for target, tuning in found
            if tuning.tuned or tuning.winograd
        ]

    def kernels_to_tune(self, device: Device) -> dict[str, list[Any]]:
        """Return the workloads of the operators that tuning can make faster."""
        library, _ = self._library(device)
        part = self.cut(self.graph.operator_names, device)
        nodes = json.loads(part.graph_json)["nodes"]
        found: dict[str, list[Any]] = {}
        for node, operator in part.operator_nodes:
            workload = library.tuning.workloads.get(nodes[node]["attrs"]["func_name"])
            if workload is not None:
                found.setdefault(operator, []).append(workload)
        return found

    def close(self) -> None:
        """Release the parameters on devices; the libraries are freed with the last stage that uses them."""
        self._on_device.clear()


def pass_timer(whole: Slice | DeviceSlice, target: str) -> Callable[[], Seconds]:
    """Return what runs a slice made with `debug`, and returns the seconds of each of its operators' nodes."""
    nodes = [node for node, _ in whole.graph.operator_nodes]
    clock = device_clock(target)
    # The debug executor runs one node in each call, after those that it has not run before it. A call of the first
    # node restarts it; the nodes of inputs run nothing.
    if clock is not None:
        execute_node = whole.executor["execute_node"]
        calls = [partial(execute_node, node) for node in nodes]

        def by_device() -> Seconds:
            execute_node(0)
            return np.array(clock(calls))

        return by_device

    execute = whole.execute()
    cost, now = _call_cost(execute), time.perf_counter

    def by_host() -> Seconds:
        execute(0)
        seconds, following = np.zeros(len(nodes)), len(whole.inputs)
        for index, node in enumerate(nodes):
            for silent in range(following, node):
                execute(silent)
            begin = now()
            execute(node)
            seconds[index] = now() - begin
            following = node + 1
        return seconds - cost

    return by_host


def _call_cost(execute: Any) -> float:
    """Return seconds of a call that runs nothing."""
    samples = []
    for _ in range(50):
        begin = time.perf_counter()
        execute(0)
        samples.append(time.perf_counter() - begin)
    return float(np.median(samples))
