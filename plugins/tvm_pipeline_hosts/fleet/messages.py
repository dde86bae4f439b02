"""What hosts and the coordinator tell one another, as bytes of JSON over whatever carries them.

A host calls `beat` every `Fleet.beat_s` with a HostReport, and the reply is an Order: all that the host is to do from
now on, not the difference to what it did. So no order can be lost, come twice, or come late: the next beat brings the
whole of it again. Hosts are the truth of what runs; the coordinator is that of what should.

A duty's *epoch* grows whenever the duty gets another host, another bundle or other settings. Lines carry the epoch
under which they were made, and the collector takes lines of the epochs that it accepts, each (camera, model, epoch,
frame) once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class ModelSettings(msgspec.Struct, frozen=True):
    """How services read and decode for a model, see model_settings.py.

    Attributes:
        values: of `run`, under the keys of its file.
        texts: the content of small files, under the keys that name them.
    """

    values: Mapping[str, str | float] = {}
    texts: Mapping[str, str] = {}


class Duty(msgspec.Struct, frozen=True):
    """One camera's frames through one model on the host that is told so.

    Attributes:
        camera: the camera's name.
        source: what the host opens; it may hold a password.
        model: the model's name.
        bundle: what to run: the id of a bundle, which is the SHA-256 of its manifest, and behind a `+` the sum of the
            model's settings where it has some, see `model_settings.named`.
        epoch: under which its lines are accepted.
        rate_fps: the frames a second that are wanted; None for all.
    """

    camera: str
    source: str
    model: str
    bundle: str
    epoch: int
    rate_fps: float | None = None


class HostOrder(msgspec.Struct, frozen=True):
    """All that a host is to do.

    Attributes:
        version: grows with every change; an order with the version that the host follows asks for nothing new, and of
            it only `taken`, `safe` and `refused` are read.
        duties: what it runs; a duty that is not listed ends.
        warm: model -> what has a process without a source, ready for a duty; named as `Duty.bundle`.
        taken: the last `HostReport.upto` whose lines were taken: the host sends those behind it. If it is neither the
            `upto` nor the `since` of the host's last report, the host sends again all lines that are not safe.
        safe: the last `HostReport.upto` whose lines are on the disk of the head: the host need not keep them.
        beat_s, late_s, alone: see `description.Fleet`.
        refused: why the coordinator does not take this host (it is not in the plan, or its name is taken); empty else.
            It is for people: the duties of such an order hold as those of any other.
        settings: of the models of the duties and of `warm`, those that have some.
    """

    version: int
    duties: tuple[Duty, ...] = ()
    warm: Mapping[str, str] = {}
    taken: str = ""
    safe: str = ""
    beat_s: float = 0.25
    late_s: float = 1.5
    alone: str = "keep"
    refused: str = ""
    settings: Mapping[str, ModelSettings] = {}


class Line(msgspec.Struct, frozen=True):
    """One line of results.

    Attributes:
        camera, model, epoch: of the duty that made it.
        frame: its index in the source, which grows within an epoch.
        line: the JSON of the frame, as `tvm_pipeline_video/service/result_lines.py` writes it.
    """

    camera: str
    model: str
    epoch: int
    frame: int
    line: msgspec.Raw


class RunningDuty(msgspec.Struct, frozen=True):
    """A duty that a host runs now, or is opening.

    Attributes:
        bundle, epoch: of the duty.
        frames: lines made in this epoch.
        opened: whether a frame came.
        problem: why no frame comes, where that is known.
        dropped: reason -> frames of the source that did not enter, in this epoch.
    """

    camera: str
    model: str
    bundle: str
    epoch: int
    frames: int = 0
    opened: bool = False
    problem: str = ""
    dropped: Mapping[str, int] = {}


class HostReport(msgspec.Struct, frozen=True):
    """A beat of a host.

    Attributes:
        host: its name.
        agent: who speaks: another text after every start of the agent.
        version: of the Order that it follows.
        running: what it runs, also what it found running when it started.
        ready: model -> that whose process is ready for a duty; named as `Duty.bundle`.
        lines: results in the order of each duty; few enough for one message.
        since: where these lines begin in the host's files, as the `upto` of those before; empty where all before are
            safe.
        upto: where they end; the coordinator gives it back as `HostOrder.taken`, and later as `HostOrder.safe`.
        waiting: how many lines wait behind these.
        figures: for people: utilisation of devices, memory, temperatures, and what the services say of themselves.
        problems: sentences about what is wrong on the host.
    """

    host: str
    agent: str
    version: int = -1
    running: tuple[RunningDuty, ...] = ()
    ready: Mapping[str, str] = {}
    lines: tuple[Line, ...] = ()
    since: str = ""
    upto: str = ""
    waiting: int = 0
    figures: Mapping[str, Any] = {}
    problems: tuple[str, ...] = ()


class FleetPlan(msgspec.Struct, frozen=True):
    """What `fleet run` tells the coordinator.

    Attributes:
        cameras: name -> (source, model -> rate).
        host_of: camera -> host, as planned.
        reach: camera -> the hosts that may take it: they reach it and have a bundle of each of its models.
        work_s: host -> model -> seconds of its busiest device for a frame, see `description.Host`.
        bundles: host -> model -> what the host runs; named as `Duty.bundle`.
        results: the file of lines, on the machine of the coordinator; empty for none.
        settings: of the models that have some.
    """

    cameras: Mapping[str, tuple[str, Mapping[str, float]]]
    host_of: Mapping[str, str]
    reach: Mapping[str, tuple[str, ...]]
    work_s: Mapping[str, Mapping[str, float]]
    bundles: Mapping[str, Mapping[str, str]]
    beat_s: float = 0.25
    late_s: float = 1.5
    alone: str = "keep"
    results: str = ""
    settings: Mapping[str, ModelSettings] = {}


class HostStatus(msgspec.Struct, frozen=True):
    """A host as the coordinator sees it.

    Attributes:
        state: alive; late (lost); unknown (planned and not heard yet); leaving (no more in the plan, and it still has
            cameras) or spare (it lives and is not in the plan).
    """

    state: str
    since_beat_s: float | None
    cameras: tuple[str, ...]
    utilisation: float
    figures: Mapping[str, Any] = {}
    problems: tuple[str, ...] = ()


class DutyStatus(msgspec.Struct, frozen=True):
    """A duty as the coordinator sees it.

    Attributes:
        host: None while no host has it.
        fps: of the lines that were taken lately.
        lines: that were taken, over all epochs.
        lost: reason -> frames, over all epochs: the service's reasons, `host lost` and `late` (of an older epoch).
        longest_gap_s: between two lines of it, by the coordinator's clock.
    """

    camera: str
    model: str
    host: str | None
    epoch: int
    fps: float
    lines: int
    lost: Mapping[str, int]
    longest_gap_s: float
    problem: str = ""


class FleetStatus(msgspec.Struct, frozen=True):
    """The fleet at one moment: for the commands that show it, the metrics and the page.

    Attributes:
        events: the latest, the oldest first: (seconds ago, kind, sentence).
        would_starve: host -> cameras that no other host could take if it were lost now.
        results: the state of the coordinator's files; a sentence where one cannot be written.
    """

    hosts: Mapping[str, HostStatus]
    duties: tuple[DutyStatus, ...]
    events: tuple[tuple[float, str, str], ...] = ()
    would_starve: Mapping[str, tuple[str, ...]] = {}
    results: str = ""
