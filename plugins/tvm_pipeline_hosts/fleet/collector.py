"""The file of a fleet's results: lines of all hosts, each (camera, model, epoch, frame) once and whole.

    collector = Collector()
    collector.into(Path("all.jsonl"))
    found = collector.take("attic", report.lines, report.since, report.upto)    # None: the host sends them again
    collector.sync()                                                            # the disk has them

What was taken is safe once the disk has it, which `sync` waits for: a power failure may take back all else, and hosts
keep it. A collector takes lines of a host only from where the host's lines before end, or from a place that is safe, so
that no gap comes between. What a disk did not keep is taken back, and hosts send it again.

A duty's lines come in the order of (epoch, frame), so that one pair for each duty tells which lines are new, however
often a host sends them; and once a camera has a line of a host, no older epoch of another host follows. An index beside
the file, written after every few megabytes, has these pairs and how far they reach; a collector that starts reads the
lines behind it. A file system may leave zeros there after a power failure: the file is cut before them, since no line
behind was safe. Next: coordinator.py, which says whose lines count.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import to_disk, write_bytes
from tvm_pipeline_hosts.fleet.messages import Line
from tvm_pipeline_video.service.log_files import appending

INDEX_EVERY = 8 << 20  # bytes of lines between two writes of the index
TAIL = 64 << 20  # bytes that are read of a file without an index
PIECE = 1 << 20
PROBE = b" " * 4096  # without the end of a line, so that a crash leaves no line of it
_NONE = (-1, -1, "")  # the place before the first line of a duty

# Keys that the collector adds; a line that has one already is put together again.
_ADDED = (b'"camera"', b'"model"', b'"host"', b'"epoch"')

_log = logging.getLogger(__name__)


class _Place(msgspec.Struct):
    """Where a line of the file stands among those of its duty."""

    camera: str
    model: str
    epoch: int
    frame: int
    host: str


class _Index(msgspec.Struct):
    """The last line of each duty among the first `end` bytes of the file."""

    end: int
    last: list[_Place]


_PLACES = msgspec.json.Decoder(_Place)


@dataclass(slots=True)
class ReceivedLines:
    """What became of the lines of a report.

    Attributes:
        new: those that were written.
        late: those of an older epoch than has a line already; they are not written.
    """

    new: list[Line] = field(default_factory=list)
    late: list[Line] = field(default_factory=list)


class Collector:
    """Writes lines of results into a file. Without one (`into(None)`) it only tells which lines are new.

    Attributes:
        problem: why lines cannot be written now; empty where they can.
        written: lines since it started.
        taken, safe: host -> the last `HostReport.upto` whose lines were taken, and are on the disk.
    """

    def __init__(self) -> None:
        self.problem = ""
        self.written = 0
        self.taken: dict[str, str] = {}
        self.safe: dict[str, str] = {}
        self._path: Path | None = None
        self._file: IO[bytes] | None = None
        self._open = ExitStack()
        self._end = self._synced = 0  # of the whole lines, and of those that are on the disk
        self._indexed = 0
        self._last: dict[tuple[str, str], tuple[int, int, str]] = {}  # duty -> (epoch, frame, host)
        self._newest: dict[str, tuple[int, str]] = {}  # camera -> (epoch, host)
        self._heads: dict[tuple[str, str, str, int], bytes] = {}

    def into(self, path: Path | None) -> None:
        """Write into this file from now on, behind what it has.

        Raises:
            OptionError: it cannot be written, or another collector writes it. Nothing has changed then.
        """
        if path is not None and path == self._path and self._file is not None:
            return
        with ExitStack() as opened:
            file = opened.enter_context(appending(path, b'{"camera":')) if path else None
            if path is not None and file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise OptionError(
                        f"`results` {path}: another process writes it; end that, or choose another file",
                        option="results",
                        value=path,
                    ) from None
                except OSError as error:  # a file system without locks
                    _log.info("%s has no lock: %s", path, error.strerror)
                try:
                    to_disk(file.fileno())  # what a process before has left
                    to_disk(path.parent)
                except OSError as error:
                    raise OptionError(_why_not(path, error), option="results", value=path) from error
            self.close()
            self._open = opened.pop_all()
        self._path, self._file, self.problem = path, file, ""
        self._end = os.fstat(file.fileno()).st_size if file else 0
        try:
            if path and path.is_file():
                self._read(path)
        except OSError as error:
            self._open.close()
            self._file = None
            raise OptionError(_why_not(path, error), option="results", value=path) from error
        self._synced = self._end
        self._write_index(self._end, self._last)

    def resume(self, path: Path | None) -> None:
        """Write into this file from now on or, where that is not possible, as soon as it is: `problem` says why."""
        try:
            self.into(path)
        except OptionError as error:
            self._path, self.problem = path, str(error)

    def take(self, host: str, lines: Sequence[Line], since: str = "", upto: str = "") -> ReceivedLines | None:
        """Write what is new of these lines, in their order, by one call of the system.

        Args:
            since, upto: where they begin and end, see HostReport.

        Returns:
            None where they cannot be written, and `problem` says why, or lines before them are missing. Nothing is
            written then.
        """
        if since and self.taken.get(host) not in (since, upto):
            return None
        taken, last = ReceivedLines(), dict[tuple[str, str], tuple[int, int, str]]()
        for line in lines:
            duty = line.camera, line.model
            epoch, frame, _ = last.get(duty) or self._last.get(duty, _NONE)
            newest, whose = self._newest.get(line.camera, (-1, host))
            if line.epoch < epoch or (line.epoch < newest and whose != host):
                taken.late.append(line)
            elif line.epoch > epoch or line.frame > frame:
                last[duty] = line.epoch, line.frame, host
                taken.new.append(line)
        if taken.new and self._path and not self._write(b"".join(self._whole(host, line) for line in taken.new)):
            return None
        for duty, place in last.items():
            self._learn(duty, place)
        self.written += len(taken.new)
        self.taken[host] = upto
        return taken

    def sync(self, waiting: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Wait until the disk has the lines that were taken until now, and note that they are safe.

        Args:
            waiting: makes what holds while it waits for the disk, as a lock that is released: lines may be taken then.
        """
        file, end, taken = self._file, self._end, dict(self.taken)
        if file is not None and end > self._synced:
            last = dict(self._last) if end - self._indexed > INDEX_EVERY else {}
            descriptor = os.dup(file.fileno())
            try:
                with waiting():
                    to_disk(descriptor)
            except OSError as error:
                self._take_back(file, error)
                return
            finally:
                os.close(descriptor)
            if self._file is file:
                self._synced = max(end, self._synced)
                if last:
                    self._write_index(end, last)
        self.safe.update(taken)

    def look(self) -> None:
        """Open the file again where it is another one now, as after a rotation, or could not be opened.

        Where the disk was full, try whether it has room now.
        """
        if self._path is None:
            return
        with suppress(OSError):
            if self._file is not None and os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                if self.problem and self._write(PROBE):
                    self._end -= len(PROBE)
                    os.ftruncate(self._file.fileno(), self._end)
                return
        self.close()
        self.resume(self._path)

    def close(self) -> None:
        """Close the file. It may be called twice."""
        self.sync()
        self._write_index(self._end, self._last)
        self._open.close()
        self._file = None

    def _whole(self, host: str, line: Line) -> bytes:
        """Return the line of the file: the host's JSON after camera, model, host and epoch."""
        found = bytes(line.line)
        if found[:1] != b"{" or found[1:2] == b"}" or b"\n" in found or any(key in found for key in _ADDED):
            return _put_together(host, line, found)
        key = (line.camera, line.model, host, line.epoch)
        head = self._heads.get(key)
        if head is None:
            if len(self._heads) > 10_000:
                self._heads.clear()
            head = self._heads[key] = msgspec.json.encode(_added(host, line))[:-1] + b","
        return b"%b%b\n" % (head, found[1:])

    def _write(self, content: bytes) -> bool:
        """Append whole lines; return False where that fails, with nothing of them in the file."""
        if self._file is None:
            return False
        try:
            if self.problem:
                os.ftruncate(self._file.fileno(), self._end)  # what could not be taken back then
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._file.fileno(), rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)
            self.problem = _why_not(self._path, error)
            return False
        self.problem = ""
        self._end += len(content)
        return True

    def _take_back(self, file: IO[bytes], error: OSError) -> None:
        """Cut off what the disk did not keep, and forget that it was taken; `look` opens the file again."""
        self.problem, self.taken = _why_not(self._path, error), dict(self.safe)
        if self._file is file:
            with suppress(OSError):
                os.ftruncate(file.fileno(), self._synced)
            self._open.close()
            self._file = None
            self._last.clear()
            self._newest.clear()

    def _read(self, path: Path) -> None:
        """Learn the last line of each duty from the index and the lines behind it."""
        begin, is_own = max(0, self._end - TAIL), False
        try:
            index = msgspec.json.decode(_index_path(path).read_bytes(), type=_Index)
        except FileNotFoundError:
            if begin:
                _log.warning("%s has no index: lines before its last %d MB are not compared", path, TAIL >> 20)
        except (OSError, *DAMAGED) as error:
            _log.warning("%s is left out (%s): the file is read itself", _index_path(path), error)
        else:
            for place in index.last:
                self._learn((place.camera, place.model), (place.epoch, place.frame, place.host))
            is_own = begin <= index.end <= self._end
            begin = index.end if is_own else begin
        self._indexed = at = begin
        for line in _lines(path, begin, self._end):
            if is_own and b"\0" in line and self._file is not None:
                _log.warning("%s: %d bytes that a power failure has damaged are cut off", path, self._end - at)
                os.ftruncate(self._file.fileno(), at)
                self._end = at
                return
            at += len(line) + 1
            with suppress(*DAMAGED):  # a line of another kind
                place = _PLACES.decode(line)
                self._learn((place.camera, place.model), (place.epoch, place.frame, place.host))

    def _learn(self, duty: tuple[str, str], place: tuple[int, int, str]) -> None:
        """Note the last line of a duty."""
        self._last[duty] = max(self._last.get(duty, _NONE), place)
        epoch, _, host = place
        if epoch > self._newest.get(duty[0], (-1, ""))[0]:
            self._newest[duty[0]] = epoch, host

    def _write_index(self, end: int, last: Mapping[tuple[str, str], tuple[int, int, str]]) -> None:
        """Write the index of lines that are on the disk; without one there are more lines to read at the next start."""
        if self._path is None or self._file is None or not self._path.is_file():
            return
        self._indexed = end
        places = [_Place(camera, model, *place) for (camera, model), place in last.items()]
        try:
            write_bytes(_index_path(self._path), msgspec.json.encode(_Index(end, places)))
        except PipelineError as error:
            _log.info("%s", error)


def _why_not(path: Path | None, error: OSError) -> str:
    return f"`results` {path}: {error.strerror or error}; hosts keep their lines until it can be written: make room"


def _index_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.index")


def _added(host: str, line: Line) -> dict[str, str | int]:
    return {"camera": line.camera, "model": line.model, "host": host, "epoch": line.epoch}


def _put_together(host: str, line: Line, found: bytes) -> bytes:
    """Return the line of JSON that already has one of the keys, or stands in several lines, or is no object."""
    content = msgspec.json.decode(found)
    content = content if isinstance(content, dict) else {"frame": line.frame, "line": content}
    return (
        msgspec.json.encode(_added(host, line) | {k: v for k, v in content.items() if k not in _added(host, line)})
        + b"\n"
    )


def _lines(path: Path, begin: int, end: int) -> Iterable[bytes]:
    with path.open("rb") as file:
        file.seek(begin)
        rest = b""
        while begin < end and (piece := file.read(min(PIECE, end - begin))):
            begin += len(piece)
            *whole, rest = (rest + piece).split(b"\n")
            yield from whole
