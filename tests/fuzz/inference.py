"""Requests for inference that no client sends, over HTTP and gRPC: each gets an answer, or an error of the protocol."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as messages

from tests.support.mutations import flipped, spliced
from tvm_pipeline import Operator, OperatorGraph, Tensor
from tvm_pipeline_video.http_server import RequestError
from tvm_pipeline_video.service.inference import InferenceModel
from tvm_pipeline_video.service.inference_grpc import _Service
from tvm_pipeline_video.service.inference_http import answered
from tvm_pipeline_video.service.shared_memory import Regions

X, SUM = Tensor("x", (1, 4)), Tensor("sum", (1, 4))
GRAPH = OperatorGraph("net", (X,), (Operator("add", "add", ("x",), (SUM,)),), ("sum",))
VALUES: list[Any] = [
    [1, 4],
    [],
    [-1, 4],
    [1 << 70],
    1e999,
    None,
    True,
    "x",
    "sum",
    "FP32",
    "BYTES",
    16,
    [1, 2, 3, 4],
    {},
]
KEYS = ("name", "shape", "datatype", "data", "parameters")
OPTIONS = ("binary_data_size", "binary_data", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size")


class Echo:
    """A pipeline whose result is there at once."""

    state = "running"

    def submit(self, inputs: Any, timeout_s: float, *, tag: Any) -> None:
        assert inputs["x"].shape == (1, 4)
        tag.set_result(({"sum": inputs["x"]}, 0.0))


class RefusedError(Exception):
    """What gRPC raises where a method aborts."""


class Context:
    def invocation_metadata(self) -> tuple[()]:
        return ()

    def abort(self, code: Any, message: str) -> NoReturn:
        raise RefusedError(message)


@cache
def model() -> InferenceModel:
    return InferenceModel(Echo(), GRAPH, "net", regions=Regions())  # type: ignore[arg-type]


def changed(content: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.choice((0, 0, 1, 3))):
        content = rng.choice((flipped, spliced))(content, rng)
    return content


def by_http(rng: random.Random) -> None:
    one: dict[str, Any] = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}
    one |= {rng.choice(KEYS): rng.choice(VALUES) for _ in range(rng.choice((0, 0, 1, 2)))}
    one["parameters"] = {rng.choice(OPTIONS): rng.choice(VALUES) for _ in range(rng.choice((0, 0, 1, 2)))}
    asked: dict[str, Any] = {"inputs": [one] * rng.choice((1, 1, 1, 0, 2))}
    if rng.random() < 0.3:
        asked["outputs"] = [{"name": rng.choice(VALUES), "parameters": {rng.choice(OPTIONS): rng.choice(VALUES)}}]
    head = changed(json.dumps(asked).encode(), rng)
    length = rng.choice((None, str(len(head)), str(len(head)), "-1", "x", str(len(head) + 99)))
    with suppress(RequestError):
        answer = answered(model(), head + rng.randbytes(rng.choice((0, 0, 16, 15))), length)
        assert answer.status_code == 200


def by_grpc(rng: random.Random) -> None:
    asked = messages.ModelInferRequest(model_name="net")
    one = asked.inputs.add(name="x", datatype=rng.choice(("FP32", "FP32", "INT8", "BYTES", "")), shape=[1, 4])
    if rng.random() < 0.5:
        one.contents.fp32_contents.extend([1, 2, 3, 4])
    else:
        asked.raw_input_contents.append(np.arange(4, dtype=np.float32).tobytes())
    if rng.random() < 0.3:
        one.parameters["shared_memory_region"].string_param = "ours"
        one.parameters["shared_memory_byte_size"].int64_param = rng.choice((16, -1, 1 << 62))
    with suppress(DecodeError, RefusedError):
        request = messages.ModelInferRequest.FromString(changed(asked.SerializeToString(), rng))
        assert _Service(model(), "").ModelInfer(request, Context()).outputs


FUZZERS = {"inference over HTTP": by_http, "inference over gRPC": by_grpc}
