"""Reads figures that the kernel tells in files, and says in words why it does not.

Such a file holds one figure or one name. Its reader meets more than files that are missing: a driver that is asleep
answers EAGAIN, a counter that is for root alone EACCES, a bus that does not answer EIO or ENODATA.
"""

from __future__ import annotations

import errno
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.files import read_at_once

MOST_BYTES = 4096  # a file of sysfs has one page


def text_of(path: Path) -> str:
    """Return what a file of the kernel says, without the white space around it.

    Raises:
        PowerError: it cannot be read; the message names it, the reason, and what would help.
    """
    try:
        return read_at_once(path, MOST_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise PowerError(f"{path}: {_reason(path, error)}") from error


def number_of(path: Path, least: int = 0) -> int:
    """Return the figure in a file of the kernel.

    Raises:
        PowerError: it cannot be read, or is empty, no figure, or below `least`; the message names the file.
    """
    text = text_of(path)
    try:
        number = int(text)
    except ValueError:
        raise PowerError(f"{path}: {text[:40]!r} is no figure") from None
    if number < least:
        raise PowerError(f"{path}: {number} is negative; is the sensor wired the other way round, or a battery's?")
    return number


def _reason(path: Path, error: OSError) -> str:
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"only root may read it; allow it until the next boot with `sudo chmod a+r {path}`, or run as root"
    if error.errno == errno.EAGAIN:
        return "its driver has no value now (EAGAIN): what it measures may be switched off or asleep"
    return error.strerror or str(error)
