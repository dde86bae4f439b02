"""The Open Inference Protocol over HTTP, with Triton's extension for binary tensors, by starlette and uvicorn.

Sources: https://github.com/kserve/open-inference-protocol, and docs/protocol/extension_binary_data.md and
extension_statistics.md of https://github.com/triton-inference-server/server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import PipelineError
from tvm_pipeline_video.service.inference import (
    DATATYPES,
    PATIENCE_S,
    VERSION,
    InferenceModel,
    about_server,
    dtype_of,
)

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.datastructures import Headers
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from tvm_pipeline_video.http_server import RequestError, refusal
except ImportError as error:
    raise PipelineError(f"`http` needs an extra: pip install 'tvm-pipeline[kserve]' ({error})") from error

LENGTH = "Inference-Header-Content-Length"  # bytes of JSON before those of tensors
Decoded = TypeVar("Decoded")
JSON_FACTOR, SLACK = 32, 1 << 16  # a number may take so many bytes in JSON; and what else a request has


class Parameters(msgspec.Struct):
    binary_data_size: int | None = None
    binary_data: bool | None = None
    binary_data_output: bool | None = None
    shared_memory_region: str = ""
    shared_memory_offset: int = 0
    shared_memory_byte_size: int = 0


class RequestInput(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    data: list[Any] | None = None


class RequestOutput(msgspec.Struct):
    name: str
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class InferRequest(msgspec.Struct):
    inputs: list[RequestInput]
    id: str = ""
    outputs: list[RequestOutput] = msgspec.field(default_factory=list)
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class RegionRequest(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


def application(model: InferenceModel, token: str = "") -> Starlette:
    """Return the web application; with a token it answers only requests that carry it (`Authorization: Bearer`)."""

    async def live(_: Request) -> Response:
        return Response(status_code=200)

    async def ready(_: Request) -> Response:
        return Response(status_code=200 if model.is_ready else 503)

    async def server(_: Request) -> Response:
        return _json(about_server())

    async def metadata(request: Request) -> Response:
        _check_path(model, request)
        return _json(model.metadata())

    async def model_ready(request: Request) -> Response:
        _check_path(model, request)
        return await ready(request)

    async def statistics(request: Request) -> Response:
        if "name" in request.path_params:
            _check_path(model, request)
        return _json(statistics_of(model))

    async def infer(request: Request) -> Response:
        _check_path(model, request)
        body = await _body(request, most_bytes(model))
        return await run_in_threadpool(answered, model, body, request.headers.get(LENGTH))

    async def register(request: Request) -> Response:
        body = await _body(request, SLACK)
        asked = _decoded(body, RegionRequest)
        model.memory().register(request.path_params["region"], asked.key, asked.offset, asked.byte_size)
        return _json({})

    async def unregister(request: Request) -> Response:
        model.memory().unregister(request.path_params.get("region", ""))
        return _json({})

    async def regions(request: Request) -> Response:
        return _json(model.memory().status(request.path_params.get("region", "")))

    def failed(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return _json({"error": str(error)}, error.status)

    of_model = [
        Route(f"/v2/models/{{name}}{version}{path}", endpoint, methods=[method])
        for version in ("", "/versions/{version}")
        for path, endpoint, method in (
            ("", metadata, "GET"),
            ("/ready", model_ready, "GET"),
            ("/stats", statistics, "GET"),
            ("/infer", infer, "POST"),
        )
    ]
    routes = [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
        Route("/v2/models/stats", statistics),
        *of_model,
        *(
            Route(f"/v2/systemsharedmemory{path}", endpoint, methods=[method])
            for path, endpoint, method in (
                ("/region/{region}/register", register, "POST"),
                ("/region/{region}/unregister", unregister, "POST"),
                ("/unregister", unregister, "POST"),
                ("/region/{region}/status", regions, "GET"),
                ("/status", regions, "GET"),
            )
        ),
    ]
    made = Starlette(routes=routes, exception_handlers={RequestError: failed})
    made.add_middleware(_Door, token=token)
    return made


class _Door:
    """Refuses requests as `http_server.refusal` has it."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refused = refusal(Headers(scope=scope), self._token)
        await (_json({"error": refused[1]}, refused[0]) if refused else self._app)(scope, receive, send)


def most_bytes(model: InferenceModel) -> int:
    """Return how many bytes a request may have: its arrays in JSON, and some more."""
    return JSON_FACTOR * model.input_elements + SLACK


def answered(model: InferenceModel, body: bytes, header_length: str | None) -> Response:
    """Return the answer to the body of a request for inference."""
    length = len(body)
    if header_length is not None:
        if not header_length.isdecimal() or int(header_length) > length:
            raise RequestError(f"{LENGTH} is {header_length[:20]!r}, and the request has {length} bytes")
        length = int(header_length)
    asked = _decoded(body[:length], InferRequest)
    inputs = _arrays(model, asked.inputs, memoryview(body)[length:])
    found = model.infer(inputs, [output.name for output in asked.outputs])
    return _answer(model, asked, found)


def _decoded(body: bytes, kind: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the request is no JSON of the protocol: {error}") from error


def _answer(model: InferenceModel, asked: InferRequest, found: Mapping[str, NDArray[Any]]) -> Response:
    outputs, tail = [], []
    wanted = {output.name: output.parameters for output in asked.outputs}
    for name, array in found.items():
        one: dict[str, Any] = {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        how = wanted.get(name, Parameters())
        if region := how.shared_memory_region:
            content = array.tobytes()
            model.memory().write(region, how.shared_memory_offset, how.shared_memory_byte_size, content)
            one["parameters"] = {"shared_memory_region": region, "shared_memory_byte_size": len(content)}
        elif asked.parameters.binary_data_output if how.binary_data is None else how.binary_data:
            content = array.tobytes()
            one["parameters"] = {"binary_data_size": len(content)}
            tail.append(content)
        else:
            one["data"] = array.ravel().tolist()
        outputs.append(one)
    answer: dict[str, Any] = {"model_name": model.name, "model_version": VERSION, "outputs": outputs}
    if asked.id:
        answer["id"] = asked.id
    head = msgspec.json.encode(answer)
    if not tail:
        return Response(head, media_type="application/json")
    return Response(b"".join([head, *tail]), media_type="application/octet-stream", headers={LENGTH: str(len(head))})


def _arrays(model: InferenceModel, inputs: Sequence[RequestInput], tail: memoryview) -> dict[str, NDArray[Any]]:
    """Return the arrays of a request: those in JSON, those behind it, and those in shared memory."""
    found: dict[str, NDArray[Any]] = {}
    taken = 0
    for one in inputs:
        dtype = dtype_of(one.name, one.datatype, one.shape, found)
        how = one.parameters
        size = how.binary_data_size
        try:
            if region := how.shared_memory_region:
                content = model.memory().read(region, how.shared_memory_offset, how.shared_memory_byte_size)
                array = np.frombuffer(content, dtype).reshape(one.shape)
            elif size is None:
                array = np.array(one.data, dtype).reshape(one.shape)
            else:
                if size < 0 or taken + size > len(tail):
                    raise ValueError(f"{size} bytes are not there")
                array = np.frombuffer(tail[taken : taken + size], dtype).reshape(one.shape)
                taken += size
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"input {one.name[:100]}: {error}") from error
        found[one.name] = array
    if taken != len(tail):
        raise RequestError(f"{len(tail) - taken} bytes behind the tensors belong to none")
    return found


def statistics_of(model: InferenceModel) -> dict[str, Any]:
    found = model.statistics
    return {
        "model_stats": [
            {
                "name": model.name,
                "version": VERSION,
                "last_inference": round(found.last_s * 1e3),
                "inference_count": found.success,
                "execution_count": found.success,
                "inference_stats": found.durations(),
                "batch_stats": [],
            }
        ]
    }


def _check_path(model: InferenceModel, request: Request) -> None:
    model.check_name(request.path_params["name"], request.path_params.get("version", ""))


async def _body(request: Request, most: int) -> bytes:
    """Return the body of a request, up to so many bytes, which may take `PATIENCE_S`."""

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise RequestError(f"the request has more than {most} bytes", 413)
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), PATIENCE_S)
    except asyncio.TimeoutError as error:
        raise RequestError(f"the request did not come in {PATIENCE_S:g} s", 408) from error


def _json(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
