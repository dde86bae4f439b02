"""What this package and its guests log in a test."""

from __future__ import annotations

import logging
from collections.abc import Callable


class _Lines(logging.Handler):
    def __init__(self, take: Callable[[str], object], levels: tuple[str, ...], of: str) -> None:
        super().__init__()
        self._take, self._levels, self._of = take, levels, of

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(self._of) and record.levelname in self._levels:
            self._take(record.getMessage())


def log_lines(*levels: str, of: str = "tvm_pipeline") -> list[str]:
    """Return a list that each line of these levels is appended to, until the test ends; `of` begins a logger's name."""
    lines: list[str] = []
    on_line(lines.append, *levels, of=of)
    return lines


def on_line(take: Callable[[str], object], *levels: str, of: str = "tvm_pipeline") -> None:
    """Have a function take each line of these levels, in the thread that logs it, until the test ends."""
    logging.getLogger().addHandler(_Lines(take, levels, of))
    logging.getLogger().setLevel(logging.INFO)


def stop_collecting() -> None:
    """Remove the handlers, and have the usual level again."""
    logger = logging.getLogger()
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
