"""A board that lies: it speaks the protocol, and says what no board says."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

from tvm_pipeline_hosts.remote.frames import PREFACE, FrameError, Header, read_frame, read_into

WELCOME = {"kind": "welcome", "value": {"session": "x"}}
Talk = Callable[[socket.socket], object]


def raw(header: object, body: bytes = b"", said: int | None = None) -> bytes:
    """Return a frame with any header, which says that its arrays have `said` bytes."""
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("!IQ", len(content), len(body) if said is None else said) + content + body


@contextmanager
def lying_board(talk: Talk) -> Iterator[str]:
    """Serve each connection with `talk`, once its client has said who it is; yield the address."""

    def serve(link: socket.socket) -> None:
        with closing(link), suppress(OSError, FrameError):
            read_into(link, memoryview(bytearray(len(PREFACE))))
            read_frame(link)
            link.sendall(PREFACE)
            talk(link)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def answering(answer: Callable[[Header], bytes]) -> Talk:
    """Return what welcomes a client, and answers each of its calls with these bytes."""

    def talk(link: socket.socket) -> None:
        link.sendall(raw(WELCOME))
        while True:
            if (header := read_frame(link).header).kind == "call":
                link.sendall(answer(header))

    return talk
