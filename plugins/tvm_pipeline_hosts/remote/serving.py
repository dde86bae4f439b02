"""The server on a board: it takes one client at a time, and gives each connection to the process of its session.

    hello      of the client, see dialing.py
    beat       while the session's process starts
    refused    another version, another client is here, or the session has ended
    welcome    of the session itself, which has the connection from then on

A session's process that is gone is noticed when it ends, and its client hears how when it comes back, which it does
since the connection ended, too. A connection that begins as those of TVM's own clients goes to TVM's own server in a
process of its own. Connections that are silent keep nobody out: the oldest one makes room for the next. There is no
authentication: whoever reaches the port runs code. Next: session.py.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tvm_pipeline.addresses import is_loopback
from tvm_pipeline.errors import OptionError
from tvm_pipeline.processes import Child
from tvm_pipeline.signals import WAIT_S
from tvm_pipeline_hosts.remote.address import Address
from tvm_pipeline_hosts.remote.channel import BEAT_S, KEEP_S, SILENT_S
from tvm_pipeline_hosts.remote.dialing import Hello, Refusal
from tvm_pipeline_hosts.remote.frames import FrameError, Header, limit_waits, write_frame
from tvm_pipeline_hosts.remote.greetings import (
    TVM_IN_USE,
    greets_as_tvm,
    hang_up,
    is_of_tvm,
    notice_death,
    read_hello,
    refuse,
)
from tvm_pipeline_hosts.remote.session import ABANDONED, BROKE, GRACE_S, READY, SessionStart

_log = logging.getLogger(__name__)

HELLO_S = 5.0  # for a client to say who it is
MOST_AT_THE_DOOR = 64  # connections that have no session yet
MOST_WAITING = 1024  # connections that the kernel keeps, in order, while the door is full
OLD_S = 0.5  # a connection at the door of this age makes room for a new one
MOST_SESSIONS = 64  # of the client: each stage of a pipeline on this host has one
MOST_NAME = 80  # characters of a client's name that are shown
MOST_ENDS = 64  # sessions whose end is remembered for a client that comes back

SESSION, TVM_CLIENT = "tvm_pipeline_hosts.remote.session:serve", "tvm_pipeline_tvm.rpc_clients:serve"


@dataclass(slots=True)
class _Running:
    """A session of the one client, and the process that serves it."""

    id: str
    client: str
    process: Child
    folder: tempfile.TemporaryDirectory[str]
    since_s: float = field(default_factory=time.time)
    ready: threading.Event = field(default_factory=threading.Event)
    leaving: threading.Event = field(default_factory=threading.Event)  # the client said so
    over: threading.Event = field(default_factory=threading.Event)
    why: str = ""

    @property
    def name(self) -> str:
        """Return the client's name as it is shown."""
        return self.client[:MOST_NAME]


class BoardServer:
    """The server; make it, then `serve`, and `close` it.

    Args:
        address: where to listen; port 0 for any.
        folder: for bundles.
        allow_others: listen also where other machines reach the port.

    Raises:
        OptionError: the address is none of this machine's, is taken, or others reach it and that was not allowed.
    """

    def __init__(
        self,
        address: Address,
        folder: Path,
        *,
        allow_others: bool = False,
        silent_s: float = SILENT_S,
        keep_s: float = KEEP_S,
    ) -> None:
        self.name = socket.gethostname()
        self._folder, self._silent_s, self._keep_s = folder, silent_s, keep_s
        self._beat_s = min(BEAT_S, silent_s / 4)
        self._listener = _listening(address, allow_others)
        self._listener.settimeout(WAIT_S)
        self.address = Address(address.host, self._listener.getsockname()[1])
        self._door: dict[socket.socket, float] = {}  # and when each came; the oldest first
        self._door_changes = threading.Condition()  # over it
        self._lock = threading.Lock()
        self._sessions: dict[str, _Running] = {}  # by id, all of one client; that of TVM's own client has none
        self._ends: OrderedDict[str, str] = OrderedDict()  # session -> why
        self._closed = threading.Event()

    @property
    def is_free(self) -> bool:
        """Whether it has no session of any client."""
        return not self._sessions

    def serve(self) -> None:
        """Take connections until `close`, or a signal's exception."""
        while not self._closed.is_set():
            try:
                link, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                _log.info(f"no connection can be taken: {error.strerror}")  # such as no more descriptors
                self._closed.wait(BEAT_S)
                continue
            self._come_in(link)
            threading.Thread(target=self._at_the_door, args=(link,), name="door", daemon=True).start()

    def close(self) -> None:
        """End the server and its session's process."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sessions = list(self._sessions.values())
        for running in sessions:
            running.process.hang_up()
        for running in sessions:
            if running.id:  # a session lets go of its devices by itself
                running.over.wait(2 * GRACE_S)
            running.process.kill()
            running.over.wait(GRACE_S)

    def _come_in(self, link: socket.socket) -> None:
        """Give a connection a place at the door. Where all are taken, the oldest makes room once it is OLD_S old."""
        with self._door_changes:
            while len(self._door) >= MOST_AT_THE_DOOR:
                oldest, since_s = next(iter(self._door.items()))
                young_s = since_s + OLD_S - time.monotonic()
                if young_s > 0:
                    self._door_changes.wait(young_s)
                else:
                    del self._door[oldest]
                    _shut(oldest)
            self._door[link] = time.monotonic()

    def _leave_door(self, link: socket.socket) -> None:
        with self._door_changes:
            self._door.pop(link, None)
            self._door_changes.notify()

    def _at_the_door(self, link: socket.socket) -> None:
        """Hear who it is, and let it in or tell it why not."""
        limit_waits(link, HELLO_S)
        late = threading.Timer(HELLO_S, _shut, (link,))
        late.daemon = True
        late.start()
        try:
            with suppress(OSError, FrameError, msgspec.MsgspecError), link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if is_of_tvm(link):
                    if not self.is_free or greets_as_tvm(link):
                        late.cancel()
                        self._take_tvm(link)
                    return
                hello = read_hello(link)
                late.cancel()
                limit_waits(link, self._silent_s)
                if isinstance(hello, Refusal):
                    refuse(link, hello)
                    return
                self._wait_for_leaving(link, hello.client)
                if isinstance(found := self._found(hello), Refusal):
                    refuse(link, found)
                else:
                    self._leave_door(link)
                    self._hand_over(found, link, hello.seen)
        finally:
            late.cancel()
            self._leave_door(link)

    def _wait_for_leaving(self, link: socket.socket, client: str) -> None:
        """Keep a client waiting while the processes of one that has left end."""
        with self._lock:
            leaving = [one for one in self._sessions.values() if one.client != client and one.leaving.is_set()]
        for running in leaving:
            while not running.over.wait(self._beat_s):
                write_frame(link, Header("beat"))

    def _found(self, hello: Hello) -> _Running | Refusal:
        """Return the session of a client, a new one where it has none; or why there is none for it."""
        with self._lock:
            if hello.session:
                if hello.session in self._sessions:
                    return self._sessions[hello.session]
                unknown = "is not known any more: `tvm-pipeline serve-rpc` was started again there, which ended it"
                return Refusal(self._ends.get(hello.session, unknown), has_ended=True)
            for running in self._sessions.values():
                if running.client != hello.client:
                    return Refusal(self._in_use(running))
            if len(self._sessions) >= MOST_SESSIONS:
                return Refusal(f"it has {MOST_SESSIONS} sessions of this client already; close some of them")
            if self._closed.is_set():
                return Refusal("it ends")
            try:
                return self._begin(SESSION, hello.client, secrets.token_hex(16))
            except OSError as error:
                return Refusal(f"no process can be started there: {error.strerror or error}")

    def _in_use(self, running: _Running) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(running.since_s))
        for_s = time.time() - running.since_s
        return (
            f"{running.name} has used {self.name} since {since} of its clock (for {for_s:.0f} s); a board serves one "
            f"client at a time, and is free at most {self._keep_s:g} s after it is gone"
        )

    def _begin(self, program: str, client: str, id: str) -> _Running:
        """Start the process that serves a client; an empty id is one of TVM's. The lock is held."""
        begin = SessionStart(id, self.name, str(self._folder), self._silent_s, self._keep_s)
        folder = tempfile.TemporaryDirectory(prefix="tvm-pipeline-", ignore_cleanup_errors=True)
        try:
            # What a process that crashes leaves behind goes with the folder.
            environment = {**os.environ, "TMPDIR": folder.name}
            process = Child(program, msgspec.json.encode(begin), environment=environment)
        except BaseException:
            folder.cleanup()
            raise
        running = self._sessions[id] = _Running(id, client, process, folder)
        threading.Thread(target=self._watch, args=(running,), name="session", daemon=True).start()
        _log.info(f"{running.name} is here")
        return running

    def _watch(self, running: _Running) -> None:
        """Wait for a session to be ready, and for its end."""
        with suppress(OSError):
            while told := running.process.receive()[0]:
                (running.ready if told == READY else running.leaving).set()
        running.process.wait()
        running.process.end()  # and what it started itself
        running.why = _how_it_ended(running.process, self._keep_s)
        running.folder.cleanup()
        with self._lock:
            del self._sessions[running.id]
            self._ends[running.id] = running.why
            while len(self._ends) > MOST_ENDS:
                self._ends.popitem(last=False)
        running.over.set()
        _log.info(
            f"{running.name} is gone" if running.process.status == 0 else f"the session of {running.name} {running.why}"
        )

    def _hand_over(self, running: _Running, link: socket.socket, seen: int) -> None:
        """Give a connection to the process of a session, when it can take it; keep the client waiting until then."""
        while not running.ready.wait(self._beat_s) and not running.over.is_set():
            write_frame(link, Header("beat"))
        with suppress(OSError):
            running.process.send(msgspec.json.encode(seen), link.fileno())
            return
        running.over.wait(2 * GRACE_S)
        refuse(link, Refusal(running.why or "ended", has_ended=True))

    def _take_tvm(self, link: socket.socket) -> None:
        """Give a connection of TVM's own client to TVM's own server."""
        host, port = link.getpeername()[:2]
        client = f"a client of TVM RPC at {Address(host, port)}"
        with self._lock:
            running = next(iter(self._sessions.values()), None)
            if running is None and not self._closed.is_set():
                self._leave_door(link)
                limit_waits(link, 0)
                notice_death(link)
                child = self._begin(TVM_CLIENT, client, "")
                child.process.send(b"0", link.fileno())
                return
        if running is not None:
            _log.info(f"{client} was sent away: {self._in_use(running)}")
        link.sendall(TVM_IN_USE)
        hang_up(link)


def _listening(address: Address, allow_others: bool) -> socket.socket:
    try:
        if not allow_others and not is_loopback(address.host):
            raise OptionError(
                f"`listen` {address}: other machines reach that address, and there is no authentication: whoever "
                "reaches the port runs code here. Listen on 127.0.0.1 and reach it through `ssh -L`, or give "
                "`allow_others` in a network where you trust every machine",
                option="listen",
                value=str(address),
            )
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((address.host, address.port), family=family, backlog=MOST_WAITING)
    except OSError as error:
        raise OptionError(
            f"`listen` {address}: {error.strerror or error}; give another address or port",
            option="listen",
            value=str(address),
        ) from error


def _how_it_ended(process: Child, keep_s: float) -> str:
    if process.status == ABANDONED:
        return f"was given up, since its client was gone for {keep_s:g} s"
    if process.status == BROKE:
        return "was given up, since its client broke the protocol again and again"
    return process.how()


def _shut(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
