"""Bundles as parcels: the files of a bundle by their SHA-256, so that each travels once and goes on where it broke off.

A bundle's manifest lists the sum of each of its files. Its own sum is the bundle's id. Who has the bundle sends the
manifest, hears which files are missing and how much of each is there, puts the rest, and has the bundle assembled:

    lacks = parcels.missing(manifest_of(path))
    for sum, offset, content, total in parts_of(path, lacks):
        parcels.put(sum, offset, content, total)
    id = parcels.assemble(manifest_of(path))

    bundles/ID.tar      whole bundles, in which the files of another one are found, too
    parts/SUM           whole files that no bundle here has yet
    parts/SUM.part      the beginning of a file

Boards and the hosts of a fleet keep such a folder. Next: methods.py.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from tvm_pipeline import PipelineError, files
from tvm_pipeline.backends.archive import MOST_BYTES, open_archive
from tvm_pipeline.backends.bundle import Manifest
from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import forget_oldest, replacing

MOST_MANIFEST_BYTES = 8 << 20
MOST_STORED_BYTES = 8 << 30
CHUNK = 1 << 20  # bytes that are put at a time
_SUM = re.compile(r"[0-9a-f]{64}")
_MANIFEST = "manifest.json"

# Where the content of a file begins, in a file that may hold others, and its bytes.
_Place = tuple[Path, int, int]


class Parcels:
    """A folder of bundles that come in parts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._bundles, self._parts = folder / "bundles", folder / "parts"

    def missing(self, manifest: bytes) -> dict[str, int]:
        """Return the sums of the files that are not here, with the bytes of each that are; raise BundleError.

        A bundle that is here whole lacks nothing.
        """
        sums = _sums(manifest)
        if self._path(sum_of(manifest)).exists():
            return {}
        here = self._places()
        for path in {here[sum][0] for sum in sums.values() if sum in here}:
            with suppress(OSError):  # what the bundle will take from it must not be forgotten meanwhile
                os.utime(path)
        return {sum: _size(self._part(sum)) for sum in sums.values() if sum not in here}

    def put(self, sum: str, offset: int, content: bytes | memoryview, total: int) -> None:
        """Add bytes to a file; the last ones make it whole, under its sum.

        Args:
            sum: of the whole file.
            offset: the place of the bytes in it; at most as many as are here.
            total: bytes of the whole file.

        Raises:
            BundleError: the bytes do not follow those here, or all together have another sum, and are gone.
            PipelineError: the folder cannot be written. What was written before stays.
        """
        if not _SUM.fullmatch(sum):
            raise BundleError(f"{sum[:80]!r} is no SHA-256; send the bundle again with this version of tvm-pipeline")
        part = self._part(sum)
        with self._writing():
            self._parts.mkdir(parents=True, exist_ok=True)
            here = _size(part)
            if not 0 <= offset <= here or not offset + len(content) <= total <= MOST_BYTES:
                raise BundleError(
                    f"bytes {offset} to {offset + len(content)} of {total} do not follow the {here} of {sum[:12]} that "
                    "are here; send the bundle again"
                )
            with part.open("ab") as file:
                _append(file, memoryview(content)[here - offset :])
                end = file.tell()
                if end == total:
                    os.fsync(file.fileno())
            if end < total:
                return
            found = files.sum_of(part)
            if found != sum:
                part.unlink()
                raise BundleError(f"a file came damaged: its sum is {found[:12]} and not {sum[:12]}; send it again")
            os.replace(part, self._parts / sum)

    def assemble(self, manifest: bytes) -> str:
        """Make a bundle of its files, whole or not at all, and return its id.

        Raises:
            BundleError: a file is missing.
            PipelineError: the folder cannot be written.
        """
        sums, id = _sums(manifest), sum_of(manifest)
        path = self._path(id)
        if path.exists():
            return id
        here = self._places()
        if lacks := [name for name, sum in sums.items() if sum not in here]:
            raise BundleError(f"{', '.join(lacks[:3])} of the bundle {id[:12]} did not come; send it again")
        with self._writing():
            self._bundles.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary, tarfile.open(temporary, "w") as tar:
            _add(tar, _MANIFEST, io.BytesIO(manifest), len(manifest))
            for name, sum in sums.items():
                place, start, size = here[sum]
                with place.open("rb") as file:
                    file.seek(start)
                    _add(tar, name, file, size)
        for sum in sums.values():
            with suppress(OSError):
                (self._parts / sum).unlink()
        return id

    def bundle(self, id: str) -> Path:
        """Return a bundle that is here; raise BundleError where it is not."""
        path = self._path(id)
        if not _SUM.fullmatch(id) or not path.exists():
            raise BundleError(f"the bundle {id[:12]} is not in {self.folder}; send it again")
        with suppress(OSError):
            os.utime(path)
        return path

    def forget_older(self, most_bytes: int = MOST_STORED_BYTES, keep: Collection[str] = ()) -> None:
        """Remove what was used longest ago until the folder has no more bytes than that, but the bundles to keep."""
        forget_oldest((*self._bundles.glob("*"), *self._parts.glob("*")), most_bytes, keep)

    def _path(self, id: str) -> Path:
        return self._bundles / f"{id}.tar"

    def _part(self, sum: str) -> Path:
        return self._parts / f"{sum}.part"

    def _places(self) -> dict[str, _Place]:
        """Return where the content of each sum that is here lies."""
        places: dict[str, _Place] = {}
        for path in self._bundles.glob("*.tar"):
            if _SUM.fullmatch(path.stem):  # another one is being written
                with suppress(BundleError, OSError), open_archive(path) as archive:
                    for name, sum in _sums(archive.read(_MANIFEST, MOST_MANIFEST_BYTES)).items():
                        if name in archive.files:
                            places[sum] = (path, *archive.files[name])
        for path in self._parts.glob("*"):
            if _SUM.fullmatch(path.name):
                places[path.name] = path, 0, _size(path)
        return places

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Name the folder in what the system says of it."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            raise PipelineError(
                f"cannot write {self.folder}: {error.strerror or error}; "
                + ("make space there, and send it again" if full else "set TVM_PIPELINE_CACHE to a folder that can be")
            ) from error


def sum_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes as text."""
    return hashlib.sha256(content).hexdigest()


def manifest_of(path: Path) -> bytes:
    """Return the manifest of a bundle; raise BundleError where it is none or cannot be read."""
    try:
        with open_archive(path) as archive:
            manifest = archive.read(_MANIFEST, MOST_MANIFEST_BYTES)
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror or error}") from error
    _sums(manifest)
    return manifest


def parts_of(path: Path, sums: Mapping[str, int]) -> Iterator[tuple[str, int, bytes, int]]:
    """Yield the rest of the files of a bundle that `Parcels.missing` returned: sum, offset, bytes, bytes in all."""
    with open_archive(path) as archive:
        names = {sum: name for name, sum in _sums(archive.read(_MANIFEST, MOST_MANIFEST_BYTES)).items()}
        for sum, here in sums.items():
            if sum not in names or names[sum] not in archive.files:
                raise BundleError(
                    f"{path} has no file of the sum {sum[:12]}; it changed while it was sent: send it again"
                )
            start, total = archive.files[names[sum]]
            for offset in range(min(here, total), total, CHUNK) or (total,):
                archive.stream.seek(start + offset)
                yield sum, offset, archive.stream.read(min(CHUNK, total - offset)), total


def _sums(manifest: bytes) -> dict[str, str]:
    """Return the sum of each file of a manifest."""
    try:
        if len(manifest) > MOST_MANIFEST_BYTES:
            raise BundleError(f"a manifest of {len(manifest)} bytes, which is more than any; send a bundle")
        sums = msgspec.json.decode(manifest, type=Manifest).sha256
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise BundleError(f"a manifest that is damaged ({error}); compile the model again") from error
    for name, sum in sums.items():
        if not _SUM.fullmatch(sum) or name == _MANIFEST:
            raise BundleError(f"a manifest that is damaged (its sum of {name[:80]!r}); compile the model again")
    return sums


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _append(file: BinaryIO, content: memoryview) -> None:
    """Write past the buffer of a file, so that whatever fails leaves a beginning of the content."""
    while len(content):
        content = content[os.write(file.fileno(), content) :]
    file.seek(0, os.SEEK_END)


def _add(tar: tarfile.TarFile, name: str, content: BinaryIO, size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = size
    tar.addfile(entry, content)
