"""What a coordinator knows of a host that it has heard: its last report and order, and the cameras it may hold open."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tvm_pipeline_hosts.fleet.messages import HostReport, Order

ORDERED = 0
FOUND = -1  # it runs, and no order was made since


@dataclass(slots=True)
class HeardHost:
    """A host that was heard.

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
    order: Order | None = None
    held: dict[str, int] = field(default_factory=dict)
    rival: tuple[str, float] | None = None

    def ordered(self, order: Order) -> None:
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


def rivals(host: str, agent: str, other: str) -> str:
    """Return the sentence about two agents that speak under the name of one host."""
    return f"two agents speak as {host}: {agent} and {other}; join one of them under another name"


def holders(hosts: Collection[HeardHost], camera: str, besides: str) -> list[str]:
    """Return the living hosts other than one that may have a camera open."""
    return [host.name for host in hosts if host.alive and camera in host.held and host.name != besides]
