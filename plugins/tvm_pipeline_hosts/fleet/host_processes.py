"""Processes as /proc shows them: which of them run a service's file, whether they live, and what they use.

A process is its number and the moment at which it began, so that another one which has got the number is not taken for
it. Which process runs which file is asked of the processes' own command lines: nothing has to be written down, and an
agent that is killed at any moment leaves no process that the next one does not find.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STOPPED = ("T", "t")
_GONE = ("Z", "X", "x")  # waits for its parent to notice, or has gone


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process; `began_ticks` counts from the start of the machine."""

    pid: int
    began_ticks: int

    @classmethod
    def of(cls, pid: int) -> HostProcess | None:
        """Return the process that has this number now; None if there is none."""
        fields = _fields(pid)
        return cls(pid, int(fields[19])) if fields and fields[0] not in _GONE else None

    def state(self) -> str:
        """Return the letter of its state, see `man proc_pid_stat`; empty once it has ended."""
        fields = _fields(self.pid)
        if not fields or int(fields[19]) != self.began_ticks or fields[0] in _GONE:
            return ""
        return fields[0]

    def usage(self) -> tuple[float, int]:
        """Return the seconds for which it has computed, and its resident memory in bytes; (0, 0) once it has ended."""
        fields = _fields(self.pid)
        if not fields or int(fields[19]) != self.began_ticks:
            return 0.0, 0
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_S, int(fields[21]) * PAGE_BYTES

    def send(self, number: signal.Signals) -> None:
        """Send it a signal if it lives; SIGKILL goes to its whole group, which is its own session's."""
        if not self.state():
            return
        with suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self.pid, number)


def processes_of(folder: Path) -> list[tuple[Path, HostProcess]]:
    """Return the living processes that are a `tvm-pipeline run --config FILE`, with a FILE below this folder."""
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        for option, value in pairwise(words):
            path = Path(os.fsdecode(value))
            if option == b"--config" and folder in path.parents and (process := HostProcess.of(int(entry.name))):
                found.append((path, process))
    return found


def _fields(pid: int) -> list[str]:
    """Return what /proc tells of a process behind its name; empty if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2].decode().split()
    except OSError:
        return []
