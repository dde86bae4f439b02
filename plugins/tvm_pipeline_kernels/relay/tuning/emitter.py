"""What tuning asks of Relay: the functions of a network, candidates of them as kernels, and networks that run.

Candidates are lowered one by one, and compiled as one module of code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.relay.backend import te_compiler

from tvm_pipeline import Model
from tvm_pipeline_kernels.choices import Choices, Workload, is_winograd
from tvm_pipeline_kernels.relay.schedules.choice_context import AnyChoices, current_cores
from tvm_pipeline_kernels.relay.schedules.conv2d_winograd import by_winograd
from tvm_pipeline_kernels.relay.tuning.runners import Runner
from tvm_pipeline_kernels.relay.tuning.tasks import optimized, tasks_of
from tvm_pipeline_kernels.tuning.candidates import Candidate, Kernel, Shapes, Stopwatch, Task
from tvm_pipeline_tvm.relay.build import as_compiled, build_library
from tvm_pipeline_tvm.relay.fold import building
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library


class RelayEmitter:
    """A model and a target of CPU cores; see `tuner.Emitter`."""

    def __init__(self, model: Model, target: str) -> None:
        self.network, self.target = model, target
        self._parsed = tvm.target.Target(target)
        with self._parsed:
            self.cores = current_cores()

    def build(self, choices: Choices) -> Library:
        return build_library(self.network, self.target, choices=choices)

    @staticmethod
    def workloads(library: Library) -> Mapping[str, Workload]:
        return library.tuning.workloads

    def tasks(self) -> list[Task[Workload]]:
        mod, params = import_model(self.network)
        return tasks_of(optimized(as_compiled(mod, params), self._parsed, params))

    def reference(self) -> Task[Workload]:
        """Return a convolution whose numbers stay in the near caches, so that it runs almost at the core's peak."""
        body = relay.var("data", shape=(1, 64, 14, 14))
        for kernel in (3, 1):  # the second reads blocks, so that the first stores them
            weights = relay.const(np.ones((64, 64, kernel, kernel), "float32"))
            body = relay.nn.conv2d(body, weights, padding=[kernel // 2] * 2, channels=64, kernel_size=[kernel] * 2)
        function = relay.Function(relay.analysis.free_vars(body), body)
        mod = relay.transform.InferType()(tvm.IRModule.from_expr(function))
        return max(tasks_of(optimized(mod, self._parsed)), key=lambda task: task.macs)

    def compile(self, candidates: Sequence[Candidate]) -> None:
        compile_candidates(candidates, self._parsed)

    @staticmethod
    def tensor(array: Any) -> Any:
        return tvm.nd.array(array)

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(self.tensor)

    def runner(self, library: Library) -> Runner:
        return Runner(self.network.name, library)


def compile_candidates(candidates: Sequence[Candidate], target: tvm.target.Target) -> None:
    """Give all candidates their kernels, in one compilation.

    Raises:
        tvm.TVMError: TVM or LLVM cannot compile one of them.
    """
    functions: dict[tvm.ir.GlobalVar, tvm.tir.PrimFunc] = {}
    names: list[list[str]] = []
    for candidate in candidates:
        names.append([])
        for function, _ in candidate.functions:
            name = f"candidate_{len(functions)}"
            if is_winograd(candidate.choice):
                with target:
                    function = by_winograd(function, candidate.choice)
            made = lowered(function, {candidate.workload: candidate.choice}, target)
            functions[tvm.ir.GlobalVar(name)] = made.with_attr("global_symbol", name)
            names[-1].append(name)
    by_name = {str(variable.name_hint): function for variable, function in functions.items()}
    with building():
        module = tvm.build(tvm.IRModule(functions), target=target)
    for candidate, own in zip(candidates, names, strict=True):
        candidate.kernels = [Kernel(module.get_function(name, True), shapes_of(by_name[name])) for name in own]


def lowered(function: relay.Function, choices: AnyChoices, target: tvm.target.Target) -> tvm.tir.PrimFunc:
    """Return a fused function as TOPI schedules it under choices."""
    compiler = te_compiler.get()
    compiler.clear()  # it knows functions, and not under which choice
    with target, building(choices):
        made = compiler.lower(te_compiler.CCacheKey(function, target))
    compiler.clear()
    [function_] = [part for _, part in made.funcs.functions_items() if isinstance(part, tvm.tir.PrimFunc)]
    return function_


def shapes_of(function: tvm.tir.PrimFunc) -> Shapes:
    """Return shape and dtype of each argument, the output last."""
    buffers = [function.buffer_map[parameter] for parameter in function.params]
    return tuple((tuple(int(extent) for extent in buffer.shape), str(buffer.dtype)) for buffer in buffers)
