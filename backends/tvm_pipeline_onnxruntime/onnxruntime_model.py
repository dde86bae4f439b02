"""An ONNX model compiled for onnxruntime: any part of its file as a runnable stage on any cores.

Read next: `frontends/onnx_graph.py` (what is cut), `sessions.py` (what runs it).
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import Array, Order, Port, Seconds, StageRunner
from tvm_pipeline.backends.cores import bind
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_model import OnnxModel
from tvm_pipeline_onnxruntime.sessions import optimised, session, told

_LEAST_S = 1e-7  # the profiler counts microseconds; this is what it shows as 0


class OnnxruntimeModel(OnnxModel):
    """The CompiledModel of this backend, of a file that `optimised` made."""

    @classmethod
    def compile(cls, model: Model, order: Order) -> OnnxruntimeModel:
        """Return any ONNX model for stages; raise ModelError where onnxruntime refuses it, or it cannot be cut."""
        return cls(Model(model.name, "onnx", optimised(model), model.inputs), order)

    def runner(
        self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device
    ) -> OnnxruntimeStage:
        return OnnxruntimeStage(self.graph.name, content, inputs, outputs, device.cores)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), as onnxruntime's profiler has them."""
        part = self.file.part([operator.name for operator in self.graph.operators])
        order = [node for operator in self.graph.operators for node in self.file.nodes(operator.name)]
        for index, node in enumerate(part.graph.node):
            node.name = str(index)
        frame = frame_of_noise(self.graph)
        with tempfile.TemporaryDirectory() as folder:
            made = session(self.graph.name, part.SerializeToString(), device.cores, Path(folder) / "profile")
            try:
                for _ in range(repeats + 1):
                    made.run(None, frame)
            except Exception as error:  # its errors have no common root
                raise ModelError(f"{self.graph.name}: onnxruntime cannot run noise: {told(error)}") from error
            events = msgspec.json.decode(Path(made.end_profiling()).read_bytes())
        microseconds: list[list[float]] = [[] for _ in order]
        for event in events:
            label, _, what = event["name"].rpartition("_kernel_time")
            if event["cat"] == "Node" and not what and label.isdecimal():
                microseconds[int(label)].append(event["dur"])
        seconds = np.empty((repeats, len(self.graph)))
        node = 0
        for index, operator in enumerate(self.graph.operators):
            count = len(self.file.nodes(operator.name))
            # The first run allocates, and does not count.
            rows = np.array([found[-repeats:] for found in microseconds[node : node + count]])
            seconds[:, index] = np.maximum(rows.sum(axis=0) * 1e-6, _LEAST_S)
            node += count
        return seconds


class OnnxruntimeStage(StageRunner):
    """The StageRunner: a session that reads and writes the runtime's buffers in place."""

    def __init__(
        self, name: str, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], cores: Sequence[int]
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._name, self._cores = name, tuple(cores)
        self._session: Any = session(name, content, cores)

    def bind(self) -> None:
        bind(self._cores)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        made = self._session
        if made is None:
            raise RunError("the stage was closed; make a new one")
        binding = made.io_binding()
        for port, array in zip(self.inputs, inputs, strict=True):
            binding.bind_cpu_input(port.name, array)
        for port, array in zip(self.outputs, outputs, strict=True):
            binding.bind_output(port.name, "cpu", 0, array.dtype, port.shape, array.ctypes.data)
        try:
            made.run_with_iobinding(binding)
        except Exception as error:  # its errors have no common root
            raise RunError(f"{self._name}: onnxruntime cannot compute a frame: {told(error)}") from error

    def close(self) -> None:
        self._session = None  # a run that still goes on keeps it until it ends
