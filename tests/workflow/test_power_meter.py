"""Which sensor a command measures with, and what a run and a profile say of joules."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiling.test_joules import PACE, Counting, profiled, working
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.workflow.power_meter import opened_meter, required_sensor, with_joules


def test_without_a_sensor_there_is_no_meter(tmp_path: Path) -> None:
    with opened_meter("", pytest.fail, root=tmp_path) as meter:
        assert meter is None
    with (
        pytest.raises(OptionError, match="`power_sensor` lamp: no sensor of this machine has this name"),
        opened_meter("lamp", pytest.fail, root=tmp_path),
    ):
        pass


def test_power_without_a_sensor_says_what_was_looked_for_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(PowerError, match=r"Looked for INA3221.*`power_sensor` FILE, or state `active_w`"):
        required_sensor("", tmp_path)
    with pytest.raises(OptionError, match="give another `power_sensor` than none"):
        required_sensor("none", tmp_path)


@pytest.mark.thorough
def test_a_profile_whose_sensor_fails_stays_without_joules() -> None:
    platform, profile = profiled("d0")
    said: list[str] = []
    failing = Counting(reads=20)
    model = working(failing, "d0")
    assert with_joules(model, platform, profile, failing, print, said.append, PACE) is profile
    assert said == ["counting: unplugged. The profile has no joules"]
    sensor = Counting(grows_w=20.0)
    found = with_joules(working(sensor, "d0"), platform, profile, sensor, print, said.append, PACE)
    assert found.idle is not None
    assert "the idle machine drew" in said[1]
