"""Frigate's protocol: clients written from it against the server, over a fake detector that finds what a picture holds.

The fake reads boxes from the pixels, so that the test knows the right answer to each picture.
"""

from __future__ import annotations

import json
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support.fake_backend import FakeModel, fake_platform, make_plan, raise_at
from tests.support.log_lines import log_lines, on_line
from tests.support.parts import FRIGATE, needs
from tvm_pipeline import Bundle, Operator, OperatorGraph, Pipeline, Tensor
from tvm_pipeline.errors import OptionError, StageError
from tvm_pipeline.testing import example_bundle

needs("zmq")
needs("av")

import zmq

from tests.plugins.video.service.test_signals import Command
from tests.support.frigate_client import ROWS, FrigateClient
from tests.support.tiny_yolo import FOUND, SIDE, write_tiny_yolo
from tvm_pipeline_video.service.frigate import interpretation, serve

ENDS = Tensor("rows", (1, 5, 6))  # YOLOv10: left, top, right, bottom, score, class
WIDTH, HEIGHT = 64, 32


def detector(picture: Tensor, outputs: tuple[Tensor, ...] = (ENDS,), **options) -> Bundle:
    """Return the bundle of a fake on two devices, which reads five rows from the first pixels of the red channel."""

    def find(array):
        pixels = array[0, :, :, 0] if array.shape[3] == 3 else array[0, 0]
        scale = 1 if array.dtype == np.uint8 else 255
        found = np.rint(pixels[0, :30].astype("float32") * scale).reshape(1, 5, 6)
        found[..., 4] /= 100
        return [found] if len(outputs) == 1 else _as_ssd(found)

    names = tuple(tensor.name for tensor in outputs)
    graph = OperatorGraph("net", (picture,), (Operator("op", "find", (picture.name,), outputs),), names)
    plan = make_plan(graph, (["d0", "d1"], ["op"]))
    model = FakeModel(graph, {"op": find}, **options)
    return replace(example_bundle(), graph=graph, platform=fake_platform("d0", "d1"), plan=plan, compiled=model)


def _as_ssd(found):
    left, top, right, bottom, scores, classes = np.moveaxis(found, 2, 0)
    boxes = np.stack([top / HEIGHT, left / WIDTH, bottom / HEIGHT, right / WIDTH], axis=2)
    return [boxes, classes, scores, np.array([5.0], "float32")]


NHWC = Tensor("x", (1, HEIGHT, WIDTH, 3), "uint8")
NCHW = Tensor("x", (1, 3, HEIGHT, WIDTH))
SSD = (Tensor("boxes", (1, 5, 4)), Tensor("classes", (1, 5)), Tensor("scores", (1, 5)), Tensor("count", (1,)))


def picture(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return a picture [1, height, width, 3] with five boxes in it, and the rows that Frigate must get."""
    left, top = random.integers(0, WIDTH // 2, 5), random.integers(0, HEIGHT // 2, 5)
    right, bottom = left + random.integers(1, WIDTH // 2, 5), top + random.integers(1, HEIGHT // 2, 5)
    scores, classes = random.permutation(np.arange(30, 100))[:5], random.integers(0, 80, 5)
    image = random.integers(0, 256, (1, HEIGHT, WIDTH, 3), "uint8")
    image[0, 0, :30, 0] = np.stack([left, top, right, bottom, scores, classes], axis=1).ravel()
    rows = np.zeros(ROWS)
    best = [index for index in np.argsort(-scores) if scores[index] >= 40]
    for row, index in zip(rows, best, strict=False):
        row[:2] = classes[index], scores[index] / 100
        row[2:] = top[index] / HEIGHT, left[index] / WIDTH, bottom[index] / HEIGHT, right[index] / WIDTH
    return image, rows


@contextmanager
def serving(bundle: Bundle, folder: Path, count: int = 1, **options) -> Iterator[list[str]]:
    """Yield the endpoints of a server of the bundle; nothing may be left of it afterwards."""
    endpoints = [f"ipc://{folder}/{number}" for number in range(count)]
    with Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline:
        found = interpretation(bundle, **options)
        server = threading.Thread(target=serve, args=(pipeline, found, endpoints), kwargs={"model": "net.tar"})
        server.start()
        try:
            yield endpoints
        finally:
            pipeline.stop()
            server.join(30)
            assert not server.is_alive()
            assert list(folder.glob("[0-9]")) == []


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("model", [NHWC, NCHW], ids=["uint8 NHWC", "float32 NCHW"])
@pytest.mark.parametrize("outputs", [(ENDS,), SSD], ids=["yolo", "ssd"])
def test_answers_are_the_boxes_in_the_picture(model, outputs, layout, tmp_path):
    random = np.random.default_rng(0)
    bundle = detector(model, outputs)
    raw = {"preprocessing": "unit"} if model is NCHW else {}
    with serving(bundle, tmp_path, **raw) as [endpoint], FrigateClient(endpoint) as client:
        assert client.asks_for("yolov9.onnx")
        for _ in range(10):
            image, rows = picture(random)
            sent = image if layout == "NHWC" else np.ascontiguousarray(image.transpose(0, 3, 1, 2))
            np.testing.assert_allclose(client.detect(sent)[0], rows, atol=1e-6)
            if model is NCHW:  # Frigate's input_dtype: float
                np.testing.assert_allclose(client.detect((sent / 255).astype("float32"))[0], rows, atol=1e-6)


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.thorough)])
def test_each_of_four_clients_gets_the_answers_to_its_own_pictures(count, tmp_path):
    def right(endpoint: str, seed: int) -> int:
        random = np.random.default_rng(seed)
        with FrigateClient(endpoint) as client:
            pairs = [picture(random) for _ in range(count)]
            return sum(np.allclose(client.detect(image)[0], rows, atol=1e-6) for image, rows in pairs)

    # Two clients share an endpoint.
    with serving(detector(NHWC), tmp_path, 3) as endpoints, ThreadPoolExecutor() as threads:
        assert list(threads.map(right, [*endpoints, endpoints[0]], range(4))) == [count] * 4


def test_frigates_own_plug_in_gets_the_boxes(tmp_path, monkeypatch):
    """The class of Frigate's source speaks to the server; two stand-ins replace the classes that it derives from."""
    needs("Frigate")

    class DetectionApi:
        def __init__(self, detector_config: object) -> None:
            self.detector_config = detector_config

    bases = {"detection_api": {"DetectionApi": DetectionApi}, "detector_config": {"BaseDetectorConfig": object}}
    for name, members in bases.items():
        monkeypatch.setitem(sys.modules, f"frigate.detectors.{name}", SimpleNamespace(**members))
    plug_in = runpy.run_path(str(FRIGATE))["ZmqIpcDetector"]
    model = SimpleNamespace(path="/config/yolo.onnx", model_type=SimpleNamespace(name="yologeneric"))
    random = np.random.default_rng(0)
    with serving(detector(NHWC), tmp_path) as [endpoint]:
        client = plug_in(SimpleNamespace(endpoint=endpoint, request_timeout_ms=30_000, linger_ms=0, model=model))
        for _ in range(1000):
            image, rows = picture(random)
            np.testing.assert_allclose(client.detect_raw(image), rows, atol=1e-6)
        client._context.destroy(linger=0)


@pytest.mark.parametrize("endpoints", [1, 2])
def test_two_clients_keep_two_devices_busy_at_once(endpoints, tmp_path):
    """Each fake device waits for the other one, so that a picture comes out only if both have one."""
    meeting, warm = threading.Barrier(2, timeout=60), [True]

    def meet(*_: object) -> None:
        if not (warm and warm.pop()):
            meeting.wait()

    bundle = detector(NHWC, hooks={("op", "d0"): meet, ("op", "d1"): meet})
    random = np.random.default_rng(0)
    pairs = [picture(random) for _ in range(2)]
    with serving(bundle, tmp_path, endpoints) as names, ExitStack() as stack, ThreadPoolExecutor() as threads:
        clients = [stack.enter_context(FrigateClient(names[-number])) for number in range(2)]
        for _ in range(5):
            answers = threads.map(lambda client, pair: client.detect(pair[0])[0], clients, pairs)
            for answer, (_, rows) in zip(answers, pairs, strict=True):
                np.testing.assert_allclose(answer, rows, atol=1e-6)
    assert not meeting.broken


def header(**fields: object) -> bytes:
    return json.dumps({"shape": NHWC.shape, "dtype": "uint8", **fields}).encode()


TENSOR = bytes(HEIGHT * WIDTH * 3)
BROKEN = [
    [b""],
    [b"{"],
    [b"\xff\x00"],
    [b"[1]", TENSOR],
    [b"[" * 60_000, TENSOR],
    [b" " * (1 << 17), TENSOR],
    [header()],
    [header(), TENSOR[1:]],
    [header(), TENSOR, TENSOR],
    [header(), TENSOR * 5000],
    [header(shape=[1, 64, 64, 3]), TENSOR],
    [header(shape=[1 << 40] * 50_0), TENSOR],
    [header(shape=[-1]), TENSOR],
    [header(shape="x"), TENSOR],
    [header(dtype="float64"), TENSOR],
    [header(dtype="O"), TENSOR],
    [header(dtype=3), TENSOR],
    [json.dumps({"model_request": "yes"}).encode()],
]


def test_broken_requests_get_no_boxes_and_harm_no_other_client(tmp_path):
    random, lines = np.random.default_rng(0), log_lines("WARNING")
    with serving(detector(NHWC), tmp_path) as [endpoint], FrigateClient(endpoint) as good:
        with FrigateClient(endpoint) as bad:
            for parts in BROKEN:
                for _ in range(2):
                    told, rows = bad.ask(*parts)
                    assert json.loads(told)["error"]
                    assert rows == bytes(480)
                image, expected = picture(random)
                np.testing.assert_allclose(good.detect(image)[0], expected, atol=1e-6)
        with FrigateClient(endpoint) as gone:  # it does not wait for its answer
            gone._socket.send_multipart([header(), TENSOR])
        image, expected = picture(random)
        np.testing.assert_allclose(good.detect(image)[0], expected, atol=1e-6)
    mistakes = [line for line in lines if "a request gets no boxes" in line]
    assert 0 < len(mistakes) == len(set(mistakes)) <= len(BROKEN)
    assert any("the model takes width 64 and height 32" in line for line in mistakes)


def test_clients_that_do_not_speak_the_protocol_harm_no_other(tmp_path):
    random = np.random.default_rng(0)
    with (
        serving(detector(NHWC), tmp_path) as [endpoint],
        FrigateClient(endpoint) as good,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
        context.socket(zmq.PUB) as other,
    ):
        for each in (dealer, other):
            each.setsockopt(zmq.LINGER, 0)
            each.connect(endpoint)
        for _ in range(50):  # without the empty part before a request; with it, but no answer is ever read
            with suppress(zmq.Again):
                dealer.send_multipart([header(), TENSOR], zmq.NOBLOCK)
                dealer.send_multipart([b"", header(), TENSOR], zmq.NOBLOCK)
            image, expected = picture(random)
            np.testing.assert_allclose(good.detect(image)[0], expected, atol=1e-6)


def test_a_model_that_a_client_sends_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    random, lines = np.random.default_rng(0), log_lines("WARNING")
    sent = json.dumps({"model_data": True, "model_name": "../evil.onnx"}).encode()
    with serving(detector(NHWC), tmp_path) as [endpoint], FrigateClient(endpoint) as client:
        (answer,) = client.ask(sent, b"a model" * 1000)
        assert json.loads(answer) == {"model_saved": False, "model_loaded": True}
        image, expected = picture(random)
        np.testing.assert_allclose(client.detect(image)[0], expected, atol=1e-6)
    assert any("'../evil.onnx' that a client sent is left alone: net.tar is served" in line for line in lines)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    ("endpoint", "error"),
    [
        ("tcp://0.0.0.0:0", "other machines reach that address, and there is no authentication.*`allow_others`"),
        ("tcp://*:0", "other machines reach that address"),
        ("tcp://127.0.0.1", "give ipc:///PATH, or tcp://ADDRESS:PORT"),
        ("tcp://127.0.0.1:65536", "give ipc:///PATH, or tcp://ADDRESS:PORT"),
        ("udp://127.0.0.1:5555", "give ipc:///PATH, or tcp://ADDRESS:PORT"),
        ("ipc:///nowhere/socket", "No such file or directory"),
        ("ipc://{folder}/kept", "this file is no socket"),
        ("ipc://{folder}/0", "another program listens there"),
    ],
)
def test_what_cannot_be_listened_at_is_refused(endpoint, error, tmp_path):
    (tmp_path / "kept").write_text("x")
    bundle = detector(NHWC)
    with (
        serving(bundle, tmp_path) as [taken],
        FrigateClient(taken) as client,
        Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline,
    ):
        assert client.asks_for("x")  # it listens by now
        with pytest.raises(OptionError, match=error):
            serve(pipeline, interpretation(bundle), [endpoint.format(folder=tmp_path)], model="net.tar")
        assert client.asks_for("x")
    assert (tmp_path / "kept").read_text() == "x"


def test_a_stage_that_fails_ends_the_server_with_its_error(tmp_path):
    error = OSError("the driver is gone")
    bundle = detector(NHWC, hooks={("op", name): raise_at(1, error) for name in ("d0", "d1")})
    plan = make_plan(bundle.graph, (["d0"], ["op"]))  # frame 0 warms it up
    endpoint = f"ipc://{tmp_path}/0"
    with Pipeline(bundle.compiled, plan, bundle.platform) as pipeline, FrigateClient(endpoint, 300) as client:

        def ask() -> None:
            with suppress(zmq.Again):  # the server is gone
                client.ask(header(), TENSOR)

        asking = threading.Thread(target=ask)
        asking.start()
        with pytest.raises(StageError, match="the driver is gone"):
            serve(pipeline, interpretation(bundle), [endpoint], model="net.tar")
        asking.join()
    assert list(tmp_path.iterdir()) == []


def test_others_are_allowed_where_that_is_given(tmp_path):
    bundle = detector(NHWC)
    with Pipeline(bundle.compiled, bundle.plan, bundle.platform) as pipeline:
        on_line(lambda line: pipeline.stop() if "answers Frigate at tcp://0.0.0.0:0" in line else None, "INFO")
        serve(pipeline, interpretation(bundle), ["tcp://0.0.0.0:0"], model="net.tar", allow_others=True)


def test_a_model_without_boxes_is_refused():
    with pytest.raises(OptionError, match="Frigate needs boxes, and net gives none that are known"):
        interpretation(detector(NHWC, (Tensor("y", (7, 7)),)))
    with pytest.raises(OptionError, match=r"Frigate needs boxes.* classification"):
        interpretation(detector(NHWC, (Tensor("y", (1, 1000)),)), "classification")
    with pytest.raises(OptionError, match="Frigate takes numbers of classes"):
        interpretation(detector(NHWC), "found.py:decode")


def test_the_command_serves_a_model_file_until_ctrl_c(tmp_path):
    needs("tvm")
    needs("onnx")
    endpoint = f"ipc://{tmp_path}/frigate"
    command = Command(tmp_path, "serve", write_tiny_yolo(tmp_path / "tiny.onnx"), "--frigate", endpoint)
    command.wait_until(lambda: "answers Frigate at" in command.errors)
    with FrigateClient(endpoint) as client:
        assert client.asks_for("tiny.onnx")
        rows, error = client.detect(np.zeros((1, SIDE, SIDE, 3), "uint8"))
    command.send(signal.SIGINT)
    assert command.end() == 130
    assert not error
    for row, ((x, y, width, height), kind, score) in zip(rows, FOUND, strict=False):
        box = [y - height / 2, x - width / 2, y + height / 2, x + width / 2]
        assert row.tolist() == pytest.approx([kind, score, *(pixel / SIDE for pixel in box)])
    assert not rows[len(FOUND) :].any()
    assert not (tmp_path / "frigate").exists()
