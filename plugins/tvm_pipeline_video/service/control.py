"""A small file that says what a run plans for from now on; it is read whenever it changes.

    objective = "energy"    # that of the run's start, where the file names none
    min-throughput = 10     # no limit, where the file names none

The file may appear late. When it vanishes, the last objective stays. A file that is half written is reported, and read
again when it changes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypedDict

from tvm_pipeline import Problem
from tvm_pipeline.core.problem import checked_objective, is_lexicographic
from tvm_pipeline.documents import TomlFile
from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime.replanning import with_runtime_objective
from tvm_pipeline_video.service.settings import Settings

_Control = TypedDict("_Control", {"objective": str, "min-throughput": float, "max-latency": float}, total=False)


def requested_problem(
    problem: Problem, objective: str | None, min_throughput_fps: float | None, max_latency_s: float | None
) -> Problem:
    """Return the problem with another objective (None: its own) and these limits.

    Raises OptionError for contradictions.
    """
    usual = replace(with_runtime_objective(problem), min_throughput_fps=None, max_latency_s=None)
    chosen = checked_objective(objective) if objective else usual.objective
    if is_lexicographic(chosen):
        raise OptionError(
            f"`objective` {objective} counts bytes, which do not change while a plan runs",
            option="objective",
            value=objective,
        )
    return replace(usual, objective=chosen, min_throughput_fps=min_throughput_fps, max_latency_s=max_latency_s)


class ControlFile:
    """The file, with what tells whether it changed since it was read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> TomlFile | None:
        """Return it where it has changed; raise OptionError, once for each change, where it cannot be used."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        seen = found.st_mtime_ns, found.st_size, found.st_ino
        if seen == self._seen or not found.st_size:  # empty: somebody is about to write
            return None
        self._seen = seen
        file = TomlFile(self._path, OptionError)
        file.tables = file.convert(_Control)
        return file


def controlled(problem: Problem, file: TomlFile, settings: Settings) -> Problem:
    """Return the problem as a control file requests it; raise OptionError with the line that is wrong."""
    values = file.tables
    try:
        return requested_problem(
            problem,
            values.get("objective", settings.objective),
            values.get("min-throughput"),
            values.get("max-latency"),
        )
    except OptionError as error:
        raise file.located(error) from error
