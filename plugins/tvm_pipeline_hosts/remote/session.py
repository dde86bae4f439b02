"""A session of a client: the process on the board that does what the client calls, one call after the other.

It gets the connection itself from the server, so that a tensor passes no other process. What crashes here, such as a
kernel with an instruction that this processor lacks, ends the session alone. The server gives it another connection
when the client comes back over a new link.

    order                   the name of the board and the times
    channel                 of the server: each connection, beside the number of the last frame that the client has. Its
                            end is ours.
    exit code ABANDONED     the client did not come back
    exit code BROKE         the client broke the protocol again and again

Next: methods.py, for what can be called.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import Bundle, open_bundle
from tvm_pipeline.backends.contract import Array, StageRunner
from tvm_pipeline.errors import RunError
from tvm_pipeline_hosts.remote.channel import Channel, ClosedError
from tvm_pipeline_hosts.remote.frames import Frame, FrameError, Header, described, limit_waits, write_frame
from tvm_pipeline_hosts.remote.parcels import Parcels
from tvm_pipeline_hosts.remote.told_errors import error_message

# Connections with the number of the last frame that the client has; None at the end of the server.
_Links = queue.Queue["tuple[socket.socket, int] | None"]
READY, LEAVING = b"ready", b"leaving"  # to the server
ABANDONED, BROKE = 75, 76
GRACE_S = 3.0  # for a call that runs when the server ends
MOST_OPEN = 2  # bundles of a session
MOST_MESSAGE_BYTES = 1 << 16  # between server and session
_ARGUMENTS = msgspec.json.Decoder(dict[str, Any])


class SessionStart(msgspec.Struct, frozen=True):
    """The order of a session."""

    session: str
    board: str
    folder: str
    silent_s: float
    keep_s: float


class Session:
    """What lasts from call to call.

    Attributes:
        board: the name of the board.
        parcels: the bundles that are here.
        stage: what a pipeline of another host runs here, and the tensors that it writes; None where it makes none.
        received: the tensors that the stage reads.
    """

    def __init__(self, board: str, folder: Path) -> None:
        self.board, self.parcels = board, Parcels(folder)
        self.stage: tuple[StageRunner, list[Array]] | None = None
        self.received: list[Array] = []
        self._open: OrderedDict[str, tuple[Bundle, ExitStack]] = OrderedDict()

    def opened(self, id: str) -> Bundle:
        """Return a bundle that was sent, opened here; it is closed when others are opened, or the session ends.

        Raises:
            BundleError: it is not here, or cannot be opened on this board.
        """
        if id in self._open:
            self._open.move_to_end(id)
            return self._open[id][0]
        path = self.parcels.bundle(id)
        while len(self._open) >= MOST_OPEN:
            self._open.popitem(last=False)[1][1].close()
        with ExitStack() as stack:
            bundle = stack.enter_context(open_bundle(path))
            self._open[id] = bundle, stack.pop_all()
        return bundle

    def close(self) -> None:
        """Close every bundle."""
        while self._open:
            self._open.popitem()[1][1].close()


def serve(order: bytes, control: socket.socket) -> None:
    """Be the process of a session until its client, the server or KEEP_S ends it."""
    faulthandler.enable(all_threads=False)
    logging.getLogger().setLevel(logging.INFO)  # for steps, which the client hears
    # A server that was killed ends it as another one does, by the end of the channel: bundles are closed first.
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    begin = msgspec.json.decode(order, type=SessionStart)
    from tvm_pipeline_hosts.remote.methods import METHODS  # which import more than this module, and take a while

    links: _Links = queue.Queue()

    def relink(seen: int, until_s: float) -> tuple[socket.socket, int]:
        while True:
            try:
                came = links.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise TimeoutError from None
            if came is None:
                raise ClosedError
            link, has = came
            welcome = msgspec.json.encode({"session": begin.session})
            with suppress(OSError):  # it broke again, and another one may come
                limit_waits(link, begin.silent_s)
                write_frame(link, Header("welcome", seen=seen, value=msgspec.Raw(welcome)))
                return link, has

    def give_up(error: BaseException) -> None:
        if isinstance(error, ClosedError):
            _leave(control)
            time.sleep(GRACE_S)  # for what ends by itself
            os._exit(0)
        os._exit(ABANDONED if isinstance(error, TimeoutError) else BROKE if isinstance(error, FrameError) else 1)

    channel = Channel(relink, begin.silent_s, begin.keep_s, give_up)
    control.send(READY)
    threading.Thread(target=_take_links, args=(control, links, channel), name="links", daemon=True).start()
    session = Session(begin.board, Path(begin.folder))
    try:
        while (frame := channel.receive()).header.kind != "bye":
            _answer(session, channel, frame, METHODS)
        _leave(control)
    except ClosedError:
        pass
    except (TimeoutError, FrameError) as error:
        give_up(error)
    finally:
        channel.close()
        session.close()


def _leave(control: socket.socket) -> None:
    """Tell the server that the client wants nothing more, so that another one may wait for the end of this process."""
    with suppress(OSError):
        control.send(LEAVING)


def _take_links(control: socket.socket, links: _Links, channel: Channel) -> None:
    """Take the connections that the server gives, until it ends."""
    while True:
        try:
            told, descriptors, _, _ = socket.recv_fds(control, MOST_MESSAGE_BYTES, 1)
        except OSError:
            told, descriptors = b"", []
        if not told:
            break
        for descriptor in descriptors:
            channel.drop_link("the client came over another one")  # before the next one is there to be dropped
            links.put((socket.socket(fileno=descriptor), msgspec.json.decode(told, type=int)))
    links.put(None)
    channel.close()
    time.sleep(GRACE_S)
    os._exit(0)


@contextmanager
def warnings_meanwhile() -> Iterator[list[str]]:
    """Collect the warnings of this package and its guests that are logged meanwhile."""
    collected: list[str] = []

    def take(record: logging.LogRecord) -> None:
        if record.name.startswith("tvm_pipeline") and record.levelno >= logging.WARNING:
            collected.append(record.getMessage())

    with _records_to(take):
        yield collected


@contextmanager
def _records_to(take: Callable[[logging.LogRecord], None]) -> Iterator[None]:
    """Have a function take what is logged meanwhile."""
    handler = logging.Handler()
    handler.emit = take  # type: ignore[assignment]
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _answer(session: Session, channel: Channel, frame: Frame, methods: Any) -> None:
    """Do what a frame calls, and send what came of it."""
    header = frame.header

    def tell(record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and record.name.startswith("tvm_pipeline"):  # a step
            channel.send(Header("tell", call=header.call, value=msgspec.Raw(msgspec.json.encode(record.getMessage()))))
        elif record.levelno >= logging.WARNING and logging.lastResort:
            logging.lastResort.handle(record)

    try:
        if header.kind != "call" or header.method not in methods:
            known = ", ".join(sorted(methods))
            raise RunError(f"a board has no method {header.method[:40]!r}, but {known}; install the same version there")
        arguments = _ARGUMENTS.decode(header.value)
        with _records_to(tell):
            value, arrays = methods[header.method](session, arguments, frame.arrays)
        done = Header("done", call=header.call, value=msgspec.Raw(msgspec.json.encode(value)), arrays=described(arrays))
    except Exception as error:
        if (told := error_message(error)).is_unknown:
            logging.getLogger(__name__).error("%s failed:\n%s", header.method, traceback.format_exc())
        done, arrays = Header("error", call=header.call, value=msgspec.Raw(msgspec.json.encode(told))), []
    channel.send(done, arrays)
