"""Processes that may die or hang: how one is started, talks, is waited for, ended, and how it ended.

A `Child` is a fresh interpreter, never a fork, because threads run here. `run_program` runs any other program, and
`status_of_copy` forks, for milliseconds. All end with this process, however it ends, and whatever they do, also in the
middle of native code:

    lifeline   the standard input of a child, which only this process holds open. When it closes, the kernel sends SIGIO
               to the child and to all that it started. (PR_SET_PDEATHSIG means the end of the *thread* that starts it.)
    channel    a socket of whole messages, so that nobody waits for the rest of half a message. A long one travels as a
               file in memory, so that a child that does not read holds nobody up.

A child that was killed may still not go, because a driver holds it: then it is left behind. Only the standard library
is imported, since a child runs this file, in some hundredths of a second.
"""

from __future__ import annotations

import fcntl
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import BinaryIO

GONE_S = 5.0  # for a process to go once it was killed, or has hung up
TICK_S = 0.5  # between two looks at whether a silent child still runs
MOST_BYTES = 1 << 16  # of a message in the channel itself

# A child finds modules where its parent does. One that is alone has no path to get.
_START = (
    "import sys; file, function, channel, *path = sys.argv[1:]; sys.path[:] = path or sys.path; "
    "import runpy; runpy.run_path(file)['begin'](function, int(channel))"
)
_starting = threading.Lock()  # a copy that is forked meanwhile would hold the ends of a process that is being started


def how_ended(status: int) -> str:
    """Return how a process ended, from its status as `subprocess` gives it.

    >>> how_ended(1), how_ended(-9)
    ('ended with status 1', 'was killed by SIGKILL')
    """
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-status}"


class Child:
    """A child, seen by its parent. It has a session of its own: Ctrl-C comes to the parent alone, which ends the child.

    Its standard output goes where errors go, since that of this process is for results.

    Args:
        function: `module:function`; the module may be the path of a file. The child calls the function with `order`
            and with its end of the channel (see `send` and `receive`), and ends when the function returns.
        order: what it is to do, however long; not empty.
        environment: of the child; that of this process by default.
        keeps_words: keep what the child writes to standard error, for `words`.
        alone: the function needs the standard library alone, and starts the faster for it.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        function: str,
        order: bytes,
        *,
        environment: Mapping[str, str] | None = None,
        keeps_words: bool = False,
        alone: bool = False,
    ) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        try:
            with theirs, _starting:
                send(self._channel, order)
                self._words = _file_in_memory() if keeps_words else None
                flags, path = (["-I", "-S"], []) if alone else ([], sys.path)
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _START, __file__, function, str(theirs.fileno()), *path],
                    stdin=subprocess.PIPE,
                    stdout=2,
                    stderr=self._words,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    start_new_session=True,
                )
        except BaseException:
            self._channel.close()
            raise
        self.pid = self._process.pid

    @property
    def status(self) -> int | None:
        """Return the status as `subprocess` gives it, once the child has ended and was waited for."""
        return self._process.returncode

    @property
    def words(self) -> str:
        """Return what the child has written to standard error."""
        assert self._words
        return os.pread(self._words.fileno(), os.fstat(self._words.fileno()).st_size, 0).decode(errors="replace")

    def send(self, message: bytes, *descriptors: int) -> None:
        """Send a message and one descriptor at most; raise OSError if the child has hung up, or reads no message."""
        send(self._channel, message, *descriptors)

    def receive(self, until_s: float | None = None) -> tuple[bytes, list[int]]:
        """Return the child's next message and the descriptors that came with it; b"" if the child has hung up.

        A thread that waits here is woken by `kill` of another thread, even if the child cannot be killed.

        Raises:
            TimeoutError: no message came before `until_s` of `time.monotonic`.
            OSError: this process has no descriptors left for those that came.
        """
        poll, has_ended = select.poll(), False
        poll.register(self._channel, select.POLLIN)
        while True:
            left_s = TICK_S if until_s is None else until_s - time.monotonic()
            if poll.poll(1000 * max(0.0, min(left_s, TICK_S))):
                return receive(self._channel)
            if has_ended:  # and what it started holds the channel
                return b"", []
            has_ended = self._process.poll() is not None  # its last message may have come since
            if left_s <= 0 and not has_ended:
                raise TimeoutError

    def wait(self, limit_s: float | None = None) -> bool:
        """Return whether the child ends within `limit_s`, or, without a limit, when it has."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self.status is not None

    def how(self) -> str:
        """Say how a child that has hung up ended; one that goes on is killed."""
        if self.wait(GONE_S):
            return how_ended(self._process.returncode)
        self.kill()
        return "hung up"

    def give_up(self) -> None:
        """Wait no more for what the child begins with."""
        self.kill()

    def leave(self, limit_s: float) -> bool:
        """Hang up, and return whether the child ends within `limit_s`."""
        self.hang_up()
        return self.wait(limit_s)

    def hang_up(self) -> None:
        """Exchange no message any more, which the child hears of."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End the child by force, with all that it started."""
        self.hang_up()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self) -> bool:
        """Kill what still runs; return whether the child is gone: one that a driver holds is left behind.

        No other thread may wait for a message then; `kill` wakes it.
        """
        self.kill()
        self._channel.close()
        if not self.wait(GONE_S):
            threading.Thread(target=self._process.wait, name=f"end of {self.pid}", daemon=True).start()
            return False
        self._process.communicate()  # closes the lifeline
        return True


class Seat(Child):
    """What one of several has of a child that they share: a channel of its own. Whoever kills the child ends all seats.

    Args:
        child: its function gets each order as a message, with the end of the seat's channel to answer on.
        order: what the child is to do for this seat.
    """

    def __init__(self, child: Child, order: bytes) -> None:
        self._process, self.pid, self._is_left = child._process, child.pid, False
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs, suppress(BrokenPipeError, ConnectionResetError):  # `receive` tells that the child has died
            child.send(order, theirs.fileno())

    def give_up(self) -> None:
        """Leave the child to the other seats; `leave` is to follow."""

    def leave(self, limit_s: float) -> bool:
        """Send nothing more, and return whether the child hangs up or ends within `limit_s`."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)
        with suppress(TimeoutError):
            while (found := self.receive(time.monotonic() + limit_s)) != (b"", []):
                for descriptor in found[1]:
                    os.close(descriptor)
            self._is_left = True
        return self._is_left

    def end(self) -> bool:
        """Kill the child if it has not let this seat go; return False if it is not gone then."""
        if not self._is_left:
            self.kill()
        self._channel.close()
        return self._is_left or self.wait(GONE_S)


def run_program(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a program; the program and all that it starts end with this process.

    Returns:
        The status as `subprocess` gives it, or None where the program took more than `limit_s` and was killed; and what
        the program wrote to standard output and to standard error.

    Raises:
        OSError: the program cannot be started.
    """
    child = Child(f"{__file__}:become", "\0".join(command).encode(), keeps_words=True, alone=True)
    try:
        if failed := child.receive()[0]:
            raise OSError(int(failed), os.strerror(int(failed)), command[0])
        in_time = child.wait(limit_s)
    finally:
        child.end()
    return child.status if in_time else None, child.words


def become(command: bytes, channel: socket.socket) -> None:
    """Be the program instead of a Python process; tell the number of the error that prevents it."""
    program, *arguments = command.decode().split("\0")
    os.dup2(2, 1)  # `Child.words` then has both
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        send(channel, str(error.errno).encode())


def status_of_copy(do: Callable[[], object], limit_s: float) -> int | None:
    """Do something in a copy of this process; return the copy's status as `subprocess` gives it, None if it hangs.

    The copy prints nothing. What `do` raises there is lost, and the status is 0: it would be raised here as well.
    """
    with _starting, warnings.catch_warnings():
        # Python warns of locks that other threads hold. The copy needs none of theirs, and is killed if it waits.
        warnings.simplefilter("ignore", DeprecationWarning)
        ours, theirs = socket.socketpair()  # each end closes with its process
        process = os.fork()
        if process == 0:
            ours.close()
            try:
                for name in ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGTERM", "SIGINT"):
                    signal.signal(signal.Signals[name], signal.SIG_DFL)
                _end_with(theirs.fileno(), os.getpid())
                silent = os.open(os.devnull, os.O_WRONLY)
                os.dup2(silent, 1)
                os.dup2(silent, 2)
                do()
            finally:
                os._exit(0)
        theirs.close()
    try:
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        in_time = bool(poll.poll(1000 * limit_s))
    finally:
        os.kill(process, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        ours.close()
    return status if in_time else None


def send(channel: socket.socket, message: bytes, *descriptors: int) -> None:
    """Send a message of any length, and one descriptor at most."""
    if len(message) > MOST_BYTES:
        with _file_in_memory() as file:
            file.write(message)
            file.flush()
            socket.send_fds(channel, [b""], [file.fileno(), *descriptors])
    elif descriptors:
        socket.send_fds(channel, [message], descriptors)
    else:
        channel.send(message)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Return the next message and the descriptors that came with it; b"" if the other side has hung up.

    Raises:
        OSError: this process has no descriptors left for those that came.
    """
    try:
        message, descriptors, flags, _ = socket.recv_fds(channel, MOST_BYTES, 2)  # the text, and the sender's own
    except ConnectionResetError:
        return b"", []
    if flags & socket.MSG_CTRUNC:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("this process has no more descriptors; allow it more (ulimit -n)")
    if descriptors and not message:
        with open(descriptors.pop(0), "rb") as file:
            file.seek(0)
            message = file.read()
    return message, descriptors


def _file_in_memory() -> BinaryIO:
    return os.fdopen(os.memfd_create("tvm-pipeline"), "w+b")


def begin(function: str, channel: int) -> None:
    """Be a child. SIGINT and SIGTERM are for the parent, which may want to drain.

    A parent that has hung up, because it gave the child up or is gone, wants to hear of nothing.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    lifeline = os.dup(0)
    os.set_inheritable(lifeline, True)  # for a program that this process becomes
    with open(os.devnull, "rb") as nothing:  # for what reads standard input, also in programs that the child starts
        os.dup2(nothing.fileno(), 0)
    _end_with(lifeline, -os.getpid())
    link = socket.socket(fileno=channel)
    link.set_inheritable(False)
    module, _, name = function.rpartition(":")
    found = runpy.run_path(module) if module.endswith(".py") else vars(import_module(module))
    order, _ = receive(link)
    with suppress(BrokenPipeError, ConnectionResetError):
        found[name](order, link)


def _end_with(lifeline: int, whom: int) -> None:
    """Have the kernel end a process, or the group -`whom`, by SIGIO when the other end of a lifeline closes.

    The parent may ignore or block SIGIO itself, which a child inherits.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGIO])
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, whom)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    if poll.poll(0):  # it was closed before
        os._exit(0)
