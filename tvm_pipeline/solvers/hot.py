"""Hot loops: functions on numbers and numpy arrays that numba compiles to machine code.

The import of numba takes half a second, and most commands plan nothing. So the decorator only registers the function.
The first call of a loop imports numba, and replaces every registered function of the loop's module by a compiled one,
with those that the module imports from others. All of them are replaced, because compiled code can only call compiled
code, and a loop finds the loops that it calls by their names in its module. numba compiles each loop at its first call
and keeps the machine code on disk; the first call of a fresh installation takes some seconds, and processes that begin
together wait for the first of them.

`NUMBA_DISABLE_JIT=1` runs the same code as plain Python without numba, for short searches, a debugger or a measurement
of coverage. Next: `planning/search/loops.py` and `memory/order_search.py`, the largest users.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import numpy as np

from tvm_pipeline.errors import PipelineError
from tvm_pipeline.files import cache_folder, locked

Loop = TypeVar("Loop", bound=Callable[..., Any])

# The loops of each module that are not compiled yet, the compiled form of each other loop, and those that were called.
_registered: defaultdict[str, list[Callable[..., Any]]] = defaultdict(list)
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_called: set[Callable[..., Any]] = set()
_lock = RLock()


def hot(loop: Loop) -> Loop:
    """Compile `loop` when it is first called.

    Its arguments are numbers, numpy arrays and NamedTuples of these. It may call other hot loops.
    """
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return loop
    _registered[loop.__module__].append(loop)

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        # Another module may have imported this function before it was replaced, so it must still work afterwards.
        if loop not in _compiled:
            _compile(loop.__module__)
        function = _compiled[loop]
        if loop not in _called:
            _compile_first(function, arguments)
            _called.add(loop)
        return function(*arguments)

    call.hot = loop  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _compile(module: str) -> None:
    """Replace every registered loop of a module by its compiled form, with those that the module imports.

    numba keeps machine code beside the module. Where that folder cannot be written, it is kept in the cache of compiled
    models; where that cannot be written either, or is full, each process compiles anew.
    """
    if not os.access(Path(__file__).parents[1], os.W_OK):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder() / "numba"))
    from numba import njit

    with _lock:
        loops = _registered.pop(module, [])
        others = _imported(loops[0].__globals__, module) if loops else []
        for loop in loops:
            try:
                function = njit(cache=True, nogil=True)(loop)
            except RuntimeError:  # numba finds no folder that can be written
                function = njit(nogil=True)(loop)
            _note_sources(function, others)
            _drop_unreadable(function)
            _save_if_possible(function)
            _compiled[loop] = loop.__globals__[loop.__name__] = function


def _imported(names: dict[str, Any], module: str) -> list[Any]:
    """Replace the loops that a module imports from others by their compiled forms, and return these."""
    found = []
    for name, value in list(names.items()):
        loop = getattr(value, "hot", getattr(value, "py_func", None))  # before it was compiled, and afterwards
        if loop is not None and loop.__module__ != module:
            if loop not in _compiled:
                _compile(loop.__module__)
            names[name] = _compiled[loop]
            found.append(_compiled[loop])
    return found


def _note_sources(function: Any, others: list[Any]) -> None:
    """Make the machine code on disk as old as the oldest file that it was compiled from.

    numba (0.68) compares the file of the loop alone, and would go on with the former code of an imported loop.
    """
    if others and _has_cache(function):
        stamps = (other._cache._cache_file._source_stamp for other in others if _has_cache(other))
        function._cache._cache_file._source_stamp = function._cache._cache_file._source_stamp, *stamps


def _compile_first(function: Any, arguments: tuple[Any, ...]) -> None:
    """Compile a loop for its first arguments. Processes that begin together compile it once: the others wait for it."""
    from numba import typeof

    with ExitStack() as held:
        with suppress(PipelineError):  # without a cache each compiles it
            held.enter_context(locked(cache_folder() / "numba" / function.__module__, function.__name__))
        function.compile(tuple(map(typeof, arguments)))


def _drop_unreadable(function: Any) -> None:
    """Clear the cache of a function on disk if it names a NamedTuple that this version does not have.

    numba (0.68) does not recognise such a cache as outdated; it fails.
    """
    if _has_cache(function):
        try:
            function._cache._cache_file._load_index()
        except (AttributeError, ImportError):
            function._cache.flush()


def _save_if_possible(function: Any) -> None:
    """Make numba (0.68) go on where the disk is full: it keeps no machine code then, and would raise OSError."""
    if _has_cache(function):
        save = function._cache.save_overload

        def attempt(*arguments: Any) -> None:
            with suppress(OSError):
                save(*arguments)

        function._cache.save_overload = attempt


def _has_cache(function: Any) -> bool:
    """Return whether numba keeps a function: not where no folder can be written."""
    return hasattr(function._cache, "_cache_file")


@hot
def draw(random: Any, count: Any) -> Any:
    """Return a whole number below `count`. Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8, 2003.

    Args:
        random: 1, uint64; the state, which is not 0.
    """
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return np.int64((x >> np.uint64(11)) * (1.0 / 9007199254740992.0) * count)
