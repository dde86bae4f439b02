"""Memory that ended plans have freed goes back to the system.

glibc's malloc keeps what is freed, in several heaps (its arenas, up to eight for each core), among which threads are
shared out. It keeps ever more: the first large block that is freed, as early as while a model is compiled, raises the
size from which blocks are mapped on their own, up to 32 MB, and twice that may then lie free at the end of a heap. So
the slots and activations of every plan lie in the heaps, what a plan frees is cut into pieces by what outlives it, and
each heap grows until it has met its worst moment, which may take hours. In 750 changes of plan the memory in use stayed
at 59 MB, and the resident memory grew by 130 MB (benchmarks/soak.py runs with and without what is here).

`malloc_trim` gives back every free page, but not those at the end of any heap but the first. So the command has all
threads use the first one (`tvm_pipeline_command.use_one_heap`). Read next: generations.py, which end.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from functools import cache

INTERVAL_S = 1.0  # between two times; each takes about a millisecond, in which no thread can allocate


class FreedMemory:
    """Gives freed memory back once plans have ended, at most every `INTERVAL_S`.

    Args:
        give_back: gives back what is free.
        clock: tells the time in seconds; monotonic.
    """

    def __init__(
        self, give_back: Callable[[], object] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._give_back, self._clock = give_back or give_freed_memory_back, clock
        self._ended = -1  # of those plans the memory was given back; at first it is that of compiling and planning
        self._given_s = -math.inf

    def look(self, ended: int) -> None:
        """Give memory back if it is time; call it again and again with the number of plans that ended until now."""
        if ended != self._ended and self._clock() - self._given_s >= INTERVAL_S:
            self._give_back()
            self._ended, self._given_s = ended, self._clock()


def give_freed_memory_back() -> bool:
    """Give back to the system all whole pages that malloc keeps free; return False where the C library is not glibc."""
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)  # without Python's lock, as all calls of ctypes
    return True


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except AttributeError:  # musl, macOS
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found
