"""A connection to the server of a board, or the reason why there is none.

The client sends PREFACE and a `hello`; the server PREFACE, beats while a session starts, and a `welcome` or `refused`.
"""

from __future__ import annotations

import getpass
import os
import socket
import time
from contextlib import suppress

import msgspec

from tvm_pipeline import __version__
from tvm_pipeline.errors import BoardLostError
from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.frames import (
    GREETING,
    PREFACE,
    PROTOCOL,
    FrameError,
    Header,
    limit_waits,
    read_frame,
    read_into,
    write_frame,
)

CONNECT_S = 5.0
START_S = 120.0  # for a session to start, while the server beats; a small board imports its compiler for half a minute


class Hello(msgspec.Struct, frozen=True):
    """What a client says first.

    Attributes:
        client: who it is, for others that find the board in use.
        tvm_pipeline: the version.
        session: that it has; empty for a new one.
        seen: the number of the last frame that it has of the session.
    """

    client: str
    tvm_pipeline: str
    session: str = ""
    seen: int = 0


class Refusal(msgspec.Struct, frozen=True):
    """Why a server takes no client.

    Attributes:
        has_ended: the session is over, for the reason in `text`; else nothing is known of the client.
    """

    text: str
    has_ended: bool = False


class RefusedError(Exception):
    """The board answered, and does not take this client."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.text)
        self.has_ended = refusal.has_ended


class NoBoardError(Exception):
    """What answers is not the server of a board, or of another version."""


class _Welcome(msgspec.Struct, frozen=True):
    session: str


def dial(address: Address, session: str, seen: int, silent_s: float) -> tuple[socket.socket, str, int]:
    """Connect to a board; return the connection, the session, and the number of the last frame that the board has.

    Raises:
        OSError: nothing answers, or the link breaks. Another try may help.
        RefusedError, NoBoardError: another try does not help.
    """
    link = socket.create_connection(address, CONNECT_S)
    try:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit_waits(link, silent_s)
        link.sendall(PREFACE)
        write_frame(link, Header("hello", value=msgspec.Raw(msgspec.json.encode(_hello(session, seen)))))
        _check_preface(link)
        until_s = time.monotonic() + START_S
        while (header := read_frame(link, most_array_bytes=0).header).kind == "beat":
            if time.monotonic() > until_s:
                raise NoBoardError(
                    f"its session did not start within {START_S:g} s; look at the standard error of `tvm-pipeline "
                    "serve-rpc` there"
                )
        if header.kind == "refused":
            raise RefusedError(msgspec.json.decode(header.value, type=Refusal))
        if header.kind != "welcome":
            raise NoBoardError(f"it answered with {header.kind}")
        return link, msgspec.json.decode(header.value, type=_Welcome).session, header.seen
    except (FrameError, msgspec.MsgspecError) as error:
        link.close()
        raise NoBoardError(str(error)) from error
    except BaseException:
        link.close()
        raise


def unreachable(address: Address, error: OSError) -> BoardLostError:
    """Return what to tell of a board that does not answer."""
    if isinstance(error, ConnectionResetError):
        hint = (
            "the connection was closed at once, as `ssh -L` does where nothing listens on the board: start "
            "`tvm-pipeline serve-rpc` there"
        )
    elif isinstance(error, (BlockingIOError, TimeoutError)):
        hint = "it does not answer; is the board on, and is the address that of `tvm-pipeline serve-rpc`?"
    elif isinstance(error, socket.gaierror):
        hint = f"there is no host {address.host} ({error.strerror})"
    else:
        hint = (
            f"{error.strerror or error}; start `tvm-pipeline serve-rpc` on the board, and `ssh -N -L "
            f"{address.port}:localhost:9190 BOARD` here"
        )
    return BoardLostError(f"no board at {address}: {hint}")


def _hello(session: str, seen: int) -> Hello:
    user = str(os.getuid())
    with suppress(KeyError, OSError, ImportError):
        user = getpass.getuser()
    return Hello(f"{user}@{socket.gethostname()} (pid {os.getpid()})", __version__, session, seen)


def _check_preface(link: socket.socket) -> None:
    """Raise NoBoardError where the other end is no server of this protocol."""
    came = bytearray()
    while len(came) < len(PREFACE) and GREETING.startswith(bytes(came[: len(GREETING)])):
        one = bytearray(1)
        read_into(link, memoryview(one))
        came += one
    if came == PREFACE:
        return
    if came.startswith(GREETING):
        told = came[len(GREETING) :].split()
        if told and told[0] != b"%03d" % PROTOCOL:
            raise NoBoardError(
                f"it speaks version {int(told[0]) if told[0].isdigit() else 0} of the protocol, and this tvm-pipeline "
                f"({__version__}) version {PROTOCOL}; install the same version at both ends"
            )
        raise NoBoardError("its processor has another byte order than this one")
    with suppress(OSError):
        came += link.recv(200)
    text = came.decode("ascii", "replace")
    if text.startswith("SSH-"):
        raise NoBoardError(
            f"it is an SSH server ({text.split(chr(10))[0].strip()}); forward a port through it, `ssh -N -L "
            "9190:localhost:9190 BOARD`, and give that port"
        )
    if text.lower().startswith(("http/", "<!doctype", "<html")):
        raise NoBoardError("it is a web server; give the port of `tvm-pipeline serve-rpc`")
    raise NoBoardError(f"it begins with {text[:40]!r}; give the port of `tvm-pipeline serve-rpc`")
