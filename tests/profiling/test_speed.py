"""The speed of the machine beside a run, against that of its profile."""

from __future__ import annotations

from dataclasses import replace

from tests.support.speed import machine_speed
from tvm_pipeline import profile_model
from tvm_pipeline.testing import example_backend, example_model, example_problem


def test_a_profile_of_a_slower_machine_makes_this_one_fast() -> None:
    model, platform = example_model(), example_problem().platform
    profile = profile_model(example_backend(), model, platform, repeats=2)
    slower = {
        name: replace(device, seconds={key: 1e4 * (seconds or 0.0) for key, seconds in device.seconds.items()})
        for name, device in profile.devices.items()
    }
    now = machine_speed(model, platform, profile)
    assert now > 0
    assert machine_speed(model, platform, replace(profile, devices=slower)) > 10 * now
