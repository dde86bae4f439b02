"""Keep Ray and an actor running on this machine: what `fleet up` and `fleet join` do until they are ended.

    keeper = NodeKeeper(node, errand, tell)
    keeper.begin()                        # Ray is up, and its actor answers
    keeper.keep(lambda: stop_wanted)      # what dies is started again, after ever longer waits

It knows no Ray itself, so that it outlives whatever dies of it: ray_node.py starts its processes, and an errand of
ray_door.py makes the actor.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline.files import write_bytes
from tvm_pipeline_hosts.fleet.host_processes import processes_of
from tvm_pipeline_hosts.fleet.ray_actors import ActorInfo, lives_in, opened
from tvm_pipeline_hosts.fleet.ray_door import ActorTask
from tvm_pipeline_hosts.fleet.ray_node import UP_S, RayNode

_log = logging.getLogger(__name__)

LOOK_S, SHORT_S = 0.5, 0.05
ERRAND_S = 90.0  # for a process that makes an actor on a busy machine
WITHOUT_ACTOR_S = 5.0  # for Ray to start an actor again that has died, before it is made anew
WAITS_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)  # between two starts that fail
SERVICES_S = 10.0  # for services to drain what is inside them
LASTING_S = 30.0  # after which a start counts as a good one


class NodeKeeper:
    """See the module.

    Args:
        node: Ray on this machine.
        errand: makes the actor.
    """

    def __init__(self, node: RayNode, errand: ActorTask) -> None:
        self._node, self._errand = node, errand
        self._up_s = self._lived_s = 0.0
        self._fails = 0

    def begin(self) -> ActorInfo:
        """Start Ray and make the actor; raise PipelineError, with nothing left running, where either fails."""
        try:
            self._start(lambda: False)
            return self._make()
        except BaseException:
            self._node.forget()
            raise

    def keep(self, wants_end: Callable[[], bool]) -> None:
        """Start again whatever dies, until the end is wanted."""
        self._lived_s = time.monotonic()
        while not wants_end():
            time.sleep(LOOK_S)
            try:
                if self._node.has_ended():
                    _log.info(f"Ray has ended ({self._node.why_ended()}); it is started again")
                    self._wait(wants_end)
                    if not wants_end():
                        self._start(wants_end)
                        self._make()
                elif lives_in(Path(self._errand.folder)):
                    self._lived_s = time.monotonic()
                elif time.monotonic() - self._lived_s > WITHOUT_ACTOR_S:
                    _log.info("its actor has ended, and is made anew")
                    self._wait(wants_end)
                    self._make()
            except OptionError:
                raise  # another host has this name by now
            except PipelineError as error:
                _log.info(f"{error}; it is tried again")

    def leave(self) -> None:
        """End Ray, then the services of the agent, which would start them again."""
        self._node.forget()
        left = [process for _, process in processes_of(Path(self._errand.folder))]
        for number, wait_s in ((signal.SIGTERM, SERVICES_S), (signal.SIGKILL, 1.0)):
            for process in left:
                process.send(number)
            until_s = time.monotonic() + wait_s
            while (left := [process for process in left if process.state()]) and time.monotonic() < until_s:
                time.sleep(SHORT_S)

    def _start(self, wants_end: Callable[[], bool]) -> None:
        self._node.start()
        self._up_s = time.monotonic()
        while not self._node.is_up():
            if wants_end():
                return
            if time.monotonic() - self._up_s > UP_S:
                self._node.end()
                raise PipelineError(f"Ray did not start within {UP_S:g} s; what it said is in {self._node.log}")
            time.sleep(SHORT_S)

    def _make(self) -> ActorInfo:
        about = run_apart(self._errand)
        if about is None:
            raise PipelineError("the actor was not made")
        self._lived_s = time.monotonic()
        return about

    def _wait(self, wants_end: Callable[[], bool]) -> None:
        """Wait before another start, the longer the more of them have failed lately."""
        self._fails = 0 if time.monotonic() - self._up_s > LASTING_S else self._fails + 1
        until_s = time.monotonic() + WAITS_S[min(self._fails, len(WAITS_S) - 1)]
        while time.monotonic() < until_s and not wants_end():
            time.sleep(LOOK_S)


def state_folder(name: str) -> Path:
    """Return where a head or a host keeps what it must not forget, by default."""
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base or os.path.expanduser("~/.local/state"), "tvm-pipeline", name)


@contextmanager
def kept_alone(folder: Path) -> Iterator[None]:
    """Hold a folder for one keeper; raise RunError, with the process of the other one, where it has one."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (folder / "keeper.lock").open("a+") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise RunError(
                    f"process {lock.read().strip() or 'another'} keeps {folder}; end it, or name another `folder`"
                ) from None
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield
    except OSError as error:
        raise PipelineError(f"cannot write {folder}: {error.strerror or error}; name another `folder`") from error


def identity_of(folder: Path) -> str:
    """Return the identity of a folder, which is made once: nobody else's is the same."""
    path = folder / "identity"
    if not path.exists():
        write_bytes(path, secrets.token_hex(16).encode())
    return path.read_text()


def run_apart(errand: ActorTask) -> ActorInfo | None:
    """Have a process of its own do an errand, since Ray's calls may hang."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tvm_pipeline_hosts.fleet.ray_door"],
            input=msgspec.json.encode(errand),
            capture_output=True,
            timeout=ERRAND_S,
            env=environment,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as error:
        raise PipelineError(f"the head at {errand.key.address} did not answer within {ERRAND_S:g} s") from error
    try:
        answer = opened(done.stdout, "")
    except msgspec.MsgspecError as error:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise PipelineError(f"the process that makes an actor ended with {done.returncode}: {said[-1]}") from error
    return msgspec.json.decode(answer, type=ActorInfo | None)
