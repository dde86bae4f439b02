"""Files that are either whole or absent, and the folder where compiled models are kept.

`replacing` writes a file or a folder under another name first; `locked` has one process make what several need; `keep`
writes what a later run can do without, and `read_kept` reads it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tvm_pipeline.errors import OptionError, PipelineError

_log = logging.getLogger(__name__)

_CACHE_VARIABLES = "TVM_PIPELINE_CACHE", "XDG_CACHE_HOME", "CACHE_DIRECTORY", "STATE_DIRECTORY"
_TEMPORARY = "tvm-pipeline-"  # what the names of temporary folders begin with
SUMS = "sums.json"  # of a sealed folder
_told: set[str] = set()  # caches of which the log said that they cannot be written
SYNC_S = 0.8  # between two waits for the disk, so that a power failure costs a second of lines, those waits included
_NO_DISK = (errno.EINVAL, errno.EROFS, errno.EACCES)  # of `to_disk`, where there is nothing to wait for

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
        for one in (temporary, *temporary.rglob("*")):
            if one.is_file() or one.is_dir():
                to_disk(one)
        os.replace(temporary, path)
        to_disk(path.parent)
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


def to_disk(file: Path | int) -> None:
    """Wait until the disk has what a file holds, or which names a folder has: else a power failure may take them back.

    Nothing is waited for where that is not possible: a pipe, a device, a folder that this user must not list.

    Args:
        file: a path, or a descriptor.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY) if isinstance(file, Path) else file
        try:
            os.fsync(descriptor)
        finally:
            if isinstance(file, Path):
                os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_DISK:
            raise


@contextmanager
def kept_on_disk(path: Path) -> Iterator[None]:
    """Have the disk keep what another writes into a file, every SYNC_S while the block lasts and once more at its end.

    A thread waits for the disk, so that the writer does not. Nothing is done for a pipe or a device.

    Args:
        path: of a file that is there.
    """
    if not path.is_file():
        yield
        return
    ended, told = threading.Event(), False
    descriptor = os.open(path, os.O_RDONLY)

    def sync(what: Path | int) -> None:
        nonlocal told
        try:
            to_disk(what)
        except OSError as error:
            if not told:
                _log.warning(
                    f"{path} may not be on the disk ({error.strerror}): a power failure may take back its last lines"
                )
            told = True

    def keep() -> None:
        sync(path.parent)  # its name
        while not ended.wait(SYNC_S):
            sync(descriptor)

    thread = threading.Thread(target=keep, name="disk", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        sync(descriptor)
        os.close(descriptor)


def write_bytes(path: Path | str, content: bytes) -> None:
    """Writes a whole file or nothing."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def check_distinct(outputs: Iterable[Path | None], inputs: Iterable[Path | str | None]) -> None:
    """Raise OptionError where an output is a file that is read, or another output, be it by another name or a link."""
    taken = {real: str(path) for path in inputs if path and (real := _file(path))}
    for output in outputs:
        if output and (real := _file(output)):
            if real in taken:
                name = str(output) if taken[real] == str(output) else f"{output}, which is {taken[real]}"
                raise OptionError(f"cannot write {name}: the same command reads or writes it; choose another file")
            taken[real] = str(output)


def _file(path: Path | str) -> object:
    """Return what tells a file from all others, or one that is to be made; None for a device, a pipe or a folder."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return os.path.realpath(path) if isinstance(path, Path) else None
    return (found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def is_open_to_others(path: Path) -> bool:
    """Return whether users other than its owner may read a file."""
    return bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


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
    """Return the folder where compiled models are kept, which is made: the first of these that can be written.

    - $TVM_PIPELINE_CACHE, else the user's cache folder ($XDG_CACHE_HOME, ~/.cache),
    - the folders that systemd gives a service ($CACHE_DIRECTORY, $STATE_DIRECTORY),
    - a private folder among the temporary files, which may be gone after the machine was started again.

    The log warns once where it is not the first of them. Where none can be written, the first is returned.
    """
    asked, base, cache, state = map(os.environ.get, _CACHE_VARIABLES)
    usual = asked or os.path.join(base or os.path.expanduser("~/.cache"), "tvm-pipeline")
    private = os.path.join(tempfile.gettempdir(), f"tvm-pipeline-{os.getuid()}")
    of_service = [cache.partition(":")[0]] if cache else []
    of_service += [os.path.join(state.partition(":")[0], "cache")] if state else []
    for place in map(Path, (usual, *of_service, private)):
        if _is_writable(place, alone=str(place) == private):
            if str(place) != usual and usual not in _told:
                _told.add(usual)
                _log.warning(
                    "the cache %s cannot be written, and %s is used; set TVM_PIPELINE_CACHE to a lasting folder that "
                    "can be written",
                    usual,
                    place,
                )
            return place
    return Path(usual)


def _is_writable(folder: Path, alone: bool) -> bool:
    """Make a folder; return whether this user can write into it, and owns it `alone` where that is asked for."""
    if str(folder).startswith("~"):  # a user without an entry in the password file has no home
        return False
    try:
        folder.mkdir(mode=0o700 if alone else 0o777, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return False
    if alone and (
        found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077 or not stat.S_ISDIR(found.st_mode)
    ):
        return False  # another user made it, who could give this one code to run
    return os.access(folder, os.W_OK | os.X_OK)


@contextmanager
def temporary_folder(need_bytes: int = 1 << 20) -> Iterator[Path]:
    """Yield a folder that is removed at the end of the block; first remove those of processes that were killed.

    The folder lies in the cache where the usual place has no room for so many bytes.
    """
    place = Path(tempfile.gettempdir())
    if shutil.disk_usage(place).free < need_bytes:
        place = cache_folder()
    for lock in place.glob(f"{_TEMPORARY}*.lock"):
        with suppress(OSError), lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock.lstat().st_uid == os.getuid():
                shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
                lock.unlink()
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=place, ignore_cleanup_errors=True) as name:
        lock = Path(f"{name}.lock")
        with open(f"{name}.new", "x") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            os.rename(held.name, lock)  # nobody sees it unlocked
            try:
                yield Path(name)
            finally:
                lock.unlink(missing_ok=True)


def keep(path: Path, content: bytes) -> None:
    """Write a file of the cache, with its sum; where that is not possible, the log warns: it can be found out again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content + b"\n" + hashlib.sha256(content).hexdigest().encode())
    except (OSError, PipelineError) as error:
        _log.warning("%s is not kept for the next time: %s", path, error)


def read_kept(path: Path) -> bytes | None:
    """Return what `keep` wrote; None where there is no such file, and where it is damaged, which the log says."""
    try:
        content, _, sum_ = path.read_bytes().rpartition(b"\n")
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest().encode() == sum_:
        return content
    _log.warning("%s is damaged (its checksum differs) and is made anew", path)
    return None


def seal(folder: Path) -> None:
    """Write the sum of each file of a folder into the folder, for `damaged`."""
    sums = {path.name: sum_of(path) for path in sorted(folder.iterdir()) if path.name != SUMS}
    (folder / SUMS).write_text(json.dumps(sums, indent=1))


def damaged(folder: Path) -> str:
    """Return the name of a file that is not as it was when the folder was sealed; empty where there is none."""
    try:
        sums: dict[str, str] = json.loads((folder / SUMS).read_bytes())
        return next((name for name, known in sums.items() if sum_of(folder / name) != known), "")
    except FileNotFoundError as error:
        return Path(error.filename).name
    except (OSError, ValueError, AttributeError):
        return SUMS


def forget_oldest(paths: Iterable[Path], most_bytes: int, keep: Collection[str] = ()) -> None:
    """Remove the files and folders that were used longest ago, until the others have no more bytes than that.

    Args:
        keep: the stems of names that are not removed.
    """
    found = []
    for path in paths:
        with suppress(OSError):
            files = [path, *path.rglob("*")] if path.is_dir() else [path]
            found.append((path.stat().st_mtime, sum(file.stat().st_size for file in files), path))
    held = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if held <= most_bytes:
            return
        if path.stem not in keep:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                held -= size


def sum_of(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of a path in the cache, which nobody need have written yet, and make the folder that it is in.

    A process that dies releases its lock. Whoever waits looks afterwards whether the other has made what it needs.

    Args:
        path: what is made while the lock is held. The lock is a file beside it, which goes when it is released.
        what: what is made, for messages.

    Raises:
        PipelineError: the cache cannot be written.
    """
    lock = path.with_name(f"{path.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _locked_file(lock, lambda: _log.info(f"another process makes {what}; waiting for it"))
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
