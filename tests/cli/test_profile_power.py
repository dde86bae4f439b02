"""`profile --power`: joules by the log of a meter, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from tests.support.guests import guests
from tvm_pipeline import read_profile
from tvm_pipeline.profiling import joules

PLATFORM = 'name = "core"\n[[device]]\nname = "cpu0"\nbackend = "host"\ncores = [0]\n'


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


@pytest.mark.thorough
def test_profile_with_joules_says_idle_power_and_joules_of_a_frame(cli, model, tmp_path, monkeypatch):
    monkeypatch.setattr(
        joules, "Pace", partial(joules.Pace, window_s=0.02, idle_window_s=0.02, settle_s=0.2, longest_s=0.1)
    )
    platform, profile, graph = tmp_path / "core.toml", tmp_path / "profile.json", tmp_path / "graph.json"
    platform.write_text(PLATFORM)
    with logger(tmp_path / "meter.csv", 7.0):
        outcome = cli(
            *("profile", model, "--platform", platform, "-o", profile, "--graph", graph, "--repeats", 2),
            *("--power", "--power-sensor", tmp_path / "meter.csv"),
        )
    assert outcome.code == 0, outcome.err
    assert "Joules by " in outcome.out
    [idle] = [line for line in outcome.out.splitlines() if "idle machine" in line]
    assert idle.split()[3:6] == ["│", "7", "W"]
    assert "tells no joules above idle" in outcome.err  # the meter stands elsewhere, and its watts never change
    found = read_profile(profile)
    assert found.idle is not None
    assert found.idle.power_w == pytest.approx(7, rel=0.01)
    assert "meter.csv" in found.environment["joules measured by"]
    assert found.device("cpu0").whole_j == pytest.approx(0, abs=1e-3)
    planned = cli("plan", graph, "--platform", platform, "--profile", profile, "--objective", "energy", "--json").json
    assert planned["predicted"]["energy_j"] >= 0


def test_power_without_a_sensor_is_an_error_before_anything_is_compiled(cli, tmp_path):
    with guests():
        outcome = cli("profile", tmp_path / "missing.onnx", "--power")
    assert outcome.code == 1
    assert "--power: this machine has no sensor of power that can be read" in outcome.err
    assert "--power-sensor FILE" in outcome.err


def test_a_sensor_without_power_is_refused(cli, model):
    outcome = cli("profile", model, "--power-sensor", "VDD_IN")
    assert (outcome.code, "--power-sensor goes with --power" in outcome.err) == (2, True)
