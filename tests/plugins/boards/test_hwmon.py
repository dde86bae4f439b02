"""Rails of Jetson boards and other chips: all are read, in the right unit, and what makes no sense is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.boards import power_trees as trees
from tests.plugins.boards.surveys import surveyed
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import PowerSensor, Sensor, chosen_sensor, mean_watts
from tvm_pipeline.power.sensor import Sum
from tvm_pipeline_boards.hwmon import hwmon_sensors

BOARDS = {
    trees.tx2: "ina3221:VDD_IN",
    trees.nano: "ina3221:POM_5V_IN",
    trees.agx_xavier: "ina3221:GPU+CPU+SOC+CV+VDDRQ+SYS5V",
    trees.xavier_nx: "ina3221:VDD_IN",
    trees.agx_orin: "ina3221:VDD_GPU_SOC+VDD_CPU_CV+VIN_SYS_5V0",
    trees.orin_nano: "ina3221:VDD_IN",
    trees.agx_thor: "ina238:VIN",
}


def watts(sensor: Sensor) -> float:
    if isinstance(sensor, Sum):
        return sum(watts(part) for part in sensor.parts)
    assert isinstance(sensor, PowerSensor)
    return sensor.watts()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.__name__)
def test_every_rail_of_a_jetson_is_read(board: Callable[[Path], dict[str, float]], tmp_path: Path) -> None:
    """Four generations of JetPack. No channel without a rail, and no sum of shunts, is a sensor."""
    expected = board(tmp_path)
    found = hwmon_sensors(tmp_path)
    assert found.obstacles == {}
    assert {sensor.name: watts(sensor) for sensor in found.sensors} == pytest.approx(expected)
    assert [sensor.name for sensor in found.sensors if sensor.scope == "board"] == [BOARDS[board]]
    best = chosen_sensor(surveyed(tmp_path))
    assert best is not None
    assert best.name == BOARDS[board]
    assert not any("measures" in sensor.covers for sensor in found.sensors)  # each rail's meaning is known
    rails = [sensor for sensor in hwmon_sensors(tmp_path).sensors if not isinstance(sensor, Sum)]
    assert mean_watts(rails, 0.02).watts == pytest.approx({rail.name: expected[rail.name] for rail in rails})


def test_an_ina226_tells_microwatts(tmp_path: Path) -> None:
    """Two unlabelled chips are told apart by their addresses; neither is taken for the board's unless it is named."""
    for number, (address, microwatts) in enumerate({"1-0041": 1_250_000, "1-0045": 75_000}.items()):
        files = {"name": "ina226", "in0_input": 1, "in1_input": 12_000, "curr1_input": 104, "update_interval": 280}
        trees.hwmon_chip(tmp_path, address, number, files | {"power1_input": microwatts})
    found = hwmon_sensors(tmp_path).sensors
    assert {sensor.name: watts(sensor) for sensor in found} == {
        "ina226@1-0041:power1": 1.25,
        "ina226@1-0045:power1": 0.075,
    }
    assert found[0].covers == "what ina226 at 1-0041 measures"
    assert found[0].period_s == 0.28  # milliseconds of one value of the chip
    assert chosen_sensor(surveyed(tmp_path)) is None
    named = chosen_sensor(surveyed(tmp_path), "ina226@1-0045:power1")
    assert named is not None
    assert named.covers == "what ina226 at 1-0045 measures"


def test_chips_of_other_makers(tmp_path: Path) -> None:
    """A GPU tells an average, a server's firmware the whole machine; voltages and currents of others are no pairs."""
    trees.hwmon_chip(tmp_path, "1-0001", 0, {"name": "amdgpu", "power1_average": 9_000_000, "power1_label": "PPT"})
    meter = {"name": "power_meter", "power1_average": 87_000_000, "power1_average_interval": 1000}
    trees.hwmon_chip(tmp_path, "1-0002", 1, meter)
    trees.hwmon_chip(tmp_path, "1-0003", 2, {"name": "ltc2992", "in1_input": 12_000, "curr1_input": 1000})
    battery = trees.hwmon_chip(tmp_path, "1-0004", 3, {"name": "BAT0", "power1_input": 8_000_000})
    (battery / "device/type").write_text("Battery\n")
    found = hwmon_sensors(tmp_path).sensors
    assert {sensor.name: (watts(sensor), sensor.scope) for sensor in found} == {
        "amdgpu:PPT": (9.0, "part"),
        "power_meter:power1": (87.0, "board"),
    }
    assert found[1].period_s == 1


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("in1_input", "-4960", "in1_input: -4960 is negative"),
        ("curr1_input", "-3000", "curr1_input: -3000 is negative"),  # more than the chip's own offset
        ("curr1_input", "", "curr1_input: '' is no figure"),
        ("curr1_input", "warn 32760", "curr1_input: 'warn 32760' is no figure"),
        ("in1_input", None, "in1_input: Is a directory"),  # as a channel that answers with an error
        ("in1_enable", "0", "in1_enable: the channel is switched off; as root, write 1"),
    ],
)
def test_nonsense_is_refused_with_its_file(file: str, content: str | None, said: str, tmp_path: Path) -> None:
    folder = trees.hwmon_chip(tmp_path, "7-0040", 6, trees.ina3221({"VDD_IN": (4960, 920), "VDD_SOC": (4952, 240)}))
    (folder / file).unlink()
    if content is None:
        (folder / file).mkdir()
    else:
        (folder / file).write_text(content)
    found = hwmon_sensors(tmp_path)
    assert [sensor.name for sensor in found.sensors] == ["ina3221:VDD_SOC"]
    assert list(found.obstacles) == ["ina3221:VDD_IN"]
    assert said in found.obstacles["ina3221:VDD_IN"]
    with pytest.raises(PowerError, match="VDD_IN: no sensor of this machine has this name"):
        chosen_sensor(surveyed(tmp_path), "VDD_IN")


def test_a_driver_that_is_asleep_is_named(tmp_path: Path) -> None:
    """A pipe whose writer says nothing answers EAGAIN, as such a driver does."""
    folder = trees.hwmon_chip(tmp_path, "7-0040", 6, trees.ina3221({"VDD_IN": (4960, 920)}))
    (folder / "curr1_input").unlink()
    os.mkfifo(folder / "curr1_input")
    writer = os.open(folder / "curr1_input", os.O_RDWR)
    try:
        found = hwmon_sensors(tmp_path)
    finally:
        os.close(writer)
    assert found.sensors == []
    assert "curr1_input: its driver has no value now (EAGAIN)" in found.obstacles["ina3221:VDD_IN"]


def test_a_rail_that_fails_later_is_named(tmp_path: Path) -> None:
    trees.xavier_nx(tmp_path)
    sensor = chosen_sensor(surveyed(tmp_path))
    assert sensor is not None
    sensor.read()
    file = tmp_path / "sys/class/hwmon/hwmon6/in1_input"
    file.unlink()
    with pytest.raises(PowerError, match="hwmon6/in1_input: No such file"):
        sensor.read()
    assert "in1_input: No such file" in mean_watts([sensor], 0).obstacles["ina3221:VDD_IN"]


def test_a_sum_lacks_none_of_its_rails(tmp_path: Path) -> None:
    """A module of which one rail cannot be read has no sum: it would be too little."""
    trees.agx_orin(tmp_path)
    file = tmp_path / "sys/class/hwmon/hwmon3/curr2_input"
    file.write_text("-5000")
    found = hwmon_sensors(tmp_path)
    assert list(found.obstacles) == ["ina3221:VDD_CPU_CV"]
    assert {sensor.scope for sensor in found.sensors} == {"part"}
    assert chosen_sensor(surveyed(tmp_path)) is None
