"""Devices of known models are measured and refitted: the whole way of `calibrate` but the clock."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.profiling.test_layer_times import network, several
from tests.support.log_lines import log_lines
from tvm_pipeline import Device, Link, Platform, read_platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform_text import platform_toml
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.cost.modelled_stage import stage_table
from tvm_pipeline.errors import ModelError, OptionError, PlanError, PlatformError, ProfileError
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.testing import FakeBackend, FakeModel, installed
from tvm_pipeline.workflow.calibrating import CalibratedPlatform, calibrate_platform

GRAPHS = several(3)
LAW = DeviceModel(macs_per_s=3e9, call_s=2e-5, operator_s=1e-5, bytes_per_s=1.5e9)
SLOW = replace(LAW, macs_per_s=1e9, bytes_per_s=4e8)
D0, D1 = Device("d0", "fake"), Device("d1", "fake")
SLOWER = Device("slow", "fake", target="slow")
BOX = Platform("box", (D0, SLOWER, D1), (Link("d0", "d1", 1e-5, 1e9),))


class Clock:
    """Times stages by the law of their device, without running them: the n-th call may be disturbed."""

    def __init__(self, disturbed: Callable[[int, Sequence[str], float], float] = lambda _, __, s: s) -> None:
        self.disturbed, self.spread = disturbed, 0.01
        self.timed: list[tuple[str, str, tuple[str, ...]]] = []

    def __call__(self, compiled: CompiledModel) -> SegmentTimer:
        def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
            self.timed.append((device.name, compiled.graph.name, tuple(operators)))
            by_law = float(stage_table([(compiled.graph, operators)]).seconds(SLOW if device.target else LAW)[0])
            digest = hashlib.sha256(f"{compiled.graph.name} {operators}".encode()).digest()[0]
            seconds = by_law * (0.95 + 0.1 * digest / 255)  # what no model knows
            seconds = self.disturbed(len(self.timed), operators, seconds)
            return SegmentProfile(device.name, tuple(operators), seconds, self.spread)

        return timed


class Backend(FakeBackend):
    """A backend one of whose devices is a stand-in, and which cannot compile for another."""

    def settle(self, device: Device) -> Device:
        settled = super().settle(device)
        return replace(settled, stand_in="the CPU (none is plugged in)") if device.name == "absent" else settled

    def compile(self, model: Any, devices: Sequence[Device], *rest: Any) -> FakeModel:
        if devices[0].name == "narrow":
            raise ModelError(f"{model.name}: operator t0 is too wide")
        return super().compile(model, devices, *rest)


@pytest.fixture
def calibrate(tmp_path, monkeypatch) -> Callable[..., CalibratedPlatform]:
    """Calibrate a platform with the three networks; `warned` hears."""
    monkeypatch.chdir(tmp_path)
    for graph in GRAPHS:
        Path(f"{graph.name}.relay").write_text("its graph is known")
    known = [D0, D1, SLOWER, Device("absent", "fake"), Device("narrow", "fake")]
    backend = Backend(known, [FakeModel(graph, {}) for graph in GRAPHS])

    def run(platform: Platform = BOX, clock: Clock | None = None, **options: Any) -> CalibratedPlatform:
        sources = options.pop("sources", [f"{graph.name}.relay" for graph in GRAPHS])
        with installed(backend):
            return calibrate_platform(sources, platform, timer=clock or Clock(), **options)

    return run


@pytest.mark.thorough
def test_known_devices_are_refitted_and_unseen_networks_predicted(calibrate, tmp_path):
    clock, heard = Clock(), log_lines("INFO")
    found = calibrate(clock=clock)
    assert [group.names for group in found.groups] == [("d0", "d1"), ("slow",)]
    assert "d0, d1 are equal: d0 is measured for all of them" in heard
    assert [name for name, _, _ in clock.timed] == ["d0"] * 16 + ["slow"] * 16
    assert len(set(clock.timed)) == 32  # no stage twice
    models = {device.name: device.model for device in found.platform.devices}
    assert models["d0"] == models["d1"] != models["slow"]
    unseen = network("unseen", np.random.default_rng(77))
    table = stage_table([(unseen, unseen.operator_names)])
    for name, law in (("d0", LAW), ("slow", SLOW)):
        assert table.seconds(models[name])[0] == pytest.approx(table.seconds(law)[0], rel=0.15)
        group = found.groups[name == "slow"].found.calibration
        assert models[name].error == pytest.approx(group.error, rel=0.05)
        assert group.error < 0.15 < group.prior_error
    text = platform_toml(found.platform, found.comments)
    (tmp_path / "calibrated.toml").write_text(text)
    assert read_platform(tmp_path / "calibrated.toml") == found.platform
    assert found.platform.links[0] == BOX.links[0]  # the others were measured
    ends = [(link.source, link.destination) for link in found.platform.links[1:]]
    assert sorted(ends) == [("d0", "slow"), ("d1", "d0"), ("d1", "slow"), ("slow", "d0"), ("slow", "d1")]
    comments = " ".join(line.removeprefix("# ").strip() for line in text.splitlines() if line.startswith("#"))
    assert "networks: net0, net1, net2" in comments
    assert "d0, d1: 16 stages; error" in comments
    assert "leaving out each of 3 networks" in comments


@pytest.mark.thorough
def test_the_second_half_is_chosen_under_the_fitted_model(calibrate):
    """What the first stages say decides which are measured next: devices of other laws part after the first half."""
    clock = Clock()
    calibrate(Platform("box", (replace(D0, model=LAW), replace(SLOWER, model=LAW))), clock)
    fast, slow = clock.timed[:16], clock.timed[16:]
    assert [stage for _, *stage in fast[:8]] == [stage for _, *stage in slow[:8]]
    assert [stage for _, *stage in fast[8:]] != [stage for _, *stage in slow[8:]]


@pytest.mark.thorough
def test_a_calibrated_model_is_the_prior_of_the_next_time(calibrate):
    again = calibrate(calibrate().platform).groups[0].found.calibration
    assert again.prior_error < 0.15


def test_a_stage_that_is_refused_is_told_and_replaced(calibrate):
    def refuse(_: int, operators: Sequence[str], seconds: float) -> float:
        if len(operators) == 1:
            raise PlanError("one operator is not worth it")
        return seconds

    warned = log_lines("WARNING")
    found = calibrate(Platform("box", (D0,)), Clock(refuse))
    assert found.groups[0].found.calibration.stages == 16
    assert warned
    assert all(line.startswith("d0: net") and "is left out: one operator" in line for line in warned)


def test_a_compiler_that_refuses_all_ends_it(calibrate):
    def refuse(*_: object) -> float:
        raise PlanError("no such operator")

    with pytest.raises(ModelError, match="device d0: its compiler refuses 6 stages, the first because: no such"):
        calibrate(Platform("box", (D0,)), Clock(refuse), count=5)


def test_a_device_that_fails_is_named_with_its_stage(calibrate):
    def fail(call: int, _: object, seconds: float) -> float:
        if call == 3:
            raise RuntimeError("the cable is loose")
        return seconds

    with pytest.raises(ProfileError, match=r"device d0 failed at net\d.*: RuntimeError: the cable is loose"):
        calibrate(Platform("box", (D0,)), Clock(fail))


def test_a_device_whose_times_vary_is_not_fitted(calibrate):
    clock, warned = Clock(), log_lines("WARNING")
    clock.spread = 0.6
    with pytest.raises(ProfileError, match=r"device d0: the times of 6 stages vary .* by 60% from run to run; stop"):
        calibrate(Platform("box", (D0,)), clock, count=5)
    assert len(clock.timed) == 6 * 3  # each was tried again
    assert all("from run to run; it is left out" in line for line in warned)


@pytest.mark.thorough
def test_a_device_that_cannot_be_fitted_does_not_lose_the_others(calibrate):
    clock, warned = Clock(), log_lines("WARNING")

    def varies(_: int, __: object, seconds: float) -> float:
        clock.spread = 0.6 if clock.timed[-1][0] == "slow" else 0.01
        return seconds

    clock.disturbed = varies
    found = calibrate(BOX, clock, count=5)
    assert [group.names for group in found.groups] == [("d0", "d1")]
    assert found.left_out["slow"].startswith("not calibrated: device slow: the times of 6 stages vary")
    assert found.left_out["slow"] in warned
    assert found.platform.device("slow").model is None
    clock.disturbed, clock.spread = lambda _, __, seconds: seconds, 0.6
    with pytest.raises(ProfileError, match="device d0: the times"):
        calibrate(BOX, clock, count=5)


def test_a_stage_whose_times_vary_is_measured_again(calibrate):
    """The steadiest measurement counts: here the second one."""
    clock = Clock()

    def unsteady_at_first(call: int, _: object, seconds: float) -> float:
        clock.spread = 0.9 if call == 1 else 0.01
        return seconds * (2 if call == 1 else 1)

    clock.disturbed = unsteady_at_first
    found = calibrate(Platform("box", (D0,)), clock).groups[0].found
    assert clock.timed[0] == clock.timed[1]
    assert len(found.times) == 16
    assert max(time.spread for time in found.times) == 0.01


def test_stand_ins_and_missing_devices_are_left_out(calibrate):
    warned = log_lines("WARNING")
    absent, gone = Device("absent", "fake"), Device("gone", "fake")
    clock = Clock()
    found = calibrate(Platform("box", (absent, D0, gone)), clock)
    assert {name for name, _, _ in clock.timed} == {"d0"}
    assert found.left_out == {
        "absent": "not calibrated: absent is missing; its stages would run on the CPU (none is plugged in)",
        "gone": "not calibrated: gone: this machine has no device gone",
    }
    assert warned[:2] == list(found.left_out.values())
    assert found.comments[-2:] == tuple(found.left_out.values())
    assert [device.model is None for device in found.platform.devices] == [True, False, True]
    with pytest.raises(PlatformError, match="no device of platform box can be calibrated: not calibrated: absent"):
        calibrate(Platform("box", (absent,)))


def test_a_model_that_does_not_compile_names_the_device(calibrate):
    with pytest.raises(ModelError, match=r"net0\.relay does not compile for device narrow: net0: operator t0 is too"):
        calibrate(Platform("box", (Device("narrow", "fake"),)))


def test_layer_times_give_way_to_the_model(calibrate):
    warned = log_lines("WARNING")
    found = calibrate(Platform("box", (replace(D0, layer_times="times.json"),)))
    assert found.platform.devices[0].layer_times == ""
    assert warned == ["d0: its calibrated model takes the place of its layer times"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sources": []}, "give at least one model"),
        ({"sources": ["net0.relay", "net0.relay"]}, "net0.relay is given twice"),
        ({"count": 4}, "`stages_to_measure` 4: the constants of a device need at least 5"),
    ],
)
def test_wrong_use_is_told_before_anything_is_measured(calibrate, options, message):
    clock = Clock()
    with pytest.raises(OptionError, match=message):
        calibrate(clock=clock, **options)
    assert clock.timed == []


def test_too_few_stages_are_said(calibrate):
    """A network of three operators has not as many stages as the constants need."""
    tiny = several(1)[0]
    cut = replace(tiny, name="net0", operators=tiny.operators[:2], outputs=("t1",))
    backend = FakeBackend([D0], [FakeModel(cut, {})])
    with installed(backend), pytest.raises(ProfileError, match=r"device d0: .*3 different stages are too few"):
        calibrate_platform(["net0.relay"], Platform("box", (D0,)), timer=Clock())


@pytest.mark.thorough
def test_devices_without_cores_are_equal_by_kind(calibrate):
    """Two of one bus are equal, whatever their index; another bus, or another model, makes another device."""
    named = [("t0", "usb:0"), ("p0", "pci:0"), ("t1", "usb:1"), ("t2", "usb:2")]
    devices = [Device(name, "fake", target=target) for name, target in named]
    devices[-1] = replace(devices[-1], model=LAW)
    backend = FakeBackend(devices, [FakeModel(graph, {}) for graph in GRAPHS])
    with installed(backend):
        found = calibrate_platform(["net0.relay"], Platform("box", tuple(devices)), count=5, timer=Clock())
    assert [group.names for group in found.groups] == [("t0", "t1"), ("p0",), ("t2",)]
