"""The cache of compiled libraries: one process compiles, others wait for it, and what is damaged is compiled anew.

The sums of all files are compared whenever a library is taken from the cache: a bundle would make damage permanent.
`kept_or_made` is all of it. `build.py` says where a library lies and how it is made.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tvm_pipeline.errors import BundleError, PipelineError
from tvm_pipeline.files import damaged, forget_oldest, locked

LEAST_FREE_BYTES = 1 << 20  # with less free space than this, a failure to compile is the disk's
MOST_BYTES = 16 << 30  # of libraries in the cache; what was used longest ago goes first
T = TypeVar("T")
_log = logging.getLogger(__name__)


def kept_or_made(
    plain: Path, what: str, place: Callable[[], Path], load: Callable[[Path], T], make: Callable[[], Path]
) -> T:
    """Return what is in the cache, or make it there under a lock that all processes share.

    Args:
        plain: what the lock is of: the same for all that make the same.
        what: what is made, for messages.
        place: returns where it lies; another process may have moved it meanwhile.
        load: reads it; raises BundleError where it is damaged.
        make: makes it, seals the folder (`files.seal`) and returns where it lies.
    """

    def checked(folder: Path) -> T:
        if name := damaged(folder):
            raise BundleError(f"{folder / name} is not as it was written")
        os.utime(folder)
        return load(folder)

    found = place()
    if found.exists():
        try:
            return checked(found)
        except BundleError:
            pass  # it is read again under the lock, since its maker may only be replacing it
    with locked(plain, what):
        found = place()
        if found.exists():
            try:
                return checked(found)
            except BundleError as error:
                _log.warning("what the cache has of %s is damaged, and it is compiled anew: %s", what, error)
                shutil.rmtree(found)
        try:
            made = load(make())
        except (PipelineError, OSError) as error:  # a linker without room says what it likes
            if shutil.disk_usage(plain.parent).free < LEAST_FREE_BYTES:
                raise PipelineError(
                    f"no space is left for {what} in the cache {plain.parent.parent}; make room there, or set "
                    "TVM_PIPELINE_CACHE to another place"
                ) from error
            raise
        forget_oldest((entry for entry in plain.parent.iterdir() if entry != found), MOST_BYTES)
        return made
