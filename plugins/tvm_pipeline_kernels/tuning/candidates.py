"""The workloads of a network, and candidates of each: compiled by an emitter, called in this process and timed.

Seconds are those of the thread that calls, in processor time, so other programs on the machine count little. Before
each call the caches are filled with other data, since in a network each kernel finds them full of what ran before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from tvm_pipeline_kernels.choices import Choice, Workload
from tvm_pipeline_tvm.kernels import tensor_bytes

_NEAR_CACHES_BYTES, _ALL_CACHES_BYTES = 3_000_000, 40_000_000
_LARGE_BYTES = 1_000_000  # of weights: such do not stay in a cache from one frame to the next
_MOST_RUNS = 8  # of a candidate in the last round; the first has 2
_KEPT = 0.4  # of the candidates after a round


Shapes = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each argument of a kernel, the output last
W = TypeVar("W")


@dataclass(slots=True)
class Task(Generic[W]):
    """One workload of a network.

    Attributes:
        macs: multiply-accumulates of one call.
        functions: the fused functions that hold it, which differ in what follows, each with its calls in the network.
            They are functions of the IR.
    """

    workload: W
    macs: int
    functions: list[tuple[Any, int]] = field(default_factory=list)

    @property
    def calls(self) -> int:
        return sum(calls for _, calls in self.functions)


@dataclass(slots=True)
class Kernel:
    """A fused function under one choice, compiled.

    Attributes:
        seconds: of its fastest call yet.
    """

    call: Any
    arguments: Shapes
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
    functions: Sequence[tuple[Any, int]]
    kernels: list[Kernel] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of all calls in a run of the network."""
        return sum(kernel.seconds * calls for kernel, (_, calls) in zip(self.kernels, self.functions, strict=True))


class Stopwatch:
    """Times kernels on the core that the thread is bound to, on arrays of random numbers.

    Args:
        tensor: makes what kernels take of an array.
    """

    def __init__(self, tensor: Callable[[Any], Any]) -> None:
        self._tensor = tensor
        self._other_data = np.zeros(_ALL_CACHES_BYTES // 8)
        self._arrays: dict[Shapes, list[Any]] = {}

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
                self._tensor(draw.standard_normal(shape).astype(dtype)) for shape, dtype in kernel.arguments
            ]
        return self._arrays[kernel.arguments]
