"""Files that are either whole or absent, and the folder where compiled models are kept.

`replacing` writes a file or a folder under another name first; `locked` has one process make what several need.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tvm_pipeline.errors import PipelineError

_log = logging.getLogger(__name__)

# What a write into a file that is open already fails with, where the place is at fault.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a temporary path beside `path`; it takes its place when the block ends without an error.

    The temporary name keeps the suffix, since some libraries choose a format by it. It may become a file or
    a folder.

    Raises:
        PipelineError: the file cannot be written. Any other error of the block, such as that of a process which cannot
            be started, is raised as it is.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    try:
        yield temporary
        _to_disk(temporary)
        os.replace(temporary, path)
    except OSError as error:
        if not _is_about(error, temporary):
            raise
        raise PipelineError(f"cannot write {path}: {error.strerror or error}; choose another place") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink()


def _is_about(error: OSError, temporary: Path) -> bool:
    """Return whether an error was met where `temporary` is written: it names a path there, or the disk is full."""
    if not isinstance(error.filename, (str, bytes)):
        return error.errno in _FULL
    named = Path(os.fsdecode(error.filename))
    return named == temporary.parent or temporary in (named, *named.parents)


def _to_disk(path: Path) -> None:
    """Wait until a file, or every file of a folder, is on the disk: a power failure must not leave its name alone."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def write_bytes(path: Path | str, content: bytes) -> None:
    """Writes a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def linked(source: Path, target: Path) -> None:
    """Give a file that nothing writes into a second name, so that it is in memory once, under whichever it is mapped.

    It is copied, and the log says so, where that cannot be: on another file system, or if the file is another user's.
    """
    try:
        os.link(source, target)
    except OSError as error:
        _log.info("%s is copied to %s, and is in memory for each of them: %s", source, target, error.strerror)
        shutil.copyfile(source, target)


def read_bytes(path: Path | str, error: type[PipelineError], most_bytes: int | None = None) -> bytes:
    """The content of a file that a user named; raises `error` where it cannot be read, or is longer than `most_bytes`.

    A pipe is read to its end, and a device that has none, such as /dev/zero, up to `most_bytes`.
    """
    try:
        with open(path, "rb") as file:
            content = file.read() if most_bytes is None else file.read(most_bytes + 1)
        if most_bytes is not None and len(content) > most_bytes:
            raise error(f"{path} has more than {most_bytes} bytes, which no such file has; is it another one?")
        return content
    except OSError as cause:
        raise error(f"cannot read {path}: {cause.strerror or cause}") from cause


def read_at_once(path: Path, most_bytes: int) -> bytes:
    """Return the first bytes of a file of the kernel, by one call of the system; raise OSError where it gives none.

    It does not wait at a pipe. A driver may answer EAGAIN, at which Python's own files raise TypeError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Where compiled models are kept: $TVM_PIPELINE_CACHE, else the user's cache folder."""
    override = os.environ.get("TVM_PIPELINE_CACHE")
    if override:
        return Path(override)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tvm-pipeline"


@contextmanager
def locked(path: Path, what: str, tell: Callable[[str], None] = lambda _: None) -> Iterator[None]:
    """Hold the lock of a path in the cache, which nobody need have written yet, and make the folder that it is in.

    A process that dies releases its lock. Whoever waits looks afterwards whether the other has made what it needs.

    Args:
        path: what is made while the lock is held. The lock is a file beside it, which goes when it is released.
        what: what is made, for messages.
        tell: hears that another process makes it, and that this one waits.

    Raises:
        PipelineError: the cache cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked_file(lock, lambda: tell(f"another process makes {what}; waiting for it"))
    except OSError as error:
        raise PipelineError(
            f"cannot write the cache {path.parent}: {error.strerror or error}; set TVM_PIPELINE_CACHE to a folder that "
            "can be written"
        ) from error
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        os.close(descriptor)


def _locked_file(lock: Path, waits: Callable[[], None]) -> int:
    """Return the descriptor of a lock's file, which this process holds; call `waits` before it waits for another."""
    told = False
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    waits()
                told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Its holder has removed the file before it released the lock; who comes later has another.
            if os.fstat(descriptor).st_ino == lock.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
