"""The coordinator with simulated hosts: losses, returns, moves, upgrades, restarts, one case at a time."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import msgspec
import pytest

from tests.plugins.hosts.fleet.plans import HOSTS, plan_of
from tests.plugins.hosts.simulated_fleet import SimulatedHost
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator

HOME = {"gate": "attic", "yard": "barn", "door": "cellar"}


class Fleet:
    """A coordinator, its hosts and their time; a step is a beat of each host and 0.25 s."""

    def __init__(self, folder: Path, names=HOSTS) -> None:
        self.folder, self.now_s = folder, 100.0
        self.hosts = {name: SimulatedHost(name) for name in names}
        self.collector = Collector()
        self.coordinator = self.begin()

    def begin(self) -> Coordinator:
        return Coordinator(lambda: self.now_s, self.folder / "memory.json", self.collector)

    def restart(self) -> None:
        """SIGKILL: nothing is closed but what the kernel closes."""
        self.collector._open.close()
        self.collector = Collector()
        self.coordinator = self.begin()

    def step(self, seconds: float = 0.25) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now_s += 0.25
            for host in self.hosts.values():
                host.work()
                host.beat(self.coordinator.beat)
            self.coordinator.tick()
            if self.now_s % 1.0 == 0:
                self.coordinator.sync()

    def follow(self, plan) -> None:
        self.coordinator.follow(plan)
        self.step(1.5)

    def running(self) -> dict[str, set[str]]:
        return {name: host.cameras() for name, host in self.hosts.items()}

    def events(self, kind: str) -> list[str]:
        return [text for _, found, text in self.coordinator.status().events if found == kind]

    def duty(self, camera: str, model: str = "faces"):
        return next(d for d in self.coordinator.status().duties if (d.camera, d.model) == (camera, model))

    def lines(self) -> list[dict]:
        text = (self.folder / "all.jsonl").read_text()
        assert text.endswith("\n") or not text
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def fleet(tmp_path) -> Fleet:
    return Fleet(tmp_path)


def planned(fleet: Fleet, host_of=HOME, **more):
    return plan_of(host_of, results=str(fleet.folder / "all.jsonl"), **more)


def placed(fleet: Fleet) -> set[tuple[str, str]]:
    return {(camera, host) for host, cameras in fleet.running().items() for camera in cameras}


def test_cameras_go_to_their_planned_hosts(fleet):
    fleet.follow(planned(fleet))
    fleet.step(6)
    assert placed(fleet) == set(HOME.items())
    line = fleet.lines()[-1]
    assert (line["host"], line["model"], line["annotations"]) == (HOME[line["camera"]], "faces", [])
    assert len({(line["camera"], line["frame"]) for line in fleet.lines()}) == len(fleet.lines()) > 50
    duty = fleet.duty("gate")
    assert (duty.host, duty.lines) == ("attic", sum(line["camera"] == "gate" for line in fleet.lines()))
    assert duty.fps == pytest.approx(4, rel=0.1)
    assert duty.longest_gap_s <= 0.25
    status = fleet.coordinator.status()
    assert {name: host.state for name, host in status.hosts.items()} == dict.fromkeys(HOSTS, "alive")
    assert status.hosts["attic"].utilisation == pytest.approx(0.1)
    assert fleet.hosts["attic"].version >= 0
    assert fleet.coordinator.beat(fleet.hosts["attic"].report()).warm == {"faces": "faces-attic-1"}


def test_a_lost_hosts_cameras_go_elsewhere_and_stay_there(fleet):
    fleet.follow(planned(fleet))
    fleet.step(5)
    attic, before = fleet.hosts["attic"], placed(fleet)
    attic.frozen = True
    fleet.step(1.5)
    assert placed(fleet) == before  # 1.5 s of silence are not yet late
    fleet.step(0.75)
    (there,) = {host for camera, host in placed(fleet) if camera == "gate"} - {"attic"}
    assert placed(fleet) - {("gate", "attic")} == before - {("gate", "attic")} | {("gate", there)}
    fleet.step(1)
    assert fleet.coordinator.status().hosts["attic"].state == "late"
    lost = fleet.duty("gate").lost["host lost"]
    assert 15 <= lost <= 25  # about 2 s of 10 frames
    attic.frozen = False
    fleet.step(1)
    assert ("gate", "attic") not in placed(fleet)
    assert fleet.coordinator.status().hosts["attic"].state == "alive"
    fleet.step(60)
    assert ("gate", there) in placed(fleet)
    assert fleet.duty("gate").lost["host lost"] == lost


def test_lines_of_a_host_that_was_cut_off_are_late(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].cut = True  # and it goes on
    fleet.step(4)
    fleet.hosts["attic"].cut = False
    fleet.step(3)
    lines = [line for line in fleet.lines() if line["camera"] == "gate"]
    hosts = [line["host"] for line in lines]
    assert hosts == sorted(hosts, key=hosts.index)  # no line of attic among those of the other
    assert len(set(hosts)) == 2
    duty = fleet.duty("gate")
    assert duty.lost["late"] > 10
    made = fleet.hosts["attic"].done
    assert made == hosts.count("attic") + duty.lost["late"]


def test_lines_of_a_host_that_was_cut_off_are_taken_until_the_first_line_of_another_host(fleet):
    fleet.follow(planned(fleet))
    for name in ("barn", "cellar"):
        fleet.hosts[name].broken = frozenset({"gate"})
    attic = fleet.hosts["attic"]
    attic.cut = True
    fleet.step(3)
    assert fleet.duty("gate").host in ("barn", "cellar")
    attic.cut = False
    fleet.step(1)
    frames = [line["frame"] for line in fleet.lines() if line["camera"] == "gate"]
    assert frames == list(range(attic.done))
    assert "late" not in fleet.duty("gate").lost
    assert attic.cameras() == set()


def test_an_agent_that_is_away_for_long_on_the_only_host_costs_nothing(fleet):
    """Its service goes on: its lines are taken when it is back, and the camera is not opened anew."""
    only = plan_of({"gate": "attic"}, hosts=("attic",), results=str(fleet.folder / "all.jsonl"))
    fleet.follow(only)
    attic = fleet.hosts["attic"]
    attic.cut = True
    fleet.step(4)
    assert fleet.duty("gate").host is None
    assert fleet.duty("gate").lost["host lost"] > 10  # as long as nothing is heard
    attic.restart()
    attic.cut = False
    fleet.step(3)
    assert fleet.duty("gate").host == "attic"
    assert len(attic.started) == 1
    frames = [line["frame"] for line in fleet.lines()]
    assert frames == list(range(attic.done))
    assert fleet.duty("gate").lost == {}


def test_a_host_that_lost_its_power_brings_what_it_had_kept(fleet):
    """Nobody else could take the camera; what is counted as lost are the frames that nobody saw."""
    fleet.follow(plan_of({"gate": "attic"}, hosts=("attic",), results=str(fleet.folder / "all.jsonl")))
    attic = fleet.hosts["attic"]
    attic.cut = True
    fleet.step(2)
    kept = len(attic.lines)
    attic.crash()
    attic.frozen = True
    fleet.step(20)
    attic.frozen = attic.cut = False
    fleet.step(3)
    first = attic.started[0]
    frames = [line["frame"] for line in fleet.lines() if line["epoch"] == first[2]]
    assert frames == list(range(len(frames)))
    assert kept > 5
    assert fleet.duty("gate").lost["host lost"] == pytest.approx(225 - kept, abs=5)  # 22.5 s of 10 frames
    assert "late" not in fleet.duty("gate").lost


def test_another_loss_moves_nobody_home(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].frozen = True
    fleet.step(3)
    fleet.hosts["attic"].frozen = False
    there = fleet.duty("gate").host
    (other,) = {"barn", "cellar"} - {there}
    fleet.hosts[other].frozen = True
    fleet.step(3)
    assert fleet.duty("gate").host == there


def test_a_host_that_has_not_read_its_order_yet_may_still_open_the_camera(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].deaf = True
    fleet.coordinator.follow(planned(fleet, HOME | {"lane": "attic"}))
    fleet.step(0.5)
    fleet.coordinator.follow(planned(fleet, HOME | {"lane": "barn"}))
    fleet.step(2)
    assert "lane" not in fleet.hosts["barn"].cameras()
    fleet.hosts["attic"].deaf = False
    fleet.step(1.5)
    assert placed(fleet) == set((HOME | {"lane": "barn"}).items())


def test_a_planned_move_waits_until_the_old_host_lets_go(fleet):
    fleet.follow(planned(fleet))
    attic, barn = fleet.hosts["attic"], fleet.hosts["barn"]
    attic.deaf = True  # it does not hear that it should end
    fleet.coordinator.follow(planned(fleet, HOME | {"gate": "barn"}))
    fleet.step(3)
    assert "gate" in attic.cameras()
    assert "gate" not in barn.cameras()
    assert fleet.duty("gate").problem == "goes to barn when attic lets it go"
    assert fleet.duty("gate").host is None
    attic.deaf = False
    fleet.step(1.5)
    assert placed(fleet) == set((HOME | {"gate": "barn"}).items())
    frames = [line["frame"] for line in fleet.lines() if line["camera"] == "gate" and line["host"] == "attic"]
    assert frames == list(range(len(frames)))
    assert "late" not in fleet.duty("gate").lost
    assert "host lost" not in fleet.duty("gate").lost


def test_a_move_goes_on_when_the_old_host_is_lost(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].frozen = True
    fleet.coordinator.follow(planned(fleet, HOME | {"gate": "barn"}))
    fleet.step(1)
    assert "gate" not in fleet.hosts["barn"].cameras()
    fleet.step(1.5)
    assert "gate" in fleet.hosts["barn"].cameras()


def test_an_upgrade_takes_the_old_lines_until_the_first_new_one(fleet):
    fleet.follow(planned(fleet))
    before = fleet.duty("gate").epoch
    fleet.coordinator.follow(planned(fleet, bundle="2"))
    order = fleet.coordinator.beat(fleet.hosts["attic"].report())
    (duty,) = order.duties
    assert duty.bundle == "faces-attic-2"
    assert duty.epoch > before
    fleet.step(2)
    lines = [line for line in fleet.lines() if line["camera"] == "gate"]
    assert {line["epoch"] for line in lines} == {before, duty.epoch}
    assert [line["epoch"] for line in lines] == sorted(line["epoch"] for line in lines)
    assert "late" not in fleet.duty("gate").lost


def test_another_source_or_rate_is_another_epoch_and_nothing_else_is(fleet):
    fleet.follow(planned(fleet))
    before = fleet.duty("gate").epoch
    fleet.follow(planned(fleet))
    assert fleet.duty("gate").epoch == before
    fleet.follow(planned(fleet, source="rtsp://gate"))
    assert fleet.duty("gate").epoch > before


def test_a_restarted_coordinator_moves_nothing_and_writes_nothing_twice(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].frozen = True
    fleet.step(3)  # gate is not at home
    fleet.hosts["attic"].frozen = False
    fleet.step(2)
    before, started = placed(fleet), {name: len(host.started) for name, host in fleet.hosts.items()}
    for host in fleet.hosts.values():
        host.deaf = True  # the answers to the last reports are lost
    fleet.step(0.5)
    for host in fleet.hosts.values():
        host.deaf = False
    fleet.restart()
    fleet.hosts["cellar"].cut = True  # its agent is the last to find the new one
    fleet.step(3)
    fleet.hosts["cellar"].cut = False
    fleet.step(10)
    assert placed(fleet) == before
    assert {name: len(host.started) for name, host in fleet.hosts.items()} == started
    found = [(line["camera"], line["epoch"], line["frame"]) for line in fleet.lines()]
    assert len(set(found)) == len(found)
    for camera, epoch in {(camera, epoch) for camera, epoch, _ in found}:
        frames = [frame for *duty, frame in found if duty == [camera, epoch]]
        assert frames == list(range(len(frames)))


def test_a_restarted_coordinator_waits_before_it_gives_away_what_it_has_not_heard(fleet):
    fleet.follow(planned(fleet))
    fleet.restart()
    fleet.hosts["attic"].frozen = True
    fleet.step(4.5)
    assert fleet.duty("gate").host is None
    assert fleet.coordinator.status().hosts["attic"].state == "unknown"
    fleet.step(2)
    assert fleet.duty("gate").host in ("barn", "cellar")


def test_a_plan_that_comes_at_once_after_a_restart_waits_for_the_hosts_of_the_one_before(fleet):
    fleet.follow(planned(fleet))
    fleet.restart()
    fleet.coordinator.follow(planned(fleet, HOME | {"door": "barn"}, hosts=("attic", "barn")))
    for name in ("attic", "barn"):
        fleet.hosts[name].beat(fleet.coordinator.beat)
        fleet.hosts[name].beat(fleet.coordinator.beat)
    assert "door" not in {duty.camera for duty in fleet.hosts["barn"].order.duties}  # cellar may have it
    fleet.step(2)
    assert placed(fleet) == set((HOME | {"door": "barn"}).items())


def test_without_its_memory_a_coordinator_leaves_what_it_finds(fleet):
    fleet.follow(planned(fleet, HOME | {"gate": "barn"}))
    (fleet.folder / "memory.json").unlink()
    before, epoch = placed(fleet), fleet.duty("gate").epoch
    fleet.restart()
    fleet.step(3)
    assert placed(fleet) == before  # nobody has told it a plan: hosts go on
    fleet.follow(planned(fleet))
    assert placed(fleet) == before
    assert fleet.duty("gate").epoch == epoch
    fleet.follow(planned(fleet))  # told again, it moves what the plan says
    assert placed(fleet) == set(HOME.items())
    assert fleet.duty("gate").epoch > epoch


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"ceiling": "many"}', b"\xff\xfe", b'{"known": ["\xff"]}', b"[" * 10_000]
)
def test_a_damaged_memory_is_told_and_left_out(fleet, content):
    (fleet.folder / "memory.json").write_bytes(content)
    fleet.restart()
    assert "memory.json is left out" in fleet.coordinator.status().results  # until it is written again
    fleet.follow(planned(fleet))
    assert placed(fleet) == set(HOME.items())
    assert fleet.coordinator.status().results == ""


def test_the_memory_is_for_its_owner_alone(fleet):
    fleet.follow(planned(fleet))
    assert (fleet.folder / "memory.json").stat().st_mode & 0o777 == 0o600


def test_a_host_that_joins_after_the_plan_gets_its_cameras_once(fleet):
    fleet.hosts["attic"].frozen = True
    fleet.follow(planned(fleet))
    fleet.step(5)
    assert fleet.duty("gate").host in ("barn", "cellar")
    fleet.hosts["attic"].frozen = False
    fleet.step(1.5)
    assert placed(fleet) == set(HOME.items())
    fleet.hosts["attic"].frozen = True
    fleet.step(3)
    fleet.hosts["attic"].frozen = False
    fleet.step(3)
    assert ("gate", "attic") not in placed(fleet)


def test_a_host_outside_the_plan_is_refused_and_one_that_leaves_lets_go(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["shed"] = SimulatedHost("shed")
    fleet.step(1)
    assert "not in the plan" in fleet.hosts["shed"].refused
    assert fleet.coordinator.status().hosts["shed"].state == "spare"
    there = ("attic", "barn")
    fleet.hosts["cellar"].deaf = True
    fleet.coordinator.follow(planned(fleet, HOME | {"door": "barn"}, hosts=there))
    fleet.step(1)
    assert fleet.coordinator.status().hosts["cellar"].state == "leaving"
    assert ("door", "cellar") in placed(fleet)
    fleet.hosts["cellar"].deaf = False
    fleet.step(1.5)
    assert placed(fleet) == set((HOME | {"door": "barn"}).items())
    assert fleet.coordinator.status().hosts["cellar"].state == "spare"


def test_a_camera_that_does_not_open_wanders_ever_more_slowly(fleet):
    for host in fleet.hosts.values():
        host.broken = frozenset({"gate"})
    fleet.follow(planned(fleet, reach={"gate": ("attic", "barn")}))
    assert fleet.duty("gate").problem == "it does not open"
    fleet.step(7)
    assert placed(fleet) == set(HOME.items())
    fleet.step(6)
    assert ("gate", "barn") in placed(fleet)
    fleet.step(15)
    assert ("gate", "barn") in placed(fleet)
    fleet.step(8)
    assert ("gate", "attic") in placed(fleet)
    assert len(fleet.events("camera")) == 2
    assert "gate gives no frames on attic (it does not open): it goes to barn" in fleet.events("camera")
    fleet.hosts["attic"].broken = frozenset()
    fleet.step(60)
    assert ("gate", "attic") in placed(fleet)
    assert fleet.duty("gate").problem == ""


def test_a_camera_that_opens_nowhere_else_stays(fleet):
    fleet.hosts["attic"].broken = frozenset({"gate"})
    fleet.follow(planned(fleet, reach={"gate": ("attic",)}))
    fleet.step(12)
    assert ("gate", "attic") in placed(fleet)
    assert len(fleet.hosts["attic"].started) == 1
    assert "it stays" in fleet.events("camera")[0]


def test_who_starves_is_told_before_and_after(fleet):
    work_s = {"attic": 0.045, "barn": 0.045, "cellar": 0.045}  # two cameras make 0.9
    host_of = {"gate": "attic", "lane": "attic", "yard": "barn", "path": "barn", "door": "cellar"}
    fleet.follow(planned(fleet, host_of, work_s=work_s))
    fleet.step(1)
    starve = fleet.coordinator.status().would_starve
    assert {host: len(cameras) for host, cameras in starve.items()} == dict.fromkeys(HOSTS, 1)
    fleet.hosts["attic"].frozen = True
    fleet.step(2.5)
    assert [duty.camera for duty in fleet.coordinator.status().duties if duty.host is None] == list(starve["attic"])
    (camera,) = starve["attic"]
    assert "no room" in fleet.duty(camera).problem
    assert fleet.events("starves")
    fleet.hosts["attic"].frozen = False
    fleet.step(1)
    assert (camera, "attic") in placed(fleet)
    assert fleet.duty(camera).problem == ""


def test_a_camera_that_no_host_reaches_says_so(fleet):
    fleet.follow(planned(fleet, HOME | {"roof": ""}, reach={"roof": ()}))
    assert fleet.duty("roof").problem == "no host of the plan can take it"
    fleet.hosts["attic"].frozen = True
    fleet.follow(planned(fleet, reach={"gate": ("attic",)}))
    fleet.step(3)
    assert fleet.duty("gate").problem == "none of attic is alive"


def test_on_a_full_disk_hosts_keep_their_lines(fleet):
    fleet.follow(planned(fleet))
    path, limits = fleet.folder / "all.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        fleet.coordinator.follow(planned(fleet, HOME | {"gate": "barn"}))
        fleet.step(3)
        assert "hosts keep their lines until it can be written" in fleet.coordinator.status().results
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    assert "gate" not in fleet.hosts["barn"].cameras()  # attic still has lines of it
    fleet.step(4)
    assert fleet.coordinator.status().results == ""
    found = [(line["camera"], line["epoch"], line["frame"]) for line in fleet.lines()]
    for camera, epoch in {duty[:2] for duty in found}:
        frames = [frame for *duty, frame in found if duty == [camera, epoch]]
        assert frames == list(range(len(frames)))
    assert not any("late" in duty.lost for duty in fleet.coordinator.status().duties)
    assert placed(fleet) == set((HOME | {"gate": "barn"}).items())
    assert len(fleet.events("results")) == 2


def test_two_agents_of_one_name(fleet):
    fleet.follow(planned(fleet))
    other = SimulatedHost("attic", agent=7)
    before = len(fleet.lines())
    for _ in range(12):
        fleet.step()
        other.work()
        other.beat(fleet.coordinator.beat)
    assert other.cameras() == set()
    for name in ("attic-0", "attic-7"):
        assert name in other.refused
        assert any(name in problem for problem in fleet.coordinator.status().hosts["attic"].problems)
    assert fleet.hosts["attic"].refused == ""
    assert placed(fleet) == set(HOME.items())
    assert len(fleet.lines()) > before
    assert len(fleet.events("two agents")) == 1


def test_a_second_agent_of_a_name_must_end_what_is_not_its_own(fleet):
    fleet.follow(planned(fleet))
    attic = fleet.hosts["attic"]
    attic.cut = True
    fleet.step(3)
    fleet.hosts["copy"] = SimulatedHost("attic", agent=7)  # another machine took the name meanwhile
    fleet.step(1)
    attic.cut = False
    fleet.step(1)
    assert attic.cameras() == set()
    assert "two agents" in attic.refused


def test_an_agent_that_is_started_again_goes_on_at_once(fleet):
    fleet.follow(planned(fleet))
    fleet.hosts["attic"].restart()
    fleet.step(4)
    assert fleet.hosts["attic"].refused == ""
    assert len(fleet.hosts["attic"].started) == 1
    frames = [line["frame"] for line in fleet.lines() if line["camera"] == "gate"]
    assert frames == list(range(len(frames)))
    assert fleet.hosts["attic"].version > 0


def test_a_coordinator_that_was_stopped_gives_nobody_up(fleet):
    fleet.follow(planned(fleet))
    before = placed(fleet)
    fleet.now_s += 30
    fleet.coordinator.tick()
    fleet.step(3)
    assert placed(fleet) == before
    assert not fleet.events("lost")
    assert {name: len(host.started) for name, host in fleet.hosts.items()} == dict.fromkeys(HOSTS, 1)


def test_what_services_dropped_is_counted_once(fleet):
    fleet.follow(planned(fleet))
    host = fleet.hosts["attic"]

    def says(**dropped: int) -> dict[str, int]:
        report = host.report()
        (running,) = report.running
        running = msgspec.structs.replace(running, dropped=dropped)
        fleet.coordinator.beat(msgspec.structs.replace(report, running=(running,)))
        return dict(fleet.duty("gate").lost)

    assert says(latest=3) == {"latest": 3}
    assert says(latest=3) == {"latest": 3}
    assert says(latest=5, stale=1) == {"latest": 5, "stale": 1}
    assert says(latest=2, stale=1) == {"latest": 7, "stale": 1}  # the service was started again
