"""An ONNX model compiled for onnxruntime: any part of its file as a runnable stage on any cores.

Read next: `frontends/onnx_graph.py` (what is cut), `sessions.py` (what runs it).
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import Array, Order, Port, Refused, Seconds, StageRunner
from tvm_pipeline.backends.cores import bind
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.operator_timing import OperatorTimer, alike_operators
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.trial import Trial
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.number_types import NARROW, packed, packed_bits, unpacked
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError
from tvm_pipeline.frontends.onnx_engine import EngineModel
from tvm_pipeline.frontends.onnx_types import onnx_type
from tvm_pipeline_onnxruntime.sessions import CORES, error_reason, optimised, session

_log = logging.getLogger(__name__)

_LEAST_S = 1e-7  # the profiler counts microseconds; this is what it shows as 0


class OnnxruntimeModel(EngineModel):
    """The CompiledModel of this backend, of a file that `optimised` made."""

    takes_narrow = True

    def __init__(self, model: Model, order: Order = "listed", joined: Sequence[Sequence[int]] = ()) -> None:
        super().__init__(model, order, joined)
        self._refused: dict[str, Mapping[str, str]] = {}  # by target, operators with the reason
        self._sessions: WeakValueDictionary[tuple[str, bytes], Any] = WeakValueDictionary()
        self._lock = threading.Lock()  # over these
        self._timer = OperatorTimer(self.graph, super().stage, self.values)

    @classmethod
    def compile(cls, model: Model, order: Order, targets: Iterable[str], trial: Trial) -> OnnxruntimeModel:
        found = cls(Model(model.name, "onnx", optimised(model), model.inputs), order)
        found.refuse({target: found._tried(target, trial) for target in targets if not _is_own(target)})
        return found

    def runner(
        self, content: bytes, inputs: Sequence[Port], outputs: Sequence[Port], device: Device
    ) -> OnnxruntimeStage:
        """Make a stage. Those of one thread compute in their callers, so that equal ones share a session.

        Replicas then read the same weights, which the cores' common cache holds once.
        """

        def made() -> Any:
            return session(self.graph.name, content, device.cores, device.target)

        if len(device.cores) > 1 or not _is_own(device.target):
            return OnnxruntimeStage(self.graph.name, made(), inputs, outputs, device.cores)
        key = device.target, hashlib.sha256(content).digest()
        with self._lock:
            shared = self._sessions.get(key)
            if shared is None:
                shared = self._sessions[key] = made()
        return OnnxruntimeStage(self.graph.name, shared, inputs, outputs, device.cores)

    def stage(self, operators: Sequence[str], device: Device) -> StageRunner:
        """Make a stage. The threads of a provider with cores are held there by a process that has no others."""
        if _is_own(device.target) or not device.cores or set(device.cores) == CORES:
            return super().stage(operators, device)
        return self.isolated_stage(operators, device)

    def refusals(self, device: Device) -> Mapping[str, str]:
        return self._refused.get(device.target, {})

    def refuse(self, refused: Refused) -> None:
        self._refused |= refused

    def _tried(self, target: str, trial: Trial) -> Mapping[str, str]:
        """Return the operators that a provider does not compute, each with the reason.

        Raises:
            ModelError: it computes none of them, or not all together.
        """
        name, (provider, _) = self.graph.name, parsed_target(target)
        owners = {index: one for one, indices in self.file.indices.items() for index in indices}
        whole = ""
        try:
            left = {owners[node] for node in trial.ask((name, target), self.numbered())}
        except RunError as error:
            whole, left = str(error), set(owners.values())
        refused = dict.fromkeys((one for one in self.file.indices if one in left), f"{provider} does not claim it")
        for group in alike_operators(self.graph) if len(left) == len(self.graph) else ():
            names = [self.graph.operators[index].name for index in group]
            try:
                left_alone = trial.ask((name, target), self.numbered(names[:1]))
            except RunError as error:
                refused |= dict.fromkeys(names, str(error).removeprefix(f"{name}: "))
            else:
                if not left_alone:
                    for one in names:
                        del refused[one]
        if (whole and not refused) or len(refused) == len(self.graph):
            reason = whole or next(iter(refused.values()))
            raise ModelError(f"{name}: {provider} runs none of its operators: {reason.removeprefix(f'{name}: ')}")
        if refused:
            first, reason = next(iter(refused.items()))
            count = f"{len(self.graph) - len(refused)} of {len(self.graph)}"
            _log.warning(
                f"{name}: {target} runs {count} operators, and leaves others to other devices: {first}, since {reason}"
            )
        return refused

    def has_operator_times(self, device: Device) -> bool:
        """Return whether onnxruntime computes the operators itself: a provider computes what it claims as one."""
        return _is_own(device.target)

    def time_operators(self, device: Device, repeats: int) -> Seconds:
        """Return seconds of every operator (repeats x operators), as onnxruntime's profiler has them.

        No profile asks for those of a provider (`has_operator_times`); they are the seconds of stages of one operator.
        """
        if not _is_own(device.target):
            seconds = self._timer.seconds(device, repeats)
            seconds[:, [self.graph.edges.index[name] for name in self.refusals(device)]] = np.nan
            return seconds
        content, (taken, given) = self.numbered(), self.ends()
        frame, results = list(map(noise, taken)), [port.buffer() for port in given]
        with tempfile.TemporaryDirectory() as folder:
            made = session(self.graph.name, content, device.cores, profile=Path(folder) / "profile")
            stage = OnnxruntimeStage(self.graph.name, made, taken, given, device.cores)
            try:
                for _ in range(repeats + 1):
                    stage.run(frame, results)
            except RunError as error:
                raise ModelError(f"{error}; it was a frame of noise") from error
            events = msgspec.json.decode(Path(made.end_profiling()).read_bytes())
        microseconds: dict[int, list[float]] = {}
        for event in events:
            label, _, what = event["name"].rpartition("_kernel_time")
            if event["cat"] == "Node" and not what and label.isdecimal():
                microseconds.setdefault(int(label), []).append(event["dur"])
        seconds = np.empty((repeats, len(self.graph)))
        for index, operator in enumerate(self.graph.operators):
            # The first run allocates, and does not count.
            rows = np.array([microseconds[node][-repeats:] for node in self.file.indices[operator.name]])
            seconds[:, index] = np.maximum(rows.sum(axis=0) * 1e-6, _LEAST_S)
        return seconds

    def close(self) -> None:
        self._timer.close()
        super().close()


class OnnxruntimeStage(StageRunner):
    """The StageRunner: a session that reads and writes the runtime's buffers in place."""

    def __init__(
        self, name: str, made: Any, inputs: Sequence[Port], outputs: Sequence[Port], cores: Sequence[int]
    ) -> None:
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._name, self._cores = name, cores
        self._session: Any = made
        # ONNX's numbers of the types that onnxruntime's Python does not know in numpy.
        self._kinds = {port.name: onnx_type(port.dtype) for port in (*inputs, *outputs) if port.dtype in NARROW}

    def bind(self) -> None:
        bind(self._cores)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        made = self._session
        if made is None:
            raise RunError("the stage was closed; make a new one")
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

    def close(self) -> None:
        self._session = None  # a run that still goes on keeps it until it ends


def _is_own(target: str) -> bool:
    """Return whether a target is onnxruntime's own kernels for CPU cores."""
    return parsed_target(target)[0] in ("", "cpu")
