"""The first loss does not wait for the compiler: a coordinator has the loops ready once it follows a plan."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# A process of its own, since the loops are compiled once in each.
PROGRAM = """
import sys
from tests.plugins.hosts.fleet.plans import plan_of
from tests.plugins.hosts.simulated_fleet import SimulatedHost
from tvm_pipeline_hosts.fleet import reassigning
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator

LOOPS = ("reassigned", "share_of")

def compiled():
    return {loop: [str(s) for s in getattr(getattr(reassigning, loop), "signatures", ())] for loop in LOOPS}

now = [0.0]
hosts = [SimulatedHost(name) for name in ("attic", "barn", "cellar")]
coordinator = Coordinator(lambda: now[0], None, Collector())

def live(seconds):
    for _ in range(int(seconds / 0.25)):
        now[0] += 0.25
        for host in hosts:
            host.work()
            host.beat(coordinator.beat)
        coordinator.tick()

coordinator.follow(plan_of({"gate": "attic", "yard": "barn", "door": "cellar"}, source="no:source"))
ready = compiled()
live(1.5)
assert hosts[0].cameras() == {"gate"}, hosts[0].cameras()
hosts[0].frozen = True
live(3)
assert "gate" in hosts[1].cameras() | hosts[2].cameras()
assert all(ready.values()), ready
assert compiled() == ready, (ready, compiled())
"""


@pytest.mark.thorough
def test_a_loss_compiles_nothing():
    environment = {name: text for name, text in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, found.stderr
