"""`tvm-pipeline devices` lists the sensors of power, what they cover and tell, and why others cannot be read."""

from __future__ import annotations

import pytest

from tests.support import power_trees as trees
from tvm_pipeline.power import survey


@pytest.mark.thorough
def test_devices_lists_the_sensors_of_power(cli, tmp_path, monkeypatch):
    rails = trees.orin_nano(tmp_path)
    (tmp_path / "sys/class/hwmon/hwmon1/curr2_input").write_text("?\n")
    monkeypatch.setattr("tvm_pipeline.cli.devices.survey", lambda: survey(tmp_path))
    outcome = cli("devices", "--json")
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
    printed = cli("devices").out
    assert "ina3221:VDD_IN" in printed
    assert "5.064 W" in printed


def test_a_platform_file_has_no_sensors(cli, tmp_path):
    """They are this machine's; the file may be another one's."""
    cli("devices", "-o", tmp_path / "desk.toml")
    outcome = cli("devices", "--platform", tmp_path / "desk.toml", "--json")
    assert "sensors" not in outcome.json
    assert "sensors of power" not in outcome.err
    assert "sensors of power: none that can be read" in cli("devices").err
