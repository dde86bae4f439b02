"""Commands of `tvm-pipeline` in forks: a process that has imported TVM spares each of them two seconds of CPU time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path


def forked(run: Callable[[], None], stdout: Path, stderr: Path | None = None) -> int:
    """Run a function in a fork of this process, which must have no threads; return the number of that process.

    Args:
        stderr: where the errors go; to `stdout` without it.
    """
    child = os.fork()
    if not child:
        status = 1
        try:
            for path, streams in ((stdout, (1,) if stderr else (1, 2)), (stderr, (2,))):
                if path:
                    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                    for stream in streams:
                        os.dup2(file, stream)
            run()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    return child


def command(*words: object) -> None:
    """Run a command of `tvm-pipeline` in this process."""
    from tvm_pipeline.cli import app

    app(args=[*map(str, words)], standalone_mode=False)
