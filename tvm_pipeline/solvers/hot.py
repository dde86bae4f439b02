"""Hot loops: compiled by numba where it is installed, else the same function as it stands, only slower.

There is one text of every loop, so the two ways cannot differ. `TVM_PIPELINE_PLAIN=1` chooses the plain one.
Compiled code is kept on disk by numba; the first call of a fresh installation takes some seconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar

Loop = TypeVar("Loop", bound=Callable[..., Any])


def hot(loop: Loop) -> Loop:
    """Compiles `loop` at its first call. Its arguments are numbers and numpy arrays; it may call other hot loops."""

    @cache
    def fastest() -> Callable[..., Any]:
        if os.environ.get("TVM_PIPELINE_PLAIN") == "1":
            return loop
        try:
            from numba import njit
        except ImportError:
            return loop
        # Compiled code calls compiled code: where the loop's text names another, it gets that one's compiled form.
        known = {name: getattr(value, "fastest", lambda value=value: value)() for name, value in _named(loop).items()}
        text = FunctionType(loop.__code__, {**loop.__globals__, **known}, loop.__name__)
        text.__qualname__, text.__module__ = loop.__qualname__, loop.__module__
        compiled: Callable[..., Any] = njit(cache=True, nogil=True)(text)
        return compiled

    @wraps(loop)
    def call(*arguments: Any) -> Any:
        return fastest()(*arguments)

    call.fastest = fastest  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _named(loop: Callable[..., Any]) -> dict[str, Any]:
    return {name: loop.__globals__[name] for name in loop.__code__.co_names if name in loop.__globals__}
