"""Power failures: an emulated disk, which keeps only what was synced, and a real ext4 that is shut down by the kernel.

`EmulatedDisk` is an emulation within this process. It notes what a file holds, and which names a folder has, whenever
os.fsync or os.fdatasync is called for it. A failure takes back all else: the worst that a file system may do, but for
damage within a file. `ShutDownDisk` is a real file system in a file, which the kernel shuts down without writing its
journal (EXT4_IOC_SHUTDOWN, as xfstests do it), and mounts again: what ext4 keeps of a power failure, where the device
itself keeps what it has confirmed. It needs root.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

_Place = tuple[int, int]  # of a file or a folder: its device and inode

UNMOUNT_S = 10.0
_SHUT_DOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN
_WITHOUT_JOURNAL = 2  # EXT4_GOING_FLAGS_NOLOGFLUSH


class EmulatedDisk:
    """See the module; it is in effect within `emulated_disk`."""

    def __init__(self) -> None:
        self._contents: dict[_Place, bytes] = {}
        self._names: dict[_Place, dict[str, _Place]] = {}
        self._held: dict[_Place, int] = {}  # descriptors, so that no new file gets the inode of one that has gone
        self._lock = threading.Lock()  # else a thread may note what it has read before another one noted more

    def synced(self, descriptor: int) -> None:
        """Note what a file or a folder holds now."""
        about, path = os.fstat(descriptor), Path(f"/proc/self/fd/{descriptor}")
        place = about.st_dev, about.st_ino
        with self._lock:
            if stat.S_ISREG(about.st_mode):
                self._contents[place] = path.read_bytes()
            elif stat.S_ISDIR(about.st_mode):
                self._names[place] = {one.name: _place(one.stat()) for one in path.iterdir() if one.is_file()}
            if place not in self._held:
                self._held[place] = os.open(path, os.O_RDONLY)  # a copy of the descriptor would hold its lock

    def left(self, folder: Path) -> dict[str, bytes]:
        """Return the files of a folder that a power failure would leave now, with their contents."""
        names = self._names.get(_place(folder.stat()), {})
        return {name: self._contents.get(place, b"") for name, place in names.items()}

    def fail(self, folder: Path) -> None:
        """Bring a folder to what a power failure leaves of its files. Whoever has them open must be gone."""
        left = self.left(folder)
        for path in folder.iterdir():
            if path.is_file():
                path.unlink()
        for name, content in left.items():
            (folder / name).write_bytes(content)
            with (folder / name).open("rb") as file:
                self.synced(file.fileno())
        descriptor = os.open(folder, os.O_RDONLY)
        self.synced(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)


@contextmanager
def emulated_disk() -> Iterator[EmulatedDisk]:
    """Have all calls of fsync and fdatasync in this process noted while the block lasts."""
    disk = EmulatedDisk()

    def noting(sync: Callable[[int], None]) -> Callable[[int], None]:
        def noted(descriptor: int) -> None:
            disk.synced(descriptor)  # what is written while the call waits may come too late for it
            sync(descriptor)

        return noted

    with (
        mock.patch("os.fsync", noting(os.fsync)),
        mock.patch("os.fdatasync", noting(os.fdatasync)),
    ):
        try:
            yield disk
        finally:
            disk.close()


class ShutDownDisk:
    """See the module; `shut_down_disk` makes it.

    Attributes:
        folder: where it is mounted.
    """

    def __init__(self, image: Path, folder: Path) -> None:
        self.folder, self._image = folder, image

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self._image, self.folder], check=True, capture_output=True)

    def unmount(self) -> None:
        """Unmount it, once nothing has a file open there."""
        until_s = time.monotonic() + UNMOUNT_S
        while True:
            done = subprocess.run(["umount", self.folder], capture_output=True, text=True)
            if not done.returncode:
                return
            if time.monotonic() > until_s:
                raise OSError(f"cannot unmount {self.folder}: {done.stderr.strip()}")
            time.sleep(0.05)

    def fail(self) -> None:
        """Shut the file system down; every call for it fails from now on, until it is mounted again."""
        descriptor = os.open(self.folder, os.O_RDONLY)
        fcntl.ioctl(descriptor, _SHUT_DOWN, struct.pack("I", _WITHOUT_JOURNAL))
        os.close(descriptor)

    def come_back(self) -> None:
        """Mount it again after a failure; the processes that had files of it open must have ended.

        It is a copy: where a new mount namespace of any process still has the one before, that would be mounted again.
        """
        self.unmount()
        before = self._image
        self._image = Path(shutil.copyfile(before, before.with_name(f"disk{time.monotonic_ns()}.img")))
        before.unlink()
        self.mount()


@contextmanager
def shut_down_disk(folder: Path) -> Iterator[ShutDownDisk]:
    """Make an ext4 of 64 MB in a folder, mounted while the block lasts; raise OSError where that is not possible."""
    image, mounted = folder / "disk.img", folder / "disk"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    disk = ShutDownDisk(image, mounted)
    try:
        subprocess.run([shutil.which("mkfs.ext4") or "/sbin/mkfs.ext4", "-q", image], check=True, capture_output=True)
        disk.mount()
    except subprocess.CalledProcessError as error:
        raise OSError(f"cannot make a disk: {error.stderr.decode(errors='replace').strip()}") from error
    try:
        yield disk
    finally:
        disk.unmount()


def _place(about: os.stat_result) -> _Place:
    return about.st_dev, about.st_ino
