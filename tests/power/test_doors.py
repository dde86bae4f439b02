"""Packages that know sensors and power modes come in by entry points; the engine works without any."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests.support.guests import Lamp, TwoModes, guests
from tvm_pipeline.core.power_mode import PowerMode
from tvm_pipeline.documents import read_toml
from tvm_pipeline.errors import PowerError
from tvm_pipeline.power import Meter, Scope, Survey, chosen_sensor, power_modes, survey

PAGE = Path(__file__).parents[2] / "docs" / "power.md"


def install(folder: Path, group: str, **functions: str) -> None:
    """Write what pip writes of an installed package with these entry points."""
    about = folder / "guest-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1\n")
    lines = [f"{name} = {function}" for name, function in functions.items()]
    (about / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))


def test_the_sensor_of_the_page_is_found_and_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = PAGE.read_text().partition("### How to add a sensor")[2].partition("\n## ")[0]
    program, settings = re.findall(r"```(?:python|toml)\n(.*?)```", section, re.DOTALL)
    (tmp_path / "lamp_sensor.py").write_text(program)
    [(group, functions)] = read_toml(settings.encode())["project"]["entry-points"].items()
    install(tmp_path, group, **functions)
    monkeypatch.syspath_prepend(tmp_path)
    lamp = chosen_sensor(survey(), "lamp")
    assert lamp is not None
    with Meter(lamp) as meter:
        time.sleep(0.05)
        energy = meter.energy(meter.began_s or 0.0, time.perf_counter())
    assert energy is not None
    assert energy.watts == pytest.approx(10)


def test_a_package_that_cannot_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "sensors", "tvm_pipeline.sensors", aged="no_such_package:find")
    install(tmp_path / "modes", "tvm_pipeline.power_modes", aged="no_such_package:modes")
    with monkeypatch.context() as path:
        path.syspath_prepend(tmp_path / "sensors")
        assert survey().obstacles["aged"] == "No module named 'no_such_package'"
    monkeypatch.syspath_prepend(tmp_path / "modes")
    power_modes()
    assert "the power modes of aged are left out: No module named 'no_such_package'" in caplog.text


def test_the_best_sensor_covers_most_and_is_found_first() -> None:
    def lamps() -> Survey:
        found = Survey([], {})
        scopes: dict[str, Scope] = {"a": "part", "b": "unit", "c": "board", "d": "board"}
        for name, scope in scopes.items():
            lamp = Lamp()
            lamp.name, lamp.scope = name, scope
            found.sensors.append(lamp)
        return found

    with guests(lamps):
        assert [sensor.name for sensor in survey().sensors] == ["c", "d", "b", "a"]


def test_without_a_package_no_sensor_and_no_mode_is_known() -> None:
    with guests():
        assert survey() == Survey([], {})
        machine = power_modes()
    assert (machine.modes(), list(machine.described()), machine.environment()) == ((), [], {})
    assert not machine.is_set(PowerMode("5W", 1))
    machine.put_back_left()
    with pytest.raises(PowerError, match="power mode 5W cannot be set: no installed package sets modes"):
        machine.mode_set(PowerMode("5W", 1))


def test_a_package_may_not_know_the_machine() -> None:
    with guests(power_modes=lambda: None):
        assert power_modes().modes() == ()
    with guests(power_modes=TwoModes):
        assert [mode.name for mode in power_modes().modes()] == ["fast", "slow"]
