"""A part of an ONNX file as OpenVINO compiles and runs it on one of its devices."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.backends.cores import bind
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.trial import answer
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError

NODE = "tvm_pipeline_node_"  # nodes of a file are called so, by their indices, to be known among OpenVINO's layers
_NODE = re.compile(rf"(?:^|,){NODE}(\d+)(?!\d)")
# The cores of this process before any thread is bound to some of them.
CORES = frozenset(os.sched_getaffinity(0))


def compiled(name: str, content: bytes, device: Device, timed: bool) -> Any:
    """Return an ONNX file as OpenVINO compiles it; raise ModelError where it refuses. `layers_s` needs `timed`."""
    target, properties = parsed_target(device.target or "CPU")
    settings: dict[str, Any] = {"PERF_COUNT": True} if timed else {}
    if target == "CPU":
        # With one thread it computes in the caller's. Pinned, it would bind callers to cores of its own choice.
        threads = max(len(device.cores), 1)
        settings |= {"NUM_STREAMS": 1, "INFERENCE_NUM_THREADS": threads, "ENABLE_CPU_PINNING": False}
    # A CPU that has bfloat16 computes in it otherwise, also as a part of another device, such as HETERO:CPU.
    if re.match("CPU|GPU|AUTO|BATCH|HETERO|MULTI", target) and "NPU" not in target:
        settings["INFERENCE_PRECISION_HINT"] = "f32"
    try:
        return core().compile_model(core().read_model(content), target, {**settings, **properties})
    except RuntimeError as error:
        raise ModelError(f"{name}: OpenVINO refuses it on {target}: {error_reason(error)}") from error


class OpenvinoStage(StageRunner):
    """The StageRunner: a request of a compiled model that reads and writes the runtime's buffers in place."""

    def __init__(self, compiled_: Any, inputs: Sequence[Port], outputs: Sequence[Port], device: Device) -> None:
        self.inputs, self.outputs, self._device = tuple(inputs), tuple(outputs), device
        self._compiled, self._request = compiled_, compiled_.create_infer_request()

    def bind(self) -> None:
        bind(self._device.cores)

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        request, tensor = self._request, openvino().Tensor  # a run that still goes on keeps it until it ends
        if request is None:
            raise RunError("the stage was closed; make a new one")
        try:
            for index, array in enumerate(inputs):
                request.set_input_tensor(index, tensor(array, shared_memory=True))
            for index, array in enumerate(outputs):
                request.set_output_tensor(index, tensor(array, shared_memory=True))
            request.infer(share_inputs=True)
        except RuntimeError as error:
            raise RunError(f"OpenVINO cannot compute a frame on {self._device.name}: {error_reason(error)}") from error

    def layers(self) -> dict[str, tuple[list[int], str]]:
        """Return the layers that run, by name: the indices of the nodes that are fused in each, and its type.

        Nodes have to be called NODE and their index. None are known of a device that does not tell what it runs.
        """
        try:
            infos = {op.get_friendly_name(): op.get_rt_info() for op in self._compiled.get_runtime_model().get_ops()}
        except RuntimeError:
            return {}

        def nodes(info: Any) -> list[int]:
            return sorted({int(node) for node in _NODE.findall(info["originalLayersNames"].astype(str))})

        return {
            name: (nodes(info), info["layerType"].astype(str))
            for name, info in infos.items()
            if "originalLayersNames" in info
        }

    def layers_s(self) -> Mapping[str, float]:
        """Return the seconds of each layer in the last run."""
        return {layer.node_name: layer.real_time.total_seconds() for layer in self._request.get_profiling_info()}

    def close(self) -> None:
        self._request = self._compiled = None


@cache
def openvino() -> Any:
    """Import OpenVINO, whose Python package tells Google of it unless its part that does so is missing."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@cache
def core() -> Any:
    """Return OpenVINO, which counts the cores of the thread that loads it: all of this process."""
    with ThreadPoolExecutor(1, initializer=bind, initargs=(tuple(CORES),)) as pool:
        return pool.submit(openvino().Core).result()


def error_reason(error: Exception) -> str:
    """Return the reason in OpenVINO's message, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(reasons)[:300] or " ".join(lines)[:300]


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child that loads OpenVINO first: list its devices, or the nodes of each layer of a model for a target."""

    def answered(question: list[str], content: bytes) -> object:
        if question:
            name, target = question
            device = Device(name, target=target)
            stage = OpenvinoStage(compiled(name, content, device, False), (), (), device)
            for tensor in stage._request.input_tensors:
                tensor.data[...] = 0
            stage.run([], [])
            return list(stage.layers().values())
        devices = {name: core().get_property(name, "SUPPORTED_PROPERTIES") for name in core().available_devices}
        return {
            name: (core().get_property(name, "FULL_DEVICE_NAME"), [key for key in keys if keys[key] != "RO"])
            for name, keys in devices.items()
        }

    answer(channel, answered)
