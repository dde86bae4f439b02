"""The two actors of a fleet. They are thin: bytes of JSON come in and go out, and what they do is done elsewhere.

A CoordinatorActor runs on the head and holds the Coordinator. An AgentActor runs on each host and holds its Agent,
whose beats are calls of the coordinator. What an answer tells stands in an envelope, errors too, so that nothing is
unpickled but bytes. Next: ray_door.py, which makes them and calls them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline import __version__
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import RunError
from tvm_pipeline.files import replacing, write_bytes
from tvm_pipeline_hosts.fleet.host_processes import HostProcess
from tvm_pipeline_hosts.fleet.messages import FleetPlan, HostOrder, HostReport
from tvm_pipeline_hosts.remote.told_errors import ErrorMessage, error_message, received_error

NAMESPACE, COORDINATOR = "tvm-pipeline", "coordinator"
BEAT_LIMIT_S = 5.0  # for one beat, after which the host looks for the coordinator anew
TICK_S = 0.1
SYNC_S = 1.0  # between two waits for the disk of the results
LOCKED_S = 15.0  # for which a new agent waits until the one before has ended
_ACTOR_FILE, _ENVIRONMENT_FILE = "actor.json", "environment"


class ActorInfo(msgspec.Struct, frozen=True):
    """What an actor tells of itself.

    Attributes:
        identity: of the folder that it works in: another machine, or another folder, has another one.
        node: the id of the node of Ray that it is on.
    """

    name: str
    identity: str
    node: str
    address: str
    pid: int
    tvm_pipeline: str


class MethodResult(msgspec.Struct, frozen=True):
    """What a method of a board returned; the bytes of its arrays, by their dtypes and shapes, come behind."""

    value: msgspec.Raw
    arrays: tuple[tuple[str, tuple[int, ...]], ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """The envelope: a value, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: ErrorMessage | None = None


def opened(answer: bytes, where: str) -> bytes:
    """Return the JSON in an envelope; raise the error that it tells, with `where` before its text."""
    found = msgspec.json.decode(answer, type=Answer)
    if found.error:
        raise received_error(found.error, where)
    return bytes(found.value)


def enclosed(work: Callable[[], Any]) -> bytes:
    """Do some work; return its result, or its error, in an envelope."""
    try:
        return msgspec.json.encode(Answer(msgspec.Raw(msgspec.json.encode(work()))))
    except Exception as error:  # it is raised again where the call came from
        return msgspec.json.encode(Answer(error=error_message(error)))


class CoordinatorActor:
    """Holds the coordinator; one call at a time."""

    def __init__(self, folder: str, identity: str) -> None:
        from tvm_pipeline_hosts.fleet.collector import Collector
        from tvm_pipeline_hosts.fleet.coordinator import Coordinator
        from tvm_pipeline_hosts.fleet.takeover import compile_loops

        # The first time on a machine that takes half a minute or more, for which the first plan would wait.
        threading.Thread(target=compile_loops, name="compile", daemon=True).start()
        self._about = _actor_info(COORDINATOR, identity)
        self._coordinator = Coordinator(time.monotonic, Path(folder, "coordinator.json"), Collector())
        self._lock = threading.Lock()
        write_actor(Path(folder))
        self._begin_ticks()

    def about(self) -> bytes:
        return enclosed(lambda: self._about)

    def beat(self, report: bytes) -> bytes:
        return self._locked(lambda: self._coordinator.beat(msgspec.json.decode(report, type=HostReport)))

    def follow(self, plan: bytes) -> bytes:
        return self._locked(lambda: self._coordinator.follow(msgspec.json.decode(plan, type=FleetPlan)))

    def status(self) -> bytes:
        return self._locked(self._coordinator.status)

    def _locked(self, work: Callable[[], Any]) -> bytes:
        with self._lock:
            return enclosed(work)

    def _begin_ticks(self) -> None:
        for work in (self._tick, self._sync):
            threading.Thread(target=_lasting, args=(work,), name=work.__name__, daemon=True).start()

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                self._coordinator.tick()

    def _sync(self) -> None:
        """A disk may take seconds, for which no beat waits."""
        while True:
            time.sleep(SYNC_S)
            with self._lock:
                self._coordinator.sync(partial(_released, self._lock))


class AgentActor:
    """Holds the agent of a host, which runs in a thread of its own."""

    def __init__(self, host: str, folder: str, identity: str) -> None:
        from tvm_pipeline_hosts.fleet.agent import Agent
        from tvm_pipeline_hosts.remote.parcels import Parcels

        self._about, self._folder = _actor_info(agent_name(host), identity), folder
        self._parcels = Parcels(parcels_folder(folder))
        beat, environment = CoordinatorBeat(), read_environment(Path(folder))
        until_s = time.monotonic() + LOCKED_S
        while True:
            try:
                self._agent = Agent(host, Path(folder), beat, self._parcels, environment=environment)
                break
            except RunError:  # the agent before has not ended yet
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
        write_actor(Path(folder))
        run = partial(self._agent.run, threading.Event())  # until the process ends
        threading.Thread(target=_lasting, args=(run,), name="agent", daemon=True).start()

    def about(self) -> bytes:
        return enclosed(lambda: self._about)

    def folder(self) -> bytes:
        return enclosed(lambda: self._folder)

    def missing(self, manifest: bytes) -> bytes:
        return enclosed(lambda: self._parcels.missing(manifest))

    def put(self, sum: str, offset: int, content: bytes, total: int) -> bytes:
        return enclosed(lambda: self._parcels.put(sum, offset, content, total))

    def assemble(self, manifest: bytes) -> bytes:
        return enclosed(lambda: self._parcels.assemble(manifest))

    def forget(self, keep: list[str]) -> bytes:
        """Bound the bundles that are kept here; those in use and those named stay."""
        return enclosed(lambda: self._parcels.forget_older(keep={*keep, *self._agent.bundles}))


class BoardActor:
    """Does what a board does for a client, with the bundles of the agent of its host; one call at a time."""

    def __init__(self, host: str, folder: str) -> None:
        # Ray limits the threads of its processes, and what is measured here is what the services will do.
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(read_environment(Path(folder)))
        # What is unpacked there goes with the actor, or with the next one where this one is killed.
        self._folder = Path(folder, "measuring", str(os.getpid()))
        for old in self._folder.parent.glob("*"):
            if not Path("/proc", old.name).exists():
                shutil.rmtree(old, ignore_errors=True)
        self._folder.mkdir(parents=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(self._folder)
        from tvm_pipeline_hosts.remote.session import Session

        self._session = Session(host, parcels_folder(folder))

    def call(self, method: str, arguments: bytes, described: bytes, contents: list[bytes]) -> list[bytes]:
        """Call a method of `methods.METHODS`; return the envelope of a Returned, and the bytes of its arrays."""
        from tvm_pipeline_hosts.fleet.ray_board import arrays_of
        from tvm_pipeline_hosts.remote.frames import described as describe
        from tvm_pipeline_hosts.remote.methods import METHODS

        returned: list[bytes] = []

        def work() -> MethodResult:
            if method not in METHODS:
                raise RunError(f"a host has no method {method[:40]!r}; install the same version there")
            arrays = arrays_of(msgspec.json.decode(described, type=list[tuple[str, tuple[int, ...]]]), contents)
            value, found = METHODS[method](self._session, msgspec.json.decode(arguments), arrays)
            returned.extend(array.tobytes() for array in found)
            return MethodResult(msgspec.Raw(msgspec.json.encode(value)), describe(found))

        answer = enclosed(work)
        return [answer, *returned]

    def close(self) -> None:
        """Close every bundle, and remove what was unpacked."""
        self._session.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class CoordinatorBeat:
    """Carries the beats of an agent to the coordinator, which may be away, or another one by now."""

    def __init__(self) -> None:
        self._coordinator: Any = None

    def __call__(self, report: HostReport) -> HostOrder:
        import ray

        try:
            if self._coordinator is None:
                self._coordinator = ray.get_actor(COORDINATOR, namespace=NAMESPACE)
            answer = ray.get(self._coordinator.beat.remote(msgspec.json.encode(report)), timeout=BEAT_LIMIT_S)
        except Exception as error:  # of many classes; the next beat asks for the coordinator by its name again
            self._coordinator = None
            first = (str(error).strip().splitlines() or [""])[0]
            raise RunError(f"the coordinator does not answer ({type(error).__name__}: {first[:200]})") from error
        return msgspec.json.decode(opened(answer, "coordinator: "), type=HostOrder)


@contextmanager
def _released(lock: threading.Lock) -> Iterator[None]:
    """Leave a lock that is held to others while the block lasts."""
    lock.release()
    try:
        yield
    finally:
        lock.acquire()


def _lasting(work: Callable[[], object]) -> None:
    """Do the work of an actor's thread. An actor without it would look alive, so Ray starts one that fails again."""
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def parcels_folder(folder: str) -> Path:
    """Return where the bundles of a host are."""
    return Path(folder, "parcels")


def agent_name(host: str) -> str:
    """Return the name of the actor of a host."""
    return f"agent-{host}"


def write_environment(folder: Path) -> None:
    """Keep the environment of this process in the folder of its host, for the services there.

    Ray changes the environment of its actors. What it is told about an actor is kept at the head, and the environment
    may hold secrets, so that they stay on the host.
    """
    pairs = (b"%b=%b" % pair for pair in os.environb.items() if not pair[0].startswith(b"RAY_"))
    with replacing(folder / _ENVIRONMENT_FILE) as temporary:
        temporary.touch(0o600)
        temporary.write_bytes(b"\0".join(pairs))


def read_environment(folder: Path) -> dict[str, str]:
    """Return the environment that `write_environment` has kept."""
    pairs = (os.fsdecode(pair).partition("=") for pair in (folder / _ENVIRONMENT_FILE).read_bytes().split(b"\0"))
    return {name: value for name, _, value in pairs}


def write_actor(folder: Path) -> None:
    """Write which process the actor of a folder is; see `lives_in`."""
    if own := HostProcess.of(os.getpid()):
        write_bytes(folder / _ACTOR_FILE, msgspec.json.encode([own.pid, own.began_ticks]))


def lives_in(folder: Path) -> bool:
    """Return whether the process of the actor that works in a folder lives."""
    try:
        process = HostProcess(*msgspec.json.decode((folder / _ACTOR_FILE).read_bytes(), type=tuple[int, int]))
    except (OSError, *DAMAGED):
        return False
    return bool(process.state())


def _actor_info(name: str, identity: str) -> ActorInfo:
    import ray

    node = ray.get_runtime_context().get_node_id()
    return ActorInfo(name, identity, node, ray.util.get_node_ip_address(), os.getpid(), __version__)
