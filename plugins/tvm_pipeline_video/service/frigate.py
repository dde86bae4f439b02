"""A detector of Frigate over ZeroMQ: pictures of its cameras come in, and boxes go out.

A request has two parts: JSON with the shape and the type of a tensor, and its bytes. The answer has two, too: JSON, and
20 rows of float32 (class, score, top, left, bottom, right as shares of the picture), the best first, zeros behind them.
A request that makes no sense gets zeros and, in the JSON, an `error`. Before its first picture Frigate asks for a model
by its name. The answer is that one is loaded, and a file that a client sends is never kept or read.

One thread takes the requests of all endpoints while the pipeline has room for a picture, and the others wait in ZeroMQ.

Source: the plug-in `zmq` of https://github.com/blakeblackshear/frigate
"""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import Bundle, PipelineError
from tvm_pipeline.errors import OptionError, PipelineClosedError, PipelineTimeoutError, StageError
from tvm_pipeline.runtime.frame_stream import FrameStream
from tvm_pipeline_video.service.host_planning import ApplicationRecord
from tvm_pipeline_video.service.video_extra import (
    FAMILIES,
    Annotation,
    Interpretation,
    Preprocessing,
    Request,
    VideoError,
    choose,
    interpret,
    preprocess,
)

try:
    import zmq
except ImportError as error:
    raise PipelineError(f"`frigate` needs an extra: pip install 'tvm-pipeline[frigate]' ({error})") from error

ROWS = 20
THRESHOLD = 0.4  # of Frigate's own detectors: it reads no row below it
MOST_CLASSES = 1000  # where the outputs do not tell
MOST_BYTES = 256 << 20  # of a part; ZeroMQ hangs up on a client that sends more
LONGEST_HEADER = 1 << 16  # bytes
RETRY_MS = 10  # while a picture waits for room in the pipeline
MOST_LINES = 100  # of the log; a client repeats its mistake many times a second
BOXES = {name for key in ("yolo", "ssd", "centernet", "mediapipe", "picodet") for name in FAMILIES[key].names}
ENDPOINT = re.compile(r"ipc://(?P<path>[^@*].*)|tcp://(?P<host>.+):(?P<port>\d{1,5})")

_log = logging.getLogger(__name__)


class Header(msgspec.Struct):
    """The first part of a request."""

    shape: tuple[int, ...] = ()
    dtype: str = ""
    model_request: bool = False
    model_data: bool = False
    model_name: str = ""


def interpretation(bundle: Bundle, decoder: str = "", preprocessing: str | Path | None = None) -> Interpretation:
    """Return how a detector is read: its labels are the numbers of its classes, since Frigate has the names.

    Args:
        decoder: the name of one; without it, that which the bundle was compiled with, or the one that is recognised.
        preprocessing: as `interpret` takes it; without it, the bundle's.

    Raises:
        OptionError: no decoder is recognised, or it finds no boxes.
    """
    graph, metadata = bundle.compiled.graph, bundle.metadata
    known = ApplicationRecord.of(bundle)
    name = decoder or (known.decoder if known else "")
    if ":" in name:
        raise OptionError(f"`decoder` {name}: Frigate takes numbers of classes; give a decoder of docs/decoders.md")
    choice = choose(graph, Request(name), metadata)
    if choice.form is None or choice.form.name not in BOXES:
        raise OptionError(f"Frigate needs boxes, and {graph.name} gives none that are known. {choice.said}")
    numbers = tuple(map(str, range(choice.form.classes or MOST_CLASSES)))
    request = Request(choice.form.name, numbers, THRESHOLD)
    return interpret(graph, metadata, request, preprocessing or bundle.preprocessing, "from the bundle")


def serve(
    pipeline: FrameStream,
    found: Interpretation,
    endpoints: Sequence[str],
    *,
    model: str,
    allow_others: bool = False,
) -> None:
    """Answer the clients of each endpoint, until the pipeline is stopped by another thread or raises.

    Args:
        pipeline: is running, and takes no other frames.
        found: what `interpretation` returns.
        endpoints: ipc:///PATH or tcp://ADDRESS:PORT.
        model: its name in messages.
        allow_others: listen also where other machines reach the port.

    Raises:
        OptionError: it cannot listen there.
        StageError: a stage failed, and no other device can run it.
    """
    detector = Detector(found, model)
    context = zmq.Context()
    files: list[Path] = []  # of sockets, which ZeroMQ leaves behind
    answering: threading.Thread | None = None
    try:
        pipeline.submit(detector.black())  # the first frame takes long, and Frigate waits for 200 ms
        detector.answer(pipeline.result().outputs)
        requests = _bound(context, endpoints, allow_others, files)
        taking, giving = context.socket(zmq.PULL), context.socket(zmq.PUSH)
        taking.bind("inproc://answers")
        giving.connect("inproc://answers")
        answering = threading.Thread(target=_answer, args=(requests, taking, pipeline, detector), daemon=True)
        answering.start()
        _log.info("%s answers Frigate at %s; Ctrl-C ends it", model, ", ".join(endpoints))
        with giving, suppress(PipelineClosedError, zmq.Again):  # nobody takes an answer when the pipeline has ended
            for result in pipeline.results():
                giving.send_multipart([result.tag, b"", *detector.answer(result.outputs)], zmq.NOBLOCK)
    finally:
        pipeline.stop()
        if answering:
            context.term()  # the thread leaves, and closes its sockets
            answering.join()
        else:
            context.destroy(linger=0)
        for file in files:
            file.unlink(missing_ok=True)


def _answer(requests: zmq.Socket[bytes], answers: zmq.Socket[bytes], pipeline: FrameStream, detector: Detector) -> None:
    """Put the pictures of requests into the pipeline, and send answers, until the context or the pipeline ends."""
    waiting: tuple[bytes, NDArray[Any]] | None = None  # a client's picture, until the pipeline has room for it
    poller = zmq.Poller()
    poller.register(answers, zmq.POLLIN)
    with requests, answers, suppress(zmq.ContextTerminated, PipelineClosedError, StageError):
        while True:
            poller.register(requests, 0 if waiting else zmq.POLLIN)
            ready = dict(poller.poll(RETRY_MS if waiting else None))
            if answers in ready:
                requests.send_multipart(answers.recv_multipart())
            if requests in ready:
                client, *parts = [part.buffer for part in requests.recv_multipart(copy=False)]
                if not parts or len(parts[0]):
                    continue  # REQ sends an empty part before its own
                found = detector.prepared(parts[1:])
                if isinstance(found, list):
                    requests.send_multipart([client, b"", *found])
                else:
                    waiting = bytes(client), found
            if waiting:
                with suppress(PipelineTimeoutError):
                    pipeline.submit(waiting[1], 0, tag=waiting[0])
                    waiting = None


class Detector:
    """Reads requests and writes answers, whatever a request holds."""

    def __init__(self, found: Interpretation, model: str) -> None:
        if found.decode is None or found.preprocessing.size is None:
            raise OptionError("Frigate needs a decoder, and pictures of one size")
        self._decode, self._settings = found.decode, found.preprocessing
        self._model, self._size = model, found.preprocessing.size
        self._told: set[str] = set()  # lines of the log

    def black(self) -> NDArray[Any]:
        """Return what the model takes for a black picture."""
        return np.zeros(self._settings.input_shape(*self._size), self._settings.dtype)

    def prepared(self, parts: Sequence[Any]) -> NDArray[Any] | list[bytes]:
        """Return what the model takes for the picture of a request, or the answer to a request without one."""
        try:
            if not parts or len(parts[0]) > LONGEST_HEADER:
                raise VideoError(f"a header of {len(parts[0]) if parts else 0} bytes")
            header = msgspec.json.decode(parts[0], type=Header)
            if header.model_request or header.model_data:
                return [msgspec.json.encode(self._about_model(header))]
            return _tensor(header, parts[1:], self._settings)
        except Exception as error:  # whatever a client sends, the others go on
            return self._no_boxes(error)

    def answer(self, outputs: dict[str, NDArray[Any]]) -> list[bytes]:
        """Return the answer to a picture from what the model found in it."""
        try:
            return _message(rows_of(self._decode(outputs, self._settings.transform(*self._size)), *self._size))
        except Exception as error:
            return self._no_boxes(error)

    def _no_boxes(self, error: Exception) -> list[bytes]:
        self._tell(f"a request gets no boxes: {error}")
        return _message(np.zeros((ROWS, 6), np.float32), error=str(error))

    def _about_model(self, header: Header) -> dict[str, bool]:
        name = repr(header.model_name[:100])
        if header.model_data:
            self._tell(f"the model {name} that a client sent is left alone: {self._model} is served")
            return {"model_saved": False, "model_loaded": True}
        self._tell(f"Frigate asks for the model {name}; {self._model} answers", logging.INFO)
        return {"model_available": True, "model_loaded": True}

    def _tell(self, line: str, level: int = logging.WARNING) -> None:
        if line not in self._told and len(self._told) < MOST_LINES:
            self._told.add(line)
            _log.log(level, "%s", line)


def _message(rows: NDArray[np.float32], **more: str) -> list[bytes]:
    return [msgspec.json.encode({"shape": rows.shape, "dtype": "float32", **more}), rows.tobytes()]


def rows_of(found: Sequence[Annotation], width: int, height: int) -> NDArray[np.float32]:
    """Return the best boxes of a picture of this size as Frigate takes them.

    Examples:
        >>> rows_of([Annotation("7", 0.5, (0, 10, 50, 20))], 100, 40)[:2].tolist()
        [[7.0, 0.5, 0.25, 0.0, 0.5, 0.5], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]
    """
    boxed = [(one.score or 0.0, one.label, one.box) for one in found if one.box and one.label.isdecimal()]
    rows = np.zeros((ROWS, 6), np.float32)
    for row, (score, label, box) in zip(rows, sorted(boxed, key=lambda one: -one[0]), strict=False):
        left, top, right, bottom = box
        row[:2] = int(label), score
        row[2:] = np.clip((top / height, left / width, bottom / height, right / width), 0, 1)
    return rows


def _tensor(header: Header, parts: Sequence[Any], settings: Preprocessing) -> NDArray[Any]:
    """Return what the model takes of a request: uint8 is a picture, and float32 has been prepared by Frigate."""
    width, height = settings.size or (0, 0)
    layouts: dict[tuple[int, ...], str] = {(1, height, width, 3): "NHWC", (1, 3, height, width): "NCHW"}
    layout, is_prepared = layouts.get(header.shape), header.dtype == settings.dtype == "float32"
    if layout is None or not (header.dtype == "uint8" or (is_prepared and settings.channels == 3)):
        raise VideoError(
            f"a tensor of {header.dtype[:20]!r} {list(header.shape[:6])}; the model takes width {width} and height "
            f"{height}, so set these and `input_dtype: int` in Frigate"
        )
    sizes = [memoryview(part).nbytes for part in parts]
    if sizes != [width * height * 3 * np.dtype(header.dtype).itemsize]:
        raise VideoError(f"parts of {sizes[:6]} bytes behind the header, which says {header.dtype} {header.shape}")
    array = np.frombuffer(parts[0], header.dtype).reshape(header.shape)
    if is_prepared:
        turns = {"NHWCNCHW": (0, 3, 1, 2), "NCHWNHWC": (0, 2, 3, 1)}.get(f"{layout}{settings.layout}")
        return array.transpose(turns) if turns else array
    return preprocess(array[0] if layout == "NHWC" else array[0].transpose(1, 2, 0), settings)


def _bound(
    context: zmq.Context[zmq.Socket[bytes]], endpoints: Sequence[str], allow_others: bool, files: list[Path]
) -> zmq.Socket[bytes]:
    """Return a socket that listens, and note its files; raise OptionError where it may not or cannot."""
    made = context.socket(zmq.ROUTER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
    made.setsockopt(zmq.RCVHWM, 2)  # of a client, which sends one request at a time
    for endpoint in endpoints:
        path = _checked(endpoint, allow_others)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            raise _refusal(endpoint, f"{error.strerror}; give another endpoint") from error
        if path:
            files.append(path)
    return made


def _checked(endpoint: str, allow_others: bool) -> Path | None:
    """Return the file of an endpoint's socket, if it has one; raise OptionError if it may not be listened at."""
    found = ENDPOINT.fullmatch(endpoint)
    if found is None or int(found["port"] or 0) >= 1 << 16:
        raise _refusal(endpoint, "give ipc:///PATH, or tcp://ADDRESS:PORT")
    if found["host"]:
        if not allow_others and not _is_loopback(found["host"]):
            raise _refusal(
                endpoint,
                "other machines reach that address, and there is no authentication: whoever reaches the port has "
                "pictures analysed here. Listen on 127.0.0.1, or give `allow_others` in a network where you trust "
                "every machine",
            )
        return None
    path = Path(found["path"])
    if path.exists():  # ZeroMQ would remove it
        if not path.is_socket():
            raise _refusal(endpoint, "this file is no socket; give the name of a new one")
        with socket.socket(socket.AF_UNIX) as other:
            if other.connect_ex(str(path)) == 0:
                raise _refusal(endpoint, "another program listens there; give another path")
    return path


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface or *, of which ZeroMQ makes something else than the system does
        return host == "localhost"


def _refusal(endpoint: str, why: str) -> OptionError:
    return OptionError(f"`frigate` {endpoint}: {why}", option="frigate", value=endpoint)
