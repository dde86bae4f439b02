"""A small file that says what a run plans for from now on, looked at while it runs.

    objective = "energy"    # that of the run's start, where it is not named
    min-throughput = 10     # no limit, where none is named

It may appear late, vanish (the last objective stays) or be half written (said, and read again when it changes).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tvm_pipeline.core.plan import Problem, is_lexicographic
from tvm_pipeline.errors import OptionError
from tvm_pipeline.runtime.replanning import timed
from tvm_pipeline.service.common import checked_objective
from tvm_pipeline.service.file import Keys, read_keys
from tvm_pipeline.service.settings import Settings

KINDS = {"objective": str, "min-throughput": float, "max-latency": float}


def wanted(problem: Problem, objective: str | None, min_throughput: float | None, max_latency: float | None) -> Problem:
    """The problem with another objective (None: its own) and these limits; raises OptionError for contradictions."""
    usual = replace(timed(problem), min_throughput_fps=None, max_latency_s=None)
    chosen = checked_objective(objective) if objective else usual.objective
    if is_lexicographic(chosen):
        raise OptionError(f"--objective {objective} counts bytes, which do not change while a plan runs")
    return replace(usual, objective=chosen, min_throughput_fps=min_throughput, max_latency_s=max_latency)


class ControlFile:
    """The file, and what it looked like last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    def news(self) -> Keys | None:
        """What it says, where it has changed; raises OptionError, once for each change, where it cannot be used."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        seen = found.st_mtime_ns, found.st_size, found.st_ino
        if seen == self._seen or not found.st_size:  # empty: somebody is about to write
            return None
        self._seen = seen
        return read_keys(self._path, KINDS)


def controlled(problem: Problem, keys: Keys, settings: Settings) -> Problem:
    """The problem as a control file wants it; raises OptionError with the line that is wrong."""
    values = keys.values
    try:
        return wanted(
            problem,
            values.get("objective", settings.objective),
            values.get("min-throughput"),
            values.get("max-latency"),
        )
    except OptionError as error:
        raise keys.located(error) from error
