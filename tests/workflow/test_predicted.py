"""Plans for devices that are not here: what is predicted for them, what stays measured, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.profiling.test_layer_times import lawful, network, several, times_of
from tests.support.log_lines import log_lines
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.errors import PlatformError, ProfileError
from tvm_pipeline.profiling.layer_times import DeviceNote, LayerTimes, read_layer_times, write_layer_times
from tvm_pipeline.workflow.steps import decide, planned

BOARD = """
name = "board"
[[device]]
name = "big"
layer_times = "times/big.json"
cores = [0]
target = "llvm -mcpu=cortex-a72"
[[device]]
name = "little"
layer_times = "times/little.json"
"""


@pytest.fixture
def board(tmp_path) -> Path:
    """The platform file of a board whose `little` takes four times as long."""
    (tmp_path / "times").mkdir()
    for name, slower in (("big", 1.0), ("little", 4.0)):
        times = times_of(*several(4), slower=slower)
        note = DeviceNote("ARM", 2, "llvm -mcpu=cortex-a53", "0.19.0")
        write_layer_times(tmp_path / "times" / f"{name}.json", LayerTimes(note, times.networks))
    (tmp_path / "board.toml").write_text(BOARD)
    return tmp_path / "board.toml"


@pytest.fixture
def graph(tmp_path) -> Path:
    (tmp_path / "asked.json").write_bytes(msgspec.json.encode(network("asked", np.random.default_rng(9))))
    return tmp_path / "asked.json"


def test_a_graph_is_planned_for_devices_that_are_not_here(board, graph):
    warned = log_lines("WARNING")
    with planned(str(graph), platform=board) as subject:
        decision, profile = decide(subject.problem(), compiled=subject.compiled)
    assert decision.plan.predicted.uncertainty < 0.01
    single = next(plan for plan in decision.candidates if plan.devices == ("big",))
    assert 1 / single.predicted.throughput_fps == pytest.approx(lawful(subject.graph).whole_s, rel=1e-3)
    assert {name: device.predicted_from for name, device in profile.devices.items()} == {
        "big": "times/big.json",
        "little": "times/little.json",
    }
    big, other, little = warned
    assert "big: seconds are predicted from shapes by times/big.json (ARM, 2 cores, llvm -mcpu=cortex-a53" in big
    assert "median error 0% for operators of networks left out" in big
    assert other == (
        "device big: its layer times are of another device: 2 cores were measured, and it has 1; target llvm "
        "-mcpu=cortex-a53 was measured, and it has llvm -mcpu=cortex-a72"
    )
    assert little.startswith("little: seconds are predicted")


def test_measured_figures_stay(board, graph, tmp_path):
    asked = network("asked", np.random.default_rng(9))
    measured = Profile(asked.name, asked.fingerprint, {"little": lawful(asked, 7.0)})
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(measured))
    with planned(str(graph), platform=board, profile=tmp_path / "profile.json") as subject:
        assert subject.profile.devices["little"] == measured.devices["little"]
        assert subject.profile.devices["big"].predicted_from


def test_operators_of_unknown_kinds_are_counted(board, graph, tmp_path):
    graph.write_text(graph.read_text().replace('"kind":"max_pool2d"', '"kind":"lrn"'))
    warned = log_lines("WARNING")
    with planned(str(graph), platform=board):
        assert "4 of 12 operators are of kinds that it does not have" in warned[0]


def test_a_model_is_compiled_here_for_its_operators_alone(board, model):
    heard = log_lines("INFO")
    with planned(str(model), platform=board) as subject:
        assert subject.compiled is None
        assert "devices that are predicted from shapes" in subject.not_here
        assert set(subject.profile.devices) == {"big", "little"}
        assert subject.profile.devices["big"].whole_s > 0
    assert heard[0].startswith(f"compiling {model} here for its operators")


def test_layer_times_beside_a_model_are_refused(board, graph):
    board.write_text(board.read_text().replace("cores = [0]", "model = { macs_per_s = 1e9 }"))
    with (
        pytest.raises(PlatformError, match="device big: it has both `layer_times` and a"),
        planned(str(graph), platform=board),
    ):
        pass


def test_a_missing_file_is_named(board, graph):
    (board.parent / "times/little.json").unlink()
    with (
        pytest.raises(ProfileError, match=r"cannot read .*times/little\.json"),
        planned(str(graph), platform=board),
    ):
        pass


def test_commands_collect_layer_times_and_plan_with_them(cli, bundle, board, graph, tmp_path):
    asked = network("asked", np.random.default_rng(9))
    measured = Profile(asked.name, asked.fingerprint, {"cpu0": lawful(asked)}, environment={"processor": "ARM"})
    (tmp_path / "profile.json").write_bytes(msgspec.json.encode(measured))
    made = tmp_path / "times/big.json"
    outcome = cli("layer-times", tmp_path / "profile.json", graph, "--device", "cpu0", "-o", made, "--add-to", made)
    assert outcome.code == 0, outcome.err
    assert "conv2d 1x1 float32" in outcome.out
    assert sorted(read_layer_times(made).networks) == ["asked", "net0", "net1", "net2", "net3"]
    assert "was measured on ARM, and others on ARM, 2 cores" in outcome.err

    alone = cli("layer-times", tmp_path / "profile.json", "--device", "cpu0", "-o", made)
    assert alone.code == 2
    assert "the graph of asked" in alone.err

    plan = cli("plan", graph, "--platform", board)
    assert "big: predicted from shapes by times/big.json, not measured" in plan.out
    assert "figures may be off by" in plan.out
    files = {"big": "times/big.json", "little": "times/little.json"}
    assert cli("plan", graph, "--platform", board, "--json").json["predicted_from_shapes"] == files


def test_a_bundle_has_layer_times(cli, bundle, tmp_path):
    """What `compile` measured on a board is enough; no graph or profile need be written beside it."""
    from tvm_pipeline import open_bundle, write_bundle

    with open_bundle(bundle) as opened:
        device = opened.platform.devices[0]
        measured = replace(opened.profile.device(device.name), uncertainty={})
        certain = replace(opened, profile=replace(opened.profile, devices={device.name: measured}))
        write_bundle(tmp_path / "net.tar", certain)
    made = tmp_path / "here.json"
    outcome = cli("layer-times", tmp_path / "net.tar", "--device", device.name, "-o", made, "--json")
    times = read_layer_times(made)
    assert (times.device.cores, times.device.target) == (len(device.cores), device.target)
    assert [layer.seconds for layer in times.networks["net"]] == list(measured.seconds.values())
    assert outcome.json["median_error"] is None  # there is no other network to predict it from
