"""What the actors of a fleet do where their own work fails."""

from __future__ import annotations

import subprocess
import sys

FAILING = """
import threading, time
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.ray_actors import CoordinatorActor

Coordinator.tick = lambda self: 1 / 0
actor = object.__new__(CoordinatorActor)
actor._coordinator, actor._lock = object.__new__(Coordinator), threading.Lock()
actor._begin_ticks()
time.sleep(60)
"""


def test_a_coordinator_whose_ticks_fail_ends():
    """Without ticks no host would ever be late; Ray starts an actor again that has ended."""
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
