"""The joules of a frame that a run reports."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.test_profile_power import logger
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings


def settings(bundle: Path, sensor: str) -> Settings:
    """Return the settings of a run at 50 frames a second, which is planned once for all tests."""
    return Settings(
        bundle=[bundle], source=["synthetic:64x48@30:30"], rate=50, verify=0, adapt="off", power_sensor=sensor
    )


@pytest.mark.thorough
def test_a_run_tells_the_joules_of_a_frame_by_the_log_of_a_meter(bundle: Path, tmp_path: Path) -> None:
    log = tmp_path / "meter.csv"
    with logger(log, 7.0):
        time.sleep(0.05)  # the meter was there before
        (report,) = Service(settings(bundle, str(log))).run()
    assert report.energy is not None
    assert str(log) in report.energy.sensor or log.name in report.energy.sensor
    assert report.energy.energy_j == pytest.approx(7 / 50, rel=0.3)
    measured = report.to_json()["measured"]
    assert measured["energy_j"] == report.energy.energy_j
    assert measured["energy"]["by"] == report.energy.by


@pytest.mark.thorough
def test_without_a_sensor_nothing_is_measured(bundle: Path) -> None:
    (report,) = Service(settings(bundle, "none")).run()
    assert report.to_json()["measured"]["energy_j"] is None
    assert report.to_json()["measured"]["energy"] is None
    with pytest.raises(OptionError, match="`power_sensor` lamp: no sensor of this machine has this name"):
        Service(Settings(bundle=[bundle], source=["synthetic"], power_sensor="lamp")).run()
