"""The counts of frames of each source, so that a run can go on where one ended.

A run begins again when its settings are read again, and after its process died. A camera is then opened again; a file
goes on at the frame after the last one whose result came out. Read next: inputs.py, which counts those frames.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline_video.service.log_files import last_line, segment_numbers, segment_path

WORKER = "TVM_PIPELINE_WORKER"  # the environment variable that gives a supervised run the folder of its counts

Counts = NDArray[np.int64]  # [next frame, results]
_COUNTS_BYTES = 16
_log = logging.getLogger(__name__)


class FrameCounts:
    """Counts for each model and source: the frame to go on at, and how many results came out.

    Args:
        folder: for files that outlive a process which is killed between two frames; without it, the counts are in
            memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.last: dict[str, Any] = {}  # the last line of the results, which may be ahead by one frame
        self._counts: dict[tuple[str, str], Counts] = {}

    def of(self, model: str, source: str, every: int = 1) -> Counts:
        """Return [next frame, results], to be written to; only each frame that `every` divides gives a result.

        `source` is the tag of a source, or its name where it has none.
        """
        key = model, source
        if key not in self._counts:
            self._counts[key] = np.zeros(2, np.int64) if self._folder is None else self._mapped(self._folder, key)
        counts, last = self._counts[key], self.last
        if (last.get("model", ""), last.get("tag") or last.get("source")) == key and last["frame"] >= counts[0]:
            counts[:] = last["frame"] + every, counts[1] + 1
        return counts

    def forget(self, model: str, source: str) -> None:
        """Close the file of the counts, where they outlive the process; `of` opens it again."""
        if self._folder is not None:
            self._counts.pop((model, source), None)

    def recall(self, results: Path, segmented: bool = False) -> None:
        """Trust the results: a process may have died after it wrote a line and before it counted the frame.

        Args:
            results: the file.
            segmented: it is the name from which segments have theirs.
        """
        if self._folder is None:
            return
        if segmented:
            self._recall_segments(results)
            return
        began = self.of("", str(results))  # 1 + how long the file was when this run first saw it
        if not began[0]:
            began[0] = 1 + (results.stat().st_size if results.is_file() else 0)
        elif results.is_file():
            self.last = last_line(results, int(began[0]) - 1)

    def _recall_segments(self, results: Path) -> None:
        began = self.of("", f"segments of {results}")  # 1 + the last number when this run first saw them
        numbers = segment_numbers(results)
        if not began[0]:
            began[0] = 1 + max(numbers, default=0)
        lines = (last_line(segment_path(results, number), 0) for number in reversed(numbers) if number >= began[0])
        self.last = next(filter(None, lines), {})  # a process may have died before it wrote a line

    def _mapped(self, folder: Path, key: tuple[str, str]) -> Counts:
        path = folder / hashlib.sha256("\n".join(key).encode()).hexdigest()[:32]
        try:
            with path.open("ab") as file:  # to write where the disk has no room for it would end the process
                os.posix_fallocate(file.fileno(), 0, _COUNTS_BYTES)
        except OSError as error:
            _log.warning(
                "the counts of %s are in memory alone, and after a crash it begins anew: cannot write %s: %s",
                " ".join(filter(None, key)),
                folder,
                error.strerror,
            )
            return np.zeros(2, np.int64)
        return np.memmap(path, np.int64, "r+", shape=(2,))

    @property
    def begun(self) -> bool:
        """True where any result came out, of this process or of one before it."""
        mapped = [np.fromfile(path, np.int64) for path in self._folder.iterdir()] if self._folder else []
        return any(counts[1:].any() for counts in (*mapped, *self._counts.values()))  # a full disk leaves an empty file
