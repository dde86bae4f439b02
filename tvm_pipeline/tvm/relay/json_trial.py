"""Relay modules as JSON, read in a copy of this process first: TVM's reader checks no reference, and dies of some.

A copy by `fork` takes milliseconds where a new interpreter takes seconds. It does with the module what its import does:
TVM dies of some modules only when they are looked at.
"""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable
from functools import lru_cache

import tvm

from tvm_pipeline.errors import ModelError

READ_S = 120.0  # seconds that reading may take


@lru_cache(maxsize=64)
def check_readable(name: str, content: bytes, use: Callable[[tvm.IRModule], object]) -> None:
    """Read a module, and use it, in a process of its own.

    Args:
        name: of the model, for messages.
        content: the module, as `tvm.ir.save_json` writes it.
        use: what this process does with the module afterwards.

    Raises:
        ModelError: that process died of it, or does not end. What it raises is left to the reader in this process.
    """
    code = _code_of_copy(content, use)
    if code is None:
        how = f"does not end in {READ_S:g} s"
    elif os.WIFSIGNALED(code):
        how = f"ends its process with {signal.Signals(os.WTERMSIG(code)).name}"
    else:
        return
    raise ModelError(
        f"{name}: TVM's reader of Relay JSON {how}: the file is damaged, or of another version of TVM; write it again "
        "with tvm.ir.save_json"
    )


def _code_of_copy(content: bytes, use: Callable[[tvm.IRModule], object]) -> int | None:
    """Return the status of a process that reads; None where it did not end in time."""
    reading, writing = os.pipe()  # which closes with the copy
    with warnings.catch_warnings():
        # Python warns of locks that other threads hold. The copy needs none of theirs, and is killed if it waits.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process == 0:
        _read_and_leave(content, use)
    os.close(writing)
    try:
        watched = select.poll()
        watched.register(reading)
        in_time = bool(watched.poll(READ_S * 1000))
    finally:
        os.close(reading)
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
    return status if in_time else None


def _read_and_leave(content: bytes, use: Callable[[tvm.IRModule], object]) -> None:
    try:
        for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        use(tvm.ir.load_json(content.decode()))
    finally:
        os._exit(0)  # also after an exception, which this process will meet as well
