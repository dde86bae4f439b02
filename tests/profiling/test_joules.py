"""Joules of operators by a sensor that counts the work that operators really did, so that the truth is known."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.log_lines import log_lines
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Reading, Sensor
from tvm_pipeline.profiling.joules import Pace, profile_joules
from tvm_pipeline.testing import FakeModel, example_graph

IDLE_W = 10.0
PACE = Pace(window_s=0.01, idle_window_s=0.01, settle_s=0.2, longest_s=0.1)
DRAWN_J = {"double": 0.02, "increment": 0.0004}  # a run; 50 times as much
RUN_S = 0.001


class Counting(Sensor):
    """Counts what operators draw on top of an idle machine."""

    name, covers, period_s = "counting", "the test", 0.001

    def __init__(self, idle_w: float = IDLE_W, reads: float = math.inf, grows_w: float = 0.0) -> None:
        self.work_j, self._idle_w, self._reads, self._grows_w = 0.0, idle_w, reads, grows_w
        self._began_s = time.perf_counter()
        self.closed = False

    def read(self) -> Sequence[Reading]:
        self._reads -= 1
        if self._reads < 0:
            raise PowerError("counting: unplugged")
        now_s = time.perf_counter()
        passed_s = now_s - self._began_s
        return [Reading(now_s, (self._idle_w + self._grows_w * passed_s / 2) * passed_s + self.work_j)]

    def close(self) -> None:
        self.closed = True


def working(sensor: Counting, *devices: str, drawn_j: dict[str, float] | None = None) -> FakeModel:
    """Return the example's model, whose operators take the same time and draw what `drawn_j` says."""
    drawn = DRAWN_J if drawn_j is None else drawn_j

    def hook(operator: str):  # type: ignore[no-untyped-def]
        def run(_: int) -> None:
            time.sleep(RUN_S)
            sensor.work_j += drawn[operator]

        return run

    functions = {"double": lambda x: [2 * x], "increment": lambda x: [x + 1]}
    hooks = {(name, device): hook(name) for name in functions for device in devices}
    return FakeModel(example_graph(), functions, hooks=hooks)


def profiled(*devices: str) -> tuple[Platform, Profile]:
    graph = example_graph()
    figures = {name: DeviceProfile.in_order(graph, [RUN_S, RUN_S]) for name in devices}
    platform = Platform("box", tuple(Device(name, "fake") for name in devices))
    return platform, Profile(graph.name, graph.fingerprint, figures)


def test_joules_are_those_above_idle_and_shared_by_power() -> None:
    sensor = Counting()
    platform, profile = profiled("d0")
    told = log_lines("INFO")
    found = profile_joules(working(sensor, "d0"), platform, profile, sensor, PACE)
    assert found.idle is not None
    assert (found.idle.sensor, found.idle.covers) == ("counting", "the test")
    assert found.idle.power_w == pytest.approx(IDLE_W, rel=0.01)
    joules = found.device("d0").joules
    assert joules is not None
    # The sum is that of the whole model, without the idle machine's, which draws as much in the same time.
    assert sum(joules.values()) == pytest.approx(sum(DRAWN_J.values()), rel=0.1)
    assert joules["double"] > 20 * joules["increment"] > 0
    assert found.device("d0").joules_uncertainty.keys() == joules.keys()
    assert found.device("d0").seconds == profile.device("d0").seconds
    assert found.warnings == ()
    assert "joules of increment on d0, 2 of 2" in told
    assert sensor.closed


def test_equal_devices_share_their_joules_and_modelled_ones_have_none() -> None:
    sensor = Counting()
    platform, profile = profiled("d0", "d1", "d2")
    profile = replace(profile, devices={name: profile.devices[name] for name in ("d0", "d1")})
    found = profile_joules(working(sensor, "d0"), platform, profile, sensor, pace=PACE)
    assert found.device("d1").joules == found.device("d0").joules
    assert found.devices.keys() == {"d0", "d1"}


def test_what_draws_no_more_than_the_idle_machine_has_no_joules_and_is_named() -> None:
    sensor = Counting()
    platform, profile = profiled("d0")
    nothing = working(sensor, "d0", drawn_j={"double": 0.02, "increment": -0.005})
    found = profile_joules(nothing, platform, profile, sensor, pace=PACE)
    joules, [said] = found.device("d0").joules or {}, found.warnings
    assert joules["increment"] == 0
    assert found.device("d0").joules_uncertainty["increment"] == 1
    assert joules["double"] == pytest.approx(0.015, abs=0.0024)  # the sum stays that of the whole model, not 0.02
    assert "1 of 2 operators" in said
    assert "such as increment (-" in said

    sensor = Counting()
    found = profile_joules(
        working(sensor, "d0", drawn_j=dict.fromkeys(DRAWN_J, 0.0)), platform, profile, sensor, pace=PACE
    )
    assert sum((found.device("d0").joules or {}).values()) < 0.001 * sum(DRAWN_J.values())
    assert "tells no joules above idle" in found.warnings[0]


def test_a_drift_of_the_idle_machine_is_said() -> None:
    sensor = Counting(grows_w=20.0)  # watts a second
    platform, profile = profiled("d0")
    found = profile_joules(working(sensor, "d0"), platform, profile, sensor, pace=PACE)
    assert "before device d0 was measured and" in found.warnings[0]
    assert found.idle is not None
    assert found.idle.uncertainty > 0.05


@pytest.mark.thorough
def test_a_process_that_does_not_rest_is_said() -> None:
    sensor = Counting()
    platform, profile = profiled("d0")
    ended = threading.Event()

    def spin() -> None:
        while not ended.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        found = profile_joules(working(sensor, "d0"), platform, profile, sensor, pace=PACE)
    finally:
        ended.set()
        thread.join()
    assert re.match(r"threads of this process took \d+% of a core while the machine was to be idle", found.warnings[0])


def test_a_sensor_that_ends_is_an_error_that_names_it() -> None:
    sensor = Counting(reads=30)
    platform, profile = profiled("d0")
    with pytest.raises(PowerError, match="counting: unplugged"):
        profile_joules(working(sensor, "d0"), platform, profile, sensor, pace=PACE)
    assert sensor.closed
