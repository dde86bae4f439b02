"""Signals that request something: to end, at once or after what is inside has come out, or to read settings again.

What hangs while a process is cleaned up to end at once, such as a decoder that does not return, is left behind after
`AT_ONCE_S`; temporary folders are removed all the same.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]

AGAIN_S = 0.3  # two signals within this time are one: `timeout` sends it to the process and to its group
AT_ONCE_S = 3.0
UNRAISED_S = 0.05  # for a `__del__` to return
# What the interpreter calls at its end for temporary folders and processes that are left; it has no public name.
CLEAN_UP, CLEAN_UP_S = "_exitfunc", 1.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The longest wait of a main thread at a stretch. Python handles a signal between two instructions, or if it interrupts
# a wait; a signal that comes just before a wait has its turn when that wait ends.
WAIT_S = 1.0


class Interrupts:
    """A handler of signals that raises KeyboardInterrupt, and has the process end soon, whatever hangs or swallows it.

    The exception's argument is the number of the signal. Further signals change nothing, so that nothing is left behind
    which is being cleaned up. Where it is raised in a `__del__`, Python would print it and go on; it is raised again.

    Args:
        status: raise SystemExit of this status instead.

    Attributes:
        number: the signal that came; 0 where none did.
    """

    def __init__(self, status: int | None = None) -> None:
        self.number = 0
        self._status = status
        self._over = False
        self._unraised = self._waits = False

    def __call__(self, number: int, _: FrameType | None = None) -> None:
        if self.number and not self._unraised:
            return
        # No Thread, whose locks may be held by the code that the signal interrupts.
        if not self.number:
            self._others, sys.unraisablehook = sys.unraisablehook, self._raise_again
            _thread.start_new_thread(self._end_soon, ())
        self.number, self._unraised = number, False
        raise self.raised()

    def raised(self) -> BaseException:
        """Return what the signal that came raises."""
        return KeyboardInterrupt(self.number) if self._status is None else SystemExit(self._status)

    def over(self) -> None:
        """Take note that everything is cleaned up."""
        self._over = True
        if self.number:
            sys.unraisablehook = self._others

    def _raise_again(self, ignored: sys.UnraisableHookArgs) -> None:
        if isinstance(ignored.exc_value, (KeyboardInterrupt, SystemExit)) and not self._over:
            self._unraised = True
            if not self._waits:
                self._waits = True
                _thread.start_new_thread(self._interrupt, ())
        else:
            self._others(ignored)

    def _interrupt(self) -> None:
        time.sleep(UNRAISED_S)
        self._waits = False
        if self._unraised and not self._over:
            signal.pthread_kill(threading.main_thread().ident or 0, self.number)  # no other thread would end its wait

    def _end_soon(self) -> None:
        time.sleep(AT_ONCE_S)
        if not self._over:
            clean_up = getattr(weakref.finalize, CLEAN_UP, None)
            if clean_up:
                _thread.start_new_thread(clean_up, ())
                time.sleep(CLEAN_UP_S)
            if self._status is None:
                os.write(2, b"stopped\n")
            os._exit(128 + self.number if self._status is None else self._status)


class Requests:
    """Keeps what signals have requested. The flags are plain, since a signal may come while any lock is held."""

    def __init__(self) -> None:
        self.stop = False
        self.reread = False
        self.interrupts = Interrupts()
        self._first_s: float | None = None

    def request_stop(self, number: int, _: FrameType | None = None) -> None:
        """Handle a signal that ends: the first one drains, and another one ends at once."""
        self.stop = True
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
        elif now_s - self._first_s >= AGAIN_S:
            self.interrupts(number)

    def request_reread(self, *_: object) -> None:
        """Handle a SIGHUP."""
        self.reread = True


def ending(handler: Handler, numbers: Iterable[int] = ENDS) -> dict[int, Handler]:
    """Return the handler for the signals that end a process, without those that are ignored, as `nohup` has SIGHUP."""
    return {number: handler for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}


def check_interrupted() -> None:
    """Raise again what a signal has raised, where a library may have made another error of it, as TVM does."""
    for handler in map(signal.getsignal, ENDS):
        if isinstance(handler, Interrupts) and handler.number:
            raise handler.raised()


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals by these functions while the block lasts. Python allows that in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
