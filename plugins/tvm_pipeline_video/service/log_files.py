"""Files of JSON lines over several runs: a line that a crash cut short is cut off, and segments have numbers."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import OptionError

_log = logging.getLogger(__name__)
LONGEST_LINE = 1 << 20  # bytes that are searched for the end of the last whole line


@contextmanager
def appending(path: Path, begin: bytes = b'{"frame":') -> Iterator[IO[bytes]]:
    """Open a file of results to append lines to, each at once, and cut off what a crash left of a line.

    Args:
        begin: what each line begins with; without it, that of `result_lines`.

    Raises OptionError where it cannot be written, or ends in something else than a part of such a line.
    """
    try:
        if path.is_file():
            _cut_broken_line(path, begin)
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise OptionError(
            f"`results` {path}: {error.strerror}; choose another place", option="results", value=path
        ) from error
    with file:
        yield file


def _cut_broken_line(path: Path, begin: bytes) -> None:
    """Cut off the last line of a file where it has no end; raise OptionError where no run writes such a line.

    A power failure may leave zeros in the place of the end.
    """
    _, end = _tail(path)
    if not (cut_bytes := path.stat().st_size - end):
        return
    with path.open("rb") as file:
        file.seek(end)
        rest = file.read().strip(b"\0")[: len(begin)]
    if cut_bytes == LONGEST_LINE or not begin.startswith(rest):
        raise OptionError(
            f"`results` {path} does not end as results do, and is left as it is; choose another place",
            option="results",
            value=path,
        )
    _log.warning("%s: %d bytes of a line that a crash cut short are cut off", path, cut_bytes)
    os.truncate(path, end)


def last_line(path: Path, after: int) -> dict[str, Any]:
    """Return the last whole line of JSON; empty where it does not end more than `after` bytes into the file."""
    whole, end = _tail(path)
    try:
        line = msgspec.json.decode(whole.splitlines()[-1]) if end > after else {}
    except DAMAGED:
        return {}
    return line if isinstance(line, dict) else {}


def segment_path(path: Path, number: int) -> Path:
    """Return the name of a segment: found.jsonl -> found-0001.jsonl."""
    return path.with_name(f"{path.stem}-{number:04d}{path.suffix}")


def segment_numbers(path: Path) -> list[int]:
    """Return the numbers of the segments that there are, in ascending order."""
    form = re.compile(re.escape(path.stem) + "-([0-9]{4,})" + re.escape(path.suffix))
    names = (other.name for other in path.parent.iterdir()) if path.parent.is_dir() else ()
    return sorted(int(found[1]) for name in names if (found := form.fullmatch(name)))


def _tail(path: Path) -> tuple[bytes, int]:
    """Return the last whole lines of a file, and where they end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole, size - len(tail) + len(whole)
