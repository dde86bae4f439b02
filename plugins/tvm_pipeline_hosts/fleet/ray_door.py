"""The one way to the actors of a fleet: from a command, and from the small processes that make the actors.

    with connected(key, address) as door:
        door.call(COORDINATOR, "status")                    # JSON, or the error of the other side

A process that makes an actor and ends: `python -m tvm_pipeline_hosts.fleet.ray_door`, with an Errand as its argument.
`up` and `join` begin one after every start of Ray and have no connection themselves: Ray ends a process that is
connected when its raylet dies. An actor is tied to the node on which it was made. One of a node that has died is
replaced, which does not wait until Ray has noticed. Read next: node_keeper.py.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from tvm_pipeline import PipelineError, __version__
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline_hosts.fleet.credentials import FleetKey, check_reach, own_address, ray_version, unpack
from tvm_pipeline_hosts.fleet.ray_actors import (
    COORDINATOR,
    NAMESPACE,
    ActorInfo,
    AgentActor,
    CoordinatorActor,
    agent_name,
    enclosed,
    opened,
    write_environment,
)
from tvm_pipeline_hosts.fleet.ray_node import SETTINGS

T = TypeVar("T")

CALL_S = 15.0
ANSWER_S = 3.0  # for an actor that is looked for before it is replaced
MADE_S = 40.0  # for a new actor on a busy machine
HEARD_S = 10.0  # for the head to take the token


class ActorTask(msgspec.Struct, frozen=True):
    """What a process that makes an actor is to do.

    Attributes:
        key: of the fleet.
        address: the IP of this machine's node.
        folder, identity: of the actor.
        what: make the coordinator, or the agent of `host`; or only look whether the head takes the key.
        host: the name of this host.
    """

    key: FleetKey
    address: str
    what: Literal["coordinator", "agent", "look"]
    folder: str = ""
    identity: str = ""
    host: str = ""


class FleetClient:
    """Calls the actors of the fleet that this process is connected with."""

    def __init__(self, node: str) -> None:
        self.node = node

    def call(self, actor: str, method: str, *arguments: Any, limit_s: float = CALL_S, kind: type[T] = Any) -> T:  # type: ignore[assignment]
        """Return what a method of an actor returns, as `kind`.

        Raises:
            PipelineError: of the other side, or no such actor answers.
        """
        import ray

        try:
            handle = ray.get_actor(actor, namespace=NAMESPACE)
            answer = ray.get(getattr(handle, method).remote(*arguments), timeout=limit_s)
        except ValueError as error:
            raise RunError(f"{_called(actor)} is not in the fleet") from error
        except Exception as error:  # Ray has many classes of them
            raise RunError(f"{_called(actor)} does not answer: {_first_line(error)}") from error
        return msgspec.json.decode(opened(answer, f"{_called(actor)}: "), type=kind)

    def hosts(self) -> list[str]:
        """Return the hosts that have an agent."""
        from ray.util import list_named_actors

        names = [one["name"] for one in list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE]
        return sorted(name.removeprefix("agent-") for name in names if name.startswith("agent-"))

    def ensure_coordinator(self, folder: str, identity: str) -> ActorInfo:
        """Return the coordinator on this node, which is made where there is none."""
        found = self._answering(COORDINATOR)
        if found and found.node == self.node and found.tvm_pipeline == __version__:
            return found
        return self._made(CoordinatorActor, COORDINATOR, (folder, identity))

    def ensure_agent(self, host: str, folder: str, identity: str) -> ActorInfo:
        """Return the agent of a host on this node, which is made where there is none.

        Raises OptionError where another machine is the host of that name.
        """
        found = self._answering(agent_name(host))
        if found and found.identity != identity:
            raise OptionError(f"another host is called {host}, at {found.address}; take another name, or end that one")
        if found and found.node == self.node and found.tvm_pipeline == __version__:
            return found
        write_environment(Path(folder))
        return self._made(AgentActor, agent_name(host), (host, folder, identity))

    def _answering(self, name: str) -> ActorInfo | None:
        with suppress(RunError):
            return self.call(name, "about", limit_s=ANSWER_S, kind=ActorInfo)
        return None

    def _made(self, kind: type[Any], name: str, arguments: tuple[Any, ...]) -> ActorInfo:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with suppress(ValueError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
        options = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": -1,
            "num_cpus": 0,
            "max_concurrency": 1 if name == COORDINATOR else 4,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self.node, soft=False),
        }
        until_s = time.monotonic() + MADE_S
        while True:
            try:
                ray.remote(kind).options(**options).remote(*arguments)
                break
            except ValueError:  # the name is free a moment after the one before was ended
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.1)
        return self.call(name, "about", limit_s=MADE_S, kind=ActorInfo)


@contextmanager
def connected(key: FleetKey, address: str = "") -> Iterator[FleetClient]:
    """Connect this process with a fleet while the block lasts; the machine must be the head or one of its hosts.

    Args:
        address: the IP of this machine in the fleet; by default that by which it reaches the head.

    Raises:
        PipelineError: no head answers, it is of another fleet, or this machine is none of its hosts.
    """
    address = address or own_address(key.host)
    with _credentials(key, address):
        alive = _nodes(key)
        if address not in alive:
            raise PipelineError(
                f"this machine, {address}, is none of the fleet's ({', '.join(sorted(alive)) or 'which has none'}); "
                "run this on the head or on a host that has joined"
            )
        import ray

        try:
            ray.init(
                address=key.address,
                _node_ip_address=address,
                namespace=NAMESPACE,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            raise PipelineError(f"the fleet at {key.address} cannot be used: {_first_line(error)}") from error
        try:
            yield FleetClient(ray.get_runtime_context().get_node_id())
        finally:
            ray.shutdown()


@contextmanager
def _credentials(key: FleetKey, address: str) -> Iterator[None]:
    """Have Ray use a key in this process, which must not have imported Ray before; see `connected`."""
    ray_version()
    with tempfile.TemporaryDirectory(prefix="tvm-fleet-") as folder:
        credentials = unpack(key, Path(folder), address)
        check_reach(key, Path(folder))
        os.environ.update({**SETTINGS, **credentials, "RAY_py_gcs_connect_timeout_s": f"{HEARD_S:g}"})
        yield


def _nodes(key: FleetKey) -> list[str]:
    """Return the IPs of the machines of a fleet; raise PipelineError where its head does not take the token."""
    import ray._raylet
    from ray.exceptions import AuthenticationError

    inside: Any = ray._raylet
    try:
        nodes = inside.GcsClient(address=key.address).get_all_node_info(timeout=HEARD_S).values()
    except AuthenticationError as error:
        raise PipelineError(
            f"the head at {key.address} does not take the token of this key; take the fleet.key that its `fleet up` "
            "has written"
        ) from error
    except Exception as error:
        raise PipelineError(
            f"the head at {key.address} does not answer within {HEARD_S:g} s: {_first_line(error)}; look there at what "
            "`fleet up` says"
        ) from error
    return [node.node_manager_address for node in nodes if node.state == 0]


def run_errand(errand: ActorTask) -> ActorInfo | None:
    """Do an errand; see Errand."""
    if errand.what == "look":
        with _credentials(errand.key, errand.address):
            _nodes(errand.key)
        return None
    with connected(errand.key, errand.address) as door:
        if errand.what == "coordinator":
            return door.ensure_coordinator(errand.folder, errand.identity)
        return door.ensure_agent(errand.host, errand.folder, errand.identity)


def _called(actor: str) -> str:
    return "the coordinator" if actor == COORDINATOR else f"host {actor.removeprefix('agent-')}"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


if __name__ == "__main__":
    # The actors are pickled by the name of their module, which this is not when it is the main one.
    from tvm_pipeline_hosts.fleet import ray_door

    given = msgspec.json.decode(sys.stdin.buffer.read(), type=ray_door.ActorTask)
    sys.stdout.buffer.write(enclosed(lambda: ray_door.run_errand(given)))
