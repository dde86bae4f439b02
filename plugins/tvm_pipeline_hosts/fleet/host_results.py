"""The lines that the services of a host have written, from files that outlive the agent, each once to the coordinator.

A service writes segments. What was read goes out as one batch, and the same batch again
until the coordinator has taken it. Lines that were taken are safe a moment later, when the disk of the head has them;
a small file remembers how far that is. The next agent goes on there, and so does this one when the coordinator is a new
one, which may lack what the one before had taken. So no line is lost; those that come twice have the same numbers, and
the collector drops them.

A service that is started again counts its frames from 0. Within an epoch frames must grow, so such a line gets the
number that it would have if the service had gone on. Read next: service_process.py.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tvm_pipeline.documents import DAMAGED
from tvm_pipeline_hosts.fleet.messages import Line
from tvm_pipeline_video.service.log_files import LONGEST_LINE, segment_numbers, segment_path

RESULTS = "results.jsonl"  # the name from which segments have theirs
CURSOR = "cursor.json"
MOST_LINES = 500
MOST_BYTES = 200_000  # of the lines of a batch; a longer line goes alone
SAVE_S = 1.0  # between two writes of the cursor
MOST_TAGS = 1000  # whose frames are remembered
MOST_AHEAD = 100  # batches that were taken and are not safe, whose ends are remembered
USUAL_LINE_BYTES = 300  # until lines were read
_Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]


class _Written(msgspec.Struct):
    """What is read of a line; the rest goes through as it is."""

    frame: int
    tag: str = ""


class Position(msgspec.Struct, frozen=True):
    """A place in the segments of a service.

    Attributes:
        segment, offset: the number of the file, and bytes into it.
        frames: tag -> (the greatest number that a line has got, what is added to the numbers that follow).
    """

    segment: _Place = 0
    offset: _Place = 0
    frames: dict[str, tuple[int, int]] = {}

    def reaches(self, other: tuple[int, int]) -> bool:
        """Return whether all before another place is before this one, too."""
        return (self.segment, self.offset) >= other


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines of all services that go out together.

    Attributes:
        since, upto: name where they begin and end, as in HostReport.
        ends: service -> where its lines end.
    """

    lines: tuple[Line, ...]
    since: str
    upto: str
    ends: Mapping[str, Position]


@dataclass(slots=True)
class HostResults:
    """The results of all services in a folder, each in a folder of its own.

    Attributes:
        folder: of the services' folders.
        models: service -> its model; those that are read.
        damaged: how many lines were no results.
    """

    folder: Path
    models: dict[str, str] = field(default_factory=dict)
    damaged: int = 0
    _taken: dict[str, Position] = field(default_factory=dict)  # where the next batch begins
    _since: str = ""  # the name of that; empty where it was safe from the beginning
    _ahead: dict[str, Mapping[str, Position]] = field(default_factory=dict)  # the ends of batches up to there, by names
    _safe: dict[str, Position] = field(default_factory=dict)
    _saved: dict[str, Position] = field(default_factory=dict)
    _batch: Batch | None = None
    _turn: int = 0
    _line_bytes: float = USUAL_LINE_BYTES
    _unsaved: bool = False
    _saved_s: float = -SAVE_S

    def recall(self) -> None:
        """Go on where the cursor file says; from the first line that there is, where it is missing or damaged."""
        with suppress(OSError, *DAMAGED):
            self._safe = msgspec.json.decode((self.folder / CURSOR).read_bytes(), type=dict[str, Position])
        self._saved, self._taken = dict(self._safe), dict(self._safe)

    def batch(self) -> Batch:
        """Return the lines behind those that were taken, the same until they are, few enough for one message."""
        if self._batch is None or not self._batch.lines:
            lines: list[Line] = []
            ends, room = dict(self._taken), MOST_BYTES
            names = sorted(self.models)
            self._turn += 1
            for index in range(len(names)):  # another service is the first each time
                name = names[(index + self._turn) % len(names)]
                ends[name], room = self._read(name, lines, room)
            places = {name: f"{ends[name].segment}:{ends[name].offset}" for name in names}
            self._batch = Batch(tuple(lines), self._since, msgspec.json.encode(places).decode(), ends)
        return self._batch

    def acknowledge(self, taken: str, safe: str) -> bool:
        """Hear how far lines were taken, and how far they are safe; see `HostOrder`.

        Return whether the last batch was taken, and had lines.
        """
        batch = self._batch
        was_taken = batch is not None and taken == batch.upto
        if batch is not None and was_taken:
            self._taken, self._since, self._batch = dict(batch.ends), taken, None
            self._ahead[taken] = batch.ends
            if len(self._ahead) > MOST_AHEAD:
                del self._ahead[next(iter(self._ahead))]
        if safe in self._ahead:
            before, names = self._safe, [*self._ahead]
            self._safe = {name: at for name, at in self._ahead[safe].items() if name in self._taken}
            self._unsaved |= self._safe != before
            for name in names[: names.index(safe) + 1]:
                del self._ahead[name]
        if batch is None or taken not in (batch.since, batch.upto):
            self._taken, self._since, self._batch = dict(self._safe), "", None
            self._ahead.clear()
        return batch is not None and was_taken and bool(batch.lines)

    def save(self, at_once: bool = False) -> None:
        """Write the cursor file if it has changed, at most once in SAVE_S; raise OSError where that fails.

        It does not wait for the disk: after a power failure an older place is found, and lines come twice.
        """
        now_s = time.monotonic()
        if not self._unsaved or (now_s - self._saved_s < SAVE_S and not at_once):
            return
        self._saved_s = now_s
        write_at_once(self.folder / CURSOR, msgspec.json.encode(self._safe))
        self._saved, self._unsaved = dict(self._safe), False

    def end(self, name: str) -> tuple[int, int]:
        """Return the place (segment, bytes) behind the last line that a service has written until now."""
        path = self.folder / name / RESULTS
        number = max(segment_numbers(path), default=0)
        return (number, segment_path(path, number).stat().st_size) if number else (0, 0)

    def waiting(self, batch: Batch) -> int:
        """Return how many lines wait behind a batch: the bytes divided by the length of a usual line."""
        left = 0
        for name in self.models:
            path, at = self.folder / name / RESULTS, batch.ends.get(name, Position())
            for number in segment_numbers(path):
                if number >= at.segment:
                    with suppress(OSError):
                        left += segment_path(path, number).stat().st_size
            left -= at.offset
        return max(0, round(left / self._line_bytes))

    def is_taken(self, name: str) -> bool:
        """Return whether all lines that a service has written are safe."""
        with suppress(OSError):
            return self._safe.get(name, Position()).reaches(self.end(name))
        return False

    def age_s(self, name: str) -> float:
        """Return for how long a service has written nothing; without end where there is nothing of it."""
        path = self.folder / name / RESULTS
        with suppress(OSError):
            if numbers := segment_numbers(path):
                return time.time() - segment_path(path, numbers[-1]).stat().st_mtime
        return math.inf

    def forget(self, name: str) -> None:
        """Read a service's results no more; its folder has gone, or will."""
        self.models.pop(name, None)
        self._taken.pop(name, None)
        self._unsaved |= self._safe.pop(name, None) is not None
        self._batch = None

    def clean(self, keep_s: float, keep_bytes: int) -> None:
        """Delete segments whose lines are safe: those older than `keep_s`, then the oldest beyond `keep_bytes`."""
        segments = []
        for name in self.models:
            path = self.folder / name / RESULTS
            for number in segment_numbers(path):
                # The last one stays, so that the next process of the service takes a number behind it; and those that
                # the next agent would read again, to find the numbers of the lines behind them.
                if number < self._saved.get(name, Position()).segment:
                    with suppress(OSError):
                        found = segment_path(path, number).stat()
                        segments.append((found.st_mtime, found.st_size, segment_path(path, number)))
        kept = sum(size for _, size, _ in segments)
        for changed_s, size, path in sorted(segments):
            if kept > keep_bytes or time.time() - changed_s > keep_s:
                with suppress(OSError):
                    path.unlink()
                kept -= size

    def _read(self, name: str, lines: list[Line], room: int) -> tuple[Position, int]:
        """Add the next lines of a service; return where they end, and the room that is left, in bytes."""
        at, path = self._taken.get(name, Position()), self.folder / name / RESULTS
        frames = dict(at.frames)
        segment, offset = at.segment, at.offset
        while room > 0 and len(lines) < MOST_LINES:
            whole = _whole_lines(segment_path(path, segment), offset, room)
            if whole:
                taken = 0
                for line in whole.splitlines(keepends=True):
                    taken += len(line)
                    self._add(name, line, frames, lines)
                    if len(lines) >= MOST_LINES:
                        break
                offset, room = offset + taken, room - taken
                continue
            following = _following(path, segment, offset)
            if following is None:
                break
            segment, offset = following, 0
        while len(frames) > MOST_TAGS:
            del frames[next(iter(frames))]
        return Position(segment, offset, frames), room

    def _add(self, name: str, text: bytes, frames: dict[str, tuple[int, int]], lines: list[Line]) -> None:
        try:
            written = _LINES.decode(text)
            content = msgspec.json.decode(text, type=dict[str, Any])  # all of it, as others will read it
            camera, _, epoch = written.tag.rpartition("@")
            number = int(epoch)
        except DAMAGED:
            self.damaged += 1
            return
        last, added = frames.get(written.tag, (-1, 0))
        frame, raw = written.frame + added, text[:-1]
        if frame <= last:  # a process that began anew
            added, frame = last + 1, last + 1 + written.frame
        if added:
            raw = msgspec.json.encode({**content, "frame": frame})
        frames[written.tag] = frame, added
        self._line_bytes += (len(text) - self._line_bytes) / 100
        lines.append(Line(camera, self.models[name], number, frame, msgspec.Raw(raw)))


_LINES = msgspec.json.Decoder(_Written)


def write_at_once(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, without waiting for the disk; for its owner alone. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _whole_lines(path: Path, offset: int, room: int) -> bytes:
    """Return the whole lines from there on, `room` bytes of them or one; empty where no whole line has come yet."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            read = file.read(room)
            whole = read[: read.rfind(b"\n") + 1]
            if whole or len(read) < room:
                return whole
            read += file.read(LONGEST_LINE) or b""
    except OSError:
        return b""
    end = read.find(b"\n") + 1
    return read[:end] if end else read if len(read) > LONGEST_LINE else b""


def _following(path: Path, segment: int, offset: int) -> int | None:
    """Return the number of the segment to go on with; None while this one is the last, or there is none."""
    own = segment_path(path, segment)
    if own.exists() and not segment_path(path, segment + 1).exists():
        return None
    numbers = segment_numbers(path)
    later = [number for number in numbers if number > segment] or ([] if own.exists() else numbers)
    # Lines may have been added between reading to the end and the beginning of the next segment.
    return min(later) if later and not _whole_lines(own, offset, MOST_BYTES) else None
