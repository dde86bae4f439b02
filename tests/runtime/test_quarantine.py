"""How long a device that failed is left out, on a clock of the test's own."""

from __future__ import annotations

import pytest

from tests.runtime.machine import problem_of
from tvm_pipeline.errors import PlatformError
from tvm_pipeline.runtime.live_pipeline import Quarantine
from tvm_pipeline.runtime.replanning import without


@pytest.mark.parametrize("served_s", [0.0, 0.5])
def test_a_cool_down_doubles_only_where_a_device_did_not_serve_well_meanwhile(served_s):
    now_s = [0.0]
    quarantine = Quarantine(0.4, clock=lambda: now_s[0])
    problem = problem_of({"d0": [1e-3], "d1": [1e-3]})

    def usable() -> list[str]:
        return [device.name for device in without(problem, quarantine.out()).platform.devices]

    quarantine.leave_out("d0")
    now_s[0] = 0.39
    assert usable() == ["d1"]
    now_s[0] = 0.4 + served_s
    assert usable() == ["d0", "d1"]
    quarantine.leave_out("d0")
    now_s[0] += 0.41
    assert len(usable()) == (2 if served_s else 1)


def test_a_device_returns_once():
    now_s = [1.0]
    quarantine = Quarantine(0.4, clock=lambda: now_s[0])
    quarantine.leave_out("d0")
    now_s[0] = 1.2
    quarantine.leave_out("d1")
    assert quarantine.returned() == []
    now_s[0] = 1.6
    assert quarantine.returned() == ["d0", "d1"]
    assert quarantine.returned() == []
    assert quarantine.out() == set()


def test_with_every_device_out_nothing_can_be_planned():
    quarantine = Quarantine(30.0)
    for device in ("d0", "d1"):
        quarantine.leave_out(device)
    with pytest.raises(PlatformError):
        without(problem_of({"d0": [1e-3], "d1": [1e-3]}), quarantine.out())
