"""The fleet: hosts, models, and cameras with the rates that they want.

A *duty* is one camera's frames through one model: the unit that is placed, moved and counted. All duties of a camera
are on one host, since most cameras can be opened once. Next: messages.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

# What a host does that hears nothing of the coordinator: it goes on with its cameras, or leaves them.
Alone = Literal["keep", "stop"]


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the fleet.

    Attributes:
        name: unique in the fleet, one word.
        work_s: model -> seconds for which the busiest device works for one frame of it, by the best plan for the model
            on this host; the inverse of the frames a second that the host makes. Other models cannot run here.
    """

    name: str
    work_s: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Camera:
    """A source of frames.

    Attributes:
        name: unique in the fleet, one word.
        source: what `video.open_source` takes, as the host opens it.
        rates_fps: model -> the frames a second that it is to see of this camera.
        hosts: names of the hosts that can reach the camera; empty where all can.
    """

    name: str
    source: str
    rates_fps: Mapping[str, float]
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts and cameras to plan for.

    Attributes:
        spare: how many hosts may be lost at the same time so that every camera still has a host.
        beat_s: seconds between two beats of a host, each of which brings its results.
        late_s: seconds without a beat after which a host counts as lost.
        alone: what a host does that hears nothing of the coordinator.
    """

    hosts: tuple[Host, ...]
    cameras: tuple[Camera, ...]
    spare: int = 0
    beat_s: float = 0.25
    late_s: float = 1.5
    alone: Alone = "keep"


@dataclass(frozen=True, slots=True)
class Placement:
    """Which host takes which camera.

    Attributes:
        host_of: camera -> host; a camera that starves is missing.
        starving: camera -> why no host takes it.
        utilisation: host -> seconds of work of its busiest device in each second; up to 1 the rates are met.
        bound: no placement that starves as few cameras, now and after losses, has a lower greatest utilisation. That
            is for work that adds up over the models of a host, each by its best plan; `deploy` may find less for all.
        starving_without: a set of lost hosts, as `a+b` -> the cameras that no host could take then; of the sets of
            `Fleet.spare` hosts, those that starve a camera.
        least_starving: no placement starves fewer cameras.
        proven: whether it is proven that no placement starves fewer cameras, now and added up over the sets of lost
            hosts, and that none of these has a lower greatest utilisation.
        moved: the cameras that leave the host that they are on.
        notes: sentences that say what was not tried or is not proven.
    """

    host_of: Mapping[str, str]
    utilisation: Mapping[str, float]
    bound: float
    starving: Mapping[str, str] = field(default_factory=dict)
    starving_without: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least_starving: int = 0
    proven: bool = False
    moved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """The distance of the greatest utilisation from the bound, relative to the bound."""
        most = max(self.utilisation.values(), default=0.0)
        return max(0.0, most / self.bound - 1) if self.bound > 0 else 0.0
