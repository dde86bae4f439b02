"""The coordinator of a fleet: hosts tell it what they run, and it tells each all that it should run.

    coordinator = Coordinator(time.monotonic, Path("coordinator.json"), Collector())
    coordinator.follow(plan)                 # by `fleet run`
    order = coordinator.beat(report)         # by every host, every `beat_s`
    coordinator.tick()                       # by whoever carries the messages, every `beat_s` or more often
    coordinator.sync()                       # by the same, once a second: hosts need not keep the lines until now
    coordinator.status()                     # for people

It knows nothing of what carries messages, and has no clock and no threads of its own: all calls come under one lock,
which `sync` may release while it waits for the disk.

Hosts are the truth of what runs. A coordinator that begins with a plan, or gets its first one, gives no camera to any
host before it has heard all hosts of the plan or LEARN_S have passed, or `late_s` if that is longer; until then it
leaves to each what it runs. So its own restart moves nothing. A host without a beat for `late_s` is lost, and its
cameras go to others. When it comes back, lines that it has made meanwhile are taken until the first line of another
host. It keeps the cameras that it still runs and no other host could take. The others do not move back, but by the next
`follow`; only when a host of the plan is heard for the first time since `follow`, those that are planned for it move
there.

Files: assignment.py, which camera is where; collector.py, the lines.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tvm_pipeline import PipelineError
from tvm_pipeline.documents import DAMAGED
from tvm_pipeline.errors import RunError
from tvm_pipeline.files import replacing
from tvm_pipeline_hosts.fleet.assignment import Assignment
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.messages import (
    Duty,
    DutyStatus,
    FleetPlan,
    FleetStatus,
    HostOrder,
    HostReport,
    HostStatus,
    Line,
)
from tvm_pipeline_hosts.fleet.takeover import compile_loops

LEARN_S = 5.0  # for which a new coordinator waits for hosts that it has not heard
LOOK_S = 1.0  # between two looks at the file of results, and two counts for rates
RIVAL_BEATS = 3  # of silence after which another agent speaks for a host: it was started again
FORGOTTEN_S = 600.0  # after which a host that is in no plan and silent is forgotten
MOST_EVENTS = 200
STARVING_A_TICK = 5  # hosts whose loss is thought through in one tick
RIVAL_SHOWN_S = 60.0  # for which a second agent of a host is told of after it spoke last
NUMBERS_A_WRITE = 100_000  # that a write of the memory allows
ORDERED, FOUND = 0, -1  # a camera that a host holds: by its order; running, and no order was made since

_NO_PLAN = FleetPlan({}, {}, {}, {}, {})
_log = logging.getLogger(__name__)


class Coordinator:
    """See the module.

    Args:
        clock: seconds that never fall.
        memory: the file of what must outlive it; None for none, as in tests.
        collector: takes the lines; `follow` tells it into which file.
    """

    def __init__(self, clock: Callable[[], float], memory: Path | None, collector: Collector) -> None:
        self._clock, self._collector = clock, collector
        self._memory = CoordinatorMemory(memory)
        self._assignment = Assignment(self._memory.number)
        self._hosts: dict[str, Member] = {}
        self._planned: set[str] = set()  # hosts of the plan
        self._warm: dict[str, dict[str, str]] = {}
        self._learning_until_s: float | None = None
        self._awaited: set[str] = set()  # hosts that may run something, while it learns
        self._moves_home = self._unsettled = False  # at the next `_settle`
        self._events: deque[tuple[float, str, str]] = deque(maxlen=MOST_EVENTS)
        self._called_s = self._looked_s = clock()
        self._told_results = ""
        self._starve: dict[str, tuple[str, ...]] = {}
        self._to_starve: list[str] = []
        if self._memory.problem:
            self._event("memory", self._memory.problem)
        if plan := self._memory.plan:
            self._take_plan(plan)
            self._called_s = clock()
            self._awaited |= self._memory.leaving
            self._collector.resume(_results(plan))
            self._learn()

    @property
    def plan(self) -> FleetPlan | None:
        """The plan that it follows; None before the first."""
        return self._assignment.plan

    def follow(self, plan: FleetPlan) -> None:
        """Bring the fleet to this plan: cameras move to the hosts that it says, each as soon as its old host let go.

        A camera whose planned host does not live stays where it is, or goes to another host of its reach.

        Raises:
            OptionError: the file of results cannot be written. The plan before stays in force.
        """
        self._collector.into(_results(plan))
        is_first = self.plan is None
        self._take_plan(plan)
        self._memory.plan, self._memory.known = plan, self._living()
        self._memory.leaving = (
            {host.name for host in self._hosts.values() if host.alive} | self._awaited
        ) - self._planned
        self._memory.write()
        self._event("plan", f"{len(plan.cameras)} cameras, {len(self._planned)} hosts")
        if is_first:
            self._learn()
            for host in self._hosts.values():
                if host.alive and host.report:
                    self._assignment.adopt(host.name, host.report.running)
            self._end_learning_if_all_are_heard()
        elif self._learning_until_s is not None:
            self._awaited |= self._planned
        self._moves_home, self._unsettled = not is_first, True
        self._settle(self._clock())

    def beat(self, report: HostReport) -> HostOrder:
        """Hear a host and return all that it should do.

        Raises:
            RunError: the host runs something, and there is no plan that says whether it should. It goes on with that.
        """
        now = self._awake()
        host = self._hosts.setdefault(report.host, Member(report.host))
        if self._is_rival(host, report, now):
            return self._refusal(host, report)
        was_alive, is_known = host.alive, host.report is not None
        host.agent, host.heard_s, host.alive, host.report = report.agent, now, True, report
        self._memory.above(max([report.version, *(duty.epoch for duty in report.running)]))
        if self.plan is None:
            if report.running:
                raise RunError(
                    f"the coordinator has no plan: {host.name} keeps what it runs until `fleet run` tells one"
                )
            return HostOrder(report.version)
        safe = self._take(host, report, now)
        self._watch(host, report, now)
        host.reported(report, safe)
        if not was_alive:
            self._arrived(host, is_known)
        if self._learning_until_s is not None:
            self._assignment.adopt(host.name, report.running)
            self._end_learning_if_all_are_heard()
        self._settle(now)
        return self._order(host)

    def tick(self) -> None:
        """Look at what time has changed: hosts that are late, the file of results."""
        now = self._awake()
        for host in [*self._hosts.values()]:
            silent_s = now - host.heard_s
            if host.alive and self.plan and silent_s > self.plan.late_s:
                self._lost(host, silent_s, now)
            elif not host.alive and host.name not in self._planned and silent_s > FORGOTTEN_S:
                del self._hosts[host.name]
        if now - self._looked_s >= LOOK_S:
            self._looked_s = now
            self._memory.look()
            self._collector.look()
            self._tell_results()
            for camera in self._assignment.cameras.values():
                for duty in camera.duties.values():
                    duty.counts.sample(now)
        self._settle(now)
        for name in self._to_starve[:STARVING_A_TICK]:
            self._starve[name] = self._assignment.starving_without(name, self._living())
        del self._to_starve[:STARVING_A_TICK]

    def sync(self, waiting: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """Wait until the disk has all lines so far; the next orders tell hosts that these are safe.

        Args:
            waiting: see `Collector.sync`.
        """
        self._collector.sync(waiting)
        self._tell_results()

    def status(self) -> FleetStatus:
        """Return the fleet as it is now."""
        now = self._clock()
        return FleetStatus(
            _host_statuses(self._assignment, self._hosts, self._planned, now),
            tuple(_duty_statuses(self._assignment, self._hosts.values(), now)),
            tuple((now - time_s, kind, text) for time_s, kind, text in self._events),
            {name: cameras for name, cameras in sorted(self._starve.items()) if cameras},
            "; ".join(filter(None, (self._collector.problem, self._memory.problem))),
        )

    def close(self) -> None:
        """Close the file of results."""
        self._collector.close()

    # The plan and time

    def _take_plan(self, plan: FleetPlan) -> None:
        compile_loops()  # else the first loss waits for it
        self._planned = {*plan.work_s, *plan.bundles, *plan.host_of.values()}.union(*plan.reach.values())
        self._warm = {}
        for camera, (_, rates) in plan.cameras.items():
            for name in plan.reach.get(camera, ()):
                have = plan.bundles.get(name, {})
                self._warm.setdefault(name, {}).update({model: have[model] for model in rates if model in have})
        self._assignment.follow(plan)
        self._assignment.changed.update(self._hosts)

    def _learn(self) -> None:
        assert self.plan is not None
        self._awaited |= self._planned
        self._learning_until_s = self._clock() + max(self.plan.late_s, LEARN_S)

    def _end_learning_if_all_are_heard(self) -> None:
        if self._awaited <= {name for name, host in self._hosts.items() if host.report}:
            self._learning_until_s = self._clock()

    def _awake(self) -> float:
        """Return the time. Silence while the coordinator itself did not run is no silence of the hosts."""
        now = self._clock()
        if self.plan and (deaf_s := now - self._called_s - 2 * self.plan.beat_s) > self.plan.late_s / 2:
            for host in self._hosts.values():
                host.heard_s += deaf_s
            self._event("deaf", f"the coordinator did not run for {deaf_s:.1f} s")
        self._called_s = now
        return now

    def _living(self) -> set[str]:
        return {host.name for host in self._hosts.values() if host.alive and host.name in self._planned}

    def _settle(self, now: float) -> None:
        """Give hosts to cameras that have none, and cameras to the orders of hosts, where something has changed."""
        assignment = self._assignment
        if self._learning_until_s is not None:
            if now < self._learning_until_s:
                return
            self._learning_until_s, self._unsettled = None, True
            self._awaited.clear()
        if self._unsettled and self.plan is not None:
            self._unsettled = False
            living = self._living()
            starved = assignment.starving()
            if self._moves_home:
                self._moves_home = False
                if moved := assignment.move_home(living):
                    self._event("move", f"the plan moves {_names(moved)}")
            assignment.renew()
            if placed := assignment.place(living):
                host_of = assignment.host_of()
                self._event("placed", f"{_names(placed)} on {_names(sorted({host_of[name] for name in placed}))}")
            for name, why in assignment.starving().items():
                if starved.get(name) != why:
                    self._event("starves", f"{name}: {why}")
            self._to_starve = sorted(living)
            self._starve = {name: found for name, found in self._starve.items() if name in living}
        if assignment.waiting:
            assignment.grant(lambda name, host: bool(_holders(self._hosts.values(), name, host)), self._living())

    # Hosts

    def _is_rival(self, host: Member, report: HostReport, now: float) -> bool:
        """Return whether another agent speaks for the host, and has done so just before."""
        if report.agent == host.agent or not host.alive:
            return False
        plan = self.plan or _NO_PLAN
        if now - host.heard_s > min(RIVAL_BEATS * plan.beat_s, plan.late_s):
            host.rival = None
            return False
        if host.rival is None or host.rival[0] != report.agent:
            self._event("two agents", _rivals(host.name, host.agent, report.agent))
        host.rival = report.agent, now
        return True

    def _refusal(self, host: Member, report: HostReport) -> HostOrder:
        """Return the order of a second agent of a host: of what it runs it may leave what the host has, no more."""
        runs = {(duty.camera, duty.model, duty.epoch) for duty in report.running}
        own = self._assignment.duties_of(host.name)
        duties = tuple(duty for duty in own if (duty.camera, duty.model, duty.epoch) in runs)
        version = report.version if len(duties) == len(runs) or self.plan is None else self._memory.number()
        return self._filled(version, duties, {}, _rivals(host.name, host.agent, report.agent))

    def _order(self, host: Member) -> HostOrder:
        if host.order is None or host.name in self._assignment.changed:
            self._assignment.changed.discard(host.name)
            duties = self._assignment.duties_of(host.name)
            refused = "" if host.name in self._planned else f"{host.name} is not in the plan: it gets no cameras"
            warm = self._warm.get(host.name, {})
            host.ordered(self._filled(self._memory.number(), duties, warm, refused))
        assert host.order is not None
        taken, safe = self._collector.taken.get(host.name, ""), self._collector.safe.get(host.name, "")
        if (host.order.taken, host.order.safe) != (taken, safe):
            host.order = msgspec.structs.replace(host.order, taken=taken, safe=safe)
        return host.order

    def _filled(self, version: int, duties: tuple[Duty, ...], warm: Mapping[str, str], refused: str) -> HostOrder:
        plan = self.plan or _NO_PLAN
        models = {duty.model for duty in duties} | set(warm)
        settings = {model: plan.settings[model] for model in sorted(models) if model in plan.settings}
        return HostOrder(
            version,
            duties,
            warm,
            beat_s=plan.beat_s,
            late_s=plan.late_s,
            alone=plan.alone,
            refused=refused,
            settings=settings,
        )

    def _arrived(self, host: Member, is_known: bool) -> None:
        """Hear the first beat of a host, or the first one after it was lost."""
        self._unsettled = True
        self._assignment.changed.add(host.name)
        self._assignment.take_back(host.name, host.report.running if host.report else ())
        if host.name not in self._planned:
            self._event("host", f"{host.name} is here and not in the plan")
            return
        self._event(
            "host", f"{host.name} is back; what went elsewhere stays there" if is_known else f"{host.name} is here"
        )
        if host.name not in self._memory.known:
            self._memory.known.add(host.name)
            self._memory.write()
            moved = self._assignment.move_home({host.name}, host.name) if self._learning_until_s is None else []
            if moved:
                self._event("move", f"{_names(moved)} to {host.name}, as planned")

    def _lost(self, host: Member, silent_s: float, now: float) -> None:
        host.lost()
        had = self._assignment.lost(host.name, now)
        self._unsettled = True
        self._event("lost", f"{host.name}: no beat for {silent_s:.1f} s" + (f"; it had {_names(had)}" if had else ""))

    # Reports

    def _take(self, host: Member, report: HostReport, now: float) -> bool:
        """Take the lines of a report; return False where they were not taken, and the host must send them again.

        Lines of duties that the plan does not have are let go. While it learns what runs, it accepts every epoch that
        is no older than what the file has.
        """
        cameras = self._assignment.cameras
        learns = self._learning_until_s is not None
        accepted: list[Line] = []
        late: list[Line] = []
        for line in report.lines:
            camera = cameras.get(line.camera)
            duty = camera.duties.get(line.model) if camera else None
            if duty is not None:
                (accepted if learns or duty.accepted.get(line.epoch) == host.name else late).append(line)
        taken = self._collector.take(host.name, accepted, report.since, report.upto)
        self._tell_results()
        if taken is None:
            return False
        for line in (*late, *taken.late):
            cameras[line.camera].duties[line.model].counts.late(line.epoch, line.frame)
        made: dict[tuple[str, str, int], list[int]] = {}
        for line in taken.new:
            made.setdefault((line.camera, line.model, line.epoch), []).append(line.frame)
        for (name, model, epoch), frames in made.items():
            duty = cameras[name].duties[model]
            duty.counts.took(epoch, frames[-1], len(frames), now, duty.rate_fps)
            self._assignment.took(name, host.name, model, epoch)
        return True

    def _watch(self, host: Member, report: HostReport, now: float) -> None:
        """Hear what the duties of a host say of themselves; a camera that does not open goes to another host."""
        problems: dict[str, str] = {}
        for running in report.running:
            camera = self._assignment.cameras.get(running.camera)
            duty = camera.duties.get(running.model) if camera else None
            if camera is None or duty is None:
                continue
            if running.dropped:
                duty.counts.dropped(running.epoch, running.dropped)
            if camera.host == host.name and running.epoch == duty.epoch and (running.opened or running.problem):
                problems[running.camera] = problems.get(running.camera) or running.problem
        for name, problem in problems.items():
            if self._assignment.is_stuck(name, problem, now) and self._learning_until_s is None:
                there = self._assignment.elsewhere(name, self._living())
                self._unsettled = True
                where = f"it goes to {there}" if there else "no other host can take it now, so it stays"
                self._event("camera", f"{name} gives no frames on {host.name} ({problem}): {where}")

    # For people

    def _tell_results(self) -> None:
        if self._collector.problem != self._told_results:
            self._told_results = self._collector.problem
            self._event("results", self._told_results or "the file of results can be written again")

    def _event(self, kind: str, text: str) -> None:
        self._events.append((self._clock(), kind, text))


def _results(plan: FleetPlan) -> Path | None:
    return Path(plan.results) if plan.results else None


def _names(names: Sequence[str]) -> str:
    """Return the first few names for a message, and how many more there are."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


class _Memory(msgspec.Struct):
    ceiling: int = 0
    plan: FleetPlan | None = None
    known: list[str] = []
    leaving: list[str] = []


class CoordinatorMemory:
    """What must not be forgotten at a restart: the numbers that were given, the plan, and the known hosts.

    It is a small file, written whole; with `path` None nothing outlives the object. Epochs and versions of orders are
    such numbers. The file has one that is greater than all that were given, so that it is written once for many of
    them. What runs where is not in it: hosts tell that.

    Attributes:
        plan: the last that was followed.
        known: hosts that were heard since the plan was followed.
        leaving: hosts outside the plan that may have had cameras when it was followed.
        problem: why the file cannot be read or written; empty where it can.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.problem = ""
        self._path = path
        content = self._read(path) if path else _Memory()
        self._number = self._ceiling = content.ceiling
        self.plan, self.known, self.leaving = content.plan, set(content.known), set(content.leaving)

    def number(self) -> int:
        """Return a number greater than all before."""
        self._number += 1
        if self._number >= self._ceiling and not self.problem:
            self.write()
        return self._number

    def above(self, heard: int) -> None:
        """Have every later number be greater than this one, which a host has told."""
        self._number = max(self._number, heard)

    def look(self) -> None:
        """Write the file where it could not be written, or read, before; to be called now and then."""
        if self.problem:
            self.write()

    def write(self) -> None:
        """Write the file. Where that fails, `problem` says so, and `look` tries again."""
        if self._path is None:
            self._ceiling = self._number + NUMBERS_A_WRITE
            return
        content = _Memory(self._number + NUMBERS_A_WRITE, self.plan, sorted(self.known), sorted(self.leaving))
        try:
            with replacing(self._path) as temporary:
                temporary.touch(0o600)  # sources hold passwords
                temporary.write_bytes(msgspec.json.encode(content))
        except (PipelineError, OSError) as error:
            self.problem = f"the coordinator's memory: {error}"
            _log.warning("%s", self.problem)
        else:
            self.problem, self._ceiling = "", content.ceiling

    def _read(self, path: Path) -> _Memory:
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Memory)
        except FileNotFoundError:
            return _Memory()
        except (OSError, *DAMAGED) as error:
            self.problem = f"the coordinator's memory {path} is left out ({error}); hosts tell what they run"
            _log.warning("%s", self.problem)
            return _Memory()


@dataclass(slots=True)
class Member:
    """A host that was heard: its last report and order, and the cameras that it may hold open.

    Attributes:
        agent: who speaks for it.
        heard_s: the time of its last beat.
        order: the last; None before the first and while it is lost.
        held: camera -> the version of the first order without it, from which on the host lets it go; ORDERED while it
            is ordered, FOUND where it was not ordered by this coordinator.
        rival: another agent that speaks under the same name, and when it did.
    """

    name: str
    agent: str = ""
    heard_s: float = 0.0
    alive: bool = False
    report: HostReport | None = None
    order: HostOrder | None = None
    held: dict[str, int] = field(default_factory=dict)
    rival: tuple[str, float] | None = None

    def ordered(self, order: HostOrder) -> None:
        """Note what a new order lists, and what it does not list any more."""
        self.order = order
        listed = {duty.camera for duty in order.duties}
        for camera, version in self.held.items():
            if version <= 0 and camera not in listed:
                self.held[camera] = order.version
        self.held.update(dict.fromkeys(listed, ORDERED))

    def reported(self, report: HostReport, safe: bool) -> None:
        """Note which cameras the host has let go: its report follows an order without them, and lists them no more.

        Args:
            safe: whether the lines of the report were taken. A camera whose last lines were not is not let go.
        """
        running = {duty.camera for duty in report.running}
        if safe:
            gone = [name for name, since in self.held.items() if 0 < since <= report.version and name not in running]
            for name in gone:
                del self.held[name]
        for name in running:
            if name not in self.held:
                self.held[name] = self.order.version if self.order else FOUND

    def lost(self) -> None:
        """Note that it is lost: it holds nothing any more."""
        self.alive, self.order, self.rival = False, None, None
        self.held.clear()


def _rivals(host: str, agent: str, other: str) -> str:
    """Return the sentence about two agents that speak under the name of one host."""
    return f"two agents speak as {host}: {agent} and {other}; join one of them under another name"


def _holders(hosts: Collection[Member], camera: str, besides: str) -> list[str]:
    """Return the living hosts other than one that may have a camera open."""
    return [host.name for host in hosts if host.alive and camera in host.held and host.name != besides]


def _host_statuses(
    assignment: Assignment, hosts: Mapping[str, Member], planned: Collection[str], now_s: float
) -> dict[str, HostStatus]:
    """Return host -> its state, for those of the plan and all others that were heard."""
    return {
        name: _host_status(name, assignment, hosts.get(name), name in planned, now_s)
        for name in sorted({*planned, *hosts})
    }


def _duty_statuses(assignment: Assignment, hosts: Collection[Member], now_s: float) -> Iterator[DutyStatus]:
    """Yield the state of each duty, in the order of cameras and models."""
    for name, camera in sorted(assignment.cameras.items()):
        problem = camera.problem
        if camera.host is not None and not camera.granted:
            let_go = " and ".join(_holders(hosts, name, camera.host))
            problem = f"goes to {camera.host}" + (f" when {let_go} lets it go" if let_go else "")
        for model, duty in sorted(camera.duties.items()):
            counts = duty.counts
            yield DutyStatus(
                name,
                model,
                camera.host if camera.granted else None,
                duty.epoch,
                counts.fps(),
                counts.lines,
                dict(counts.lost_until(now_s, duty.rate_fps)),
                counts.gap_until(now_s),
                problem,
            )


def _host_status(name: str, assignment: Assignment, host: Member | None, is_planned: bool, now_s: float) -> HostStatus:
    cameras, utilisation = tuple(assignment.cameras_of(name)), assignment.utilisation(name)
    if host is None or host.report is None:
        return HostStatus("unknown", None, cameras, utilisation)
    problems = host.report.problems
    if host.rival and now_s - host.rival[1] < RIVAL_SHOWN_S:
        problems = (*problems, _rivals(name, host.agent, host.rival[0]))
    state = "alive" if host.alive else "late"
    if host.alive and not is_planned:
        state = "leaving" if host.held else "spare"
    return HostStatus(state, max(0.0, now_s - host.heard_s), cameras, utilisation, host.report.figures, problems)
