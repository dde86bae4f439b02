"""Model files become a bundle for each kind of host: kinds, what is compiled once, and what one host cannot run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.plugins.hosts.remote.conftest import serving_board
from tests.support.onnx_models import write_pooling_net
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, PipelineError, RunError
from tvm_pipeline_hosts.fleet.fleet_file import read_fleet
from tvm_pipeline_hosts.fleet.host_works import host_works
from tvm_pipeline_hosts.fleet.kind_bundles import KindBundles, kinds_of
from tvm_pipeline_hosts.fleet.ray_actors import BoardActor, MethodResult, opened, write_environment
from tvm_pipeline_hosts.fleet.ray_board import arrays_of
from tvm_pipeline_hosts.remote import serving
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.board_measuring import BoardPlatform
from tvm_pipeline_hosts.remote.frames import described

FLEET = """
[[host]]
name = "attic"

[[host]]
name = "barn"

[[host]]
name = "cellar"

[[host]]
name = "shed"
bundles = { net = "shed.tar" }

[[model]]
name = "net"
file = "net.onnx"

[[camera]]
name = "gate"
source = "synthetic"
models = ["net@5"]
hosts = ["attic", "barn", "shed"]
"""

CPU = Device("cpu", "host", (0, 1), "llvm -mcpu=cortex-a57")
ATTIC = BoardPlatform(Platform("attic", (CPU,)), "aarch64", "Cortex-A57", {"tvm": "0.19"})


def test_hosts_are_of_one_kind_if_a_bundle_of_one_is_right_for_the_other() -> None:
    """Names of platforms and warnings do not matter; devices, their targets and cores, processor and versions do."""
    same = msgspec.structs.replace(ATTIC, platform=Platform("barn", (CPU,)), warnings=["it is warm"])
    others = {
        "target": msgspec.structs.replace(ATTIC, platform=Platform("attic", (replace(CPU, target="llvm"),))),
        "cores": msgspec.structs.replace(ATTIC, platform=Platform("attic", (replace(CPU, cores=(0,)),))),
        "backend": msgspec.structs.replace(ATTIC, platform=Platform("attic", (replace(CPU, backend="gpu"),))),
        "processor": msgspec.structs.replace(ATTIC, processor="Cortex-A72"),
        "versions": msgspec.structs.replace(ATTIC, versions={"tvm": "0.20"}),
    }
    kinds = kinds_of({"attic": ATTIC, **others, "barn": same})
    assert [kind.hosts for kind in kinds] == [("attic", "barn"), *((name,) for name in others)]
    assert len({kind.key for kind in kinds}) == len(kinds)


class Hosts:
    """Hosts of one kind, which are the same board; some cannot be reached, and some compute for another processor."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.calls: list[tuple[str, str]] = []
        self.away: set[str] = set()
        self.other: set[str] = set()
        self.dying: set[str] = set()  # as soon as something is measured

    @contextmanager
    def open_board(self, host: str) -> Iterator[HostOf]:
        if host in self.away:
            raise RunError(f"host {host} does not answer")
        yield HostOf(self, host)


class HostOf:
    """One of the hosts: what `KindBundles` takes as a board."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self.name, self._hosts = name, hosts
        self.send = hosts.board.send

    def call(self, method, arguments, *rest, **more):
        self._hosts.calls.append((self.name, method))
        if method == "profile" and self.name in self._hosts.dying:
            raise RunError(f"host {self.name}: profile did not end")
        found, arrays = self._hosts.board.call(method, arguments, *rest, **more)
        if method == "settle" and self.name in self._hosts.other:
            devices = tuple(replace(each, backend="unheard") for each in found.platform.devices)
            found = msgspec.structs.replace(found, platform=Platform(self.name, devices), processor="another")
        return found, arrays


@pytest.fixture
def hosts(tmp_path: Path, own_cache: Path) -> Iterator[Hosts]:
    write_pooling_net(tmp_path / "net.onnx")
    (tmp_path / "fleet.toml").write_text(FLEET)
    with serving_board(tmp_path / "board", serving.SESSION) as server, Board.connect(str(server.address)) as board:
        yield Hosts(board)


@pytest.mark.thorough
def test_a_model_is_compiled_and_measured_once_for_a_kind(hosts: Hosts, tmp_path: Path) -> None:
    """On the host with least to do, or the next where that dies. The second time nothing is; other kinds are told."""
    hosts.other.add("shed")
    file = read_fleet(tmp_path / "fleet.toml")
    said = log_lines("INFO", "WARNING")
    cameras = {"attic": 1, "barn": 2}.get
    hosts.dying = {"attic"}
    made = KindBundles(hosts.open_board, lambda host: cameras(host, 0))
    found = made.completed(file, ["attic", "barn", "cellar", "shed"])
    bundles = {host.name: dict(host.bundles) for host in found.hosts}
    assert bundles["attic"] == bundles["barn"] != {}
    assert bundles["cellar"] == {}
    assert bundles["shed"] == {"net": tmp_path / "shed.tar"}
    assert [host for host, method in hosts.calls if method == "profile"] == ["attic", "barn"]
    assert any(line.startswith("attic has not measured net, and another host of its kind is asked") for line in said)
    assert any("barn runs 2 cameras while net is measured there" in line for line in said)
    works = host_works(replace(found, hosts=found.hosts[:2])).work_s
    assert works["attic"] == works["barn"]
    assert 0 < works["barn"]["net"] < 1

    assert ("barn", "compute") in hosts.calls
    assert any(line.startswith("net on barn: ") for line in said)

    hosts.calls.clear()
    hosts.other = {"attic"}
    again = made.completed(file, ["attic", "barn"])
    assert {method for _, method in hosts.calls} == {"settle"}
    assert again.hosts[1].bundles == found.hosts[1].bundles
    assert again.hosts[0].bundles == {}
    assert any(line.startswith("net does not run on attic, which get no camera") for line in said)

    hosts.other, hosts.away = {"attic"}, {"barn"}
    with pytest.raises(PipelineError, match=r"model net has no host: .*barn does not answer.*unheard"):
        made.completed(replace(file, hosts=file.hosts[:2]), ["attic", "barn"])


def test_the_actor_of_a_host_does_what_a_board_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors go and come as bytes, an error comes as its class, and the threads are those of the services."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    write_environment(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray does
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    left = tmp_path / "measuring" / f"{1 << 30}"  # no process has this number
    left.mkdir(parents=True)
    actor = BoardActor("attic", str(tmp_path))
    assert not left.exists()
    assert Path(tempfile.gettempdir()).parent == left.parent
    assert "OMP_NUM_THREADS" not in os.environ
    sent = [np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0,), np.uint8)]
    header = msgspec.json.encode(described(sent))
    answer, *contents = actor.call("echo", b'{"a": 1}', header, [array.tobytes() for array in sent])
    found = msgspec.json.decode(opened(answer, ""), type=MethodResult)
    assert msgspec.json.decode(found.value) == {"a": 1}
    for array, expected in zip(arrays_of(found.arrays, contents), sent, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
    (answer,) = actor.call("profile", b'{"bundle": "0", "repeats": 1, "strict": false}', b"[]", [])
    with pytest.raises(BundleError, match=r"host attic: the bundle 0 is not in .*send it again"):
        opened(answer, "host attic: ")
    (answer,) = actor.call("fly", b"{}", b"[]", [])
    with pytest.raises(RunError, match="has no method 'fly'"):
        opened(answer, "")
    actor.close()
    assert not list(left.parent.iterdir())
