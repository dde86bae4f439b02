"""Regions of shared memory that clients of the inference server on this machine register, so that no array is sent.

A region is read and written by system calls and not mapped: a client that cuts its memory short gets an error, where a
mapping would end this process. The protocol is Triton's extension, docs/protocol/extension_shared_memory.md of
https://github.com/triton-inference-server/server. Read next: inference.py.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from tvm_pipeline_video.http_server import RequestError

FOLDER = Path("/dev/shm")  # where Linux has what shm_open makes
MOST_REGIONS = 1024


class Region(NamedTuple):
    """A part of a file of shared memory, which stays open."""

    key: str
    offset: int
    byte_size: int
    file: FileIO


class Regions:
    """The regions that clients have registered, by their names; many threads may use them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Open a region; raise RequestError where there is none, or the name is taken."""
        about = f"shared memory {name[:100]!r}"
        if not re.fullmatch(r"/?[\w.-]{1,200}", key):
            raise RequestError(f"{about}: {key[:100]!r} is no key of shared memory")
        with self._lock:
            if name in self._regions:
                raise RequestError(f"{about} is registered already; unregister it first")
            if len(self._regions) >= MOST_REGIONS:
                raise RequestError(f"{about}: {MOST_REGIONS} regions are registered; unregister those of before")
            try:
                opened = os.open(
                    FOLDER / key.removeprefix("/"), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                )
            except OSError as error:
                raise RequestError(f"{about}: {key} cannot be opened ({error.strerror})") from error
            file = FileIO(opened, "r+b")
            found = os.fstat(opened)
            if not stat.S_ISREG(found.st_mode) or min(offset, byte_size) < 0 or offset + byte_size > found.st_size:
                file.close()
                raise RequestError(f"{about}: {key} has no {byte_size} bytes at {offset}, but {found.st_size} in all")
            self._regions[name] = Region(key, offset, byte_size, file)

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; what uses it still ends first."""
        with self._lock:
            if name:
                self._regions.pop(name, None)
            else:
                self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """Return a region, or all of them; raise RequestError where there is none of that name."""
        with self._lock:
            names = [name] if name else list(self._regions)
            found = [(one, self._of(one)) for one in names]
        return [
            {"name": one, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
            for one, region in found
        ]

    def _of(self, name: str) -> Region:
        if name not in self._regions:
            raise RequestError(f"no shared memory {name[:100]!r} is registered")
        return self._regions[name]

    def _place(self, name: str, offset: int, byte_size: int) -> tuple[FileIO, int]:
        with self._lock:
            region = self._of(name)
        if min(offset, byte_size) < 0 or offset + byte_size > region.byte_size:
            raise RequestError(
                f"shared memory {name[:100]!r} has {region.byte_size} bytes, and no {byte_size} at {offset}"
            )
        return region.file, region.offset + offset

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """Return bytes of a region; raise RequestError where it does not have them."""
        file, at = self._place(name, offset, byte_size)
        content = os.pread(file.fileno(), byte_size, at)
        if len(content) != byte_size:
            raise RequestError(f"shared memory {name[:100]!r} was cut short by its owner")
        return content

    def write(self, name: str, offset: int, byte_size: int, content: bytes) -> None:
        """Put bytes into the place of a region that a client gave them; raise RequestError where they do not fit."""
        file, at = self._place(name, offset, byte_size)
        if len(content) > byte_size:
            raise RequestError(f"shared memory {name[:100]!r}: an output has {len(content)} bytes, not {byte_size}")
        if os.fstat(file.fileno()).st_size < at + len(content):
            raise RequestError(f"shared memory {name[:100]!r} was cut short by its owner")
        os.pwrite(file.fileno(), content, at)
