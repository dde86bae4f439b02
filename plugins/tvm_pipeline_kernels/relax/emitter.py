"""What tuning asks of Relax: the functions of a network, candidates of them as kernels, and networks that run.

The functions are those that FuseTIR makes, before they are scheduled. A tile is an attribute of one, so its candidates
are one function under several schedules. Winograd's algorithm is another function: the network is fused once for each
of the few forms that a workload can have.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.ports import aligned_empty, input_for_timing
from tvm_pipeline_kernels.choices import (
    Choice,
    Choices,
    Workload,
    is_winograd,
    macs_of,
    possible_choices,
    winograd_choices,
)
from tvm_pipeline_kernels.relax.schedules import RULE, scheduled, workload_of
from tvm_pipeline_kernels.relax.schedules.choice import CHOICE
from tvm_pipeline_kernels.relax.schedules.cores import cores_of
from tvm_pipeline_kernels.relax.schedules.epilogue import blocks_of
from tvm_pipeline_kernels.relax.schedules.lowering import PIPELINE
from tvm_pipeline_kernels.tuning.candidates import Candidate, Kernel, Shapes, Stopwatch, Task
from tvm_pipeline_kernels.tuning.race import Seconds, Times, by_workload, fastest
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.build import Library, build_library, in_integers, prepared
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified
from tvm_pipeline_tvm.target_text import tvm_target

ANY_ERROR = float("inf")  # of a layer while it is timed; a build keeps to the tolerance of the model

_Functions = dict[Workload, list[tuple[tirx.PrimFunc, int]]]


class RelaxEmitter:
    """A model and a target of CPU cores; see `tuner.Emitter`."""

    def __init__(self, model: Model, target: str) -> None:
        self.network, self.target = model, target
        self._parsed = tvm_target(target)
        self.cores = cores_of(self._parsed)
        self._by_form: list[_Functions] = []

    def build(self, choices: Choices) -> Library:
        return build_library(self.network, self.target, choices=choices)

    @staticmethod
    def workloads(library: Library) -> Mapping[str, Workload]:
        return library.workloads

    def tasks(self) -> list[Task[Workload]]:
        return [Task(workload, macs_of(workload), functions) for workload, functions in self._direct.items()]

    def reference(self) -> Task[Workload]:
        """Return a convolution whose numbers stay in the near caches, so that it runs almost at the core's peak.

        Its kernel is 5 x 5, which Winograd's algorithm does not compute.
        """
        builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((1, 64, 14, 14), "float32"))
        weights = relax.const(np.ones((64, 64, 5, 5), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                output = builder.emit_output(relax.op.nn.conv2d(x, weights, padding=2))
            builder.emit_func_output(output)
        [(workload, functions)] = self._functions(simplified(builder.get()), {}).items()
        return Task(workload, macs_of(workload), functions)

    def compile(self, candidates: Sequence[Candidate]) -> None:
        functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        for candidate in candidates:
            candidate.kernels = []
            for function in self._of(candidate):
                name = f"candidate_{len(functions)}"
                made, _ = scheduled(function, self.cores)
                functions[tvm.ir.GlobalVar(name)] = made.with_attr({"global_symbol": name, "tirx.is_scheduled": True})
                candidate.kernels.append(Kernel(name, shapes_of(function)))
        module = tvm.compile(tvm.IRModule(functions), target=self._parsed, tir_pipeline=PIPELINE)
        for candidate in candidates:
            for kernel in candidate.kernels:
                kernel.call = module[kernel.call]

    @staticmethod
    def tensor(array: Any) -> Any:
        aligned = aligned_empty(array.shape, str(array.dtype))
        aligned[...] = array
        return tvm_ffi.from_dlpack(aligned)

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.tensor)

    def runner(self, library: Library) -> Runner:
        return Runner(self.network.name, library, Device("tuned", "host", target=library.target))

    # ------------------------------------------------------------------------------------------- functions

    @cached_property
    def _simplified(self) -> tvm.IRModule:
        return prepared(simplified(import_model(self.network)), in_integers([self.target]))

    @cached_property
    def _direct(self) -> _Functions:
        """Functions by direct sums."""
        workloads = self._functions(self._simplified, {})
        return self._functions(self._simplified, {each: possible_choices(each, self.cores)[0] for each in workloads})

    def _of(self, candidate: Candidate) -> list[tirx.PrimFunc]:
        """Return the functions of a candidate, in the order of its task's."""
        if not is_winograd(candidate.choice):
            return [_with_choice(function, candidate.choice) for function, _ in candidate.functions]
        wanted = [function for function, _ in candidate.functions]
        direct = [function for function, _ in self._direct[candidate.workload]]
        place = winograd_choices(candidate.workload, self.cores).index(candidate.choice)
        while len(self._by_form) <= place:
            forms = {each: winograd_choices(each, self.cores) for each in self._direct}
            chosen = {each: of[len(self._by_form)] for each, of in forms.items() if len(self._by_form) < len(of)}
            self._by_form.append(self._functions(self._simplified, chosen))
        other = [function for function, _ in self._by_form[place][candidate.workload]]
        if len(other) != len(direct):
            raise RuntimeError("what is fused to it depends on the algorithm")
        return [other[direct.index(function)] for function in wanted]

    def _functions(self, mod: tvm.IRModule, choices: Choices) -> _Functions:
        """Return the functions of each workload under choices, with their calls, in the order of the network."""
        fused = kernel_passes.fused(mod, self._parsed, apart=True, tolerance=ANY_ERROR, choices=choices)
        return functions_by_workload(kernel_passes.unscheduled(fused, self._parsed), workload_of)


def functions_by_workload(
    mod: tvm.IRModule, workload_of: Callable[[tirx.PrimFunc], Workload | None]
) -> dict[Workload, list[tuple[tirx.PrimFunc, int]]]:
    """Return the functions of TIR of each workload, with their calls in `main`, in the order of the network."""
    calls: Counter[Any] = Counter()

    def visit(expr: Any) -> None:
        if isinstance(expr, tvm.ir.Call) and expr.args and isinstance(expr.args[0], tvm.ir.GlobalVar):
            calls[expr.args[0]] += 1

    relax.analysis.post_order_visit(mod["main"], visit)
    found: _Functions = {}
    for symbol, count in calls.items():
        workload = workload_of(mod[symbol])
        if workload is not None:
            found.setdefault(workload, []).append((mod[symbol], count))
    return found


def shapes_of(function: tirx.PrimFunc) -> Shapes:
    """Return shape and dtype of each argument, the output last."""
    return tuple((tuple(map(int, param.shape)), str(param.dtype)) for param in function.params)


def _with_choice(function: tirx.PrimFunc, choice: Choice) -> tirx.PrimFunc:
    """Return a function whose convolution is to follow a choice."""
    s = s_tir.Schedule(function, error_render_level="none")
    for block in blocks_of(s):
        if RULE in s.get(block).annotations:
            if CHOICE in s.get(block).annotations:
                s.unannotate(block, CHOICE)
            s.annotate(block, CHOICE, list(choice))
    return s.mod["main"]


class Runner:
    """A whole network in one slice, run kernel by kernel."""

    def __init__(self, name: str, library: Library, device: Device) -> None:
        model = RelaxModel(name, [library], lambda _: None)
        plan = model.plan_slice(model.graph.operator_names, device)
        self._slice: Any = model.runnable_plan(plan, device)
        inputs = [input_for_timing(model.graph, port) for port in plan.inputs]
        self._buffers = inputs, [port.buffer() for port in plan.outputs]
        running = [call.kernel for call in plan.calls if not call.is_view]
        self._workloads = [library.workloads.get(library.calls[kernel].function) for kernel in running]

    def run(self) -> Seconds:
        seconds, now = np.zeros(len(self._workloads)), time.thread_time_ns
        for index, (function, tensors) in enumerate(self._slice.calls(*self._buffers)):
            begin = now()
            function(*tensors)
            seconds[index] = (now() - begin) / 1e9
        return seconds

    def times(self, seconds: Seconds) -> Times:
        taken = fastest(seconds)
        return Times(taken.sum(axis=1), by_workload(taken, self._workloads))
