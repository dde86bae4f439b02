"""A whole network of Relay that runs node by node, on a core or on a GPU: what a race of two libraries runs."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from tvm_pipeline import Device
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline_kernels.tuning.race import Seconds, Times, by_workload, fastest
from tvm_pipeline_tvm.relay.compiled import RelayModel, pass_timer
from tvm_pipeline_tvm.relay.executor import Slice
from tvm_pipeline_tvm.relay.library import Library


class Runner:
    """A whole network in one slice, run node by node."""

    def __init__(self, name: str, library: Library) -> None:
        device = Device("tuned", "host", target=library.target)
        model = RelayModel(name, [library], lambda _: None)
        part = model.cut(model.graph.operator_names, device)
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
        taken = fastest(seconds)
        return Times(taken.sum(axis=1), by_workload(taken, self._workloads))


class DeviceRunner:
    """A whole network on a GPU, in one stage, and once more run node by node."""

    def __init__(self, name: str, library: Library, device: Device) -> None:
        model = RelayModel(name, [library], lambda _: None)
        part = model.cut(model.graph.operator_names, device)
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
        taken = fastest(np.maximum(seconds, 1e-9))
        return Times(taken[:, -1], by_workload(taken, self._workloads))
