"""Which sensor a command measures with, and what a run and a profile say of joules."""

from __future__ import annotations

import pytest

from tests.profiling.test_joules import PACE, Counting, profiled, working
from tests.support.guests import guests
from tests.support.log_lines import log_lines
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.power import Survey
from tvm_pipeline.workflow.power_meter import opened_meter, required_sensor, with_joules


def test_without_a_sensor_there_is_no_meter() -> None:
    with guests(), opened_meter("") as meter:
        assert meter is None
    with (
        pytest.raises(OptionError, match="`power_sensor` lamp: no sensor of this machine has this name"),
        opened_meter("lamp"),
    ):
        pass


def test_power_without_a_sensor_says_what_was_looked_for_and_what_to_do() -> None:
    with guests(), pytest.raises(PowerError, match=r"No installed package looks for any\. Give the log of a meter"):
        required_sensor("")
    nothing = Survey([], {"candle": "it is out"}, ("lamps", "candles"))
    said = r"Looked for lamps, candles; candle cannot be read: it is out.*`power_sensor` FILE, or state `active_w`"
    with guests(lambda: nothing), pytest.raises(PowerError, match=said):
        required_sensor("")
    with pytest.raises(OptionError, match="give another `power_sensor` than none"):
        required_sensor("none")


@pytest.mark.thorough
def test_a_profile_whose_sensor_fails_stays_without_joules() -> None:
    platform, profile = profiled("d0")
    said = log_lines("WARNING")
    failing = Counting(reads=20)
    model = working(failing, "d0")
    assert with_joules(model, platform, profile, failing, PACE) is profile
    assert said == ["counting: unplugged. The profile has no joules"]
    sensor = Counting(grows_w=20.0)
    found = with_joules(working(sensor, "d0"), platform, profile, sensor, PACE)
    assert found.idle is not None
    assert "the idle machine drew" in said[1]
