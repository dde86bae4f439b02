"""A board from here: call what it can, send it bundles.

    with Board.connect("localhost:9190") as board:
        id = board.send(Path("model.tar"))
        result, arrays = board.call("profile", {"bundle": id})

A link that dies is noticed within `SILENT_S` and made again for `KEEP_S`, while what was called goes on over there.
Next: methods.py, for what can be called, and dialing.py, for how a link is made.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from tvm_pipeline import PipelineError, Platform
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import BoardLostError, RunError
from tvm_pipeline_hosts.remote.address import Address, parse_address
from tvm_pipeline_hosts.remote.channel import KEEP_S, SILENT_S, Channel, ClosedError
from tvm_pipeline_hosts.remote.dialing import NoBoardError, RefusedError, dial, unreachable
from tvm_pipeline_hosts.remote.frames import FrameError, Header, described
from tvm_pipeline_hosts.remote.methods import Description
from tvm_pipeline_hosts.remote.parcels import manifest_of, parts_of
from tvm_pipeline_hosts.remote.told_errors import ErrorMessage, received_error

_log = logging.getLogger(__name__)

T = TypeVar("T")
RETRY_S = 0.1, 2.0  # between two attempts to connect: the first ones, and the last ones
TELL_S = 1.0  # between two lines about an upload


class Board:
    """A board that `tvm-pipeline serve-rpc` runs on. Calls of several threads come one after the other.

    Attributes:
        name: of the board.
        platform: its devices, as detected and settled there.
        software: versions by name: tvm-pipeline, python, machine, and of the backends there.
        address: where it is reached.
    """

    name: str
    platform: Platform
    software: Mapping[str, str]

    def __init__(self, address: Address, silent_s: float, keep_s: float) -> None:
        self.address = address
        self._silent_s, self._keep_s = silent_s, keep_s
        self._channel: Channel | None = None
        self._session, self._calls = "", 0
        self._has_heard = False  # somebody of the session's end
        self._over = threading.Event()
        self._turn = threading.Lock()
        self._running = ""  # the method
        self.name = str(address)

    @classmethod
    def connect(cls, address: str, *, silent_s: float = SILENT_S, keep_s: float = KEEP_S) -> Board:
        """Connect to a board; use it as a context manager, or `close` it.

        Args:
            address: `HOST:PORT`, or `HOST` for port 9190.
            silent_s: seconds without a byte after which a link is given up.
            keep_s: seconds for which it is tried to have a link again.

        Raises:
            OptionError: the address is none.
            BoardLostError: nothing answers there, something else does, or the board is in use.
        """
        board = cls(parse_address(address), silent_s, keep_s)
        try:
            found, _ = board.call("describe", {}, kind=Description)
        except BaseException:
            board.close()
            raise
        board.name, board.platform, board.software = found.name, found.platform, found.software
        for warning in found.warnings:
            _log.warning(f"board {board.name}: {warning}")
        return board

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        kind: type[T] = Any,  # type: ignore[assignment]
    ) -> tuple[T, list[Array]]:
        """Have the board do something, and return what came of it.

        Args:
            method: one of `methods.METHODS` over there.
            arguments: what becomes JSON.
            arrays: tensors of plain numbers, of any shape.
            kind: the type of the result, for msgspec.

        Returns:
            The result, and arrays whose data begins at a multiple of 64 bytes.

        Raises:
            PipelineError: what the board raised, of the same class, with the board's name before its text.
            BoardLostError: the link could not be had back, or the board breaks the protocol again and again.
            RunError: the process of the session crashed; the next call has another one.
        """
        with self._turn:
            self._running = method
            try:
                return self._call(method, arguments, arrays, kind)
            finally:
                self._running = ""

    def send(self, bundle: Path) -> str:
        """Have a bundle on the board, of which only what is not there is sent; return its id.

        Raises:
            BundleError: it is none, or cannot be read.
        """
        manifest = np.frombuffer(manifest_of(bundle), np.uint8)
        lacks, _ = self.call("missing", {}, [manifest], kind=dict[str, int])
        sent, told_s = 0, time.monotonic()
        for sum, offset, content, total in parts_of(bundle, lacks):
            place = {"sum": sum, "offset": offset, "total": total}
            self.call("put", place, [np.frombuffer(content, np.uint8)])
            sent += len(content)
            if time.monotonic() - told_s > TELL_S:
                told_s = time.monotonic()
                _log.info(f"sending {bundle.name} to {self.name}: {sent / 1e6:.1f} MB")
        id, _ = self.call("assemble", {}, [manifest], kind=str)
        return id

    def expect_within(self, silent_s: float) -> None:
        """Give the link of the present session up after so many seconds without a byte, from now on."""
        if self._channel is not None:
            self._channel.expect_within(silent_s)

    def close(self) -> None:
        """End the session, and with it what it runs."""
        self._over.set()
        if self._channel is not None:
            self._channel.close(Header("bye"))
            self._channel = None

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(
        self, method: str, arguments: Mapping[str, Any], arrays: Sequence[Array], kind: type[T]
    ) -> tuple[T, list[Array]]:
        self._calls += 1
        channel, number = self._opened(), self._calls
        value = msgspec.Raw(msgspec.json.encode(arguments))
        try:
            channel.send(Header("call", call=number, method=method, value=value, arrays=described(arrays)), arrays)
            while True:
                header, came = channel.receive()
                if header.call != number:  # of a call that was interrupted here
                    continue
                if header.kind == "tell":
                    _log.info(msgspec.json.decode(header.value, type=str))
                elif header.kind == "error":
                    raise received_error(msgspec.json.decode(header.value, type=ErrorMessage), f"board {self.name}: ")
                elif header.kind == "done":
                    return msgspec.json.decode(header.value, type=kind), came
        except (FrameError, RefusedError, NoBoardError, BoardLostError) as error:
            raise self._lost(error, f"in {method}") from error
        except ClosedError:
            raise RunError(f"board {self.name} was closed while {method} ran") from None
        except msgspec.MsgspecError as error:
            raise RunError(f"board {self.name}: {method} answered what this version cannot read: {error}") from error

    def _opened(self) -> Channel:
        """Return the channel of the present session; begin another session where that has ended."""
        if self._channel is not None and self._channel.end is not None:
            if not self._has_heard:  # it ended between two calls
                _log.info(str(self._lost(self._channel.end, "between two calls")))
            self._channel = None
        if self._channel is None:
            self._session, self._has_heard = "", False
            self._over.clear()
            self._channel = Channel(self._linked, self._silent_s, self._keep_s)
        return self._channel

    def _linked(self, seen: int, until_s: float) -> tuple[socket.socket, int]:
        """Connect: once for a new session, and as long as it may be there for one that has lost its link."""
        is_new, retry_s = not self._session, RETRY_S[0]
        if not is_new:
            _log.info(f"the link to board {self.name} broke; connecting again for up to {self._keep_s:g} s")
            if self._over.wait(RETRY_S[0]):
                raise ClosedError
        while True:
            try:
                link, self._session, has = dial(self.address, self._session, seen, self._silent_s)
                if not is_new and time.monotonic() > until_s:
                    link.close()
                    raise TimeoutError("nothing comes over the links that it takes")
            except OSError as error:
                if is_new:
                    raise unreachable(self.address, error) from error
                if time.monotonic() + retry_s > until_s:
                    raise self._given_up(error) from error
            else:
                if not is_new:
                    _log.info(f"the link to board {self.name} is back")
                return link, has
            if self._over.wait(retry_s):
                raise ClosedError
            retry_s = min(2 * retry_s, RETRY_S[1])

    def _given_up(self, error: OSError) -> BoardLostError:
        what = f"while {self._running} ran" if self._running else "between two calls"
        why = self._channel.why if self._channel is not None else ""
        return BoardLostError(
            f"the link to board {self.name} broke {what} ({why}), and could not be had back within {self._keep_s:g} s "
            f"({error.strerror or error}); the session there ends, too. Look whether the board is on and whether "
            "`ssh -L` runs, and start again: what was sent stays there"
        )

    def _lost(self, error: BaseException, when: str) -> PipelineError:
        """Return what to raise for an error that ended the session, or kept it from beginning."""
        self._has_heard = True
        if isinstance(error, RefusedError) and error.has_ended:
            return RunError(
                f"the session of board {self.name} {error} {when}; the standard error of `tvm-pipeline serve-rpc` "
                "there may say more. The next call begins another session"
            )
        if isinstance(error, PipelineError):
            return error
        if isinstance(error, FrameError):
            return BoardLostError(
                f"board {self.name} broke the protocol again and again {when}, at last with {error}; look what "
                f"answers at {self.address}"
            )
        return BoardLostError(f"no board for you at {self.address}: {error}")
