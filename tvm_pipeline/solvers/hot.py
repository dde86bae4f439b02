"""Hot loops: functions on numbers and numpy arrays that numba compiles to machine code.

The import of numba takes half a second, and most commands plan nothing. So the decorator only registers the function.
The first call of a loop imports numba, and replaces every registered function of the loop's module by a compiled one.
All of them are replaced, because compiled code can only call compiled code, and a loop finds the loops that it calls by
their names in its module. numba compiles each loop at its first call and keeps the machine code on disk; the first call
of a fresh installation takes some seconds.

`NUMBA_DISABLE_JIT=1` runs the same code as plain Python, for a debugger or a measurement of coverage. Next:
`planning/search/loops.py` and `memory/order_search.py`, the largest users.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])

# The loops of each module that are not compiled yet, and the compiled form of each other loop.
_registered: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_lock = Lock()


def hot(loop: Loop) -> Loop:
    """Compile `loop` when it is first called.

    Its arguments are numbers, numpy arrays and NamedTuples of these. It may call other hot loops of its own module.
    """
    _registered[loop.__module__].append(loop)

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        # Another module may have imported this function before it was replaced, so it must still work afterwards.
        if loop not in _compiled:
            _compile(loop.__module__)
        return _compiled[loop](*arguments)

    return call  # type: ignore[return-value]


def _compile(module: str) -> None:
    """Replace every registered loop of a module by its compiled form."""
    from numba import njit

    with _lock:
        for loop in _registered.pop(module, []):
            function = njit(cache=True, nogil=True)(loop)
            _drop_unreadable(function)
            _compiled[loop] = loop.__globals__[loop.__name__] = function


def _drop_unreadable(function: Any) -> None:
    """Clear the cache of a function on disk if it names a NamedTuple that this version does not have.

    numba (0.68) does not recognise such a cache as outdated; it fails.
    """
    if hasattr(function, "_cache"):  # it has none where NUMBA_DISABLE_JIT is set
        try:
            function._cache._cache_file._load_index()
        except (AttributeError, ImportError):
            function._cache.flush()
