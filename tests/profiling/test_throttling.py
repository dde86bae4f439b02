"""Throttling is told when it begins and when it ends, once each, and by nothing that is no sign of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.board_trees import TREES, bind_trips, replace_by_folder, write
from tvm_pipeline import Profile, profile_model
from tvm_pipeline.profiling.throttling import PERIOD_S, QUIET_S, ThrottleWatch
from tvm_pipeline.testing import example_backend, example_model, example_problem

THERMAL = "sys/class/thermal"
ORIN, THOR, NANO, TX2 = "Orin Nano Super, JetPack 6", "Thor, JetPack 7", "Nano, JetPack 4", "TX2, JetPack 4"


class Hands:
    """A clock whose hands the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def hands() -> Hands:
    return Hands()


def after(hands: Hands, watch: ThrottleWatch, seconds: float) -> str:
    hands.now_s += seconds
    return watch.look()


def cooler(root: Path, name: str) -> str:
    """Return the folder of a cooling device."""
    [found] = [
        path.parent for path in (root / THERMAL).glob("cooling_device*/type") if path.read_text().strip() == name
    ]
    return str(found.relative_to(root))


def test_it_begins_and_ends_once(tmp_path: Path, hands: Hands) -> None:
    root = TREES[ORIN].write(tmp_path / "root")
    watch = ThrottleWatch(root, hands)
    assert (watch.look(), watch.begun) == ("", "")
    alert = f"{cooler(root, 'gpu-throttle-alert')}/cur_state"
    write(root, alert, "1\n")
    write(root, f"{THERMAL}/thermal_zone1/temp", "99500\n")
    write(root, "sys/class/devfreq/17000000.gpu/cur_freq", "306000000\n")
    assert after(hands, watch, PERIOD_S) == (
        "the machine is throttled: gpu-throttle-alert is at step 1, gpu-thermal is slowed down from 99 °C on; "
        "gpu-thermal has 99.5 °C, cores 0-3 at 1.73 of 1.73 GHz, GPU at 0.31 of 1.02 GHz"
    )
    assert watch.is_throttled
    assert [after(hands, watch, PERIOD_S) for _ in range(5)] == [""] * 5
    write(root, alert, "0\n")
    write(root, f"{THERMAL}/thermal_zone1/temp", "80000\n")
    assert after(hands, watch, QUIET_S - 1) == ""
    assert after(hands, watch, PERIOD_S) == (
        "throttling has ended after 10 s; gpu-thermal has 80.0 °C, cores 0-3 at 1.73 of 1.73 GHz, GPU at 0.31 of "
        "1.02 GHz"
    )
    assert not watch.is_throttled
    assert watch.begun  # a profile was still measured while it was
    assert after(hands, watch, 60) == ""


def test_signs_that_come_one_by_one_are_one_throttling(tmp_path: Path, hands: Hands) -> None:
    root = TREES[THOR].write(tmp_path / "root")
    watch = ThrottleWatch(root, hands)
    counter = "sys/class/hwmon/hwmon3/oc3_event_cnt"
    told = []
    for count in range(0, 180, 9):
        write(root, counter, f"{count}\n")
        told.append(after(hands, watch, PERIOD_S))
        told.append(after(hands, watch, PERIOD_S))
    assert [line for line in told if line] == [told[2]]
    assert "9 more of oc3_event_cnt (soctherm_oc: too much current, or too little voltage)" in told[2]
    assert after(hands, watch, QUIET_S).startswith("throttling has ended after 72 s")


def test_the_counters_of_older_jetsons(tmp_path: Path, hands: Hands) -> None:
    root = TREES[TX2].write(tmp_path / "root")
    watch = ThrottleWatch(root, hands)
    write(root, "sys/class/hwmon/hwmon2/oc1_priority", "3\n")
    assert after(hands, watch, PERIOD_S) == ""
    write(root, "sys/class/hwmon/hwmon2/oc1_irq_cnt", "2\n")
    assert after(hands, watch, PERIOD_S).startswith("the machine is throttled: 2 more of oc1_irq_cnt (soctherm_oc: ")


def test_it_reads_no_more_often_than_it_says(tmp_path: Path, hands: Hands) -> None:
    root = TREES[NANO].write(tmp_path / "root")
    watch = ThrottleWatch(root, hands)
    watch.look()
    write(root, f"{cooler(root, 'cpu-balanced')}/cur_state", "3\n")
    assert after(hands, watch, PERIOD_S / 2) == ""
    assert "cpu-balanced is at step 3" in after(hands, watch, PERIOD_S / 2)
    assert "cpu-balanced is at step 3" in ThrottleWatch(root, hands).look_now()  # also if it was before


def test_a_trip_point_that_is_reached(tmp_path: Path, hands: Hands) -> None:
    root = TREES[TX2].write(tmp_path / "root")
    zone = f"{THERMAL}/thermal_zone2"
    watch = ThrottleWatch(root, hands)
    write(root, f"{zone}/temp", "95400\n")
    assert after(hands, watch, PERIOD_S) == ""
    write(root, f"{zone}/temp", "95500\n")
    assert "GPU-therm is slowed down from 95.5 °C on; GPU-therm has 95.5 °C" in after(hands, watch, PERIOD_S)


@pytest.mark.parametrize("board", TREES)
@pytest.mark.parametrize("celsius", [40, 72, 99, 110])
def test_a_jetson_is_throttled_only_from_a_trip_point_that_slows_it_down(
    tmp_path: Path, hands: Hands, board: str, celsius: int
) -> None:
    """At 72 degrees an Orin has passed a passive trip point to which an alert for hot surfaces is bound, a Nano one for
    the refresh of its memory. At 99 a Thor is not slowed down yet.
    """
    root = TREES[board].write(tmp_path / "root")
    for number in range(len(TREES[board].zones)):
        write(root, f"{THERMAL}/thermal_zone{number}/temp", f"{celsius * 1000}\n")
    if celsius >= 70 and (alerts := [name for name in TREES[board].coolers if name == "hot-surface-alert"]):
        write(root, f"{cooler(root, alerts[0])}/cur_state", "1\n")
    watch = ThrottleWatch(root, hands)
    assert bool(watch.look_now()) == (celsius >= (109 if board == THOR else 99))


def test_what_is_no_sign(tmp_path: Path, hands: Hands) -> None:
    """Fans, a chip that always tells 100 degrees, settings, idle clocks, and a GPU whose sensor is switched off."""
    root = TREES[NANO].write(tmp_path / "root")
    write(root, f"{cooler(root, 'pwm-fan')}/cur_state", "7\n")
    pmic = f"{THERMAL}/thermal_zone4"
    assert (root / pmic / "type").read_text() == "PMIC-Die\n"
    slows = ("cpu-balanced",)
    bind_trips(root, pmic, [("passive", 99, slows)])
    for number, (name, state) in enumerate(
        (("TCC Offset", 30), ("intel_powerclamp", -1), ("Fan", 1), ("bq25890", 2), ("hot-surface-alert", 1))
    ):
        write(root, f"{THERMAL}/cooling_device{10 + number}/type", f"{name}\n")
        write(root, f"{THERMAL}/cooling_device{10 + number}/cur_state", f"{state}\n")
    write(root, f"{THERMAL}/thermal_zone9/type", "x86_pkg_temp\n")
    write(root, f"{THERMAL}/thermal_zone9/temp", "60000\n")
    bind_trips(root, f"{THERMAL}/thermal_zone9", [("passive", 50, slows)])
    write(root, "sys/devices/system/cpu/cpufreq/policy0/scaling_cur_freq", "102000\n")
    replace_by_folder(root, f"{THERMAL}/thermal_zone2/temp")
    watch = ThrottleWatch(root, hands)
    assert [watch.look_now(), after(hands, watch, PERIOD_S)] == ["", ""]


def test_a_sensor_that_answers_eagain_is_passed_over(tmp_path: Path, hands: Hands) -> None:
    """As that of a GPU which is switched off does. A pipe whose writer is silent answers so, too."""
    root = TREES[THOR].write(tmp_path / "root")
    temp = root / f"{THERMAL}/thermal_zone1/temp"
    temp.unlink()
    os.mkfifo(temp)
    writer = os.open(temp, os.O_RDWR)
    try:
        watch = ThrottleWatch(root, hands)
        write(root, f"{cooler(root, 'cpu-throttle-alert')}/cur_state", "1\n")
        assert "cpu-throttle-alert is at step 1; tj-thermal has 59.8 °C" in after(hands, watch, PERIOD_S)
    finally:
        os.close(writer)


def test_counters_of_intels_cores(tmp_path: Path, hands: Hands) -> None:
    counters = [f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count" for core in range(2)]
    for counter in counters:
        write(tmp_path, counter, "7\n")
    watch = ThrottleWatch(tmp_path, hands)
    assert after(hands, watch, PERIOD_S) == ""
    write(tmp_path, counters[1], "12\n")
    assert after(hands, watch, PERIOD_S) == (
        "the machine is throttled: 5 more of core_throttle_count (the cores are too hot)"
    )


def test_an_empty_machine(tmp_path: Path, hands: Hands) -> None:
    watch = ThrottleWatch(tmp_path, hands)
    assert watch.look_now() == ""
    assert ThrottleWatch(tmp_path / "missing").look_now() == ""


def test_a_profile_that_was_measured_while_throttled_says_so(tmp_path: Path) -> None:
    root = TREES[ORIN].write(tmp_path / "root")
    assert not [line for line in _profiled(root).warnings if "throttled" in line]
    write(root, f"{cooler(root, 'gpu-throttle-alert')}/cur_state", "1\n")
    [warning] = [line for line in _profiled(root).warnings if "throttled" in line]
    assert warning.startswith(
        "the machine was throttled while net was measured (gpu-throttle-alert is at step 1; tj-thermal has 52.0 °C, "
    )
    assert warning.endswith("profile again")


def _profiled(root: Path) -> Profile:
    return profile_model(example_backend(), example_model(), example_problem().platform, repeats=4, root=root)
