"""What this package and its guests log in a test."""

from __future__ import annotations

import logging


class _Lines(logging.Handler):
    def __init__(self, levels: tuple[str, ...], of: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._levels, self._of = levels, of

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.startswith(self._of) and record.levelname in self._levels:
            self.lines.append(record.getMessage())


def log_lines(*levels: str, of: str = "tvm_pipeline") -> list[str]:
    """Return a list that each line of these levels is appended to, until the test ends; `of` begins a logger's name."""
    handler = _Lines(levels, of)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    return handler.lines


def stop_collecting() -> None:
    """Remove the handlers, and have the usual level again."""
    logger = logging.getLogger()
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
        logger.setLevel(logging.WARNING)
