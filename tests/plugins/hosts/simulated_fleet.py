"""Hosts of a fleet that run nothing: they follow orders and send lines as an agent does, on a clock of the test.

Tests and benchmarks of the coordinator use them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from tvm_pipeline.errors import RunError
from tvm_pipeline_hosts.fleet.messages import Duty, HostOrder, HostReport, Line, RunningDuty

MOST_LINES = 40  # in a report


@dataclass
class Running:
    """A duty that a host runs."""

    duty: Duty
    frames: int = 0
    ends: bool = False


@dataclass
class SimulatedHost:
    """A host with its agent.

    Attributes:
        running: (camera, model, epoch) -> the duty, also those that end and are not reported as ended yet.
        lines: that were made and not taken; `done` were before them.
        unsafe: the last of those that were taken; the disk of the head may lack them.
        sent: how many of `lines` the last report had.
        frozen: it neither works nor speaks; cut: it works and is not heard; deaf: it is heard and hears nothing.
    """

    name: str
    agent: int = 0
    version: int = -1
    running: dict[tuple[str, str, int], Running] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    unsafe: list[Line] = field(default_factory=list)
    done: int = 0
    sent: int = 0
    order: HostOrder | None = None
    frozen: bool = False
    cut: bool = False
    deaf: bool = False
    refused: str = ""
    broken: frozenset[str] = frozenset()  # cameras that do not open here
    started: list[tuple[str, str, int]] = field(default_factory=list)

    def work(self, frames: int = 1) -> None:
        """Follow the last order, then make lines of every duty."""
        if self.frozen:
            return
        if self.order is not None:
            self._follow(self.order)
            self.order = None
        for (camera, model, epoch), running in self.running.items():
            if camera in self.broken or running.ends:
                continue
            for _ in range(frames):
                line = b'{"frame":%d,"annotations":[]}' % running.frames
                self.lines.append(Line(camera, model, epoch, running.frames, msgspec.Raw(line)))
                running.frames += 1

    def beat(self, speak: Callable[[HostReport], HostOrder]) -> HostOrder | None:
        """Speak with the coordinator; return what it answered, also where this host does not hear it."""
        if self.frozen or self.cut:
            return None
        try:
            order = speak(self.report())
        except RunError:  # there is no plan
            return None
        if not self.deaf:
            self.hear(order)
        return order

    def report(self) -> HostReport:
        self.sent = self.sent or min(len(self.lines), MOST_LINES)
        sent = self.lines[: self.sent]
        unsent = {(line.camera, line.model, line.epoch) for line in self.lines[self.sent :]}
        for key in [key for key, running in self.running.items() if running.ends and key not in unsent]:
            del self.running[key]
        return HostReport(
            self.name,
            f"{self.name}-{self.agent}",
            self.version,
            tuple(
                RunningDuty(
                    *(camera, model, running.duty.bundle, epoch, running.frames, running.frames > 0),
                    problem="it does not open" if camera in self.broken else "",
                )
                for (camera, model, epoch), running in self.running.items()
            ),
            lines=tuple(sent),
            since=self._since,
            upto=self._upto,
            waiting=len(self.lines) - len(sent),
        )

    def hear(self, order: HostOrder) -> None:
        self.refused = order.refused
        is_known = order.taken in (self._since, self._upto)
        if order.taken == self._upto:
            self.unsafe += self.lines[: self.sent]
            del self.lines[: self.sent]
            self.done, self.sent = self.done + self.sent, 0
        if order.safe:
            del self.unsafe[: max(0, int(order.safe) - (self.done - len(self.unsafe)))]
        if not is_known:
            self._go_back()
        self.order = order

    def restart(self) -> None:
        """Start the agent anew: it finds what runs, and what it has sent is not known to it."""
        self.agent += 1
        self.version, self.order = -1, None
        self._go_back()

    def crash(self) -> None:
        """Lose all that runs, as by a loss of power; the files of lines stay."""
        self.restart()
        self.running.clear()

    def cameras(self) -> set[str]:
        """Return the cameras that it has open."""
        return {camera for (camera, _, _), running in self.running.items() if not running.ends}

    @property
    def _since(self) -> str:
        return str(self.done) if self.unsafe else ""

    @property
    def _upto(self) -> str:
        return str(self.done + self.sent)

    def _go_back(self) -> None:
        self.lines[:0] = self.unsafe
        self.done, self.sent = self.done - len(self.unsafe), 0
        self.unsafe.clear()

    def _follow(self, order: HostOrder) -> None:
        self.version = order.version
        wanted = {(duty.camera, duty.model, duty.epoch): duty for duty in order.duties}
        for key, running in self.running.items():
            running.ends = running.ends or key not in wanted
        for key, duty in wanted.items():
            if key not in self.running:
                self.running[key] = Running(duty)
                self.started.append(key)
