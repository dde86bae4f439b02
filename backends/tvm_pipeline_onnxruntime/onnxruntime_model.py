"""An ONNX model compiled for onnxruntime: any part of its file as a runnable stage on any cores.

Read next: `frontends/onnx_graph.py` (what is cut), `sessions.py` (what runs it).
"""

from __future__ import annotations

import hashlib
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from tvm_pipeline.backends.contract import Array, Order, Port, Seconds
from tvm_pipeline.backends.engine import EngineStage, refused_alone, seconds_of_noise
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import NARROW, packed, packed_bits, unpacked
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_model import OnnxModel
from tvm_pipeline.frontends.onnx_types import onnx_type
from tvm_pipeline_onnxruntime.onnxruntime import is_own
from tvm_pipeline_onnxruntime.sessions import error_reason, kernels, optimised, session


class OnnxruntimeModel(OnnxModel):
    """The CompiledModel of this backend, of a file that `optimised` made."""

    takes_narrow = True

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(model, order, joined)
        self._sessions: WeakValueDictionary[tuple[str, bytes], Any] = WeakValueDictionary()
        self._lock = threading.Lock()  # over these

    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> OnnxruntimeModel:
        found = cls(Model(model.name, "onnx", optimised(model), model.inputs), order)
        for target in targets:
            if not is_own(target):
                found.leave(target, found._tried(target, trial))
        return found

    def runner(
        self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device
    ) -> OnnxruntimeStage:
        """Make a stage. Those of one thread compute in their callers, so that equal ones share a session.

        Replicas then read the same weights, which the cores' common cache holds once.
        """

        def made() -> Any:
            return session(self.graph.name, content, device.cores, device.target)

        if len(device.cores) > 1 or not is_own(device.target):
            return OnnxruntimeStage(self.graph.name, made(), inputs, outputs, device.cores)
        key = device.target, hashlib.sha256(content).digest()
        with self._lock:
            shared = self._sessions.get(key)
            if shared is None:
                shared = self._sessions[key] = made()
        return OnnxruntimeStage(self.graph.name, shared, inputs, outputs, device.cores)

    def has_own_threads(self, device: Device) -> bool:
        return not is_own(device.target)

    def _tried(self, target: str, trial: Trial) -> Mapping[str, str]:
        """Return the operators that a provider does not compute, each with the reason.

        Raises:
            ModelError: it computes none of them, or not all together.
        """
        name, (provider, _) = self.graph.name, parsed_target(target)
        whole, refused = "", dict.fromkeys(self.file.indices, f"{provider} does not claim it")
        try:
            left = set(trial.ask((name, target, False), self.numbered()))
            refused = {one: why for one, why in refused.items() if left.intersection(self.file.indices[one])}
        except RunError as error:
            whole = str(error)
        if len(refused) == len(self.graph):
            alone = refused_alone(self.graph, lambda one: trial.ask((name, target, True), self.numbered([one])))
            refused = {one: alone[one].removeprefix(f"{name}: ") for one in refused if one in alone}
        if (whole and not refused) or len(refused) == len(self.graph):
            reason = whole or next(iter(refused.values()))
            raise ModelError(f"{name}: {provider} runs none of its operators: {reason.removeprefix(f'{name}: ')}")
        return refused

    def has_operator_times(self, device: Device) -> bool:
        """Return whether onnxruntime computes the operators itself: a provider computes what it claims as one."""
        return is_own(device.target)

    def counted_s(self, device: Device, repeats: int) -> Seconds | None:
        """Return seconds of operators as onnxruntime's profiler has them; no profile asks for those of a provider."""
        if not is_own(device.target):
            return None
        with tempfile.TemporaryDirectory() as folder:
            made = session(self.graph.name, self.numbered(), device.cores, profile=Path(folder) / "profile")
            list(seconds_of_noise(OnnxruntimeStage(self.graph.name, made, *self.ends(), device.cores), repeats))
            microseconds: dict[int, list[float]] = {}
            for node, _, spent in kernels(made):
                microseconds.setdefault(node, []).append(spent)
        columns = [[microseconds[node][-repeats:] for node in nodes] for nodes in self.file.indices.values()]
        return np.stack([np.sum(column, axis=0) for column in columns], axis=1) * 1e-6


class OnnxruntimeStage(EngineStage):
    """The StageRunner: a session that reads and writes the runtime's buffers in place."""

    def __init__(
        self, name: str, made: Any, inputs: Sequence[Port], outputs: Sequence[Port], cores: Sequence[int]
    ) -> None:
        super().__init__(made, inputs, outputs, cores)
        self._name = name
        # ONNX's numbers of the types that onnxruntime's Python does not know in numpy.
        self._kinds = {port.name: onnx_type(port.dtype) for port in (*inputs, *outputs) if port.dtype in NARROW}

    def compute(self, made: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        binding = made.io_binding()
        kinds, held, results = self._kinds, [], []  # packed arrays live until the frame is computed
        for port, array in zip(self.inputs, inputs, strict=True):
            if port.name in kinds:
                held.append(packed(array) if packed_bits(port.dtype) else array)
                binding.bind_input(port.name, "cpu", 0, kinds[port.name], port.shape, held[-1].ctypes.data)
            else:
                binding.bind_cpu_input(port.name, array)
        for port, array in zip(self.outputs, outputs, strict=True):
            kind, written = kinds.get(port.name, array.dtype), array
            if port.name in kinds and packed_bits(port.dtype):
                written = np.empty(-(-array.size * packed_bits(port.dtype) // 8), np.uint8)
                results.append((port, written, array))
            binding.bind_output(port.name, "cpu", 0, kind, port.shape, written.ctypes.data)
        try:
            made.run_with_iobinding(binding)
        except Exception as error:  # its errors have no common root
            raise RunError(f"{self._name}: onnxruntime cannot compute a frame: {error_reason(error)}") from error
        for port, written, array in results:
            np.copyto(array, unpacked(written, port.shape, port.dtype))
