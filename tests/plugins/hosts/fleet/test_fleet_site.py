"""Watching a fleet: metrics, health, state, the page, `top`, all from a real status."""

from __future__ import annotations

import json
import re
import subprocess
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest
from rich.console import Console

from tests.support.parts import CHROMIUM, needs

needs("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from tests.plugins.hosts.fleet.plans import plan_of
from tests.plugins.hosts.fleet.test_coordinator import HOME, Fleet
from tvm_pipeline.errors import OptionError
from tvm_pipeline_hosts.fleet.fleet_site import FleetSite
from tvm_pipeline_hosts.fleet.messages import FleetStatus
from tvm_pipeline_hosts.fleet.status_tables import duties_table, fleet_view, hosts_table
from tvm_pipeline_video.commands import top

TOKEN = "a-token-for-the-tests"
FIGURES = {
    "services": [{"model": "faces", "bundle": "ab", "pid": 7, "rss_bytes": 1 << 20, "statistics": {"fps": 9.5}}],
    "load": 0.5,
    "throttled": "",
    "odd name!": 3,
}


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    """A fleet whose host attic is lost, with a camera that nobody else reaches."""
    made = Fleet(tmp_path)
    made.follow(plan_of(HOME | {"roof": "attic"}, reach={"roof": ("attic",)}, results=str(tmp_path / "all.jsonl")))
    made.step(6)
    made.hosts["attic"].frozen = True
    made.step(4)
    barn = made.hosts["barn"]
    made.coordinator.beat(msgspec.structs.replace(barn.report(), figures=FIGURES, problems=("it is [hot]",)))
    return made


def get(url: str, **headers: str):
    try:
        with urlopen(Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(text: str) -> dict[tuple, float]:
    return {
        (sample.name.removeprefix("tvm_pipeline_fleet_"), *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_carry_the_host(fleet):
    with FleetSite(fleet.coordinator.status) as site:
        status, text = get(f"{site.url}metrics")
    assert status == 200
    found = samples(text)
    assert found["host_state", "attic", "late"] == 1
    assert found["host_state", "alive", "barn"] == 1
    assert found["host_state", "alive", "attic"] == 0
    gate = fleet.duty("gate")
    assert found["lines_total", "faces", "gate"] == gate.lines > 0
    assert found["lost_frames_total", "faces", "gate", "host lost"] == gate.lost["host lost"] > 10
    assert found[("camera_host", *sorted(("faces", "gate", gate.host)))] == 1
    assert found["camera_problem", "faces", "roof"] == 1
    assert found["host_utilisation_ratio", gate.host] == pytest.approx(0.2)
    assert found["host_load", "barn"] == 0.5
    assert found["host_odd_name_", "barn"] == 3
    assert found["service_rss_bytes", "ab", "barn", "faces"] == 1 << 20
    assert found["service_statistics_fps", "ab", "barn", "faces"] == 9.5
    assert not any("pid" in name for name, *_ in found)
    assert any(name == "process_resident_memory_bytes" for name, *_ in found)


def test_counters_of_a_camera_do_not_fall_when_it_moves(fleet):
    with FleetSite(fleet.coordinator.status) as site:
        before = samples(get(f"{site.url}metrics")[1])
        fleet.hosts["attic"].frozen = False
        fleet.follow(plan_of(HOME, results=str(fleet.folder / "all.jsonl")))
        after = samples(get(f"{site.url}metrics")[1])
    counters = [key for key in before if key[0].endswith("_total") and "roof" not in key and "process" not in key[0]]
    assert len(counters) >= 4
    assert all(after[key] >= before[key] for key in counters)


def test_health_says_what_is_wrong(fleet):
    with FleetSite(fleet.coordinator.status) as site:
        status, text = get(f"{site.url}health")
        assert status == 503
        assert json.loads(text) == {"healthy": False, "why": "no beat of attic; no host has roof"}
        fleet.hosts["attic"].frozen = False
        fleet.step(2)
        assert get(f"{site.url}health") == (200, '{"healthy":true,"why":""}')


def test_the_state_is_the_status(fleet):
    with FleetSite(fleet.coordinator.status) as site:
        found = msgspec.json.decode(get(f"{site.url}state")[1], type=FleetStatus)
        assert get(f"{site.url}etc/passwd")[0] == 404
    assert found.hosts["attic"].state == "late"
    assert "rtsp" not in str(found)


def test_it_wants_a_token_where_others_can_come(fleet):
    with pytest.raises(OptionError, match="give a `token`"):
        FleetSite(fleet.coordinator.status, "0.0.0.0")
    with FleetSite(fleet.coordinator.status, token=TOKEN) as site:
        assert get(f"{site.url}state")[0] == 401
        assert get(f"{site.url}state", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(f"{site.url}?token={TOKEN}")[0] == 200


def test_a_fleet_that_goes_away_is_still_shown(fleet, monkeypatch):
    monkeypatch.setattr(top, "LOOK_EVERY_S", 0.01)
    with FleetSite(fleet.coordinator.status) as site:
        server = top.server_at(site.url, None, "fleet run")
        states = top.states(server, server.state(FleetStatus))
        assert "no answer" not in text_of(fleet_view(*next(states)))
    shown = text_of(fleet_view(*next(states)))
    assert f"no answer from {site.url} for 0 s" in shown
    assert "2 of 3 hosts alive" in shown


def text_of(renderable) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_tables_show_the_ill_first_and_say_what_they_leave_out(fleet):
    status = fleet.coordinator.status()
    table = duties_table(status, 2)
    assert (table.rows[0][0], table.marked) == ("roof: faces", {0})
    assert table.title == "Cameras (2 more without a problem)"
    assert hosts_table(status).marked == {0}
    assert "unhappy" in text_of(fleet_view(msgspec.structs.replace(status, results="unhappy")))


def test_the_page_needs_nothing_from_elsewhere(fleet):
    with FleetSite(fleet.coordinator.status) as site:
        text = get(site.url)[1]
    assert not re.search(r"https?:|@import|url\(|[\"'`]//", text)
    asked = set(re.findall(r'byId\("(\w+)"\)', text)) | set(re.findall(r'fill\("(\w+)"', text))
    assert asked == set(re.findall(r'id="(\w+)"', text))


@pytest.mark.needs("Chromium")
def test_the_page_draws_a_fleet_in_chromium(fleet, tmp_path):
    with FleetSite(fleet.coordinator.status, token=TOKEN) as site:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom")
        folder = f"--user-data-dir={tmp_path / 'chromium'}"
        command = [CHROMIUM, *options, folder, "--virtual-time-budget=3000", f"{site.url}?token={TOKEN}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert "CONSOLE" not in done.stderr
    assert '<span id="health" class="bad">unhealthy<' in done.stdout
    assert "2 of 3 hosts alive, 3 of 4 cameras with a host" in done.stdout
    for text in ("it is [hot]", "none of attic is alive", "no beat of attic"):
        assert text in done.stdout
