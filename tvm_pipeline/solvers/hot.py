"""Hot loops: functions on numbers and numpy arrays that numba compiles to machine code.

To import numba takes half a second, and most commands plan nothing. So the decorator only notes the function; the
first call of a loop imports numba, and puts a compiled function in the place of every noted one of that module. They
all have to be replaced, because compiled code can call compiled code only: a loop finds the loops that it calls by
their names in its module. numba compiles each at its own first call and keeps the machine code on disk; the first call
of a fresh installation takes some seconds.

`NUMBA_DISABLE_JIT=1` runs the same text as plain Python, for a debugger or a measurement of coverage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])

# For each module the loops that are not compiled yet, and for each loop that is its compiled form.
_noted: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_lock = Lock()


def hot(loop: Loop) -> Loop:
    """Compile `loop` when it is first called.

    Its arguments are numbers, numpy arrays and NamedTuples of these. It may call other hot loops of its own module.
    """
    _noted[loop.__module__].append(loop)

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        # Other modules may have imported this function before it was replaced, so it works afterwards, too.
        if loop not in _compiled:
            _compile(loop.__module__)
        return _compiled[loop](*arguments)

    return call  # type: ignore[return-value]


def _compile(module: str) -> None:
    from numba import njit

    with _lock:
        for loop in _noted.pop(module, []):
            function = njit(cache=True, nogil=True)(loop)
            _drop_unreadable(function)
            _compiled[loop] = loop.__globals__[loop.__name__] = function


def _drop_unreadable(function: Any) -> None:
    """Clear what numba keeps on disk of a function where it names a NamedTuple that this version does not have.

    numba does not take that for an old cache but fails (0.68).
    """
    if hasattr(function, "_cache"):  # it has none where NUMBA_DISABLE_JIT is set
        try:
            function._cache._cache_file._load_index()
        except (AttributeError, ImportError):
            function._cache.flush()
