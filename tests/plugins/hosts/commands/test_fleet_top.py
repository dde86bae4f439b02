"""`fleet top`: what it shows, and what it says where there is none."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.parts import needs

needs("prometheus_client")

from tests.plugins.hosts.fleet.plans import plan_of
from tests.plugins.hosts.fleet.test_coordinator import HOME, Fleet
from tvm_pipeline_hosts.fleet.fleet_site import FleetSite

TOKEN = "a-token-for-the-tests"


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    """A fleet whose host attic is lost, with a camera that nobody else reaches."""
    made = Fleet(tmp_path)
    made.follow(plan_of(HOME | {"roof": "attic"}, reach={"roof": ("attic",)}))
    made.hosts["attic"].frozen = True
    made.step(4)
    barn = made.hosts["barn"]
    made.coordinator.beat(msgspec.structs.replace(barn.report(), problems=("it is [hot]",)))
    return made


def test_top_shows_a_fleet(cli, fleet, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with FleetSite(fleet.coordinator.status, token=TOKEN) as site:
        outcome = cli("fleet", "top", site.url, "--once", "--token", TOKEN)
        other = cli("top", site.url, "--once", "--token", TOKEN)
    assert outcome.code == 0
    said = ("2 of 3 hosts alive, 3 of 4 cameras with a host", "late", "it is [hot]", "none of attic is alive")
    for text in (*said, "host lost", "Happened lately", "attic: no beat for"):
        assert text in outcome.out
    assert other.code == 1
    assert "is no `tvm-pipeline run --watch`" in other.err
    gone = cli("fleet", "top", site.url, "--once", "--token", TOKEN)
    assert gone.code == 1
    assert "start `tvm-pipeline fleet run ... --watch" in gone.err
