"""A power mode while a block lasts. What was before is put back: at the end, on errors, on signals, and after SIGKILL.

`mode_set` writes down what was before, sets the mode, and puts back what was. A process that is killed leaves what it
wrote down, and `put_back_left` does the rest: the supervisor calls it when a worker ended, and every run and every
profile of power modes when it starts. Read next: mode_record.py, nvpmodel.py, clock_limits.py.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import PowerMode, PowerModes
from tvm_pipeline_boards.clock_limits import are_fixed, read_limit, write_limit
from tvm_pipeline_boards.jetson import read_jetson
from tvm_pipeline_boards.mode_record import (
    RECORD,
    ModeRecord,
    boot_id,
    locked_record,
    read_record,
    remove_record,
    state_folder,
    state_folders,
    write_record,
)
from tvm_pipeline_boards.nvpmodel import current_nvpmodel, nvpmodel_modes, set_nvpmodel

_log = logging.getLogger(__name__)


class BoardModes(PowerModes):
    """The power modes of this machine: those of `nvpmodel` on a Jetson, and limits of clocks.

    Args:
        root: the folder that has `proc`, `sys`, `etc` and `var`.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def modes(self) -> Sequence[PowerMode]:
        """Return the modes of the Jetson that this is; raise PowerError if its file of modes is damaged."""
        return [mode.power_mode for mode in nvpmodel_modes(self._root)]

    def environment(self) -> Mapping[str, str]:
        """Return `board`, `l4t` and `power mode`; nothing where it is no Jetson."""
        jetson = read_jetson(self._root)
        known = {"board": jetson.name, "l4t": jetson.l4t, "power mode": jetson.power_mode} if jetson else {}
        return {key: value for key, value in known.items() if value}

    def described(self) -> Iterator[str]:
        """Yield a line for the Jetson that this is, and one for each of its modes."""
        if jetson := read_jetson(self._root):
            yield f"board: {jetson}"
            if unsteady := self.unsteady():
                yield unsteady
        with suppress(PowerError):  # which `modes` raises
            modes = nvpmodel_modes(self._root)
            current = current_nvpmodel(self._root) if modes else None
            for mode in modes:
                yield f"{mode}{', which is set' if mode.number == current else ''}"

    def unsteady(self) -> str:
        """Return that `jetson_clocks` is off; empty where this is no Jetson, and where no clock tells it."""
        if read_jetson(self._root) is None or are_fixed(self._root):
            return ""
        return "jetson_clocks is off: clocks follow the load; run `sudo jetson_clocks` before you profile"

    def is_set(self, mode: PowerMode) -> bool:
        """Return whether the machine is in this mode: the number of `nvpmodel` and the limits are those of the mode."""
        if mode.nvpmodel is not None and current_nvpmodel(self._root) != mode.nvpmodel:
            return False
        try:
            return all(read_limit(clock, self._root) == limit for clock, limit in mode.clock_limits.items())
        except PowerError:
            return False

    @contextmanager
    def mode_set(self, mode: PowerMode) -> Iterator[None]:
        """Have the machine in a power mode while the block lasts, and put back what was before.

        Call `put_back_left` first. Where the mode is set already, nothing is changed. What cannot be put back is kept
        on record, and the log warns of it.

        Raises:
            PowerError: another process has a mode set, or the mode cannot be set; what was before is then put back.
        """
        folder = state_folder()
        with locked_record(folder) as mine:
            if self.is_set(mode):
                if not mine:
                    _log.warning(
                        f"another process has set power mode {mode.name}; when it ends, it puts back what was before"
                    )
                yield
                return
            left = read_record(folder)
            if not mine:
                set_by = f"process {left.pid} has set power mode {left.mode}" if left else "another process has set one"
                raise PowerError(f"power mode {mode.name} cannot be set: {set_by}, which only its end puts back")
            if left:
                raise PowerError(
                    f"power mode {mode.name} cannot be set: what power mode {left.mode} had changed is not put back "
                    f"({folder / RECORD}). Put it back: {left.by_hand}; then remove the file"
                )
            record = _before(mode, self._root)
            write_record(folder, record)
            holder = _Holder()
            # A finalizer, so that it is put back once, and also where the process ends in the middle of cleaning up.
            put_back_once = weakref.finalize(holder, _put_back_and_forget, record, folder, self._root)
            try:
                _set(mode, self._root)
                _log.warning(f"power mode {mode.name} is set for this; {record.by_hand} when it ends")
                yield
            finally:
                _uninterrupted(put_back_once)

    def put_back_left(self) -> None:
        """Put back what a process that was killed had set; a process that runs keeps its mode.

        The log says that it was put back. If that fails, the log says what the user does next.
        """
        for folder in state_folders():
            if not os.path.lexists(folder / RECORD):
                continue
            try:
                if not os.access(folder, os.W_OK, effective_ids=True):
                    _tell_of_others(folder)
                    continue
                with locked_record(folder) as mine:
                    record = read_record(folder) if mine else None
                    if record is None:
                        continue
                    _uninterrupted(partial(_put_back_left, record, folder, self._root))
            except PowerError as error:
                _log.warning(str(error))


class _Holder:
    """What lives as long as the mode is set."""


def _tell_of_others(folder: Path) -> None:
    """Warn of what a process of root left, which this user cannot put back."""
    record = read_record(folder)
    if record and not Path(f"/proc/{record.pid}").exists():
        _log.warning(
            f"process {record.pid} was killed in power mode {record.mode}, and this user cannot put back what was "
            f"before. As root, run `tvm-pipeline run` or do by hand: {record.by_hand}; then remove {folder / RECORD}"
        )


def _put_back_left(record: ModeRecord, folder: Path, root: Path) -> None:
    if _put_back_and_forget(record, folder, root):
        _log.warning(f"process {record.pid} was killed in power mode {record.mode}; what was before is put back")


def _before(mode: PowerMode, root: Path) -> ModeRecord:
    """Return what the mode will change, as it is now."""
    number = None
    if mode.nvpmodel is not None:
        number = current_nvpmodel(root)
        if number is None:
            raise PowerError(
                f"power mode {mode.name}: the present mode is not known, so it could not be put back; does "
                "`nvpmodel -q` tell it?"
            )
    limits = {}
    for clock in mode.clock_limits:
        try:
            limits[clock] = read_limit(clock, root)
        except PowerError:
            if mode.nvpmodel is None:  # which may bring the core of this clock
                raise
    return ModeRecord(mode.name, os.getpid(), boot_id(root), number, limits)


def _set(mode: PowerMode, root: Path) -> None:
    if mode.nvpmodel is not None and current_nvpmodel(root) != mode.nvpmodel:
        set_nvpmodel(mode.nvpmodel, root)
    for clock, limit in mode.clock_limits.items():
        write_limit(clock, limit, root)


def _put_back_and_forget(record: ModeRecord, folder: Path, root: Path) -> bool:
    """Put back what was before, and remove the record; if that fails, warn and keep it."""
    reasons = []
    try:
        if record.nvpmodel is not None and current_nvpmodel(root) != record.nvpmodel:
            set_nvpmodel(record.nvpmodel, root)
    except PowerError as error:
        reasons.append(str(error))
    # The modes of nvpmodel limit clocks, so these come after it. A boot has put them back itself.
    limits = record.clock_limits if record.boot == boot_id(root) else {}
    for clock, limit in limits.items():
        try:
            if read_limit(clock, root) != limit:
                write_limit(clock, limit, root)
        except PowerError as error:
            reasons.append(str(error))
    if reasons:
        _log.warning(
            f"what was before power mode {record.mode} is not put back: {'; '.join(reasons)}. Do it by hand: "
            f"{record.by_hand}; the next run tries again"
        )
        return False
    try:
        remove_record(folder)
    except OSError as error:
        _log.warning(f"{folder / RECORD} cannot be removed: {error.strerror or error}; remove it")
    return True


def _uninterrupted(work: Callable[[], object]) -> None:
    """Do it in a thread, which signals do not interrupt; what they raise here is raised when it is done."""
    done = threading.Event()  # a join that a signal interrupts takes the thread for ended

    def worked() -> None:
        try:
            work()
        finally:
            done.set()

    threading.Thread(target=worked, name="power mode").start()
    interrupted: BaseException | None = None
    while not done.is_set():
        try:
            done.wait()
        except (KeyboardInterrupt, SystemExit) as error:
            interrupted = error
    if interrupted:
        raise interrupted
