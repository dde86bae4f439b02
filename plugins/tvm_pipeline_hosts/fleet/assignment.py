"""Which host has which camera, and the epochs under which its lines are accepted.

A camera with a host is *granted* to it once no other living host may still have it open; only then it stands in the
host's order, under a new epoch. Hosts that are lost hold nothing. Lines of an older epoch are accepted until the first
one of a newer epoch, also from a host that was lost and is back. Next: takeover.py, which chooses hosts;
coordinator.py, which speaks with them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tvm_pipeline_hosts.fleet.messages import Duty, FleetPlan, RunningDuty
from tvm_pipeline_hosts.fleet.takeover import take_over

PATIENCE_S = 10.0  # for which a camera that does not open stays where it is; doubled by every move for that reason
LONGEST_PATIENCE_S = 600.0
MOST_ACCEPTED = 8  # epochs of a duty
COUNTED_EPOCHS = 8  # of which is known what they dropped
HOST_LOST, LATE = "host lost", "late"
RATE_OVER = 5  # seconds over which lines make a rate


class DutyCounts:
    """Counters of one duty over all its epochs: lines, their rate, the longest gap, what was lost. None ever falls.

    Attributes:
        lines: that were taken.
        last_s: when the last one was, by the coordinator's clock.
        lost: reason -> frames.
    """

    __slots__ = ("_dropped", "_heard", "_kept", "_lost_s", "_samples", "last_s", "lines", "longest_gap_s", "lost")

    def __init__(self) -> None:
        self.lines = 0
        self.last_s: float | None = None
        self.longest_gap_s = 0.0
        self.lost: dict[str, int] = {}
        self._lost_s: float | None = None
        self._kept = 0  # lines since then that are of the time before or during the loss
        self._dropped: dict[int, Mapping[str, int]] = {}
        self._heard: dict[int, int] = {}  # epoch -> the last frame of which is known what became of it
        self._samples: deque[tuple[float, int]] = deque(maxlen=RATE_OVER + 1)

    def took(self, epoch: int, frame: int, lines: int, now_s: float, rate_fps: float | None) -> None:
        """Count lines of an epoch that came together, up to this frame.

        The first ones of another epoch after a loss tell how many frames it has cost; those of the same epoch, which
        the host had kept, are not among them.
        """
        goes_on = epoch in self._heard
        self._hear(epoch, frame)
        if self._lost_s is not None and goes_on:
            self._kept += lines
        elif self._lost_s is not None:
            self._count(HOST_LOST, self._unseen(now_s, rate_fps))
            self.host_back()
        if self.last_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_s)
        self.lines += lines
        self.last_s = now_s

    def late(self, epoch: int, frame: int) -> None:
        """Count a line of an epoch that is not accepted, unless it is sent again or was taken before."""
        if frame > self._heard.get(epoch, -1):
            self._hear(epoch, frame)
            self._count(LATE, 1)

    def dropped(self, epoch: int, dropped: Mapping[str, int]) -> None:
        """Hear what the service has dropped in this epoch so far; a service that began again counts from 0."""
        before = self._dropped.get(epoch)
        if dropped == before:
            return
        for reason, frames in dropped.items():
            known = before.get(reason, 0) if before else 0
            self._count(reason, frames - known if frames >= known else frames)
        self._dropped[epoch] = dropped
        if len(self._dropped) > COUNTED_EPOCHS:
            del self._dropped[min(self._dropped)]

    def host_lost(self, now_s: float) -> None:
        """Begin to estimate the frames that nobody sees: from the last line, or from now where there was none."""
        if self._lost_s is None:
            self._lost_s = now_s if self.last_s is None else self.last_s

    def host_back(self) -> None:
        """End the estimate: the host still has the camera, and what it has seen meanwhile comes."""
        self._lost_s, self._kept = None, 0

    def sample(self, now_s: float) -> None:
        """Remember the count for the rate; to be called once a second."""
        self._samples.append((now_s, self.lines))

    def fps(self) -> float:
        """Return the lines a second of the last seconds that `sample` saw."""
        if len(self._samples) < 2:
            return 0.0
        (begin_s, begin), (end_s, end) = self._samples[0], self._samples[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else 0.0

    def lost_until(self, now_s: float, rate_fps: float | None) -> dict[str, int]:
        """Return reason -> frames, with those that a loss which is not over has cost until now."""
        if self._lost_s is None:
            return self.lost
        return self.lost | {HOST_LOST: self.lost.get(HOST_LOST, 0) + self._unseen(now_s, rate_fps)}

    def gap_until(self, now_s: float) -> float:
        """Return the longest gap between two lines in seconds, that since the last one included."""
        return self.longest_gap_s if self.last_s is None else max(self.longest_gap_s, now_s - self.last_s)

    def _unseen(self, now_s: float, rate_fps: float | None) -> int:
        assert self._lost_s is not None
        return max(0, round((self.fps() if rate_fps is None else rate_fps) * (now_s - self._lost_s)) - self._kept)

    def _count(self, reason: str, frames: int) -> None:
        if frames > 0:
            self.lost[reason] = self.lost.get(reason, 0) + frames

    def _hear(self, epoch: int, frame: int) -> None:
        self._heard[epoch] = frame
        if len(self._heard) > COUNTED_EPOCHS:
            del self._heard[min(self._heard)]


@dataclass(slots=True)
class AssignedDuty:
    """A duty of a camera.

    Attributes:
        epoch: the newest; 0 before the first.
        accepted: epoch -> the host whose lines of it are taken.
    """

    source: str
    rate_fps: float | None
    bundle: str = ""
    epoch: int = 0
    accepted: dict[int, str] = field(default_factory=dict)
    counts: DutyCounts = field(default_factory=DutyCounts)


@dataclass(slots=True)
class AssignedCamera:
    """A camera and where it is.

    Attributes:
        host: the one that is to have it; None for none.
        granted: whether it is in the order of that host.
        failed: hosts where it did not open lately.
        patience_s: how long it may stay without a frame where it is.
        since_s: when it began to give no frames for a reason, or to give them again; None before.
        stuck: which of both.
        problem: that reason, or why it has no host.
    """

    duties: dict[str, AssignedDuty]
    host: str | None = None
    granted: bool = False
    failed: set[str] = field(default_factory=set)
    patience_s: float = PATIENCE_S
    since_s: float | None = None
    stuck: bool = False
    problem: str = ""


class Assignment:
    """The cameras of a plan with their hosts. All methods but `follow` cost little.

    Attributes:
        plan: None before the first.
        cameras: name -> where it is.
        waiting: cameras that have a host and are not granted.
        changed: hosts whose order is another one than when this was last emptied.
    """

    def __init__(self, number: Callable[[], int]) -> None:
        self.plan: FleetPlan | None = None
        self.cameras: dict[str, AssignedCamera] = {}
        self.waiting: set[str] = set()
        self.changed: set[str] = set()
        self._number = number
        self._of_host: dict[str, set[str]] = {}

    def follow(self, plan: FleetPlan) -> None:
        """Take the cameras, models and rates of a plan. Cameras stay where they are if that host may have them."""
        self.plan = plan
        for name in self.cameras.keys() - plan.cameras.keys():
            self._assign(name, None)
            del self.cameras[name]
        for name, (source, rates) in plan.cameras.items():
            camera = self.cameras.setdefault(name, AssignedCamera({}))
            camera.failed.clear()
            for model in camera.duties.keys() - rates.keys():
                del camera.duties[model]
            for model, rate in rates.items():
                duty = camera.duties.setdefault(model, AssignedDuty(source, None))
                if (duty.source, duty.rate_fps) != (source, _rate(rate)):
                    # The frames of another source, or of another policy, are numbered anew.
                    duty.source, duty.rate_fps, duty.bundle = source, _rate(rate), ""
            if camera.host is not None:
                self.changed.add(camera.host)
                if camera.host not in plan.reach.get(name, ()):
                    self._assign(name, None)

    def renew(self) -> int:
        """Give a new epoch to granted duties whose bundle, source or rate is another one; return how many."""
        found = 0
        for camera in self.cameras.values():
            if camera.host is not None and camera.granted:
                for model, duty in camera.duties.items():
                    if not duty.epoch or duty.bundle != self._bundle(camera.host, model):
                        self._begin(camera.host, model, duty)
                        found += 1
        return found

    def move_home(self, living: Collection[str], only: str | None = None) -> list[str]:
        """Assign cameras to their planned hosts that live, all or those of one host; return those that move."""
        assert self.plan is not None
        moved = []
        for name, planned in self.plan.host_of.items():
            camera = self.cameras.get(name)
            if camera is None or camera.host == planned or planned not in living or only not in (None, planned):
                continue
            if planned in self.plan.reach.get(name, ()) and planned not in camera.failed:
                if camera.host is not None:
                    moved.append(name)
                self._assign(name, planned)
        if only is None:
            self._make_room()
        return moved

    def place(self, living: Collection[str]) -> list[str]:
        """Assign cameras without a host to hosts that live; return those that got one."""
        plan = self.plan
        homeless = [name for name, camera in self.cameras.items() if camera.host is None]
        if plan is None or not homeless:
            return []
        found = take_over(self._without_failed(plan, homeless, living), self.host_of(), living)
        placed = []
        for name in homeless:
            camera = self.cameras[name]
            if host := found.get(name):
                self._assign(name, host)
                placed.append(name)
            else:
                camera.problem = self._why(name, living)
        return placed

    def is_stuck(self, name: str, problem: str, now_s: float) -> bool:
        """Hear why a camera gives no frames, or "" if it does; return whether it has had no frames for too long."""
        camera = self.cameras[name]
        camera.problem = problem
        if camera.since_s is None or camera.stuck != bool(problem):
            camera.since_s, camera.stuck = now_s, bool(problem)
        is_long = now_s - camera.since_s >= camera.patience_s
        if is_long and not problem:
            camera.patience_s = PATIENCE_S
            camera.failed.clear()
        return is_long and camera.stuck

    def starving(self) -> dict[str, str]:
        """Return camera -> why it has no host, for those that have none."""
        return {name: camera.problem for name, camera in self.cameras.items() if camera.host is None}

    def elsewhere(self, name: str, living: Collection[str]) -> str | None:
        """Assign a camera that does not open to another host, and return that; None where no other one has room."""
        plan, camera = self.plan, self.cameras[name]
        assert plan is not None
        here = camera.host
        assert here is not None
        camera.patience_s = min(2 * camera.patience_s, LONGEST_PATIENCE_S)
        camera.since_s = None
        camera.failed.add(here)
        others = [host for host in plan.reach.get(name, ()) if host in living and host != here]
        if camera.failed.issuperset(others):
            camera.failed = {here}
        reach = {**plan.reach, name: tuple(host for host in others if host not in camera.failed)}
        host_of = self.host_of()
        del host_of[name]
        host = take_over(msgspec.structs.replace(plan, reach=reach), host_of, living).get(name)
        if host is None:
            camera.failed.discard(here)
            return None
        self._assign(name, host)
        return host

    def lost(self, host: str, now_s: float) -> list[str]:
        """Take all cameras of a host away; return those that it had."""
        had = sorted(self._of_host.get(host, ()))
        for name, camera in self.cameras.items():
            for duty in camera.duties.values():
                if camera.host == host or (host in duty.accepted.values() and not camera.granted):
                    duty.counts.host_lost(now_s)
            if camera.host == host:
                self._assign(name, None)
        return had

    def adopt(self, host: str, running: Iterable[RunningDuty]) -> list[str]:
        """Leave to a host what it was found to run, if the plan allows it; the newest epoch of a camera wins.

        Returns:
            The cameras that it has now by that.
        """
        assert self.plan is not None
        found: dict[str, list[RunningDuty]] = {}
        for duty in running:
            camera = self.cameras.get(duty.camera)
            if camera and duty.model in camera.duties and host in self.plan.reach.get(duty.camera, ()):
                found.setdefault(duty.camera, []).append(duty)
        adopted = []
        for name, duties in found.items():
            camera = self.cameras[name]
            known = max(duty.epoch for duty in camera.duties.values())
            if camera.host not in (None, host) and known >= max(duty.epoch for duty in duties):
                continue
            self._assign(name, host)
            self.waiting.discard(name)
            camera.granted = True
            for duty in sorted(duties, key=lambda duty: duty.epoch):
                own = camera.duties[duty.model]
                own.accepted = {e: whose for e, whose in own.accepted.items() if whose == host} | {duty.epoch: host}
                own.epoch, own.bundle = duty.epoch, duty.bundle
            adopted.append(name)
        return adopted

    def take_back(self, host: str, running: Iterable[RunningDuty]) -> None:
        """Leave to a host that was lost and is back those cameras that it still runs and no host has had since."""
        kept = []
        for duty in running:
            camera = self.cameras.get(duty.camera)
            own = camera.duties.get(duty.model) if camera and camera.host is None else None
            if own is not None and own.epoch == duty.epoch:
                kept.append(duty)
        for name in self.adopt(host, kept):
            for own in self.cameras[name].duties.values():
                own.counts.host_back()

    def grant(self, is_held: Callable[[str, str], bool], living: Collection[str]) -> None:
        """Put waiting cameras into the order of their host under new epochs, unless another living host holds them.

        Args:
            is_held: whether a living host other than this one may have the camera open.
        """
        for name in sorted(self.waiting):
            camera = self.cameras[name]
            assert camera.host is not None
            if camera.host in living and not is_held(name, camera.host):
                self.waiting.discard(name)
                camera.granted, camera.problem, camera.since_s = True, "", None
                for model, duty in camera.duties.items():
                    self._begin(camera.host, model, duty)

    def took(self, name: str, host: str, model: str, epoch: int) -> None:
        """Hear of a line that was taken: older epochs of the duty end, and those of other hosts for the camera."""
        for other, duty in self.cameras[name].duties.items():
            if len(duty.accepted) > 1:
                duty.accepted = {
                    newer: whose
                    for newer, whose in duty.accepted.items()
                    if newer >= epoch or (whose == host and other != model)
                }

    def duties_of(self, host: str) -> tuple[Duty, ...]:
        """Return what the order of a host lists."""
        return tuple(
            Duty(name, duty.source, model, duty.bundle, duty.epoch, duty.rate_fps)
            for name in sorted(self._of_host.get(host, ()))
            if (camera := self.cameras[name]).granted
            for model, duty in camera.duties.items()
            if duty.epoch
        )

    def cameras_of(self, host: str) -> list[str]:
        return sorted(self._of_host.get(host, ()))

    def host_of(self) -> dict[str, str]:
        """Return camera -> host of those that have one."""
        return {name: camera.host for name, camera in self.cameras.items() if camera.host is not None}

    def utilisation(self, host: str) -> float:
        """Return the seconds for which the busiest device of a host works in each second, for all its cameras."""
        work_s = self.plan.work_s.get(host, {}) if self.plan else {}
        return sum(
            (duty.rate_fps or duty.counts.fps()) * work_s.get(model, 0.0)
            for name in self._of_host.get(host, ())
            for model, duty in self.cameras[name].duties.items()
        )

    def starving_without(self, host: str, living: Collection[str]) -> tuple[str, ...]:
        """Return the cameras of a host that no other living host could take if this one were lost now."""
        had = self._of_host.get(host)
        if not had or self.plan is None:
            return ()
        left = {name: where for name, where in self.host_of().items() if where != host}
        found = take_over(self.plan, left, set(living) - {host})
        return tuple(name for name in sorted(had) if name not in found)

    def _make_room(self) -> None:
        """Take from hosts that have too much to do the cameras that are planned for others."""
        assert self.plan is not None
        for host, cameras in self._of_host.items():
            for name in sorted(cameras):
                if self.plan.host_of.get(name) != host and self.utilisation(host) > 1:
                    self._assign(name, None)

    def _assign(self, name: str, host: str | None) -> None:
        camera = self.cameras[name]
        if camera.host == host:
            return
        if camera.host is not None:
            self._of_host[camera.host].discard(name)
            self.changed.add(camera.host)
        camera.host, camera.granted, camera.problem, camera.since_s = host, False, "", None
        self.waiting.discard(name)
        if host is not None:
            self._of_host.setdefault(host, set()).add(name)
            self.waiting.add(name)

    def _begin(self, host: str, model: str, duty: AssignedDuty) -> None:
        duty.epoch, duty.bundle = self._number(), self._bundle(host, model)
        duty.accepted[duty.epoch] = host
        if len(duty.accepted) > MOST_ACCEPTED:
            del duty.accepted[min(duty.accepted)]
        self.changed.add(host)

    def _bundle(self, host: str, model: str) -> str:
        return self.plan.bundles.get(host, {}).get(model, "") if self.plan else ""

    def _without_failed(self, plan: FleetPlan, names: Iterable[str], living: Collection[str]) -> FleetPlan:
        """Return the plan without the hosts where these cameras did not open, where another one lives."""
        reach = {}
        for name in names:
            if failed := self.cameras[name].failed:
                left = tuple(host for host in plan.reach.get(name, ()) if host not in failed)
                if any(host in living for host in left):
                    reach[name] = left
        return msgspec.structs.replace(plan, reach={**plan.reach, **reach}) if reach else plan

    def _why(self, name: str, living: Collection[str]) -> str:
        """Return why no host has the camera."""
        reach: Mapping[str, tuple[str, ...]] = self.plan.reach if self.plan else {}
        hosts = reach.get(name, ())
        there = [host for host in hosts if host in living]
        if there:
            return f"no room: {', '.join(there)} can take it and would be busy for more than each second"
        return f"none of {', '.join(hosts)} is alive" if hosts else "no host of the plan can take it"


def _rate(rate_fps: float) -> float | None:
    """Return the rate of a plan as a duty has it: None for all frames."""
    return rate_fps if 0 < rate_fps < float("inf") else None
