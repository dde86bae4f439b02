"""`tvm-pipeline devices` lists the sensors and the power modes that installed packages know."""

from __future__ import annotations

from tests.support.guests import Lamp, TwoModes, guests
from tvm_pipeline.power import Survey


def test_what_packages_know_is_listed(cli):
    found = Survey([Lamp()], {"candle": "it is out"})
    with guests(lambda: found, TwoModes):
        outcome = cli("devices", "--json")
        printed = cli("devices")
    assert outcome.json["sensors"] == [{"name": "lamp", "covers": "the test", "scope": "board", "watts": 10.0}]
    assert outcome.json["sensors_not_read"] == {"candle": "it is out"}
    assert [mode["name"] for mode in outcome.json["power_modes"]] == ["fast", "slow"]
    assert "10 W" in printed.out
    assert "candle: it cannot be read: it is out" in printed.err
    assert "a board of the test, in mode fast" in printed.err


def test_a_platform_file_has_no_sensors(cli, tmp_path):
    """They are this machine's; the file may be another one's."""
    cli("devices", "-o", tmp_path / "desk.toml")
    outcome = cli("devices", "--platform", tmp_path / "desk.toml", "--json")
    assert "sensors" not in outcome.json
    assert "sensors of power" not in outcome.err
    with guests():
        assert "sensors of power: none that can be read" in cli("devices").err
