"""What a machine was set to before a power mode: a file that outlives a process which is killed.

It is written before the first change, and removed after everything is put back. While a process has a mode set, it
holds a lock beside the file, which the system releases with the process: a record whose lock is free was left behind.

The file is in $TVM_PIPELINE_STATE, else for root in /var/lib/tvm-pipeline-modes, else in $XDG_STATE_HOME/tvm-pipeline
or ~/.local/state/tvm-pipeline. It names clocks and modes, and no paths. The folder must belong to the user who writes
there: the owner of a folder may exchange what another user writes for a link. So root's is not /var/lib/tvm-pipeline,
which is that of the service's user. Next: mode_switch.py.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from tvm_pipeline.errors import PlatformError, PowerError
from tvm_pipeline.files import replacing
from tvm_pipeline.power import PowerMode
from tvm_pipeline.system_files import file_text

RECORD, LOCK = "power-mode.json", "power-mode.lock"
OF_ROOT = Path("/var/lib/tvm-pipeline-modes")
_MOST_BYTES = 1 << 16


class ModeRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was before a mode was set.

    Attributes:
        mode: the name of the mode that was then set.
        pid: the process that set it.
        boot: the boot of the machine; clock limits do not outlive it, the mode of `nvpmodel` does.
        nvpmodel: the number of the mode before; None where it was not changed.
        clock_limits: the limits before, of the clocks that were changed.
    """

    mode: str
    pid: int
    boot: str
    nvpmodel: int | None = None
    clock_limits: dict[str, int] = {}

    def __post_init__(self) -> None:
        if self.nvpmodel is not None or self.clock_limits:
            try:
                PowerMode("before", self.nvpmodel, self.clock_limits)
            except PlatformError as error:
                raise ValueError(str(error).partition(";")[0]) from error

    @property
    def by_hand(self) -> str:
        """How a user puts everything back."""
        steps = [] if self.nvpmodel is None else [f"`sudo nvpmodel -m {self.nvpmodel}`"]
        steps += [f"limit {clock} to {limit}" for clock, limit in self.clock_limits.items()]
        return ", then ".join(steps) or "nothing"


def boot_id(root: Path = Path("/")) -> str:
    """Return what tells this boot of the machine from others; empty where the system does not."""
    return file_text(root / "proc/sys/kernel/random/boot_id")


def state_folder() -> Path:
    """Return the folder of this user's record."""
    if override := os.environ.get("TVM_PIPELINE_STATE"):
        return Path(override)
    if os.geteuid() == 0:
        return OF_ROOT
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base or os.path.expanduser("~/.local/state"), "tvm-pipeline")


def state_folders() -> list[Path]:
    """Return the folders where a record may have been left: this user's, and root's, who can set modes."""
    if "TVM_PIPELINE_STATE" in os.environ:
        return [state_folder()]
    return list(dict.fromkeys((state_folder(), OF_ROOT)))


@contextmanager
def locked_record(folder: Path) -> Iterator[bool]:
    """Hold the lock of a folder's record while the block lasts; yield False where another process holds it.

    Raises:
        PowerError: the lock cannot be opened, or the folder is another user's.
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        about = folder.stat()
        if about.st_uid != os.geteuid() or (about.st_uid == 0 and about.st_mode & 0o022):
            raise PowerError(
                f"{folder} is not used: another user could exchange what is written there; set TVM_PIPELINE_STATE to a "
                "folder that belongs to this user alone"
            )
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise PowerError(
            f"cannot use {folder / LOCK}: {error.strerror or error}; set TVM_PIPELINE_STATE to a folder of this user"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        yield mine
    finally:
        os.close(lock)


def write_record(folder: Path, record: ModeRecord) -> None:
    """Write the record, whole and to the disk; raise PipelineError where that is not possible."""
    with replacing(folder / RECORD) as temporary:
        temporary.touch(0o644)  # other users may read what they cannot put back
        temporary.write_bytes(msgspec.json.encode(record))


def read_record(folder: Path) -> ModeRecord | None:
    """Return the folder's record; None where there is none.

    Raises:
        PowerError: it is damaged, or not the user's own or root's; what was set before is then not known.
    """
    path = folder / RECORD
    try:
        # Neither a link nor a pipe: the file decides what root writes.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PowerError(f"{path} cannot be read: {error.strerror or error}{_REMEDY}") from error
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid not in (0, os.geteuid()) or about.st_mode & 0o022:
            raise PowerError(f"{path} is not trusted: another user could have written it{_REMEDY}")
        content = file.read(_MOST_BYTES)
    try:
        return msgspec.json.decode(content, type=ModeRecord)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PowerError(f"{path} is damaged: {error}{_REMEDY}") from error


_REMEDY = (
    "; it should tell what a run that was killed had changed. See `nvpmodel -q` and the clocks' limits, set them as "
    "they should be, and remove the file"
)


def remove_record(folder: Path) -> None:
    """Remove the record, now that everything is put back."""
    with suppress(FileNotFoundError):
        (folder / RECORD).unlink()
