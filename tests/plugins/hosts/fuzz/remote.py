"""Fuzzers of the protocol of boards: one call is one hostile input, made of the numbers that a seed gives.

    frames          bytes that begin like a frame, for `read_frame`
    door            bytes of a stranger, for a server that lives in this process
    calls           calls of a client that is let in, with any arguments and arrays
    lying boards    a board that answers a client with any frames

A fuzzer raises where anything but an error of this package gets out, where the server serves no more, or where a client
never ends. Next: __main__.py, which calls them.
"""

from __future__ import annotations

import json
import logging
import random
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.plugins.hosts.remote.lying_board import WELCOME, lying_board, raw
from tvm_pipeline.errors import PipelineError
from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.frames import DTYPES, PREFACE, Frame, FrameError, Header, read_frame
from tvm_pipeline_hosts.remote.greetings import TVM_MAGIC
from tvm_pipeline_hosts.remote.methods import METHODS
from tvm_pipeline_hosts.remote.parcels import CHUNK, sum_of
from tvm_pipeline_hosts.remote.serving import BoardServer
from tvm_pipeline_hosts.remote.session import Session, _answer

ENDS_S = 60.0  # for a client that a board lies to
# Methods that compute for as long as they are asked to are left out.
CALLED = ("assemble", "echo", "give", "make_stage", "missing", "put", "run_stage", "swallow", "fly", "")
NUMBERS = (-1, 0, 1, 2, 7, 255, 2**16, 2**31, 2**32, 2**63, 2**64, 2**70, 10**4000)
TEXTS = ("", "x", "\0", "\x1b]0;pwned\x07", "../../etc/passwd", "é\u202e", "[/red]", "x" * 100_000, "0" * 64)


def fuzz_frames(draw: random.Random) -> None:
    """Read any bytes as a frame."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=_send, args=(ours, _damaged(draw, _frame(draw))))
        sender.start()
        try:
            read_frame(theirs)
        except (FrameError, OSError):
            pass
        finally:
            theirs.close()
            sender.join()


def fuzz_door(draw: random.Random) -> None:
    """Say anything to a server; it must serve the next one, and have no session."""
    server = _server()
    value = {"client": _text(draw), "tvm_pipeline": draw.choice(TEXTS), "session": _text(draw), "seen": _number(draw)}
    hello = PREFACE + raw({"kind": "hello", "value": draw.choice([value, _value(draw)])})
    tvm = TVM_MAGIC + struct.pack("<i", draw.choice([-1, 0, 5, 4096, 4097, 2**31 - 1])) + draw.randbytes(5)
    said = draw.choice([hello, tvm, PREFACE + _frame(draw), draw.randbytes(draw.randrange(100))])
    with _raising():
        with socket.create_connection(server.address, ENDS_S) as link:
            _send(link, _damaged(draw, said))
            _heard(link)
        with socket.create_connection(server.address, ENDS_S) as link:
            link.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(10))
            if not _heard(link).startswith(b"HTTP/1.0 400"):
                raise AssertionError("the server answers nobody any more")
        if not server.is_free:
            raise AssertionError("a stranger has a session")


def fuzz_calls(draw: random.Random) -> None:
    """Call a method of a board with anything; one answer is sent, and nothing else happens."""
    with tempfile.TemporaryDirectory() as folder, _without_logs():
        store = Path(folder) / "cache" / "parcels"
        session, channel = Session("attic", store), _Kept()
        for call in range(draw.randrange(1, 5)):
            header = Header("call", call, 0, call, draw.choice(CALLED), value=_json(_arguments(draw)))
            arrays = [_array(draw) for _ in range(draw.choice([0, 1, 1, 1, 2]))]
            _answer(session, channel, Frame(header, arrays), METHODS)  # type: ignore[arg-type]
            if channel.kinds[call:] not in (["done"], ["error"]):
                raise AssertionError(f"{header.method} answered {channel.kinds[call:]}")
        session.close()
        if outside := [path for path in Path(folder).rglob("*") if path.is_file() and store not in path.parents]:
            raise AssertionError(f"a call wrote {outside}")


def fuzz_lying_board(draw: random.Random) -> None:
    """Call a board that answers with anything; the client ends, with a result or an error of this package."""
    frames = [_frame(draw) for _ in range(draw.randrange(1, 4))]
    reply = _damaged(draw, b"".join(frames)) if draw.random() < 0.5 else b"".join(frames)
    if b'"beat"' in reply:  # whoever beats on each link is one that computes, and may do so for ever
        return
    welcome = raw(WELCOME) if draw.random() < 0.8 else raw({"kind": "welcome", "value": _value(draw)})

    def talk(link: socket.socket) -> None:
        link.sendall(welcome)
        read_frame(link)
        link.sendall(reply)
        while link.recv(1 << 16):
            pass

    def call(address: str) -> None:
        with suppress(PipelineError), Board.connect(address, silent_s=0.2, keep_s=0.3) as board:
            board.call("echo", {})

    with _raising(), lying_board(talk) as address:
        client = threading.Thread(target=call, args=(address,), daemon=True)
        client.start()
        client.join(ENDS_S)
        if client.is_alive():
            raise AssertionError(f"the client of a lying board does not end within {ENDS_S:g} s")


FUZZERS: dict[str, Callable[[random.Random], None]] = {
    "remote frames": fuzz_frames,
    "remote door": fuzz_door,
    "remote calls": fuzz_calls,
    "remote lying boards": fuzz_lying_board,
}


# ------------------------------------------------------------------------------------------------ hostile values


def _frame(draw: random.Random) -> bytes:
    """Return a frame with any header, lengths that lie, and arrays of any extents."""
    header: dict[str, Any] = {
        "kind": draw.choice(["call", "tell", "done", "error", "beat", "bye", "welcome", "refused"])
    }
    for name in ("number", "seen", "call"):
        if draw.random() < 0.5:
            header[name] = draw.choice([1, 1, 2, _number(draw)])
    if draw.random() < 0.7:
        header["value"] = _value(draw)
    body = b""
    if draw.random() < 0.4:
        header["arrays"] = [
            [draw.choice([*sorted(DTYPES), "object", ">f4"]), _shape(draw)] for _ in range(draw.randrange(4))
        ]
        body = draw.randbytes(draw.choice([0, 1, 16, 1000]))
    content = json.dumps(header).encode()
    if draw.random() < 0.1:
        content = b"[" * draw.choice([1, 100_000]) + content
    if draw.random() < 0.1:
        return struct.pack("!IQ", draw.choice([len(content), 2**32 - 1]), draw.choice([0, 2**32, 2**64 - 1])) + content
    return raw(content, body, draw.choice([None, None, 0, len(body) + 1, 2**40]))


def _value(draw: random.Random) -> Any:
    """Return what stands in a frame: nearly what is expected, or anything."""
    told = {
        "name": draw.choice(["OptionError", "StageError", "BoardLostError", "SystemExit", _text(draw)]),
        "text": _text(draw),
    }
    facts = {name: draw.choice([None, _text(draw), _number(draw)]) for name in ("option", "value", "stage", "device")}
    device = {"name": draw.choice(["cpu0", _text(draw)]), "backend": draw.choice(["host", _text(draw)])}
    board = {
        "name": _text(draw),
        "platform": {"name": _text(draw), "devices": [device]},
        "software": {"machine": _text(draw)},
    }
    return draw.choice(
        [None, _text(draw), _number(draw), [], {}, told, told | {"facts": facts}, board, {"session": _text(draw)},
         {"text": _text(draw), "has_ended": draw.choice([True, False, 1])}]
    )  # fmt: skip


def _arguments(draw: random.Random) -> Any:
    """Return the arguments of a call: nearly what is expected, or anything."""
    content = draw.randbytes(draw.randrange(20))
    place = {"sum": draw.choice([sum_of(content), _text(draw)]), "offset": draw.choice([0, _number(draw)])}
    stage = {"bundle": draw.choice(TEXTS), "device": _text(draw), "operators": draw.choice([[], [_text(draw)], 5])}
    return draw.choice(
        [_value(draw), place | {"total": draw.choice([len(content), CHUNK, _number(draw)])}, stage,
         {"size_bytes": draw.choice([0, 1000, -1, 2**28 + 1, _number(draw)])}]
    )  # fmt: skip


def _array(draw: random.Random) -> Any:
    manifest = {
        "format": 2,
        "tvm_pipeline": "0",
        "backend": "x",
        "versions": {},
        "sha256": {_text(draw): draw.choice(TEXTS)},
    }
    content = draw.choice([draw.randbytes(draw.randrange(200)), json.dumps(manifest).encode(), b"[" * 10_000])
    return np.frombuffer(content, np.uint8)


def _shape(draw: random.Random) -> list[int]:
    return [draw.choice([0, 1, 2, 3, _number(draw)]) for _ in range(draw.choice([0, 1, 2, 3, 33]))]


def _number(draw: random.Random) -> int:
    return draw.choice([draw.choice(NUMBERS), draw.randrange(100), draw.getrandbits(40)])


def _text(draw: random.Random) -> str:
    return draw.choice([draw.choice(TEXTS), "".join(chr(draw.randrange(1, 0xD7FF)) for _ in range(draw.randrange(10)))])


def _damaged(draw: random.Random, content: bytes) -> bytes:
    """Return bytes as they are, cut, or with some of them changed."""
    damaged = bytearray(content)
    if draw.random() < 0.3:
        del damaged[draw.randrange(len(damaged) + 1) :]
    if draw.random() < 0.3 and damaged:
        for _ in range(draw.randrange(1, 5)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged)


# ------------------------------------------------------------------------------------------------ both ends


class _Kept:
    """Stands for the channel of a session: it keeps the kinds of the frames that are sent."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def send(self, header: Header, arrays: object = ()) -> None:
        self.kinds.append(header.kind)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep the tracebacks that a session logs from the output."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@cache
def _server() -> BoardServer:
    server = BoardServer(Address("127.0.0.1", 0), Path("/nonexistent"))  # no session ever needs it
    threading.Thread(target=server.serve, daemon=True).start()
    return server


@contextmanager
def _raising() -> Iterator[None]:
    """Raise what a thread raises meanwhile."""
    escaped: list[BaseException] = []

    def keep(told: threading.ExceptHookArgs) -> None:
        if told.exc_value is not None:
            escaped.append(told.exc_value)

    before, threading.excepthook = threading.excepthook, keep
    try:
        yield
    finally:
        threading.excepthook = before
    for error in escaped:
        raise error


def _send(link: socket.socket, content: bytes) -> None:
    try:
        link.sendall(content)
        link.shutdown(socket.SHUT_WR)
    except OSError:  # the other end has hung up
        pass


def _heard(link: socket.socket) -> bytes:
    """Return what comes until the other end hangs up."""
    came = b""
    try:
        while piece := link.recv(1 << 16):
            came += piece
    except ConnectionError:
        pass
    return came


def _json(value: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())
