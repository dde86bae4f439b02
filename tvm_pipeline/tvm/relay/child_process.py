"""A process of its own for what may end its process or hang in it: compiling, and kernels on a device.

The child is a fresh interpreter with the parent's path, and dies with its parent. It reads an order from a file that
the parent has written, and tells what it does through a pipe, a line of JSON each. Its module has a function `serve`
for that. Next: `child.py`, `tuning/device_child.py`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tvm_pipeline.errors import RunError

CHILD = (
    "import sys; module, descriptor, folder, *sys.path = sys.argv[1:]; "
    "from importlib import import_module; import_module(module).serve(int(descriptor), folder)"
)
ORDER = "order"  # the file that tells the child what to do
_ENDING_S = 60.0  # that a process has for ending after it has closed the pipe
_GONE_S = 10.0  # and for going once it is killed

# Takes a line, and returns the seconds within which the next one must come; None where it may take any time.
Heard = Callable[[bytes], "float | None"]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended.

    Attributes:
        code: as `subprocess` has it: that of a signal is negative.
        words: what it wrote to stderr.
        was_silent: it was killed because a line did not come in time.
    """

    code: int
    words: str
    was_silent: bool = False

    @property
    def how(self) -> str:
        """Return the name of the signal, or the exit code."""
        names = {-number.value: number.name for number in signal.Signals}
        return names.get(self.code, f"exit code {self.code}")

    @property
    def last_words(self) -> str:
        """Return the assertion that failed, or the last line, without the path of LLVM's source in front of it."""
        lines = [line.strip() for line in self.words.splitlines() if line.strip()]
        told = [line for line in lines if "Assertion" in line or "LLVM ERROR" in line] or lines[-1:]
        return told[0][-300:] if told else ""


def run_child(module: str, order: bytes, heard: Heard) -> Ended:
    """Run `serve` of a module in a child until it ends, or until it is silent for too long.

    Raises:
        RunError: it cannot be started; or it was killed and does not go, because a driver holds it.
    """
    with contextlib.ExitStack() as opened:
        try:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="tvm-pipeline-"))
            spoken = opened.enter_context(open(f"{folder}/stderr", "w+b"))
            (Path(folder) / ORDER).write_bytes(order)
        except OSError as error:
            raise RunError(
                f"cannot write what a process of {module} is to do: {error.strerror or error}; make room in the folder "
                "for temporary files, or name another one in the variable TMPDIR"
            ) from error
        reading, writing = os.pipe()
        command = [sys.executable, "-c", CHILD, module, str(writing), folder, *sys.path]
        try:
            try:
                # A session of its own: Ctrl-C comes to the parent alone, which ends the child and its linker.
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    stderr=spoken,
                    pass_fds=[writing],
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(
                    f"no process can be started for {module}: {error.strerror or error}; end other programs, or raise "
                    "the limit of processes (`ulimit -u`)"
                ) from error
            finally:
                os.close(writing)
            try:
                was_silent = not _follow(reading, heard)
                if not was_silent:
                    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it while it ends
                        process.wait(_ENDING_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                _wait(process)
        finally:
            os.close(reading)
        spoken.seek(0)
        return Ended(process.returncode, spoken.read().decode(errors="replace"), was_silent)


def _follow(reading: int, heard: Heard) -> bool:
    """Pass on each line until the child closes the pipe; return False where one does not come in time."""
    rest, deadline = b"", None
    while True:
        timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([reading], [], [], timeout)[0]:
            return False
        part = os.read(reading, 1 << 16)
        if not part:
            return True
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            limit_s = heard(line)
            deadline = None if limit_s is None else time.monotonic() + limit_s


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(_GONE_S)
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"process {process.pid} was killed and does not go: a driver holds it; restart the machine before the "
            "device is used again"
        ) from error


def end_with_parent() -> None:
    """Die when the parent does, even where it was killed; the child calls it."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
