"""A small file of JSON in which a run with `wait` tells other processes of its sources, replaced when that changes.

    {"pid": 4711, "began": 1795430000.1, "ready": true, "frames": 120,
     "tags": {"gate@17": {"source": "rtsp://gate/1", "opened": true, "problem": "", "ended": false, "frames": 120,
                          "dropped": {"fps": 240}, "reconnects": 0}},
     "statistics": {"throughput_fps": 10.0, "latency_p50_s": 0.02, "latency_p99_s": 0.03}}

docs/service.md explains it. Read next: changing_inputs.py, which counts.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import msgspec

_log = logging.getLogger(__name__)

WRITTEN_S = 1.0  # between two looks


class StatusFile:
    """The file, with what it holds.

    Args:
        path: of the file; None to write none.
        began_s: when the run began, in seconds since 1970.
    """

    def __init__(self, path: Path | None, began_s: float) -> None:
        self._path = path
        self._head = {"pid": os.getpid(), "began": began_s}
        self._written = b""
        self._said = ""
        self._next_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return self._path is not None and time.monotonic() >= self._next_s

    def look(self) -> None:
        """Let it be time to look again, because something changed."""
        self._next_s = 0.0

    def write(self, **found: Any) -> None:
        """Replace the file where what is found differs from what it holds."""
        if self._path is None:
            return
        self._next_s = time.monotonic() + WRITTEN_S
        content = msgspec.json.encode({**self._head, **found}) + b"\n"
        if content == self._written:
            return
        # It tells of now: after a power failure nobody needs it, so that it need not be on the disk.
        beside = self._path.with_name(f".{self._path.name}.new")
        try:
            beside.write_bytes(content)
            beside.replace(self._path)
        except OSError as error:
            if str(error) != self._said:
                _log.warning(f"`status` {self._path}: {error.strerror}; it is tried again")
            self._said = str(error)
            return
        self._written, self._said = content, ""
