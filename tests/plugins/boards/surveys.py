"""The survey of a machine whose files are a tree of a test."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.support.guests import guests
from tvm_pipeline.power import Survey, survey
from tvm_pipeline_boards.machine_sensors import machine_sensors


def surveyed(root: Path) -> Survey:
    """Return the sensors that a machine with these files has, the best first."""
    with guests(sensors=partial(machine_sensors, root)):
        return survey()
