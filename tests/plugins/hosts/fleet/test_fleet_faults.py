"""Any faults in any order: hosts that freeze, are cut off or hear nothing, agents, hosts and the coordinator started
again, a full disk, new plans; and what holds all the time.

- no (camera, model, epoch, frame) stands twice in the file, and every line is whole;
- lines of a camera come from one host at a time, in growing epochs;
- a host is ordered to begin a camera only while no other host that was not lost has it in its order or open;
- a camera on a living host stays there, whatever becomes of the others, unless a plan moves it;
- after a quiet time every camera that can have a host is open on exactly one, which lives, and no line is lost.
"""

from __future__ import annotations

import json
import resource
import tempfile
from pathlib import Path

from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.plugins.hosts.fleet.plans import HOSTS, plan_of
from tests.plugins.hosts.simulated_fleet import SimulatedHost
from tests.support.examples import examples
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.coordinator import Coordinator
from tvm_pipeline_hosts.fleet.messages import HostOrder

CAMERAS = tuple("abcdef")
MODELS = {"a": ("faces", "plates"), "b": ("faces", "plates")}
WORK_S = 0.018  # on a host, so that two hosts can take all cameras, with 8 duties of 10 fps, and one cannot
REACH = {"e": ("attic", "barn"), "f": ("cellar",)}
STEP_S = 0.25

host_names = st.sampled_from(HOSTS)


class FleetMachine(RuleBasedStateMachine):
    @initialize(homes=st.lists(host_names, min_size=6, max_size=6))
    def begin(self, homes):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "all.jsonl"
        self.now_s, self.full, self.bundle, self.is_new_plan = 0.0, False, 1, False
        self.hosts = {name: SimulatedHost(name) for name in HOSTS}
        self.orders: dict[str, HostOrder] = {}
        self.read = 0  # bytes of the file that the invariants have seen
        self.given_up: dict[str, set[tuple[str, str, int]]] = {name: set() for name in HOSTS}
        self.last: dict[tuple[str, str], tuple[int, int]] = {}
        self.newest: dict[str, tuple[int, str]] = {}
        self.collector = Collector()
        self.coordinator = self.made()
        self.plan = self.planned(homes)
        self.coordinator.follow(self.plan)

    def made(self) -> Coordinator:
        return Coordinator(lambda: self.now_s, Path(self.folder.name) / "memory.json", self.collector)

    def planned(self, homes, without=None):
        hosts = [name for name in HOSTS if name != without]
        reach = {camera: [name for name in REACH.get(camera, HOSTS) if name != without] for camera in CAMERAS}
        host_of = {
            camera: home if home in reach[camera] else next(iter(reach[camera]), "")
            for camera, home in zip(CAMERAS, homes, strict=True)
        }
        work_s = dict.fromkeys(HOSTS, WORK_S)
        more = {"reach": reach, "models": MODELS, "work_s": work_s, "bundle": str(self.bundle)}
        return plan_of(host_of, hosts, results=str(self.path), **more)

    # What happens

    @rule(steps=st.integers(1, 12))
    def time_passes(self, steps):
        for _ in range(steps):
            self.step()

    @rule(name=host_names, how=st.sampled_from(("frozen", "cut", "deaf")), steps=st.integers(1, 12))
    def something_happens_to_a_host(self, name, how, steps):
        setattr(self.hosts[name], how, True)
        self.time_passes(steps)

    @rule(name=host_names)
    def a_host_is_well_again(self, name):
        host = self.hosts[name]
        host.frozen = host.cut = host.deaf = False

    @rule(name=host_names, steps=st.integers(0, 4))
    def an_agent_starts_again(self, name, steps):
        self.hosts[name].cut = True
        self.time_passes(steps)
        self.hosts[name].restart()
        self.hosts[name].cut = False

    @rule(name=host_names)
    def a_host_loses_power(self, name):
        self.hosts[name].crash()

    @rule(steps=st.integers(1, 8), remembers=st.booleans())
    def the_coordinator_is_killed(self, steps, remembers):
        self.collector._open.close()
        for _ in range(steps):
            self.now_s += STEP_S
            for host in self.hosts.values():
                host.work()
        if not remembers:
            (Path(self.folder.name) / "memory.json").unlink(missing_ok=True)
        self.collector = Collector()
        self.coordinator = self.made()
        if not remembers:
            self.coordinator.follow(self.plan)

    @rule(room=st.integers(0, 300))
    def the_disk_is_full(self, room):
        self.full, self.room = True, self.path.stat().st_size + room

    @rule()
    def the_disk_has_room(self):
        self.full = False

    @rule(homes=st.lists(host_names, min_size=6, max_size=6), without=st.none() | host_names, upgrade=st.booleans())
    def a_new_plan(self, homes, without, upgrade):
        self.bundle += upgrade
        self.is_new_plan = True
        self.plan = self.planned(homes, without)
        self.coordinator.follow(self.plan)

    @rule()
    def it_is_quiet(self):
        """After some time, with those ill that are ill, all is as it should be."""
        self.full = False
        for host in self.hosts.values():
            host.deaf = False
        for _ in range(60):
            self.step()
        open_on = {camera: [h.name for h in self.hosts.values() if camera in h.cameras()] for camera in CAMERAS}
        well = {host.name for host in self.hosts.values() if not host.frozen and not host.cut}
        status = self.coordinator.status()
        for duty in status.duties:
            living = [name for name in open_on[duty.camera] if name in well]
            assert living == ([duty.host] if duty.host else []), duty
            if duty.host is None:
                share = WORK_S * 10 * len(self.plan.cameras[duty.camera][1])
                can = [name for name in self.plan.reach[duty.camera] if name in well]
                assert all(status.hosts[name].utilisation + share > 1 for name in can), duty
        for name in well:
            assert not self.hosts[name].lines or self.hosts[name].running, name
        assert status.results == ""
        assert self.coordinator.plan == self.plan

    # How

    def step(self):
        self.now_s += STEP_S
        for host in self.hosts.values():
            host.work()
            host.beat(self.spoken)
        self.stays(self.coordinator.tick)
        if self.now_s % 1.0 == 0:
            self.stays(self.coordinator.sync)
        for name, status in self.coordinator.status().hosts.items():
            if status.state == "late" or (status.state == "unknown" and self.coordinator._learning_until_s is None):
                host = self.hosts[name]
                ordered = {(d.camera, d.model, d.epoch) for d in host.order.duties} if host.order else set()
                self.given_up[name] |= {*host.running, *ordered}

    def spoken(self, report):
        order = self.stays(lambda: self.coordinator.beat(report), home=report.host)
        self.check_order(report, order)
        self.orders[report.host] = order
        return order

    def stays(self, call, home=None):
        """Call the coordinator: cameras of living hosts stay, but for a new plan, and for what is at home at a host."""
        before, moves = self.placed(), self.is_new_plan
        self.is_new_plan = moves and self.coordinator._moves_home
        answer = self.limited(call)
        after, living = self.placed(), self.living()
        for camera, host in before.items():
            is_home = home is not None and after.get(camera) == home == self.plan.host_of.get(camera)
            assert moves or is_home or after.get(camera) == host or host not in living, f"{camera} has left {host}"
        return answer

    def check_order(self, report, order):
        """What is new in an order is neither ordered of another living host nor open there.

        What a host has open that was lost meanwhile, and is back, is not its own any more.
        """
        known = {duty.camera for duty in self.orders[report.host].duties} if report.host in self.orders else set()
        known |= {duty.camera for duty in report.running}
        for camera in {duty.camera for duty in order.duties} - known:
            for other in self.living() - {report.host}:
                ordered = {duty.camera for duty in self.orders[other].duties} if other in self.orders else set()
                assert camera not in ordered, f"{camera} is ordered of {report.host} and of {other}"
                running = self.hosts[other].running
                has_open = {key[0] for key in running.keys() - self.given_up[other] if not running[key].ends}
                assert camera not in has_open, f"{camera} is open on {other}"

    def limited(self, call):
        """Call the coordinator while files cannot grow, where the disk is full."""
        if not self.full:
            return call()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.room, before[1]))
        try:
            return call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def living(self) -> set[str]:
        return {name for name, host in self.coordinator.status().hosts.items() if host.state in ("alive", "leaving")}

    def placed(self) -> dict[str, str]:
        hosts = self.coordinator.status().hosts
        return {camera: name for name, host in hosts.items() for camera in host.cameras}

    @invariant()
    def lines_come_once_and_in_order(self):
        if not hasattr(self, "path"):
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            content = file.read()
        assert content.endswith(b"\n") or not content
        self.read += len(content)
        for text in content.splitlines():
            line = json.loads(text)
            duty, place = (line["camera"], line["model"]), (line["epoch"], line["frame"])
            assert place > self.last.get(duty, (-1, -1)), f"{duty}: {place} after {self.last[duty]}"
            self.last[duty] = place
            epoch, host = self.newest.get(line["camera"], (-1, line["host"]))
            assert line["epoch"] >= epoch or line["host"] == host, f"{duty}: {line['host']} and {host} in turns"
            if line["epoch"] >= epoch:
                self.newest[line["camera"]] = line["epoch"], line["host"]

    def teardown(self):
        if hasattr(self, "folder"):
            self.it_is_quiet()
            self.coordinator.close()
            self.folder.cleanup()


FleetMachine.TestCase.settings = examples(40, stateful_step_count=25, phases=(Phase.generate,))
TestFleetFaults = FleetMachine.TestCase
