"""Candidates of fused functions: lowered one by one, compiled as one module of code, called in this process and timed.

Seconds are those of the thread that calls, in processor time, so other programs on the machine count little. Before
each call the caches are filled with other data, since in a network each kernel finds them full of what ran before it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.relay.backend import te_compiler

from tvm_pipeline_kernels.relay.schedules.choices import AnyChoices, Choice, Workload, is_winograd
from tvm_pipeline_kernels.relay.schedules.conv2d_winograd import by_winograd
from tvm_pipeline_tvm.kernels import tensor_bytes
from tvm_pipeline_tvm.relay.fold import building

_NEAR_CACHES_BYTES, _ALL_CACHES_BYTES = 3_000_000, 40_000_000
_LARGE_BYTES = 1_000_000  # of weights: such do not stay in a cache from one frame to the next
_MOST_RUNS = 8  # of a candidate in the last round; the first has 2
_KEPT = 0.4  # of the candidates after a round


@dataclass(slots=True)
class Kernel:
    """A fused function under one choice, compiled.

    Attributes:
        arguments: shape and dtype of each, the output last.
        seconds: of its fastest call yet.
    """

    call: Any
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    seconds: float = float("inf")

    @property
    def has_large_weights(self) -> bool:
        return any(tensor_bytes(*argument) > _LARGE_BYTES for argument in self.arguments[1:-1])


@dataclass(slots=True)
class Candidate:
    """One choice for a workload: a kernel for each of its functions.

    Attributes:
        calls: of each kernel in the network.
    """

    workload: Workload
    choice: Choice
    functions: Sequence[tuple[relay.Function, int]]
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all calls in a run of the network."""
        return sum(kernel.seconds * calls for kernel, (_, calls) in zip(self.kernels, self.functions, strict=True))


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


def shapes_of(function: tvm.tir.PrimFunc) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of each argument, the output last."""
    buffers = [function.buffer_map[parameter] for parameter in function.params]
    return tuple((tuple(int(extent) for extent in buffer.shape), str(buffer.dtype)) for buffer in buffers)


class Stopwatch:
    """Times kernels on the core that the thread is bound to, on arrays of random numbers."""

    def __init__(self) -> None:
        self._other_data = np.zeros(_ALL_CACHES_BYTES // 8)
        self._arrays: dict[tuple[tuple[tuple[int, ...], str], ...], list[Any]] = {}

    def halve(self, candidates: Sequence[Candidate]) -> Candidate:
        """Return the candidate of the least seconds: each round runs the fastest of the last one twice as often."""
        left, runs = list(candidates), 2
        while True:
            for _ in range(runs):
                for candidate in left:
                    self.time(candidate)
            left.sort(key=lambda candidate: candidate.seconds)
            if len(left) == 1 or runs == _MOST_RUNS:
                break
            left, runs = left[: max(2, round(len(left) * _KEPT))], 2 * runs
        self._arrays.clear()
        return left[0]

    def time(self, candidate: Candidate, *, evicts: bool = True) -> None:
        """Run each kernel once, with caches full of other data unless told otherwise."""
        for kernel in candidate.kernels:
            arrays = self._arrays_for(kernel)
            evicted = (_ALL_CACHES_BYTES if kernel.has_large_weights else _NEAR_CACHES_BYTES) // 8
            if evicts:
                np.add(self._other_data[:evicted], 1.0, out=self._other_data[:evicted])
            begin = time.thread_time_ns()
            kernel.call(*arrays)
            kernel.seconds = min(kernel.seconds, (time.thread_time_ns() - begin) / 1e9)

    def _arrays_for(self, kernel: Kernel) -> list[Any]:
        if kernel.arguments not in self._arrays:
            draw = np.random.default_rng(0)
            self._arrays[kernel.arguments] = [
                tvm.nd.array(draw.standard_normal(shape).astype(dtype)) for shape, dtype in kernel.arguments
            ]
        return self._arrays[kernel.arguments]
