"""Where results go: JSON lines for programs, here, and a video for people, in video_file.py.

A sink stands under its own name from the beginning, and each line or piece of video reaches it at once. So it can be
read meanwhile, and what an exception, a full disk or a kill leaves behind is whole. Read next: video_file.py.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
from av.error import FFmpegError

from tvm_pipeline_video.errors import VideoError


def check_place(path: Path) -> None:
    """Raise VideoError where the path is a folder, or lies in none."""
    if path.is_dir():
        raise VideoError(f"cannot write {path}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise VideoError(f"cannot write {path}: there is no folder {path.parent}; make it first")


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn the system's error of a failed write into a VideoError that names the file."""
    try:
        yield
    except (OSError, FFmpegError) as error:
        if isinstance(error, BrokenPipeError):
            advice = "its reader has gone; keep it running or write to a file"
        else:
            advice = "check that its folder may be written to and has space left, or choose another place"
        raise VideoError(f"cannot write {name}: {error.strerror or error}; {advice}") from error


def json_line(value: Any) -> bytes:
    """Return a value as JSON on one line: plain values, dataclasses, NumPy scalars and arrays."""
    return _ENCODER.encode(value)


class JsonLines:
    """Writes one JSON object a line, each at once; what stood in the file before is replaced.

    A file holds whole lines at any moment, also after a kill and after a write that fails.

    Args:
        target: a path, also of a device or a pipe; '-' for standard output; or a binary stream, which stays open.

    Raises VideoError when it cannot be written.
    """

    def __init__(self, target: str | Path | IO[bytes]) -> None:
        is_path = isinstance(target, (str, Path)) and target != "-"
        self.name = str(target if is_path else getattr(target, "name", "standard output"))
        self._owned = is_path
        self._file = self._open(target)

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._owned:
            with naming(self.name):
                self._file.close()

    def _open(self, target: str | Path | IO[bytes]) -> IO[bytes]:
        if target == "-":
            return sys.stdout.buffer
        if not isinstance(target, (str, Path)):
            return target
        path = Path(target)
        check_place(path)
        with naming(self.name):
            file = path.open("ab", buffering=0)  # appending, so that others may empty it meanwhile
            if path.is_file():
                file.truncate(0)
            return file

    def write(self, value: Any) -> None:
        """Write what `json_line` makes of a value."""
        line = json_line(value) + b"\n"
        with naming(self.name):
            if isinstance(self._file, io.FileIO):
                _write_whole(self._file.fileno(), line)
            else:
                self._file.write(line)
                self._file.flush()


def _write_whole(descriptor: int, line: bytes) -> None:
    """Write all of a line, with one call unless the system takes less; of a file, take back what a failure cut."""
    before = os.fstat(descriptor)
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        if stat.S_ISREG(before.st_mode):
            os.ftruncate(descriptor, before.st_size)
        raise


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; convert it to plain values first")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)
