"""A model is compiled here for a board, and measured there: on loopback the board is this machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")
needs("onnx")

from tests.cli.conftest import cli
from tests.plugins.hosts.remote.conftest import serving_board
from tests.plugins.hosts.remote.other_tvm import SESSION
from tests.plugins.hosts.remote.proxy import Proxy
from tests.support.onnx_models import write_picture_net
from tvm_pipeline import open_bundle, write_bundle
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import read_profile
from tvm_pipeline.errors import ModelError, PlatformError
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_hosts.remote import remote_machine, serving
from tvm_pipeline_hosts.remote.board import Board
from tvm_pipeline_hosts.remote.board_check import check_board
from tvm_pipeline_hosts.remote.remote_machine import RemoteMachine

__all__ = ["cli"]


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    return write_picture_net(tmp_path_factory.mktemp("model") / "net.onnx")


@pytest.fixture(scope="module")
def patient(tmp_path_factory):
    """A board whose links are not given up while this machine is busy."""
    with serving_board(tmp_path_factory.mktemp("board"), serving.SESSION) as server:
        yield server


@pytest.fixture
def address(patient):
    return str(patient.address)


@pytest.fixture(scope="module")
def machine(patient):
    with Board.connect(str(patient.address)) as board:
        yield RemoteMachine(board)


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A platform file of one core, so that little is measured."""
    file = tmp_path_factory.mktemp("desk") / "desk.toml"
    file.write_text('name = "desk"\n[[device]]\nname = "only"\nbackend = "host"\ncores = [0]\n')
    return file


@pytest.mark.thorough
def test_a_profile_has_the_operators_and_devices_of_the_same_machine(cli, net, address, desk, tmp_path):
    there, here = tmp_path / "there.json", tmp_path / "here.json"
    for file, remote in ((there, ("--remote", address)), (here, ())):
        outcome = cli("profile", net, "--platform", desk, "--repeats", 2, "-o", file, *remote)
        assert outcome.code == 0, outcome.err
    found, own = read_profile(there), read_profile(here)
    assert (found.graph, found.fingerprint) == (own.graph, own.fingerprint)
    assert {name: list(each.seconds) for name, each in found.devices.items()} == {
        name: list(each.seconds) for name, each in own.devices.items()
    }
    assert found.environment["processor"] == own.environment["processor"]


def test_a_bundle_is_compiled_compared_planned_there_and_runs(cli, net, address, desk, tmp_path):
    bundle = tmp_path / "net.tar"
    outcome = cli("compile", net, "-o", bundle, "--remote", address, "--platform", desk, "--json")
    assert outcome.code == 0, outcome.err
    [compared] = outcome.json["compared"]
    assert "only of board" in compared
    assert "off by 0," in compared  # it is the same code
    with open_bundle(bundle) as opened:
        assert [device.name for device in opened.platform.devices] == ["only"]
        assert opened.profile.devices["only"].whole_s > 0
    benched = cli("bench", bundle, "--remote", address, "--seconds", "0.05", "--rounds", 1, "--json")
    assert benched.code == 0, benched.err
    [candidate] = benched.json["candidates"]
    assert candidate["measured"]["throughput_fps"] > 0
    planned = cli("plan", bundle, "--remote", address, "--json", "--verify", 0)
    assert planned.json["stages"] == [{"devices": ["only"], "operators": candidate["stages"][0]["operators"]}]


@pytest.mark.thorough
def test_weights_travel_once(net, patient, desk, tmp_path):
    with Proxy(patient.address.port) as proxy, Board.connect(proxy.address) as board:
        machine = RemoteMachine(board)
        made = compile_source(net, platform=desk, machine=machine, order="memory")  # no other test sent these files
        [only] = made.platform.devices
        machine.stage_timer(made.compiled, made.platform)(made.compiled.graph.operator_names, only)
        first = proxy.up
        path = tmp_path / "first.tar"
        with open_bundle(_saved(machine, made, path)) as bundle:
            final = replace(bundle, plan=replace(bundle.plan, scheduler="dp"))
            write_bundle(tmp_path / "final.tar", final)
        board.send(tmp_path / "final.tar")
        weights = sum(tensor.stat().st_size for tensor in made.compiled.libraries[only.target].folder.iterdir())
        assert proxy.up - first < weights / 10


def _saved(machine, made, path):
    """Write the bundle that travelled for measuring."""
    from tvm_pipeline import Bundle, Plan, Prediction, Stage
    from tvm_pipeline.core.profile import unmeasured

    graph = made.compiled.graph
    plan = Plan(graph.name, "x", "throughput", (Stage(("only",), tuple(graph.operator_names)),), Prediction())
    write_bundle(path, Bundle(graph, made.platform, unmeasured(graph), plan, made.compiled))
    return path


@pytest.mark.thorough
def test_stages_turns_and_joules_by_watts_are_the_boards(net, machine, desk):
    made = compile_source(net, platform=desk, machine=machine)
    [only] = made.platform.devices
    names = made.compiled.graph.operator_names
    timed = machine.stage_timer(made.compiled, made.platform)(names[:2], only)
    assert (timed.device, timed.operators) == ("only", tuple(names[:2]))
    assert 0 < timed.seconds < 1
    with pytest.raises(PlatformError, match=f"board {machine.name}: .*nowhere"):
        machine.stage_timer(made.compiled, made.platform)(names, Device("nowhere"))


@pytest.mark.thorough
def test_a_bundle_for_another_platform_is_refused_by_the_board(cli, net, address, machine, desk, tmp_path):
    made = compile_source(net, platform=desk, machine=machine)
    path = _saved(machine, made, tmp_path / "net.tar")
    with open_bundle(path) as bundle:
        far = Platform("far", (replace(bundle.platform.devices[0], cores=(4000,)),))
        write_bundle(path, replace(bundle, platform=far, profile=_one_second(bundle.graph)))
    outcome = cli("bench", path, "--remote", address, "--seconds", "0.05")
    assert outcome.code == 1
    assert "was made for another machine: device only names cores [4000]" in outcome.err


def _one_second(graph):
    from tvm_pipeline.core.profile import DeviceProfile, Profile

    return Profile(graph.name, graph.fingerprint, {"only": DeviceProfile.in_order(graph, [1.0] * len(graph))})


@pytest.mark.thorough
def test_another_tvm_is_said_with_both_versions(cli, net, tmp_path):
    with serving_board(tmp_path / "board", SESSION) as server:
        outcome = cli("compile", net, "-o", tmp_path / "net.tar", "--remote", server.address)
    assert outcome.code == 1
    assert "has tvm 0.99 with Relay, and this machine has 0." in outcome.err
    assert not (tmp_path / "net.tar").exists()


@pytest.mark.thorough
def test_a_board_that_is_lost_while_it_measures_leaves_no_output(cli, net, desk, tmp_path, monkeypatch):
    with serving_board(tmp_path / "board", serving.SESSION, keep_s=1.0) as server, Proxy(server.address.port) as proxy:

        class Losing(Board):
            @classmethod
            def connect(cls, address):
                return super().connect(address, keep_s=1.0)

            def call(self, method, *arguments, **named):
                if method == "profile":  # no byte of the answer comes through, and no other link
                    proxy.refuses_after_cut, proxy.cut_down = True, 1
                return super().call(method, *arguments, **named)

        monkeypatch.setattr(remote_machine, "Board", Losing)
        file = tmp_path / "profile.json"
        outcome = cli("--traceback", "profile", net, "--remote", proxy.address, "--platform", desk, "-o", file)
    assert outcome.code == 1
    assert "BoardLostError" in outcome.err
    assert "broke while profile ran" in outcome.err
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("compile", "NET", "-o", "net.tar", "--source", "video.mp4"), "--source does not go with --remote"),
        (("compile", "NET", "-o", "net.tar", "--memory-rewrite"), "--memory-rewrite does not go with --remote"),
        (("profile", "NET", "--power-modes"), "--power-modes does not go with --remote"),
        (("tune", "NET", "--objective", "latency"), "--objective does not go with --remote"),
        (("plan", "NET", "NET"), "--remote goes with one model"),
    ],
)
def test_what_is_for_this_machine_alone_is_refused(cli, net, arguments, named):
    outcome = cli(*(net if each == "NET" else each for each in arguments), "--remote", "localhost:1")
    assert outcome.code == 2
    assert named in outcome.err


@pytest.mark.thorough
def test_a_board_tells_what_it_would_tune(cli, net, address):
    here, there = (cli("tune", net, *remote, "--seconds", 0, "--json") for remote in ((), ("--remote", address)))
    assert there.code == 0, there.err
    [target] = there.json["targets"]
    assert target["kernels"] == here.json["targets"][0]["kernels"] > 0


@pytest.mark.thorough
def test_outputs_of_a_board_that_are_wrong_are_an_error():
    operators = (Operator("op", "dense", ("x",), (Tensor("y", (1, 10)),)),)
    graph = OperatorGraph("net", (Tensor("x", (1, 10)),), operators, ("y",))
    right = np.linspace(1, 2, 10, dtype="float32").reshape(1, 10)
    check_board("attic", graph, "cpu0", [right], [right * np.float32(1 + 1e-5)])
    with pytest.raises(
        ModelError, match=r"something else on cpu0 of board attic than on this machine: output .* off by"
    ):
        check_board("attic", graph, "cpu0", [right], [right[:, ::-1].copy()])
