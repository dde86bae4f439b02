"""The beats of an agent, in a thread of their own, and the lock by which a folder has one agent at a time."""

from __future__ import annotations

import fcntl
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tvm_pipeline.errors import RunError
from tvm_pipeline_hosts.fleet.messages import HostOrder, HostReport


class Beats:
    """Calls `beat` in a thread of its own, one call at a time, so that one that hangs holds up nothing."""

    def __init__(self, beat: Callable[[HostReport], HostOrder]) -> None:
        self.is_out = False
        self._reports: queue.SimpleQueue[HostReport | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[HostOrder | Exception] = queue.SimpleQueue()
        arguments = beat, self._reports, self._replies
        threading.Thread(target=_call, args=arguments, name="beats", daemon=True).start()

    def send(self, report: HostReport) -> None:
        self.is_out = True
        self._reports.put(report)

    def reply(self, wait_s: float) -> HostOrder | Exception | None:
        """Return what the call that is out has brought, or its error; None if nothing came in that time."""
        if not self.is_out:
            return None
        try:
            found = self._replies.get(timeout=wait_s) if wait_s > 0 else self._replies.get_nowait()
        except queue.Empty:
            return None
        self.is_out = False
        return found

    def close(self) -> None:
        self._reports.put(None)


def _call(
    beat: Callable[[HostReport], HostOrder],
    reports: queue.SimpleQueue[HostReport | None],
    replies: queue.SimpleQueue[HostOrder | Exception],
) -> None:
    while (report := reports.get()) is not None:
        try:
            replies.put(beat(report))
        except Exception as error:  # whatever carries beats may fail in its own ways; the next one is tried
            replies.put(error)


def locked_for_agent(folder: Path) -> int:
    """Return the descriptor of the lock of an agent's folder, which this process holds; make the folder.

    Raises RunError where another process holds it, or it cannot be written.
    """
    try:
        (folder / "services").mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder / "agent.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror or error}; give the agent another folder") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        other = os.read(descriptor, 32).decode(errors="replace").strip() or "another one"
        os.close(descriptor)
        raise RunError(
            f"the agent of process {other} runs in {folder}; end it, or give this one another folder"
        ) from error
    with suppress(OSError):  # a full disk; the number is for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor
