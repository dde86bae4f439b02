"""The Open Inference Protocol: Triton's own clients against a pipeline, and requests that make no sense."""

from __future__ import annotations

import os
import random
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import shared_memory
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.fake_backend import FakeModel, fake_platform, make_plan, raise_at
from tests.support.parts import needs

needs("av")
needs("tritonclient")

import grpc
from google.protobuf.json_format import MessageToDict
from tritonclient import grpc as rpc
from tritonclient import http as web
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc as services
from tritonclient.utils import InferenceServerException

from tvm_pipeline import Operator, OperatorGraph, Pipeline, Tensor
from tvm_pipeline.errors import ModelError, OptionError, StageError
from tvm_pipeline_video.http_server import listening
from tvm_pipeline_video.service.inference import DATATYPES, InferenceModel, address_of, serving

X, N = Tensor("x", (1, 4)), Tensor("n", (2,), "int32")
SUM, TWICE = Tensor("sum", (1, 4)), Tensor("twice", (2,), "int32")
GRAPH = OperatorGraph(
    "net",
    (X, N),
    (Operator("add", "add", ("x",), (SUM,)), Operator("double", "mul", ("n",), (TWICE,))),
    ("sum", "twice"),
)
TOKEN = "open sesame"


@contextmanager
def served(token: str = "", hooks: dict | None = None) -> Iterator[tuple[InferenceModel, str, str]]:
    """Yield a model of two stages with the addresses where it is served over HTTP and gRPC."""
    compiled = FakeModel(GRAPH, {"add": lambda x: [x + 1], "double": lambda n: [n * 2]}, hooks=hooks or {})
    plan = make_plan(GRAPH, (["d0"], ["add"]), (["d1"], ["double"]))
    with Pipeline(compiled, plan, fake_platform("d0", "d1")) as pipeline:
        model = InferenceModel(pipeline, GRAPH, "net")
        model.warm()
        ports = [free_port(), free_port()]
        with serving(model, ("127.0.0.1", ports[0]), ("127.0.0.1", ports[1]), token):
            failure: list[StageError] = []

            def run() -> None:
                try:
                    model.run()
                except StageError as error:
                    failure.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            try:
                yield model, *(f"127.0.0.1:{port}" for port in ports)
            finally:
                pipeline.stop()
                thread.join()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def arrays(number: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((1, 4), number, np.float32), "n": np.array([number, -number], np.int32)}


def inputs_for(module, given: dict[str, np.ndarray], **options: bool) -> list:  # type: ignore[no-untyped-def, type-arg]
    found = []
    for name, array in given.items():
        one = module.InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
        one.set_data_from_numpy(array, **options)
        found.append(one)
    return found


def answer_to(request: urllib.request.Request) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, msgspec.json.decode(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, msgspec.json.decode(error.read())


def check(result, number: int = 1) -> None:  # type: ignore[no-untyped-def]
    np.testing.assert_array_equal(result.as_numpy("sum"), np.full((1, 4), number + 1, np.float32))
    np.testing.assert_array_equal(result.as_numpy("twice"), np.array([2 * number, -2 * number], np.int32))


def test_tritons_client_over_http() -> None:
    with served() as (_, http, _), web.InferenceServerClient(http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("net")
        assert client.get_server_metadata()["name"] == "tvm-pipeline"
        metadata = client.get_model_metadata("net", "1")
        assert metadata["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [1, 4]},
            {"name": "n", "datatype": "INT32", "shape": [2]},
        ]
        for binary in (True, False):
            check(client.infer("net", inputs_for(web, arrays(3), binary_data=binary), request_id="7"), 3)
            wanted = [web.InferRequestedOutput("twice", binary_data=binary)]
            found = client.infer("net", inputs_for(web, arrays(), binary_data=binary), outputs=wanted)
            assert found.as_numpy("sum") is None
            assert found.as_numpy("twice").tolist() == [2, -2]
        [statistics] = client.get_inference_statistics("net")["model_stats"]
        assert statistics["inference_count"] == statistics["inference_stats"]["success"]["count"] == 4
        with pytest.raises(InferenceServerException, match="there is no model other; net is served"):
            client.get_model_metadata("other")
        with pytest.raises(InferenceServerException, match=r"input x is FP32 \[1, 3\]; net takes FP32 \[1, 4\]"):
            client.infer("net", inputs_for(web, {**arrays(), "x": np.zeros((1, 3), np.float32)}))
        with pytest.raises(InferenceServerException, match="net has the inputs x, n; x came"):
            client.infer("net", inputs_for(web, {"x": arrays()["x"]}))
        with pytest.raises(InferenceServerException, match="and no depth"):
            client.infer("net", inputs_for(web, arrays()), outputs=[web.InferRequestedOutput("depth")])


def test_tritons_client_over_grpc() -> None:
    with served() as (_, _, address), rpc.InferenceServerClient(address) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("net")
        assert client.get_server_metadata().name == "tvm-pipeline"
        assert [one.name for one in client.get_model_metadata("net").inputs] == ["x", "n"]
        check(client.infer("net", inputs_for(rpc, arrays(5))), 5)
        [statistics] = client.get_inference_statistics("net").model_stats
        assert statistics.inference_stats.success.count == 1
        with pytest.raises(InferenceServerException, match=r"StatusCode.NOT_FOUND\] there is no model other"):
            client.infer("other", inputs_for(rpc, arrays()))
        with pytest.raises(InferenceServerException, match=r"StatusCode.INVALID_ARGUMENT\] input x is FP32 \[1, 3\]"):
            client.infer("net", inputs_for(rpc, {**arrays(), "x": np.zeros((1, 3), np.float32)}))
        with grpc.insecure_channel(address) as channel:  # numbers in the message itself
            request = messages.ModelInferRequest(model_name="net")
            for name, array in arrays(2).items():
                one = request.inputs.add(name=name, datatype=DATATYPES[array.dtype.name], shape=array.shape)
                getattr(one.contents, "fp32_contents" if name == "x" else "int_contents").extend(array.ravel().tolist())
            answer = services.GRPCInferenceServiceStub(channel).ModelInfer(request)
            assert np.frombuffer(answer.raw_output_contents[1], np.int32).tolist() == [4, -4]


def test_clients_share_the_pipeline_and_each_has_its_own_answer() -> None:
    with served() as (model, http, address):

        def ask(number: int) -> None:
            if number % 2:
                with web.InferenceServerClient(http) as client:
                    check(client.infer("net", inputs_for(web, arrays(number))), number)
            else:
                with rpc.InferenceServerClient(address) as client:
                    check(client.infer("net", inputs_for(rpc, arrays(number))), number)

        with ThreadPoolExecutor(8) as clients:
            list(clients.map(ask, range(64)))
        assert model.statistics.success == 64


def test_a_token_is_asked_for() -> None:
    with served(TOKEN) as (_, http, address):
        header = {"Authorization": f"Bearer {TOKEN}"}
        with web.InferenceServerClient(http) as client:
            assert not client.is_server_live()
            check(client.infer("net", inputs_for(web, arrays()), headers=header))
        with rpc.InferenceServerClient(address) as client:
            with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
                client.infer("net", inputs_for(rpc, arrays()))
            check(client.infer("net", inputs_for(rpc, arrays()), headers={"authorization": f"Bearer {TOKEN}"}))


def test_a_page_of_another_site_gets_nothing() -> None:
    with served() as (_, http, _):
        for host, status in (("localhost", 200), (http, 200), ("evil.example", 403)):
            assert answer_to(urllib.request.Request(f"http://{http}/v2", headers={"Host": host}))[0] == status


def test_a_pipeline_that_fails_lets_its_clients_go() -> None:
    with (
        served(hooks={("add", "d0"): raise_at(2, RuntimeError("the kernel failed"))}) as (model, http, _),
        web.InferenceServerClient(http) as client,
    ):
        check(client.infer("net", inputs_for(web, arrays())))
        with pytest.raises(InferenceServerException, match="net does not answer: "):
            client.infer("net", inputs_for(web, arrays()))
        assert not client.is_server_ready()
        assert model.statistics.fail == 1


def test_requests_that_make_no_sense_get_an_error_and_the_others_go_on() -> None:
    """Each is a right request with some bytes changed, left out or added; the answer is right, or an error in JSON."""
    draw = random.Random(4)
    right = msgspec.json.encode(
        {
            "inputs": [
                {"name": n, "shape": list(a.shape), "datatype": DATATYPES[a.dtype.name], "data": a.ravel().tolist()}
                for n, a in arrays().items()
            ]
        }
    )
    with served() as (model, http, _):
        seen = set()
        for _ in range(300):
            body = bytearray(right)
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(len(body))
                body[at : at + draw.randrange(3)] = draw.randbytes(draw.randrange(3))
            headers = {"Inference-Header-Content-Length": draw.choice(["", "-1", "0", "9", "99999", "x"])}
            request = urllib.request.Request(
                f"http://{http}/v2/models/net/infer", bytes(body), headers if draw.randrange(2) else {}
            )
            status, said = answer_to(request)
            assert said.keys() >= ({"outputs"} if status == 200 else {"error"})
            seen.add(status)
        assert seen == {200, 400}
        too_long = urllib.request.Request(f"http://{http}/v2/models/net/infer", b" " * (1 << 20))
        assert answer_to(too_long)[0] == 413
        assert model.is_ready


@pytest.fixture
def region() -> Iterator[shared_memory.SharedMemory]:
    """Memory for the arrays of a request, and behind them for those of its answer."""
    made = shared_memory.SharedMemory(create=True, size=256)
    made.buf[:16], made.buf[64:72] = arrays(5)["x"].tobytes(), arrays(5)["n"].tobytes()
    yield made
    made.close()
    made.unlink()


@pytest.mark.parametrize("module", [web, rpc], ids=["http", "grpc"])
def test_arrays_in_shared_memory(module, region: shared_memory.SharedMemory) -> None:  # type: ignore[no-untyped-def]
    with served() as (model, http, grpc_at), module.InferenceServerClient(http if module is web else grpc_at) as client:
        client.register_system_shared_memory("ours", region.name, 200, offset=0)
        status = client.get_system_shared_memory_status()
        known = (
            status
            if module is web
            else [MessageToDict(one, preserving_proto_field_name=True) for one in status.regions.values()]
        )
        assert [(one["name"], int(one["byte_size"])) for one in known] == [("ours", 200)]
        given = [module.InferInput("x", [1, 4], "FP32"), module.InferInput("n", [2], "INT32")]
        given[0].set_shared_memory("ours", 16)
        given[1].set_shared_memory("ours", 8, offset=64)
        outputs = [module.InferRequestedOutput("sum"), module.InferRequestedOutput("twice")]
        outputs[0].set_shared_memory("ours", 32, offset=128)
        found = client.infer("net", given, outputs=outputs)
        assert found.as_numpy("twice").tolist() == [10, -10]
        assert np.frombuffer(region.buf[128:144], np.float32).tolist() == [6.0] * 4
        outputs[0].set_shared_memory("ours", 32, offset=190)
        with pytest.raises(InferenceServerException, match="'ours' has 200 bytes, and no 32 at 190"):
            client.infer("net", given, outputs=outputs)
        outputs[0].set_shared_memory("ours", 8)
        with pytest.raises(InferenceServerException, match="an output has 16 bytes, not 8"):
            client.infer("net", given, outputs=outputs)
        with pytest.raises(InferenceServerException, match="registered already"):
            client.register_system_shared_memory("ours", region.name, 200)
        client.unregister_system_shared_memory("ours")
        with pytest.raises(InferenceServerException, match="no shared memory 'ours' is registered"):
            client.infer("net", given)
        for key, message in (
            ("../../etc/passwd", "is no key"),
            ("nothing-there", "cannot be opened"),
            (region.name, "has no 300 bytes"),
        ):
            with pytest.raises(InferenceServerException, match=message):
                client.register_system_shared_memory("other", key, 300)
        assert model.is_ready


def test_a_client_that_cuts_its_memory_short_harms_nobody(region: shared_memory.SharedMemory) -> None:
    with served() as (model, http, _), web.InferenceServerClient(http) as client:
        client.register_system_shared_memory("ours", region.name, 200)
        os.truncate(f"/dev/shm/{region.name}", 8)
        one = web.InferInput("x", [1, 4], "FP32")
        one.set_shared_memory("ours", 16)
        with pytest.raises(InferenceServerException, match="cut short by its owner"):
            client.infer("net", [one])
        check(client.infer("net", inputs_for(web, arrays(3))), 3)
        model.regions = None  # as where other machines may ask
        with pytest.raises(InferenceServerException, match="this server listens beyond it"):
            client.get_system_shared_memory_status()


@pytest.mark.parametrize(
    ("text", "token", "others", "message"),
    [
        ("eighty", "", False, "give PORT or ADDRESS:PORT"),
        ("70000", "", False, "a port is a number from 0 to 65535"),
        ("0.0.0.0:8000", "", False, "other machines reach this address"),
        ("0.0.0.0:8000", "", True, "other machines reach this address"),
        ("0.0.0.0:8000", TOKEN, False, "other machines reach this address"),
        ("nowhere.invalid:8000", "", False, "this machine knows no such address"),
    ],
)
def test_where_it_may_not_listen(text: str, token: str, others: bool, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        address_of("http", text, token, allow_others=others)


def test_no_answer_waits_for_an_acknowledgement() -> None:
    with listening("http", "127.0.0.1", 0) as taken:
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_where_it_may_listen() -> None:
    assert address_of("http", "8000", "", allow_others=False) == ("127.0.0.1", 8000)
    assert address_of("http", "[::1]:8000", "", allow_others=False) == ("::1", 8000)
    assert address_of("http", "0.0.0.0:8000", TOKEN, allow_others=True) == ("0.0.0.0", 8000)


def test_a_type_that_the_protocol_lacks_is_refused_by_the_tensor() -> None:
    needs("ml_dtypes")
    given = Tensor("sum", (1, 4), "bfloat16")
    graph = OperatorGraph("net", (X,), (Operator("add", "add", ("x",), (given,)),), ("sum",))
    with pytest.raises(ModelError, match="net: sum is bfloat16, which the protocol has no tensors of"):
        InferenceModel(None, graph, "net")  # type: ignore[arg-type]  # it is refused before
