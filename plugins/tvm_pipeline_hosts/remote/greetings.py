"""How a connection to the server of a board begins: as a client of ours, one of TVM's, or a stranger.

Each function here waits no longer than the link's limits allow. Next: serving.py, which lets clients in.
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

import msgspec

from tvm_pipeline import __version__
from tvm_pipeline_hosts.remote.dialing import Hello, Refusal
from tvm_pipeline_hosts.remote.frames import (
    GREETING,
    PREFACE,
    FrameError,
    Header,
    limit_waits,
    read_frame,
    read_into,
    write_frame,
)

TVM_MAGIC = struct.pack("<i", 0xFF271)
TVM_IN_USE = struct.pack("<i", 0xFF271 + 1)
TVM_GREETING = struct.Struct("<ii")  # the magic, and the length of the client's name behind it
MOST_TVM_NAME = 4096  # bytes
TVM_CLIENTS = b"client:"  # begins the names of clients, and not those of servers, which come to a tracker
KEEPALIVE_S = 10  # of silence, after which the kernel asks whether a client of TVM is still there, and asks again
KEEPALIVES = 5  # without an answer, after which it is not
HANG_UP_S = 1.0  # for the other end to read why it is sent away
MOST_HELLO_BYTES = 1 << 16
STRANGER = (
    b"HTTP/1.0 400 Bad Request\r\nContent-Type: text/plain\r\n\r\n"
    b"This is tvm-pipeline serve-rpc, which tvm-pipeline itself calls.\r\n"
)


def is_of_tvm(link: socket.socket) -> bool:
    """Wait for the first bytes, which stay there; return whether TVM's own clients begin so."""
    return _peeked(link, len(TVM_MAGIC)) == TVM_MAGIC


def greets_as_tvm(link: socket.socket) -> bool:
    """Wait for the whole greeting of a client of TVM, which stays there for TVM; return whether it is one."""
    if len(head := _peeked(link, TVM_GREETING.size)) < TVM_GREETING.size:
        return False
    _, length = TVM_GREETING.unpack(head)
    if not 0 < length <= MOST_TVM_NAME:
        return False
    name = _peeked(link, len(head) + length)[len(head) :]
    return len(name) == length and name.startswith(TVM_CLIENTS)


def notice_death(link: socket.socket) -> None:
    """Have the kernel break a connection whose other end has lost its power, since TVM waits without a limit."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, limit in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, KEEPALIVES),
    ):
        link.setsockopt(socket.IPPROTO_TCP, option, limit)


def read_hello(link: socket.socket) -> Hello | Refusal:
    """Return who a client is, or why its kind is not served; raise where it is no client."""
    greeting = bytearray(len(GREETING))
    read_into(link, memoryview(greeting))
    if greeting != GREETING:
        link.sendall(STRANGER)
        hang_up(link)
        raise FrameError("no client")
    rest = bytearray(len(PREFACE) - len(GREETING))
    read_into(link, memoryview(rest))
    link.sendall(PREFACE)  # whatever the client's version is: it says then what both are
    if GREETING + rest != PREFACE:
        hang_up(link)
        raise FrameError("another version")
    try:
        header = read_frame(link, MOST_HELLO_BYTES, 0).header
        if header.kind != "hello":
            raise FrameError(f"{header.kind} at the door")
        hello = msgspec.json.decode(header.value, type=Hello)
        if not hello.client.isprintable():
            raise FrameError("a client whose name is not one line of text")
    except (FrameError, msgspec.MsgspecError):
        hang_up(link)
        raise
    if hello.tvm_pipeline != __version__:
        return Refusal(
            f"the board has tvm-pipeline {__version__}, and here is {hello.tvm_pipeline[:40]}; install the same "
            "version at both ends"
        )
    return hello


def refuse(link: socket.socket, refusal: Refusal) -> None:
    write_frame(link, Header("refused", value=msgspec.Raw(msgspec.json.encode(refusal))))
    hang_up(link)


def hang_up(link: socket.socket) -> None:
    """End a connection whose other end may still send; to close it over unread bytes would take back what was said."""
    limit_waits(link, HANG_UP_S)
    link.shutdown(socket.SHUT_WR)
    until_s = time.monotonic() + HANG_UP_S
    with suppress(OSError):
        while time.monotonic() < until_s and link.recv(1 << 16):
            pass


def _peeked(link: socket.socket, size: int) -> bytes:
    """Return so many bytes, which stay there to be received; fewer where no more come in time."""
    return link.recv(size, socket.MSG_PEEK | socket.MSG_WAITALL)
