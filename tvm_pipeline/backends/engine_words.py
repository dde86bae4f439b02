"""What an engine's native code writes to standard output and error, where it has no setting for that."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_taking = threading.Lock()


@contextmanager
def taken_words(words: list[str]) -> Iterator[None]:
    """Put what this process writes into `words`, line by line, and so what other threads write meanwhile."""
    with _taking, os.fdopen(os.memfd_create("words"), "r+", errors="replace") as log:
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(log.fileno(), number)
        try:
            yield
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)
            log.seek(0)
            words += log.read().splitlines()
