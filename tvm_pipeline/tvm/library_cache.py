"""The cache of compiled libraries: one process compiles, others wait for it, and what is damaged is compiled anew.

`kept_or_made` is all of it. `build.py` says where a library lies and how it is made.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tvm_pipeline.errors import BundleError
from tvm_pipeline.files import locked

T = TypeVar("T")
_log = logging.getLogger(__name__)


def kept_or_made(
    plain: Path,
    what: str,
    place: Callable[[], Path],
    load: Callable[[Path], T],
    make: Callable[[], Path],
    tell: Callable[[str], None],
) -> T:
    """Return what is in the cache, or make it there under a lock that all processes share.

    Args:
        plain: what the lock is of: the same for all that make the same.
        what: what is made, for messages.
        place: returns where it lies; another process may have moved it meanwhile.
        load: reads it; raises BundleError where it is damaged.
        make: makes it, and returns where it lies.
    """
    found = place()
    if found.exists():
        try:
            return load(found)
        except BundleError:
            pass  # it is read again under the lock, since its maker may only be replacing it
    with locked(plain, what, tell):
        found = place()
        if found.exists():
            try:
                return load(found)
            except BundleError as error:
                _log.warning("what the cache has of %s is damaged, and it is compiled anew: %s", what, error)
                shutil.rmtree(found)
        return load(make())
