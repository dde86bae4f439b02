"""Recognise work that other programs disturbed, by what the kernel tells of it and by a reference kernel beside it.

The kernel tells how long a thread waited on a run queue, how often it was switched involuntarily, and how much of its
cores the hypervisor took. None of that shows a core that is slower for a while, because its twin on the same real core
is busy or another guest is. So a small computation that is always the same, the reference kernel, runs before and after
the work. What a system does not tell is left out (`observable`). Next: `timings.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import numpy as np

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MOST_WAITED = 0.01  # the share of its time that undisturbed work may wait for a core
MOST_SLOWER = 0.05  # how much slower than at its best the reference kernel may be beside undisturbed work
# What a thread waited is told when it goes on, so that a short window may be told of more than there is of it.
MOST_TAKEN = 0.9


@dataclass(frozen=True, slots=True)
class Window:
    """What was observed while some work was timed.

    Attributes:
        elapsed_s: seconds that the work took.
        waited_s: seconds that it waited on run queues; None where the kernel does not tell.
        switches: involuntary context switches of the thread. They count only where `waited_s` is None: a switch for
            some microseconds disturbs nothing.
        stolen_s: seconds that the hypervisor took from its cores.
        reference_s: seconds of the reference kernel, the slower of those before and after the work; 0 where none ran.
    """

    elapsed_s: float
    waited_s: float | None = None
    switches: int = 0
    stolen_s: float = 0.0
    reference_s: float = 0.0

    @property
    def taken(self) -> float:
        """The share of the time that other programs and the hypervisor took, from 0 to MOST_TAKEN."""
        taken_s = (self.waited_s or 0.0) + self.stolen_s
        return min(taken_s / self.elapsed_s, MOST_TAKEN) if self.elapsed_s else 0.0

    def slower(self, best_s: float) -> float:
        """Return how much slower the core was than at its best, where the reference kernel takes `best_s`."""
        return max(self.reference_s / best_s - 1, 0.0) if best_s else 0.0

    def lost(self, best_s: float) -> float:
        """Return the share that others took, of the time and of the core's speed."""
        return self.taken + self.slower(best_s)

    def is_disturbed(self, best_s: float) -> bool:
        switched = self.waited_s is None and self.switches > 0
        return switched or self.taken > MOST_WAITED or self.slower(best_s) > MOST_SLOWER


class Watch:
    """Observes what the calling thread loses to others; only the thread that made it may use it.

    The calling thread is bound to its device, and has worked there, so that its pool of threads exists. If there are
    several cores, no reference kernel runs: the pool's threads still spin for a while after their work, and slow it.
    """

    def __init__(self, cores: Sequence[int]) -> None:
        self._cores = tuple(cores)
        self._opened = ExitStack()
        self._delays = [file for path in _schedstats(self._cores) if (file := self._open(path)) and _tells(file)]
        self._status = self._open(PROC / "thread-self/status")
        self._stat = self._open(PROC / "stat") if cores else None
        self._reference = ReferenceKernel() if len(self._cores) < 2 else None
        self.look_s = 0.0  # the seconds of the latest observation itself

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def begin(self) -> None:
        """Begin a window."""
        self._reference_s = self._run_reference()
        self._mark()

    def end(self) -> Window:
        """End the window, and begin the next one."""
        end_s = time.perf_counter()
        delays, switches, stolen = self._run_delays(), self._switches(), self._stolen()
        after_s = self._run_reference()
        window = Window(
            elapsed_s=end_s - self._began_s,
            waited_s=_most_risen(self._before[0], delays),
            switches=switches - self._before[1],
            stolen_s=_most_risen(self._before[2], stolen) or 0.0,
            reference_s=max(self._reference_s, after_s),
        )
        self._reference_s = after_s
        self._mark()
        self.look_s = self._began_s - end_s
        return window

    def _run_reference(self) -> float:
        return self._reference.seconds() if self._reference else 0.0

    def _mark(self) -> None:
        self._before = self._run_delays(), self._switches(), self._stolen()
        self._began_s = time.perf_counter()

    def _open(self, path: Path) -> FileIO | None:
        try:
            return self._opened.enter_context(path.open("rb", buffering=0))
        except OSError:
            return None

    def _run_delays(self) -> list[float]:
        """Return the seconds that each thread has waited on run queues."""
        return [int(fields[1]) * 1e-9 if (fields := _read(file).split()) else 0.0 for file in self._delays]

    def _switches(self) -> int:
        """Return how often this thread was switched involuntarily."""
        _, _, rest = _read(self._status).partition(b"nonvoluntary_ctxt_switches:") if self._status else (b"", b"", b"")
        return int(rest.split()[0]) if rest else 0

    def _stolen(self) -> list[float]:
        """Return the seconds that the hypervisor has taken from each core."""
        names = {b"cpu%d" % core for core in self._cores}
        lines = [line.split() for line in _read(self._stat).splitlines()] if self._stat else []
        return [int(line[8]) / _TICKS_PER_S for line in lines if len(line) > 8 and line[0] in names]


class ReferenceKernel:
    """A computation that always takes the same time on an undisturbed core: about 0.1 ms, inside its first caches."""

    def __init__(self) -> None:
        self._values = np.random.default_rng(0).permutation(8192).astype(np.int32)
        self._factors = np.linspace(1, 2, 4096, dtype=np.float32)
        self._sorted, self._products = np.empty_like(self._values), np.empty_like(self._factors)

    def seconds(self) -> float:
        """Return the seconds of a run, the shorter of two: a timer's interrupt is no disturbance."""
        return min(self._run(), self._run())

    def _run(self) -> float:
        begin = time.perf_counter()
        for _ in range(3):
            for _ in range(40):
                np.multiply(self._factors, self._factors, out=self._products)
            np.copyto(self._sorted, self._values)
            self._sorted.sort()
        return time.perf_counter() - begin


def observable(cores: Sequence[int]) -> tuple[str, ...]:
    """Return what this system tells of disturbances on these cores."""
    stat = _text(PROC / "stat")
    found = {
        "run queue": _text(PROC / "thread-self/schedstat").strip() not in ("", "0 0 0"),
        "involuntary switches": "nonvoluntary_ctxt_switches" in _text(PROC / "thread-self/status"),
        "steal time": any(f"cpu{core} " in stat for core in cores),
        "reference kernel": True,
    }
    return tuple(name for name, is_told in found.items() if is_told)


def _schedstats(cores: tuple[int, ...]) -> list[Path]:
    """Return the scheduler's file on this thread, and of the threads that it started to share the work on its cores."""
    own, paths = threading.get_native_id(), [PROC / "thread-self/schedstat"]
    if len(cores) < 2:
        return paths
    for path in sorted((PROC / "self/task").glob("*")):
        try:
            shares = int(path.name) > own and os.sched_getaffinity(int(path.name)) <= set(cores)
        except OSError:  # it ended meanwhile
            continue
        if shares:
            paths.append(path / "schedstat")
    return paths


def _tells(file: FileIO) -> bool:
    """Return whether the kernel counts: a thread that runs has been given a slice of time."""
    fields = _read(file).split()
    return len(fields) == 3 and int(fields[2]) > 0


def _most_risen(before: list[float], after: list[float]) -> float | None:
    """Return by how much the figure rose that rose most; None where there are none."""
    return max((now - then for then, now in zip(before, after, strict=False)), default=None)


def _read(file: FileIO) -> bytes:
    """Return the file from its beginning; nothing where the thread that it is about has ended."""
    try:
        return os.pread(file.fileno(), 1 << 16, 0)
    except OSError:
        return b""


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
