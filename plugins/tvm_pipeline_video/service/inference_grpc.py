"""The Open Inference Protocol over gRPC: the service that Triton's client package describes, by grpcio.

The messages are those of `tritonclient.grpc`, so that nothing is generated here. Read next: inference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import PipelineError
from tvm_pipeline_video.http_server import RequestError, has_token
from tvm_pipeline_video.service.inference import (
    DATATYPES,
    VERSION,
    InferenceModel,
    about_server,
    dtype_of,
)

try:
    import grpc
    from tritonclient.grpc import service_pb2 as messages
    from tritonclient.grpc import service_pb2_grpc as services
except ImportError as error:
    raise PipelineError(f"`grpc` needs an extra: pip install 'tvm-pipeline[kserve]' ({error})") from error

THREADS = 32  # requests that wait for their results at one time
SLACK = 1 << 16  # bytes of a request beside its arrays
CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    404: grpc.StatusCode.NOT_FOUND,
    503: grpc.StatusCode.UNAVAILABLE,
}
# Where a request has numbers in the message itself, the field for each type.
CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
}


def server_of(model: InferenceModel, address: str, token: str = "") -> tuple[grpc.Server, int]:
    """Return a server that listens at ADDRESS:PORT, and its port, a free one for 0. Call `start`, and later `stop`.

    Raises:
        RuntimeError: it cannot listen there.
    """
    most = 16 * model.input_elements + SLACK
    server = grpc.server(
        ThreadPoolExecutor(THREADS), options=[("grpc.max_receive_message_length", most), ("grpc.so_reuseport", 0)]
    )
    services.add_GRPCInferenceServiceServicer_to_server(_Service(model, token), server)
    return server, server.add_insecure_port(address)


Method = Callable[["_Service", Any, grpc.ServicerContext], Any]


def _answering(method: Method) -> Method:
    """Check the token, and tell a client what is wrong with its request."""

    @wraps(method)
    def answered(self: _Service, request: Any, context: grpc.ServicerContext) -> Any:
        if not has_token(str(dict(context.invocation_metadata()).get("authorization", "")), self.token):
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "give the token: authorization: Bearer TOKEN")
        try:
            return method(self, request, context)
        except RequestError as error:
            context.abort(CODES.get(error.status, grpc.StatusCode.INTERNAL), str(error))

    return answered


class _Service(services.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """The methods by the names of the protocol."""

    def __init__(self, model: InferenceModel, token: str) -> None:
        self.served, self.token = model, token

    @_answering
    def ServerLive(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.ServerLiveResponse(live=True)

    @_answering
    def ServerReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.ServerReadyResponse(ready=self.served.is_ready)

    @_answering
    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.served.check_name(request.name, request.version)
        return messages.ModelReadyResponse(ready=self.served.is_ready)

    @_answering
    def ServerMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        return messages.ServerMetadataResponse(**about_server())

    @_answering
    def ModelMetadata(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.served.check_name(request.name, request.version)
        return messages.ModelMetadataResponse(**self.served.metadata())

    @_answering
    def ModelStatistics(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        if request.name:
            self.served.check_name(request.name, request.version)
        found = self.served.statistics
        durations = {name: messages.StatisticDuration(**figure) for name, figure in found.durations().items()}
        one = messages.ModelStatistics(
            name=self.served.name,
            version=VERSION,
            last_inference=round(found.last_s * 1e3),
            inference_count=found.success,
            execution_count=found.success,
            inference_stats=messages.InferStatistics(**durations),
        )
        return messages.ModelStatisticsResponse(model_stats=[one])

    @_answering
    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.served.check_name(request.model_name, request.model_version)
        found = self.served.infer(_arrays(self.served, request), [output.name for output in request.outputs])
        wanted = {output.name: output.parameters for output in request.outputs}
        answer = messages.ModelInferResponse(model_name=self.served.name, model_version=VERSION, id=request.id)
        for name, array in found.items():
            output = answer.outputs.add(name=name, datatype=DATATYPES[array.dtype.name])
            output.shape.extend(array.shape)
            content = array.tobytes()
            if place := _place(wanted.get(name, {})):
                self.served.memory().write(*place, content)
                output.parameters["shared_memory_region"].string_param = place[0]
                output.parameters["shared_memory_byte_size"].int64_param = len(content)
                content = b""  # clients count the raw contents by their outputs
            answer.raw_output_contents.append(content)
        return answer

    @_answering
    def SystemSharedMemoryRegister(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.served.memory().register(request.name, request.key, request.offset, request.byte_size)
        return messages.SystemSharedMemoryRegisterResponse()

    @_answering
    def SystemSharedMemoryUnregister(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        self.served.memory().unregister(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    @_answering
    def SystemSharedMemoryStatus(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802
        answer = messages.SystemSharedMemoryStatusResponse()
        for one in self.served.memory().status(request.name):
            answer.regions[one["name"]].MergeFrom(answer.RegionStatus(**one))
        return answer


def _place(parameters: Any) -> tuple[str, int, int] | None:
    """Return the region of shared memory that a tensor is in, its offset there, and its bytes; None without one."""
    if "shared_memory_region" not in parameters:
        return None
    numbers = (
        parameters[f"shared_memory_{name}"].int64_param if f"shared_memory_{name}" in parameters else 0
        for name in ("offset", "byte_size")
    )
    offset, byte_size = numbers
    return parameters["shared_memory_region"].string_param, offset, byte_size


def _arrays(served: InferenceModel, request: Any) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request, whose bytes stand behind all inputs, as numbers in each, or in shared memory."""
    raw = list(request.raw_input_contents)
    sent = [one.name for one in request.inputs if _place(one.parameters) is None]
    if raw and len(raw) != len(sent):
        raise RequestError(f"{len(sent)} inputs came with {len(raw)} raw contents")
    contents = iter(raw)
    found: dict[str, NDArray[Any]] = {}
    for one in request.inputs:
        shape = list(one.shape)
        dtype = dtype_of(one.name, one.datatype, shape, found)
        try:
            if place := _place(one.parameters):
                found[one.name] = np.frombuffer(served.memory().read(*place), dtype).reshape(shape)
            elif raw:
                found[one.name] = np.frombuffer(next(contents), dtype).reshape(shape)
            else:
                numbers = getattr(one.contents, CONTENTS[one.datatype])
                found[one.name] = np.array(numbers, dtype).reshape(shape)
        except (KeyError, ValueError, OverflowError) as error:
            raise RequestError(f"input {one.name[:100]}: {error}") from error
    return found
