"""Devices of another host in a pipeline; the other host is another process tree of this machine.

`benchmarks/several_hosts.py` holds the backend to the whole contract, which takes a session for each of many stages.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from tests.support.onnx_models import write_picture_net
from tvm_pipeline import (
    Plan,
    Platform,
    Prediction,
    Problem,
    Profile,
    Stage,
    load,
    open_bundle,
    profile_model,
    write_bundle,
)
from tvm_pipeline.backends.bundle import Bundle
from tvm_pipeline.backends.contract import CompiledModel, Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.backends.registry import find_backend, settle_platform
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import PlatformError, RunError
from tvm_pipeline.planning import plan
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.testing import installed
from tvm_pipeline_hosts.remote.remote_backend import RemoteBackend

CORE = min(os.sched_getaffinity(0))
HERE = Device("here", "host", (CORE,))


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """The address of `serve-rpc`, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = "{}:{}".format(*listener.getsockname())
    command = [sys.executable, "-m", "tvm_pipeline.cli", "serve-rpc", "--listen", address]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        assert any(b"listens on" in line for line in process.stdout)
        yield address, process.pid
        process.terminate()


@pytest.fixture(scope="module")
def server(serving: tuple[str, int]) -> str:
    return serving[0]


@pytest.fixture(scope="module")
def backend() -> Iterator[RemoteBackend]:
    with closing(RemoteBackend()) as backend, installed(find_backend("host"), backend):
        yield backend


@pytest.fixture(scope="module")
def there(server: str, backend: RemoteBackend) -> Device:
    """The first core as the other host offers it."""
    board = backend.board(server)
    name = next(d.name for d in board.platform.devices if d.backend == "host" and d.cores == (CORE,))
    return Device("barn", "remote", target=f"{server}/{name}")


@pytest.fixture(scope="module")
def platform(there: Device) -> Platform:
    return settle_platform(Platform("two hosts", (HERE, there)))[1]


@pytest.fixture(scope="module")
def compiled(
    backend: RemoteBackend, platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CompiledModel]:
    net = load(write_picture_net(tmp_path_factory.mktemp("net") / "net.onnx"))
    with closing(backend.compile(net, platform.devices)) as compiled:
        yield compiled


@pytest.fixture(scope="module")
def profile(backend: RemoteBackend, compiled: CompiledModel, platform: Platform) -> Profile:
    return profile_model(backend, compiled, platform, repeats=2)


def test_a_model_is_measured_planned_and_run_on_two_hosts(
    compiled: CompiledModel, platform: Platform, profile: Profile
) -> None:
    """The profile has what tensors cost on the way, plans use both hosts, and results are those of one host."""
    assert profile.devices["barn"].receive is not None
    assert profile.devices["here"].receive is None
    problem = Problem(compiled.graph, platform, profile)
    assert any(set(candidate.devices) == {"here", "barn"} for candidate in plan(problem).candidates)
    names = compiled.graph.operator_names
    half = len(names) // 2
    split = Plan(
        compiled.graph.name,
        "test",
        "throughput",
        (Stage(("here",), tuple(names[:half])), Stage(("barn",), tuple(names[half:]))),
        Prediction(),
    )
    with LivePipeline(compiled, problem, split) as pipeline:
        (result,) = pipeline.map([_frame(compiled)])
    for name, expected in _whole(compiled, platform.devices[0]).items():
        np.testing.assert_array_equal(result.outputs[name], expected)


def test_a_bundle_names_the_other_host_and_finds_it_again(
    compiled: CompiledModel, platform: Platform, profile: Profile, tmp_path: Path
) -> None:
    chosen = plan(Problem(compiled.graph, platform, profile)).plan
    write_bundle(tmp_path / "net.tar", Bundle(compiled.graph, platform, profile, chosen, compiled))
    with open_bundle(tmp_path / "net.tar") as opened:
        stage = opened.compiled.stage(opened.graph.operator_names, opened.platform.device("barn"))
        with closing(stage):
            assert [port.name for port in stage.inputs] == [tensor.name for tensor in opened.graph.inputs]


def test_a_host_that_is_lost_costs_its_device_and_no_frame(
    compiled: CompiledModel, platform: Platform, profile: Profile, serving: tuple[str, int]
) -> None:
    problem = Problem(compiled.graph, platform, profile)
    names = tuple(compiled.graph.operator_names)
    both = Plan(compiled.graph.name, "test", "throughput", (Stage(("here", "barn"), names),), Prediction())
    expected = _whole(compiled, platform.devices[0])
    with LivePipeline(compiled, problem, both) as pipeline:
        seen = 0
        for result in pipeline.map(_frame(compiled) for _ in range(200)):
            seen += 1
            for name, array in expected.items():
                np.testing.assert_array_equal(result.outputs[name], array)
            if seen == 40:
                _kill_children(serving[1])
        failures = [event for event in pipeline.events if event.kind == "failure"]
    assert seen == 200
    assert failures
    assert "barn" in failures[0].reason
    with suppress(RunError):  # the session of the other tests was killed, too: a call says so, the next begins another
        compiled.stage(names, platform.devices[1]).close()


@pytest.mark.parametrize(
    ("target", "says"),
    [("barn", "HOST:PORT/DEVICE"), ("", "HOST:PORT/DEVICE"), ("{free}/cpu0", "serve-rpc"), ("{server}/npu", "npu")],
)
def test_a_device_that_cannot_be_used_is_named(backend: RemoteBackend, server: str, target: str, says: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = "{}:{}".format(*listener.getsockname())
    device = Device("barn", "remote", target=target.format(free=free, server=server))
    with pytest.raises(PlatformError, match="barn") as refusal:
        backend.settle(device)
    assert says in str(refusal.value)


def _kill_children(pid: int) -> None:
    """Kill the sessions of a server."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # threads end meanwhile, and so do their children
            for child in (task / "children").read_text().split():
                os.kill(int(child), signal.SIGKILL)


def _frame(compiled: CompiledModel) -> dict[str, np.ndarray]:
    return {t.name: noise(Port(t.name, t.shape, t.dtype)) for t in compiled.graph.inputs}


def _whole(compiled: CompiledModel, device: Device) -> dict[str, np.ndarray]:
    """Return the outputs of the unsplit model on a device of this host."""
    with closing(compiled.stage(compiled.graph.operator_names, device)) as stage:
        outputs = [port.buffer() for port in stage.outputs]
        frame = _frame(compiled)
        stage.run([frame[port.name] for port in stage.inputs], outputs)
        return {port.name: array.reshape(array.shape) for port, array in zip(stage.outputs, outputs, strict=True)}
