"""Signals that request something of a run: to end after what is inside has come out, or to read its settings again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


class Requests:
    """Keeps what signals have requested. The flags are plain, since a signal may come while any lock is held."""

    def __init__(self) -> None:
        self.stop = False
        self.reread = False

    def request_stop(self, *_: object) -> None:
        """Handle the first Ctrl-C, or a SIGTERM; a second Ctrl-C interrupts."""
        self.stop = True
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def request_reread(self, *_: object) -> None:
        """Handle a SIGHUP."""
        self.reread = True


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
