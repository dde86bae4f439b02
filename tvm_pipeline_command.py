"""The beginning of the command `tvm-pipeline`: importing the package takes seconds, in which Ctrl-C must end it, too.

It stands outside of the package, whose own import is a part of that time. Nothing is to be cleaned up before the
command itself begins, so that the process can end where it is. Read next: `tvm_pipeline/cli/__init__.py`.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal

_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h, which calls these heaps arenas


def main() -> None:
    """Import the command line, which a signal ends at once, and run it."""
    use_one_heap()
    open_standard_streams()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
            # While the interpreter takes itself down, a signal would kill it and replace the status of the command.
            atexit.register(signal.signal, number, signal.SIG_IGN)
    from tvm_pipeline.cli import main as command

    command()


def use_one_heap() -> bool:
    """Have all threads take their memory from one heap of malloc; return False where the C library is not glibc.

    Call it before any thread is made, so before numpy is imported: glibc keeps the limit that it has used once. Only
    of this heap does it give back all that is free, see `tvm_pipeline/runtime/freed_memory.py`.
    """
    try:
        return bool(ctypes.CDLL(None).mallopt(_ARENA_MAX, 1))
    except AttributeError:  # musl, macOS
        return False


def open_standard_streams() -> None:
    """Give streams that are closed, as after `<&-`, the null device: else the next file or socket takes their numbers.

    A child process, whose own streams have these numbers, would lose it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def stop(number: int, _: object) -> None:
    """Handle a signal while modules are imported: an exception would print a traceback, and may be swallowed there."""
    os.write(2, b"stopped\n")
    os._exit(128 + number)


if __name__ == "__main__":
    main()
