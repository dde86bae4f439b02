"""What the services of a host need in tests, where `install` puts it: a fake backend, and sources that fail.

A service is a process of its own, which finds backends and kinds of sources by the entry points of packages.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Listener
from pathlib import Path

import msgspec
import numpy as np

from tvm_pipeline.backends.bundle import Bundle, write_bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.planning import plan
from tvm_pipeline.testing import FakeBackend, FakeModel
from tvm_pipeline.testing import installed as installed_backends
from tvm_pipeline_hosts.fleet.agent import Agent
from tvm_pipeline_hosts.fleet.messages import HostOrder, HostReport
from tvm_pipeline_hosts.remote.parcels import Parcels
from tvm_pipeline_video.decoding import Picture
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.kinds import Kind, SourceOptions
from tvm_pipeline_video.sources import Source

ROOT = Path(__file__).parents[3]
FPS = 20.0

backend = FakeBackend([Device("d0", "fake")])


def scores(picture: Array) -> list[Array]:
    """The one operator of the model."""
    return [picture.mean(axis=(2, 3), dtype=np.float32)]


def _graph() -> OperatorGraph:
    picture, means = Tensor("picture", (1, 3, 32, 32), "float32"), Tensor("scores", (1, 3), "float32")
    return OperatorGraph(
        "means", (picture,), (Operator("means", "mean", ("picture",), (means,), macs=3072),), ("scores",)
    )


def write_service_bundle(path: Path, revision: str) -> None:
    """Write a bundle of a tiny model; another revision is another bundle."""
    graph, platform = _graph(), Platform("box", (Device("d0", "fake"),))
    profile = Profile(graph.name, graph.fingerprint, {"d0": DeviceProfile.in_order(graph, [0.001])})
    found = plan(Problem(graph, platform, profile)).plan
    with installed_backends(backend):
        model = FakeModel(graph, {"means": scores})
        write_bundle(path, Bundle(graph, platform, profile, found, model, metadata={"revision": revision}))


def _pictures() -> Iterator[Picture]:
    number = 0
    while True:
        yield Picture(number / FPS, np.zeros((32, 32, 3), np.uint8))
        number += 1


class _Locked(Source):
    """A source that holds a file while it is open, as a camera is held."""

    def close(self) -> None:
        super().close()
        Path(self.name.partition(":")[2]).unlink(missing_ok=True)


def _open_once(spec: str, opening: SourceOptions) -> Source:
    holder = Path(spec.partition(":")[2])
    try:
        with holder.open("x") as file:
            file.write(f"{os.getpid()}\n")
    except FileExistsError as error:
        with (holder.parent / "refused").open("a") as file:
            file.write(f"{os.getpid()}\n")
        raise VideoError(f"{spec} is in use") from error
    return _Locked(spec, _pictures(), fps=FPS, frames=None, limit=opening.limit)


once = Kind("once", lambda spec: spec.startswith("once:"), _open_once, live=False, exclusive=True, help="once:FILE")


def agent_command(host: str, folder: Path, socket: Path) -> list[str]:
    """Return the command of a process that is the agent of a host, and beats over a Unix socket."""
    code = "import sys; from tests.plugins.hosts.fleet_host import run_agent; run_agent(*sys.argv[1:])"
    return [sys.executable, "-c", code, host, str(folder), str(socket)]


def run_agent(host: str, folder: str, socket: str) -> None:
    with Client(socket, "AF_UNIX") as wire:

        def beat(report: HostReport) -> HostOrder:
            wire.send_bytes(msgspec.json.encode(report))
            return msgspec.json.decode(wire.recv_bytes(), type=HostOrder)

        Agent(host, Path(folder), beat, Parcels(Path(folder) / "parcels")).run(threading.Event())


@contextmanager
def answering(socket: Path, beat: Callable[[HostReport], HostOrder]) -> Iterator[None]:
    """Answer the beats of an agent in another process, until that ends."""
    with Listener(str(socket), "AF_UNIX") as listener:

        def answer() -> None:
            with suppress(EOFError, ConnectionError), listener.accept() as wire:
                while True:
                    order = beat(msgspec.json.decode(wire.recv_bytes(), type=HostReport))
                    wire.send_bytes(msgspec.json.encode(order))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield
        thread.join(5.0)


def install(folder: Path) -> dict[str, str]:
    """Make the backend and the kind of source those of an installed package; return the environment that has it."""
    package = folder / "fleet_host-1.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fleet-host\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[tvm_pipeline.backends]\nfake = tests.plugins.hosts.fleet_host:backend\n"
        "[tvm_pipeline.sources]\nonce = tests.plugins.hosts.fleet_host:once\n"
    )
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "backends", ROOT / "plugins", folder)))}
