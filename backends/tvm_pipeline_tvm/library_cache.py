"""The cache of compiled libraries: one process compiles, others wait for it, and what is damaged is compiled anew.

The sums of all files are compared whenever a library is taken from the cache: a bundle would make damage permanent.
A library lies where its choices of tuning say, but for choices of other libraries' workloads: `tuned_or_made`. The
`build.py` of each IR says how it is made.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tvm_pipeline.errors import BundleError, PipelineError
from tvm_pipeline.files import damaged, forget_oldest, keep, locked, read_kept, replacing, seal
from tvm_pipeline_tvm.kernel_sets import Choices, hashable

LEAST_FREE_BYTES = 1 << 20  # with less free space than this, a failure to compile is the disk's
MOST_BYTES = 16 << 30  # of libraries in the cache; what was used longest ago goes first
T = TypeVar("T")
_log = logging.getLogger(__name__)


def tuned_or_made(
    plain: Path,
    what: str,
    choices: Choices,
    digest_of: Callable[[Choices], str],
    load: Callable[[Path], T],
    write: Callable[[Path, Choices], tuple[Iterable[Any], Choices]],
) -> T:
    """Return the library of these choices from the cache, or make it there; other arguments are of `kept_or_made`.

    Args:
        plain: where it lies without choices.
        choices: of tuning, perhaps for workloads that the library does not have.
        digest_of: returns a digest of choices, whatever their order is.
        write: writes the library into a folder; returns its workloads, and the choices that it used.
    """

    def place() -> Path:
        return _tuned_folder(plain, _own(plain, choices)[0], digest_of)

    def make() -> Path:
        own, is_sorted = _own(plain, choices)
        folder = _tuned_folder(plain, own, digest_of) if is_sorted else plain.with_name(f"{plain.name}-new")
        for left in (*plain.parent.glob(f".{plain.name}*"), plain.with_name(f"{plain.name}-new")):
            shutil.rmtree(left, ignore_errors=True)  # by a process that was killed, since this one holds the lock
        with replacing(folder) as temporary:
            temporary.mkdir()
            workloads, used = write(temporary, own)
            seal(temporary)
        keep(_workloads_file(plain), msgspec.json.encode(sorted(set(workloads))))
        return folder if is_sorted else _moved(folder, _tuned_folder(plain, used, digest_of))

    return kept_or_made(plain, what, place, load, make)


def _own(plain: Path, choices: Choices) -> tuple[Choices, bool]:
    """Return the choices for workloads of this library, and whether it is known which these are."""
    known = _known_workloads(plain) if choices else None
    if known is None:
        return choices, not choices
    return {workload: choice for workload, choice in choices.items() if workload in known}, True


def _tuned_folder(plain: Path, choices: Choices, digest_of: Callable[[Choices], str]) -> Path:
    """Return the folder of a library; `choices` are for workloads of this library only."""
    return plain.with_name(f"{plain.name}-{digest_of(choices)[:16]}") if choices else plain


def _moved(folder: Path, target: Path) -> Path:
    """Move a library to its place, unless one is there already."""
    try:
        os.replace(folder, target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _workloads_file(plain: Path) -> Path:
    return plain.with_suffix(".workloads.json")


def _known_workloads(plain: Path) -> set[Any] | None:
    """Return the workloads of a model that was compiled before; None where they are not known."""
    content = read_kept(_workloads_file(plain))
    return None if content is None else set(hashable(msgspec.json.decode(content, type=list[Any])))


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
