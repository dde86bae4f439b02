"""A host of the fleet as a board: what `serve-rpc` does for its clients, in an actor of its own while a block lasts.

    with host_board(door, "attic") as board:
        board.call("settle", {"platform": None})

Bundles go to the agent of the host, by whose folder of parcels the actor finds them. Read next: remote/methods.py, for
what can be called; kind_bundles.py, which does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline.errors import RunError
from tvm_pipeline_hosts.fleet.ray_actors import ActorInfo, BoardActor, MethodResult, agent_name, opened
from tvm_pipeline_hosts.fleet.ray_door import FleetClient
from tvm_pipeline_hosts.fleet.shipping import send_bundle
from tvm_pipeline_hosts.remote.frames import described

T = TypeVar("T")
CLOSE_S = 5.0
CALL_S = 3600.0  # a model may take long to measure; a process or a host that dies is noticed before


class HostBoard:
    """A host: what `remote_machine.RemoteMachine` takes. Lines that its methods tell while they run are dropped."""

    def __init__(self, door: FleetClient, host: str, actor: Any) -> None:
        self.name = host
        self._door, self._actor = door, actor

    def call(
        self,
        method: str,
        arguments: Mapping[str, Any],
        arrays: Sequence[Array] = (),
        kind: type[T] = Any,  # type: ignore[assignment]
    ) -> tuple[T, list[Array]]:
        """Have the host do something, as `Board.call`."""
        import ray

        contents = [np.ascontiguousarray(array).tobytes() for array in arrays]
        header = msgspec.json.encode(described(arrays))
        try:
            called = self._actor.call.remote(method, msgspec.json.encode(arguments), header, contents)
            answer, *contents = ray.get(called, timeout=CALL_S)
        except Exception as error:  # Ray has many classes of them
            first = (str(error).strip().splitlines() or [""])[0]
            raise RunError(f"host {self.name}: {method} did not end ({type(error).__name__}: {first[:200]})") from error
        found = msgspec.json.decode(opened(answer, f"host {self.name}: "), type=MethodResult)
        return msgspec.json.decode(found.value, type=kind), arrays_of(found.arrays, contents)

    def send(self, bundle: Path) -> str:
        """Have a bundle on the host, and return its id."""
        return send_bundle(self._door, self.name, bundle)[0]


@contextmanager
def host_board(door: FleetClient, host: str) -> Iterator[HostBoard]:
    """Give a host as a board while the block lasts; its process ends then, also where this one crashes.

    Raises PipelineError where the host does not answer.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = door.call(agent_name(host), "about", kind=ActorInfo).node
    folder = door.call(agent_name(host), "folder", kind=str)
    options = {
        "num_cpus": 0,
        "max_restarts": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    actor = ray.remote(BoardActor).options(**options).remote(host, folder)
    try:
        yield HostBoard(door, host, actor)
    finally:
        with suppress(Exception):  # of Ray, where the host is lost
            ray.get(actor.close.remote(), timeout=CLOSE_S)
        ray.kill(actor)


def arrays_of(described: Sequence[tuple[str, tuple[int, ...]]], contents: Sequence[bytes]) -> list[Array]:
    """Return arrays from their dtypes, shapes and bytes, aligned as compiled kernels want them."""
    found = []
    for (dtype, shape), content in zip(described, contents, strict=True):
        array = aligned_empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8)
        found.append(array)
    return found
