"""A part of an ONNX file as OpenVINO compiles and runs it on one of its devices."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import cache
from typing import Any

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import Array, Port
from tvm_pipeline.backends.cores import made_on
from tvm_pipeline.backends.engine import CORES, EngineStage
from tvm_pipeline.backends.engine_targets import parsed_target
from tvm_pipeline.backends.trial import answer
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, RunError

NODE = "tvm_pipeline_node_"  # nodes of a file are called so, by their indices, to be known among OpenVINO's layers
_NODE = re.compile(rf"(?:^|,){NODE}(\d+)(?!\d)")
_INT32 = np.iinfo(np.int32)


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
        return core().compile_model(_parsed(content), target, {**settings, **properties})
    except RuntimeError as error:
        raise ModelError(f"{name}: OpenVINO refuses it on {target}: {error_reason(error)}") from error


class OpenvinoStage(EngineStage):
    """The StageRunner: a request of a compiled model that reads and writes the runtime's buffers in place.

    Raises:
        ModelError: OpenVINO ignores an input, or gives an output in another shape or type than ONNX says.
    """

    def __init__(
        self, name: str, compiled_: Any, inputs: Sequence[Port], outputs: Sequence[Port], device: Device
    ) -> None:
        super().__init__(compiled_.create_infer_request(), inputs, outputs, device.cores)
        self._name, self._device = name, device
        self._read = _read_inputs(name, compiled_, self.inputs)
        for port, given in zip(self.outputs, compiled_.outputs, strict=True):
            _check(name, port, given)
        self._copied = _copied(compiled_, self._read)
        # Outputs whose extents OpenVINO does not know before a frame: it gives them in memory of its own.
        self.open = [index for index, given in enumerate(compiled_.outputs) if given.partial_shape.is_dynamic]
        self._wide = [index for index, port in enumerate(self.inputs) if port.dtype == "int64"]

    def compute(self, request: Any, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        """Compute a frame; raise RunError also for what is beyond the integers of OpenVINO, which have 32 bits."""
        tensor = openvino().Tensor
        for index in self._wide:
            if inputs[index].min(initial=0) < _INT32.min or inputs[index].max(initial=0) > _INT32.max:
                raise RunError(
                    f"{self._name}: input {self.inputs[index].name} has numbers beyond 32 bits, and OpenVINO computes "
                    "int64 in int32; run the model on another engine"
                )
        try:
            for place, index in enumerate(self._read):
                request.set_input_tensor(place, tensor(inputs[index], shared_memory=True))
            for index, array in enumerate(outputs):
                if index not in self.open:
                    request.set_output_tensor(index, tensor(array, shared_memory=True))
            request.infer(share_inputs=True)
            found = {index: request.get_output_tensor(index).data for index in self.open}
        except RuntimeError as error:
            raise RunError(f"OpenVINO cannot compute a frame on {self._device.name}: {error_reason(error)}") from error
        for index, array in found.items():
            if array.shape != self.outputs[index].shape:
                raise RunError(_otherwise(self._name, self.outputs[index], "shape", list(array.shape)))
            np.copyto(outputs[index], array)
        for written, read in self._copied:
            np.copyto(outputs[written], inputs[read])

    def layers(self) -> dict[str, tuple[list[int], str]]:
        """Return the layers that run, by name: the indices of the nodes that are fused in each, and its type.

        Nodes have to be called NODE and their index. None are known of a device that does not tell what it runs.
        """
        infos = {op.get_friendly_name(): op.get_rt_info() for op in _running(self.made.get_compiled_model())}
        texts = {
            name: (info["originalLayersNames"].astype(str), info["layerType"].astype(str))
            for name, info in infos.items()
            if "originalLayersNames" in info
        }
        return {name: (sorted(set(map(int, _NODE.findall(text)))), kind) for name, (text, kind) in texts.items()}

    def layers_s(self) -> Mapping[str, float]:
        """Return the seconds of each layer in the last run."""
        return {layer.node_name: layer.real_time.total_seconds() for layer in self.made.get_profiling_info()}


def _parsed(content: bytes) -> Any:
    """Return a file as OpenVINO reads it, whose TopK then gives the first of equal numbers, as ONNX says."""
    model = core().read_model(content)
    for node in model.get_ops():
        if node.get_type_name() == "TopK":
            node.set_attribute("sort", "value")
            node.set_attribute("stable", True)
    return model


def _read_inputs(name: str, compiled_: Any, inputs: Sequence[Port]) -> list[int]:
    """Return which of these inputs each input of a compiled model is; raise ModelError if it lacks one.

    Its inputs are those of the file in their order, without those that its operators ignore.
    """
    if len(compiled_.inputs) == len(inputs):
        return list(range(len(inputs)))
    places = {port.name: index for index, port in enumerate(inputs)}
    found = [next((places[name] for name in one.get_names() if name in places), None) for one in compiled_.inputs]
    ignored = [port.name for index, port in enumerate(inputs) if index not in found and 0 not in port.shape]
    read = [index for index in found if index is not None]
    if ignored or len(read) < len(found):
        raise ModelError(
            f"{name}: OpenVINO ignores an input, one of {', '.join(ignored or places)}; make it a constant "
            "(`input_values`), or run the model on another engine"
        )
    return read


def _check(name: str, port: Port, given: Any) -> None:
    """Raise ModelError where OpenVINO has another shape or type for a tensor than ONNX says."""
    shape, dtype = given.partial_shape, given.element_type.to_dtype().name
    if not shape.compatible(openvino().PartialShape(list(port.shape))):
        raise ModelError(_otherwise(name, port, "shape", str(shape)))
    if dtype != port.dtype:
        raise ModelError(_otherwise(name, port, "type", dtype))


def _otherwise(name: str, port: Port, what: str, found: object) -> str:
    right = port.dtype if what == "type" else list(port.shape)
    return (
        f"{name}: OpenVINO gives tensor {port.name} the {what} {found}, and ONNX {right}; "
        "run the model on another engine"
    )


def _copied(compiled_: Any, read: Sequence[int]) -> list[tuple[int, int]]:
    """Return outputs that are inputs as they are, each with the input: OpenVINO leaves the buffer that it is given."""
    places = {port.get_node().get_friendly_name(): read[place] for place, port in enumerate(compiled_.inputs)}
    results = {port.get_node().get_friendly_name(): index for index, port in enumerate(compiled_.outputs)}
    nodes = [node for node in _running(compiled_) if node.get_friendly_name() in results]
    sources = [(results[node.get_friendly_name()], node.input_values()[0].get_node()) for node in nodes]
    return [
        (index, places[source.get_friendly_name()])
        for index, source in sources
        if source.get_type_name() == "Parameter"
    ]


def _running(compiled_: Any) -> list[Any]:
    """Return the nodes that run; none of a device that does not tell."""
    try:
        return list(compiled_.get_runtime_model().get_ops())
    except RuntimeError:
        return []


@cache
def openvino() -> Any:
    """Import OpenVINO, whose Python package tells Google of it unless its part that does so is missing."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


@cache
def core() -> Any:
    """Return OpenVINO, which counts the cores of the thread that loads it: all of this process."""
    return made_on(tuple(CORES), openvino().Core)


def error_reason(error: Exception) -> str:
    """Return the reason in OpenVINO's message, without the places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    reasons = [line for line in lines if line and not line.startswith(("Exception from", "Check '"))]
    return " ".join(reasons)[:300] or " ".join(lines)[:300]


def serve(order: bytes, channel: socket.socket) -> None:
    """Be the child that loads OpenVINO first: list its devices, or the nodes of each layer of a model for a target.

    A model is asked for by its name, the target, its inputs, its outputs and all its tensors; it computes a frame.
    """
    answer(channel, lambda question, content: _tried(content, *question) if question else _listed())


def _listed() -> dict[str, tuple[str, list[str]]]:
    """Return each device's full name, and the properties that can be set."""
    devices = {name: core().get_property(name, "SUPPORTED_PROPERTIES") for name in core().available_devices}
    return {
        name: (core().get_property(name, "FULL_DEVICE_NAME"), [key for key in keys if keys[key] != "RO"])
        for name, keys in devices.items()
    }


def _tried(content: bytes, name: str, target: str, *ports: object) -> list[tuple[list[int], str]]:
    device = Device(name, target=target)
    taken, given, tensors = (msgspec.convert(each, list[Port]) for each in ports)
    made, known = compiled(name, content, device, False), {port.name: port for port in tensors}
    for operator in _parsed(content).get_ops():
        for output in operator.outputs():
            for tensor in known.keys() & output.get_names():
                _check(name, known[tensor], output)
    stage = OpenvinoStage(name, made, taken, given, device)
    frame = [port.buffer() for port in taken]
    for array in frame:
        array.fill(0)
    # Of zeros an open output may have no elements, which is no fault of the model.
    with suppress(RunError) if stage.open else nullcontext():
        stage.run(frame, [port.buffer() for port in given])
    return list(stage.layers().values())
