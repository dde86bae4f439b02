"""Frames in order and once each, over links that come and go.

A channel outlives its links. Each end numbers the frames that must arrive, says in every frame which it has seen, and
keeps its own until the other end has. After a new link each says where it is, and what the other lacks is sent again.

A link is given up when it breaks, and after `silent_s` without a byte: both ends send a *beat* every second in which
they send nothing else. An other end that breaks the protocol on MOST_BROKEN links in a row ends the channel. Links that
bring neither a beat nor a new frame count as none: an other end that makes nothing but such is given up after `keep_s`.

Whoever waits for a frame reads the socket in its own thread, so that a tensor costs no change of threads. While nobody
waits, because this end computes, a thread of the channel reads, beats and links anew.
Next: board.py and session.py, the two ends.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from tvm_pipeline.backends.ports import Array
from tvm_pipeline_hosts.remote.frames import Frame, FrameError, Header, limit_waits, read_frame, write_frame

BEAT_S = 1.0
SILENT_S = 10.0  # without a byte of the other end, after which a link is given up
LEAVE_S = 2.0  # for the other end to hang up after a last frame
MOST_BROKEN = 3  # links on which the other end may break the protocol before it sends a frame that is right
KEEP_S = 60.0  # for which both ends keep what is not acknowledged, and a board its session, while there is no link

# Return a new link and the number of the last frame that its other end has, or raise why there is none, by the time
# (of `time.monotonic`) given second. The first argument is what this end has seen.
Relink = Callable[[int, float], tuple[socket.socket, int]]


class ClosedError(Exception):
    """This end has closed the channel."""


class Channel:
    """One end.

    Args:
        relink: makes the first link, and each one after a link broke. What it raises ends the channel for good, and is
            raised by `receive` from then on. A FrameError is, too, where the other end breaks the protocol again and
            again.
        ended: hears, from the channel's own thread, what ended the channel, and of a `bye` that came while nobody
            waited.
    """

    def __init__(
        self,
        relink: Relink,
        silent_s: float = SILENT_S,
        keep_s: float = KEEP_S,
        ended: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self.silent_s, self.keep_s = silent_s, keep_s
        self.why = ""  # the last link broke
        self._relink, self._on_end = relink, ended
        self._link: socket.socket | None = None
        self._lost_s = time.monotonic()
        self._wrote_s = self._heard_s = self._lost_s
        self._number = self._seen = 0
        self._broken = 0  # links in a row on which the other end broke the protocol
        self._is_alive = False  # the present link has brought a beat or a new frame
        self._kept: deque[tuple[Header, Sequence[Array]]] = deque()  # not acknowledged, in order
        self._inbox: deque[Frame] = deque()  # read while nobody waited
        self._end: BaseException | None = None
        self._closed = threading.Event()
        self._look = threading.Event()  # the channel's own thread is to look at once
        # Taken in this order.
        self._linking, self._reading, self._writing = threading.Lock(), threading.Lock(), threading.Lock()
        self._beat_s = min(BEAT_S, silent_s / 4)
        self._keeper = threading.Thread(target=self._keep, name="channel", daemon=True)
        self._keeper.start()

    @property
    def end(self) -> BaseException | None:
        """What ended the channel for good; None while it may go on."""
        return self._end

    def send(self, header: Header, arrays: Sequence[Array] = ()) -> None:
        """Have a frame arrive, now or over a later link. The arrays must not change until the other end answers."""
        arrays = [np.asarray(array, order="C") for array in arrays]
        with self._writing:
            self._number += 1
            header.number = self._number
            self._kept.append((header, arrays))
            if self._link is not None:
                self._write(self._link, header, arrays)

    def receive(self) -> Frame:
        """Return the next frame, however long it takes.

        Raises:
            ClosedError: `close` was called.
            FrameError: the other end breaks the protocol again and again.
            BaseException: what `relink` has raised.
        """
        while True:
            with self._reading:
                if self._inbox:
                    return self._inbox.popleft()
                link = self._link
                if link is not None and (frame := self._read(link)):
                    return frame
            if self._link is None:
                self._linked()

    def expect_within(self, silent_s: float) -> None:
        """Give a link up after so many seconds without a byte, from now on."""
        self.silent_s = silent_s
        if (link := self._link) is not None:
            with suppress(OSError):  # it broke, and the next one gets it
                limit_waits(link, silent_s)

    def drop_link(self, why: str) -> None:
        """Give the present link up, since another one is there."""
        if (link := self._link) is not None:
            self._lost(link, why)

    def close(self, last: Header | None = None) -> None:
        """End, and the thread of the channel, too; a last frame is sent if there is a link, and waited for a little."""
        link = self._link
        if last is not None and link is not None and self._writing.acquire(timeout=self._beat_s):
            try:
                self._number += 1
                last.number = self._number
                self._write(link, last, ())
            finally:
                self._writing.release()
            self._drain(link)
        self._closed.set()
        self._look.set()
        if self._link is not None:
            self._lost(self._link, "it was closed here")
        if threading.current_thread() is not self._keeper:
            self._keeper.join(self._beat_s)

    def _drain(self, link: socket.socket) -> None:
        """Wait until the other end has hung up, which shows that it has all, but no longer than LEAVE_S."""
        with suppress(OSError):
            link.shutdown(socket.SHUT_WR)
            limit_waits(link, LEAVE_S)
            until_s = time.monotonic() + LEAVE_S
            if self._reading.acquire(timeout=self._beat_s):
                try:
                    while time.monotonic() < until_s and link.recv(1 << 16):
                        pass
                finally:
                    self._reading.release()

    def _linked(self) -> None:
        """Have a link, or raise why there is none."""
        with self._linking:
            if self._closed.is_set():
                raise ClosedError
            if self._end is not None:
                raise self._end
            if self._link is not None:
                return
            try:
                link, has = self._relink(self._seen, self._lost_s + self.keep_s)
            except Exception as error:
                self._end = error
                raise
            limit_waits(link, self.silent_s)
            with self._writing:
                self._forget(has)
                self._heard_s = self._wrote_s = time.monotonic()
                self._is_alive = False
                self._link = link
                if self._closed.is_set():
                    self._lost(link, "it was closed here")
                for header, arrays in list(self._kept):
                    if self._link is link:
                        self._write(link, header, arrays)

    def _write(self, link: socket.socket, header: Header, arrays: Sequence[Array]) -> None:
        """Write to a link, which may be given up over it."""
        header.seen = self._seen
        try:
            write_frame(link, header, arrays)
            self._wrote_s = time.monotonic()
        except BlockingIOError:
            self._lost(link, f"it took nothing for {self.silent_s:g} s")
        except OSError as error:
            self._lost(link, error.strerror or str(error))
        except BaseException:  # Ctrl-C in the middle of a frame
            self._lost(link, "it was interrupted here")
            raise

    def _read(self, link: socket.socket) -> Frame | None:
        """Read a frame of a link; return None for a beat, and where the link was given up over it."""
        try:
            frame = read_frame(link)
            self._heard_s = time.monotonic()
            number, has = frame.header.number, frame.header.seen
            if number > self._seen + 1:
                raise FrameError(f"frame {number} after frame {self._seen}")
            if has > self._number:
                raise FrameError(f"word of frame {has}, and {self._number} were sent")
            self._forget(has)
            is_new = number > self._seen
            self._is_alive = self._is_alive or is_new or frame.header.kind == "beat"
            if is_new:
                self._seen, self._broken = number, 0
                return frame
        except BlockingIOError:
            self._lost(link, f"nothing came for {self.silent_s:g} s")
        except FrameError as error:
            self._broken += 1
            if self._broken == MOST_BROKEN:
                self._end = error
            self._lost(link, f"what came was {error}")
        except OSError as error:
            self._lost(link, error.strerror or str(error))
        except BaseException:
            self._lost(link, "it was interrupted here")
            raise
        return None

    def _forget(self, has: int) -> None:
        """Let go of what the other end has."""
        while self._kept and self._kept[0][0].number <= has:
            with suppress(IndexError):
                self._kept.popleft()

    def _lost(self, link: socket.socket, why: str) -> None:
        if self._link is link:
            self._link, self.why = None, why
            if self._is_alive:
                self._lost_s = time.monotonic()
        # Whoever waits for it wakes up. The descriptor is closed with the last reference, so that no other gets it.
        with suppress(OSError):
            link.shutdown(socket.SHUT_RDWR)
        self._look.set()

    def _keep(self) -> None:
        """Beat, read while nobody waits, and link anew, until the channel ends."""
        while not self._closed.is_set():
            self._look.clear()
            link = self._link
            if link is None:
                try:
                    self._linked()
                except ClosedError:
                    return
                except Exception as error:
                    self._on_end(error)
                    return
                continue
            if self._writing.acquire(blocking=False):  # else a frame is on its way, which is as good
                try:
                    if self._link is link and time.monotonic() - self._wrote_s > self._beat_s / 2:
                        self._write(link, Header("beat"), ())
                finally:
                    self._writing.release()
            if self._reading.acquire(blocking=False):  # else somebody waits, and notices silence
                try:
                    while self._link is link and _has_come(link):
                        if frame := self._read(link):
                            self._inbox.append(frame)
                            if frame.header.kind == "bye":  # the other end needs nothing that is computed here
                                self._on_end(ClosedError())
                    if time.monotonic() - self._heard_s > self.silent_s:
                        self._lost(link, f"nothing came for {self.silent_s:g} s")
                finally:
                    self._reading.release()
            self._look.wait(self._beat_s)


def _has_come(link: socket.socket) -> bool:
    waiting = select.poll()
    waiting.register(link, select.POLLIN)
    return bool(waiting.poll(0))
