"""The command `calibrate`: from devices whose times follow a model to the platform file that `plan` reads."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tests.calibration.test_measuring import Clock
from tests.profiling.machine import Clock as Standing
from tests.profiling.test_layer_times import network, several
from tvm_pipeline import Device, Operator, OperatorGraph, Platform, read_platform
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.cli.calibrate import seen_from, write_and_show
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.cost.modelled_stage import stage_table
from tvm_pipeline.profiling import disturbance
from tvm_pipeline.testing import FakeBackend, FakeModel, installed
from tvm_pipeline.workflow.calibrating import calibrate_platform

LAW = DeviceModel(macs_per_s=8e10, operator_s=1e-4, bytes_per_s=4e10)


def zeros(operator: Operator, *_: Array) -> list[Array]:
    return [np.zeros(tensor.shape, tensor.dtype) for tensor in operator.outputs]


def paced(graph: OperatorGraph, clock: Standing) -> FakeModel:
    """Return the graph as a model whose operators take the seconds of the law; else the clock stands still."""
    functions = {operator.name: partial(zeros, operator) for operator in graph.operators}
    hooks = {
        (operator.name, "d0"): clock.taking(float(stage_table([(graph, [operator.name])]).seconds(LAW)[0]))
        for operator in graph.operators
    }
    return FakeModel(graph, functions, hooks=hooks)


@pytest.fixture
def box(tmp_path, monkeypatch) -> Path:
    """A platform file of two equal devices, in a folder with the files of two networks."""
    monkeypatch.chdir(tmp_path)
    for graph in several(2):
        Path(f"{graph.name}.relay").write_text("its graph is known")
    path = tmp_path / "box.toml"
    path.write_text("# by hand\n" + platform_toml(Platform("box", (Device("d0", "fake"), Device("d1", "fake")))))
    return path


def test_the_file_that_it_writes_is_what_plan_reads(cli, box, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    clock = Standing()
    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(disturbance, "PROC", tmp_path / "proc")  # so that the load of this machine does not count
    out, graph = tmp_path / "calibrated.toml", tmp_path / "asked.json"
    asked = network("asked", np.random.default_rng(9))
    graph.write_bytes(msgspec.json.encode(asked))
    with installed(FakeBackend(read_platform(box).devices, [paced(graph, clock) for graph in several(2)])):
        outcome = cli("calibrate", "net0.relay", "net1.relay", "--platform", box, "-o", out, "--stages-to-measure", 6)
        assert outcome.code == 0, outcome.err
        planned = cli("plan", graph, "--platform", out, "--json")
    assert [device.model.error is not None for device in read_platform(out).devices] == [True, True]
    assert out.read_text().startswith("# Written by `tvm-pipeline calibrate`")
    assert "d0, d1: error" in outcome.out
    by_law = stage_table([(asked, asked.operator_names)])
    assert by_law.seconds(read_platform(out).devices[0].model)[0] == pytest.approx(by_law.seconds(LAW)[0], rel=0.1)
    assert all(name in outcome.out for name in ("macs_per_s", "operator_s", "factor of conv2d 1x1 float32"))
    assert planned.code == 0, planned.err
    assert set(planned.json["modelled"]) == {"d0", "d1"}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("json", [False, True])
def test_what_was_fitted_is_printed(box, tmp_path, capsys, json):
    devices = (Device("d0", "fake"), Device("slow", "fake", target="slow"))
    with installed(FakeBackend(devices, [FakeModel(graph, {}) for graph in several(2)])):
        sources = ["net0.relay", "net1.relay"]
        found = calibrate_platform(sources, Platform("box", devices), count=8, timer=Clock())
    write_and_show(found, tmp_path / "out.toml", json)
    out, _ = capsys.readouterr()
    assert read_platform(tmp_path / "out.toml") == found.platform
    if not json:
        assert all(line in " ".join(out.split()) for group in found.groups for line in group.advice)
        assert len([line for line in out.splitlines() if "macs_per_s" in line and "GMAC/s" in line]) == 2
        return
    shown = msgspec.json.decode(out)
    assert [group["devices"] for group in shown["calibrated"]] == [["d0"], ["slow"]]
    for group, fitted in zip(shown["calibrated"], found.groups, strict=True):
        assert len(group["stages"]) == 8
        assert group["error"] == fitted.found.calibration.error
        assert group["constants"]["macs_per_s"]["fitted"] == group["model"]["macs_per_s"]


def test_an_edge_tpu_that_is_missing_is_not_calibrated(cli, tmp_path, model):
    (tmp_path / "coral.toml").write_text(
        'name = "coral"\n[[device]]\nname = "tpu0"\nbackend = "edgetpu"\ntarget = "usb:0"\n'
    )
    outcome = cli("calibrate", model, "--platform", tmp_path / "coral.toml", "-o", tmp_path / "out.toml")
    assert outcome.code == 1
    assert "not calibrated: tpu0 is missing; its stages would run on" in outcome.err
    assert not (tmp_path / "out.toml").exists()


def test_where_it_cannot_write_it_measures_nothing(cli, box, tmp_path):
    outcome = cli("calibrate", "net0.relay", "--platform", box, "-o", tmp_path / "none/out.toml")
    assert outcome.code == 1
    assert "cannot write" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "Missing argument"),
        (["absent.onnx"], 1, "absent.onnx: no such file"),
        (["net0.relay", "net0.relay"], 2, "net0.relay is given twice"),
        (
            ["net0.relay", "--stages-to-measure", 3],
            2,
            "--stages-to-measure 3: the constants of a device need at least 5",
        ),
    ],
)
def test_wrong_use_is_one_line(cli, box, tmp_path, arguments, code, message):
    outcome = cli("calibrate", *arguments, "--platform", box, "-o", tmp_path / "out.toml")
    assert (outcome.code, message in outcome.err) == (code, True), outcome.err
    assert not (tmp_path / "out.toml").exists()


def test_layer_times_of_other_devices_are_found_from_the_new_folder():
    """A file that moves keeps what it names: paths are seen from its folder."""
    far, near = Device("far", layer_times="times/far.json"), Device("near")
    moved = seen_from(Platform("box", (far, near)), Path("boards"), Path("boards/new"))
    assert [device.layer_times for device in moved.devices] == ["../times/far.json", ""]
