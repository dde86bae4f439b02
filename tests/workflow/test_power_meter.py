"""Which sensor a command measures with, and what a run and a profile say of joules."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tvm_pipeline_video.service.running import Service
from tvm_pipeline_video.service.settings import Settings

from tests.profiling.test_joules import PACE, Counting, profiled, working
from tvm_pipeline.errors import OptionError, PowerError
from tvm_pipeline.workflow.power_meter import opened_meter, required_sensor, with_joules


@contextmanager
def logger(path: Path, watts: float) -> Iterator[None]:
    """Append a line of a meter every 10 ms."""
    ended = threading.Event()
    path.write_text("time,power_w\n")

    def log() -> None:
        while not ended.wait(0.01):
            with path.open("a") as file:
                file.write(f"{time.time():.6f},{watts}\n")

    thread = threading.Thread(target=log)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


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
def test_without_a_sensor_nothing_is_measured(bundle: Path, tmp_path: Path) -> None:
    (report,) = Service(settings(bundle, "none")).run()
    assert report.to_json()["measured"]["energy_j"] is None
    assert report.to_json()["measured"]["energy"] is None
    with opened_meter("", pytest.fail, root=tmp_path) as meter:
        assert meter is None
    with pytest.raises(OptionError, match="`power_sensor` lamp: no sensor of this machine has this name"):
        Service(Settings(bundle=[bundle], source=["synthetic"], power_sensor="lamp")).run()


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
