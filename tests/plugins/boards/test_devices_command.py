"""`tvm-pipeline devices` lists the sensors of power and why others cannot be read, the board and its power modes."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cli.conftest import cli
from tests.plugins.boards import power_trees as trees
from tests.support.board_trees import TREES
from tests.support.guests import guests
from tvm_pipeline_boards.machine_sensors import machine_sensors
from tvm_pipeline_boards.mode_switch import BoardModes

__all__ = ["cli"]


@pytest.mark.thorough
def test_devices_lists_the_sensors_of_power(cli, tmp_path):
    rails = trees.orin_nano(tmp_path)
    (tmp_path / "sys/class/hwmon/hwmon1/curr2_input").write_text("?\n")
    with guests(sensors=partial(machine_sensors, tmp_path)):
        outcome = cli("devices", "--json")
        printed = cli("devices").out
    first, second = outcome.json["sensors"]
    assert first["watts"] == pytest.approx(rails["ina3221:VDD_IN"])
    assert first == {
        "name": "ina3221:VDD_IN",
        "covers": "the module, without its carrier board",
        "scope": "board",
        "watts": first["watts"],
    }
    assert second["name"] == "ina3221:VDD_SOC"
    assert list(outcome.json["sensors_not_read"]) == ["ina3221:VDD_CPU_GPU_CV"]
    assert "ina3221:VDD_CPU_GPU_CV: it cannot be read: " in outcome.err
    assert "curr2_input: '?' is no figure" in outcome.err
    assert "ina3221:VDD_IN" in printed
    assert "5.064 W" in printed


def test_devices_names_the_board_and_its_modes(cli, tmp_path):
    root = TREES["Nano, JetPack 4"].write(tmp_path / "root")
    with guests(power_modes=partial(BoardModes, root)):
        said = " ".join(cli("devices").err.split())
    told = TREES["Nano, JetPack 4"].told
    modes = "power mode MAXN (nvpmodel 0): no limits, which is set power mode 5W (nvpmodel 1): no limits"
    assert f"board: {told} {modes}" in said
