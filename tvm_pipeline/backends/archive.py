"""Tar files from strangers: the plain files of an archive, found without trusting a header.

Python's tarfile follows sparse maps, negative sizes and sizes of extended headers, so that a small archive fills the
disk or is never read to its end (CVE-2025-8194). Here each header stands behind the content of the last one, a file is
as long as the bytes that are there, and anything but plain files and folders is refused. Next: `bundle.py`.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tvm_pipeline.errors import BundleError

BLOCK = tarfile.BLOCKSIZE
MOST_BYTES = 16 << 30  # that are unpacked, of all files together
MOST_FILES = 10_000
_MOST_EXTENDED = 1 << 16  # bytes of an extended header
# What an extended header may say: `path` of a long name counts, and the others do not matter.
_HARMLESS = frozenset(("path", "mtime", "atime", "ctime", "uid", "gid", "uname", "gname", "comment"))
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Archive:
    """The plain files of an open archive, by name: where the content of each begins, and its bytes."""

    path: Path
    stream: BinaryIO
    files: dict[str, tuple[int, int]]

    def read(self, name: str, most_bytes: int) -> bytes:
        """Return a whole file; raise BundleError where it is missing or longer than that."""
        start, size = self._found(name)
        if size > most_bytes:
            raise BundleError(f"{self.path}: {name} has {size} bytes, more than any; do not trust it")
        self.stream.seek(start)
        return self.stream.read(size)

    def extract(self, name: str, target: Path) -> str:
        """Write a file to a place that is not there yet; return its SHA-256. Raise BundleError where it is missing."""
        start, left = self._found(name)
        digest = hashlib.sha256()
        self.stream.seek(start)
        with open(target, "xb") as file:
            while left:
                part = self.stream.read(min(left, _CHUNK))
                if not part:
                    raise BundleError(f"{self.path}: {name} ends early; the bundle was cut short")
                file.write(part)
                digest.update(part)
                left -= len(part)
        return digest.hexdigest()

    def _found(self, name: str) -> tuple[int, int]:
        if name not in self.files:
            raise BundleError(f"{self.path}: {name} is missing; it is no bundle, or was cut short")
        return self.files[name]


@contextmanager
def open_archive(path: Path) -> Iterator[Archive]:
    """Open a tar file, all of whose headers are read and checked first.

    Raises:
        BundleError: it is no plain tar file, is cut short, or holds what no bundle has: links, devices, sparse files,
            one name twice, or more than MOST_FILES files or MOST_BYTES bytes.
    """
    # Without a wait: whoever opens a named pipe waits for its writer.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
        about = os.fstat(stream.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise BundleError(f"{path}: it is no file; give a bundle that `tvm-pipeline compile` made")
        yield Archive(path, stream, _listed(path, stream, about.st_size))


def _listed(path: Path, stream: BinaryIO, end: int) -> dict[str, tuple[int, int]]:
    files: dict[str, tuple[int, int]] = {}
    total, name = 0, ""
    for header, start in _headers(path, stream, end):
        if header.type == tarfile.XHDTYPE:
            name = _long_name(path, stream, start, header.size) or name
            continue
        name, told = "", name or header.name
        if header.isdir():
            continue
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise BundleError(f"{path}: {told} is no plain file; no bundle has such, do not trust it")
        if told in files:
            raise BundleError(f"{path}: {told} is in it twice; no bundle is such, do not trust it")
        files[told] = start, header.size
        total += header.size
        if total > MOST_BYTES or len(files) > MOST_FILES:
            raise BundleError(
                f"{path}: it has more than {MOST_FILES} files or {MOST_BYTES >> 30} GiB, more than any model; do "
                "not trust it"
            )
    return files


def _headers(path: Path, stream: BinaryIO, end: int) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield each header with the place of its content, which lies inside of the file."""
    place = 0
    while place < end:
        stream.seek(place)
        block = stream.read(BLOCK)
        if not block.strip(b"\0"):
            if place == 0 or len(block) < BLOCK:
                break
            return  # the end that tar writes
        try:
            header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            raise BundleError(f"{path}: not a bundle, or cut short ({error} at byte {place})") from error
        start = place + BLOCK
        if header.size < 0 or not header.name.isprintable():
            raise BundleError(f"{path}: its header at byte {place} is forged; do not trust it")
        if header.type in (*tarfile.REGULAR_TYPES, tarfile.XHDTYPE) and start + header.size > end:
            raise BundleError(f"{path}: {header.name} ends early; the bundle was cut short")
        yield header, start
        place = start + -(-header.size // BLOCK) * BLOCK
    if place == 0 or end < BLOCK:
        raise BundleError(f"{path}: not a bundle, or cut short: it is empty")
    raise BundleError(f"{path}: it was cut short: the end of the archive is missing")


def _long_name(path: Path, stream: BinaryIO, start: int, size: int) -> str:
    """Return the name that an extended header gives the next file; empty where it gives none."""
    stream.seek(start)
    content, name = stream.read(min(size, _MOST_EXTENDED)), ""
    while content.strip(b"\0"):
        length = content.partition(b" ")[0]
        if not length.isdigit() or len(length) > 6 or not len(length) + 1 < int(length) <= len(content):
            raise BundleError(f"{path}: an extended header at byte {start} is damaged; do not trust it")
        record, content = content[len(length) + 1 : int(length)], content[int(length) :]
        key, _, value = record.rstrip(b"\n").decode("utf-8", "replace").partition("=")
        if key not in _HARMLESS:
            raise BundleError(f"{path}: an extended header sets {key[:40]!r}, which no bundle does; do not trust it")
        name = value if key == "path" else name
    return name
