"""What a run writes for others to read: its events, a line for each frame, its figures.

What a service writes is a log: lines are appended as they come, and one that a crash cut short is cut off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import msgspec

from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime import Event, RunStatistics
from tvm_pipeline.service.common import say

LONGEST_LINE = 1 << 20  # bytes that are searched for the end of the last whole line

Tell = Callable[[Event, str], None]  # an event, and the model it is of where there are several


@contextmanager
def event_log(path: Path | None) -> Iterator[Tell]:
    """Appends each event to a file of JSON lines; where that fails it is said, and the run goes on."""
    if path is None:
        yield lambda _, __: None
        return
    try:
        file = path.open("ab", buffering=0)  # what could not be written is not tried again when it is closed
    except OSError as error:
        raise OptionError(f"--events {path}: {error.strerror}; choose another place") from error
    with file:

        def write(event: Event, model: str) -> None:
            line = asdict(event) | ({"model": model} if model else {})
            try:
                file.write(msgspec.json.encode(line) + b"\n")
            except (OSError, ValueError) as error:
                say(f"warning: --events {path}: {error}; it lacks: {event.reason}", "yellow")

        yield write


@contextmanager
def appending(path: Path) -> Iterator[IO[bytes]]:
    """A file to append lines to, each at once; what a crash left of a line is cut off.

    Raises OptionError where it cannot be written.
    """
    try:
        file = path.open("ab", buffering=0)
        if path.is_file():
            _, end = _tail(path)
            os.truncate(path, end)
    except OSError as error:
        raise OptionError(f"--results {path}: {error.strerror}; choose another place") from error
    with file:
        yield file


def last_line(path: Path, after: int) -> dict[str, Any]:
    """The last whole line of JSON, where it ends more than so many bytes into the file; else empty."""
    whole, end = _tail(path)
    try:
        line = msgspec.json.decode(whole.splitlines()[-1]) if end > after else {}
    except msgspec.DecodeError:
        return {}
    return line if isinstance(line, dict) else {}


def _tail(path: Path) -> tuple[bytes, int]:
    """The last whole lines of a file, and where they end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read()
    whole = tail[: tail.rfind(b"\n") + 1]
    return whole, size - len(tail) + len(whole)


def line_json(seen: Any, stand_ins: Iterable[str] = (), model: str = "") -> dict[str, Any]:
    """One frame's line: what a decoder found, else the size and the highest place of each output."""
    line = {"frame": seen.frame.index, "time_s": seen.frame.time_s, "latency_s": seen.result.latency_s}
    if model:
        line["model"] = model
    line["source"] = seen.frame.source
    if seen.frame.age_s is not None:
        line["age_s"] = seen.frame.age_s
    if stand_ins:
        line["stand_ins"] = list(stand_ins)
    if seen.annotations:
        return {**line, "annotations": [asdict(annotation) for annotation in seen.annotations]}
    outputs = {
        name: {"shape": list(array.shape), "argmax": int(array.argmax()), "max": float(array.max())}
        for name, array in seen.result.outputs.items()
    }
    return {**line, "outputs": outputs}


def measured_json(statistics: RunStatistics) -> dict[str, Any]:
    """A run's statistics under the names of a prediction; the latency includes the queues of a full pipeline."""
    return {"latency_s": statistics.latency_p50_s, "energy_j": None, **asdict(statistics)}
