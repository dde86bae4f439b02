"""Two libraries of one network side by side: passes in turns, and each kernel timed where it runs in the network.

Kernels of CPU cores are timed in processor time of the thread, those of a GPU by the wall. Other programs make kernels
slower and never faster. So the passes are dealt out to a few comparisons, and each takes the fastest run of every
kernel. What differs between the comparisons is the noise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline import Device
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline_kernels.relay.tuning.tasks import W
from tvm_pipeline_tvm.relay.compiled import RelayModel, pass_timer
from tvm_pipeline_tvm.relay.executor import Slice
from tvm_pipeline_tvm.relay.library import Library

COMPARISONS = 4
ROUNDS = 5 * COMPARISONS  # passes of each library
LEAST_GAIN = 1.01  # what a kernel must win in every comparison, so that noise is no gain

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a network, in each comparison.

    Attributes:
        whole: seconds of a pass.
        workloads: seconds of a pass in the kernels of a workload, and how many these are.
    """

    whole: Seconds
    workloads: Mapping[Any, tuple[Seconds, int]]


def race(name: str, default: Library, tuned: Library) -> tuple[Times, Times]:
    """Return the times of both libraries, whose passes take turns on the core that the thread is bound to."""
    return _race([_Runner(name, library) for library in (default, tuned)], ROUNDS)


def race_on(
    device: Device, name: str, default: Library, tuned: Library, rounds: int, pulse: Callable[[], None]
) -> tuple[Times, Times]:
    """Return the times of both libraries, whose passes take turns on a GPU.

    Args:
        rounds: of passes of both; a multiple of `COMPARISONS`.
        pulse: is called before each pass.
    """
    return _race([DeviceRunner(name, library, device) for library in (default, tuned)], rounds, pulse)


def _race(
    runners: Sequence[_Runner | DeviceRunner], rounds: int, pulse: Callable[[], None] = lambda: None
) -> tuple[Times, Times]:
    samples: list[list[Seconds]] = [[], []]
    for _ in range(rounds + 1):  # the first pass of each does not count
        for taken, runner in zip(samples, runners, strict=True):
            pulse()
            taken.append(runner.run())
    first, second = (runner.times(np.array(taken[1:])) for runner, taken in zip(runners, samples, strict=True))
    return first, second


def winners(default: Times, tuned: Times, workloads: Iterable[W]) -> set[W]:
    """Return the workloads that the second library computes faster, by more than the noise."""
    return {
        workload
        for workload in workloads
        if np.min(default.workloads[workload][0] / tuned.workloads[workload][0]) > LEAST_GAIN
    }


class _Runner:
    """A whole network in one slice, run node by node."""

    def __init__(self, name: str, library: Library) -> None:
        device = Device("tuned", "host", target=library.target)
        model = RelayModel(name, [library], lambda _: None)
        part = model.cut([operator.name for operator in model.graph.operators], device)
        self._slice = Slice(library, part, debug=True)
        inputs = [input_for_timing(model.graph, port) for port in part.inputs]
        self._buffers = inputs, [port.buffer() for port in part.outputs]
        self._slice.set_buffers(*self._buffers)
        self._execute = self._slice.execute()
        nodes: list[dict[str, Any]] = json.loads(part.graph_json)["nodes"]
        self._workloads = [library.tuning.workloads.get(node.get("attrs", {}).get("func_name", "")) for node in nodes]

    def run(self) -> Seconds:
        """Run a pass; return the seconds of each node."""
        seconds, now = np.zeros(len(self._workloads)), time.thread_time_ns
        self._execute(0)  # the debug executor begins anew
        for node in range(1, len(seconds)):
            begin = now()
            self._execute(node)
            seconds[node] = (now() - begin) / 1e9
        return seconds

    def times(self, seconds: Seconds) -> Times:
        """Sum up the seconds of passes (passes x nodes)."""
        fastest = _fastest(seconds)
        return Times(fastest.sum(axis=1), _by_workload(fastest, self._workloads))


class DeviceRunner:
    """A whole network on a GPU, in one stage, and once more run node by node."""

    def __init__(self, name: str, library: Library, device: Device) -> None:
        model = RelayModel(name, [library], lambda _: None)
        part = model.cut([operator.name for operator in model.graph.operators], device)
        # The executors that the timer calls do not keep their slices, and these keep the arena.
        self._whole, self._by_node = model.runnable(part, device), model.runnable(part, device, debug=True)
        self._buffers, others = (
            ([input_for_timing(model.graph, port) for port in part.inputs], [port.buffer() for port in part.outputs])
            for _ in range(2)
        )
        self._by_node.set_buffers(*others)
        self._time_nodes = pass_timer(self._by_node, device.target)
        nodes: list[dict[str, Any]] = json.loads(part.graph_json)["nodes"]
        names = [nodes[node]["attrs"]["func_name"] for node, _ in part.operator_nodes]
        self._workloads = [library.tuning.workloads.get(name) for name in names]

    def run(self) -> Seconds:
        """Run two passes; return the seconds of each node in one, and of the other as a whole."""
        nodes = self._time_nodes()
        begin = time.perf_counter()
        self._whole.run(*self._buffers)
        return np.append(nodes, time.perf_counter() - begin)

    def times(self, seconds: Seconds) -> Times:
        """Sum up the seconds of passes (passes x nodes, and the whole)."""
        fastest = _fastest(np.maximum(seconds, 1e-9))
        return Times(fastest[:, -1], _by_workload(fastest, self._workloads))


def _fastest(seconds: Seconds) -> Seconds:
    """Return the fastest run of each node in each comparison (comparisons x nodes); passes are dealt out in turn."""
    return np.array([seconds[first::COMPARISONS].min(axis=0) for first in range(min(COMPARISONS, len(seconds)))])


def _by_workload(fastest: Seconds, workloads: Sequence[Any]) -> dict[Any, tuple[Seconds, int]]:
    columns: dict[Any, list[int]] = {}
    for node, workload in enumerate(workloads):
        if workload is not None:
            columns.setdefault(workload, []).append(node)
    return {workload: (fastest[:, own].sum(axis=1), len(own)) for workload, own in columns.items()}
