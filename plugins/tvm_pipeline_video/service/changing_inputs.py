"""The sources of a run with `wait`: some go and others come while those that stay lose no frame.

A source is known by its tag, or by its name where it has none. Each is opened and closed in threads of its own, so
that a camera that hangs, or is not there, holds up nobody. Read next: inputs.py (sources that stay), live_sets.py
(frames of a set that changes), status_file.py (what others read of them).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tvm_pipeline import Device
from tvm_pipeline.addresses import shown
from tvm_pipeline_video.service.inputs import read_ahead, source_policy
from tvm_pipeline_video.service.progress import Counts, FrameCounts
from tvm_pipeline_video.service.settings import Settings, for_each
from tvm_pipeline_video.service.video_extra import (
    Frame,
    LiveSet,
    LiveSource,
    LiveStatistics,
    Policy,
    source_kind,
)

GONE_S = 10.0  # for so long the counts of a source that went are told
INSIDE_S = 5.0  # how long the frames of such a source are waited for
CLOSE_S = 2.5  # how long closing waits for all sources together
RETRY_S = 300.0  # after which a rate that was too much is tried again

# Hears what became of a source: the kind of event, why, its name, its tag, and the seconds that it took.
Tell = Callable[[str, str, str, str, float], None]


@dataclass(frozen=True, slots=True)
class SourceSetting:
    """A source as the settings have it."""

    spec: str
    tag: str
    policy: Policy
    paced: bool

    @property
    def name(self) -> str:
        """The spec without passwords."""
        return shown(self.spec)

    @property
    def key(self) -> str:
        """What tells it from the others: its tag, or its name where it has none."""
        return self.tag or self.name


def wanted_sources(settings: Settings) -> list[SourceSetting]:
    """Return the sources of settings. One that does not film by itself is read by the clock, unless it may `block`."""
    given = for_each("policy", settings.policy, len(settings.source), "sources")
    tags = settings.tag or [""] * len(settings.source)
    return [
        SourceSetting(spec, tag, source_policy(spec, text), "block" not in (text or ""))
        for spec, tag, text in zip(settings.source, tags, given, strict=True)
    ]


@dataclass(eq=False, slots=True)
class _RunningSource:
    """A source that runs, is being opened, or has ended, with the counts of its frames."""

    wanted: SourceSetting
    counts: Counts
    first: int
    policy: Policy
    source: LiveSource = field(init=False)
    said: str = ""  # the last problem that was told, until it was open again
    ended: bool = False
    written: int = 0  # results that came out of `source`
    gone_s: float | None = None  # since when the settings do not name it
    shut: threading.Event = field(default_factory=threading.Event)  # another one may open the same camera
    closed: bool = False  # and nothing more of it comes out

    @property
    def inside(self) -> int:
        """The number of frames that were taken and whose results are not written."""
        return self.source.counts().delivered - self.written

    def status(self) -> dict[str, Any]:
        counted = self.source.counts()
        gone = {} if self.gone_s is None else {"gone": True, "closed": self.closed}
        return {
            "source": self.wanted.name,
            "opened": self.source.opened,
            "problem": self.source.problem,
            "ended": self.ended,
            "frames": int(self.counts[1]),
            "dropped": dict(counted.dropped),
            "reconnects": counted.reconnects,
            **gone,
        }


class ChangingInputs:
    """The sources of a model that waits for them, in the place of `ModelSources`.

    `change` and `close` belong to one thread, the frames to another one; everything else may be called by any.

    Args:
        settings: of the run; how long a source may stall, and what decodes video.
        counts: of the frames of each source.

    Attributes:
        tell: hears of sources, from any thread.
        admits: is asked before a source comes, with the frames a second of all sources then; returns why that would be
            too many, empty where it is not.
        late_age_s: of each source, as in `LiveSource`; None for its own.
        written: results that were counted, of all sources.
        fps: None, since nothing is known of sources to come.
    """

    def __init__(self, settings: Settings, counts: FrameCounts) -> None:
        self.tell: Tell = lambda *_: None
        self.admits: Callable[[float], str] = lambda _: ""
        self.late_age_s: Callable[[], float] | None = None
        self._refused: Mapping[str, tuple[SourceSetting, str]] = {}  # and why
        self._too_much: tuple[float, float] | None = None  # frames a second, and until when they count as too many
        self.written = 0
        self.fps: float | None = None
        self._settings, self._counts = settings, counts
        self._set = LiveSet(over=self._over)
        self._changed = threading.Condition()  # over the counts of frames, where one changes of a source that went
        self._closing = False
        self._kept: Mapping[str, _RunningSource] = {}  # exchanged as a whole
        self._gone: Mapping[str, _RunningSource] = {}
        self._closers: list[threading.Thread] = []
        self._awaited_s = 0.0

    @property
    def name(self) -> str:
        """The names of all of them, for people."""
        return ", ".join(self._kept) or "no source"

    @property
    def frames(self) -> Iterator[Frame]:
        """The frames of all of them as they come, until `close`."""
        return iter(self._set)

    def change(self, settings: Settings) -> str:
        """Have the sources of these settings from now on, and return a sentence about the change.

        A source that stays keeps its reader and its frames; one with another spec under the same key is another one.
        Those that go give no frame any more. `admits` decides on each source that comes, in the order of the
        settings. A thread of the source opens it if `admits` allows it.
        """
        wanted = {one.key: one for one in wanted_sources(settings)}
        kept = dict(self._kept)
        goes = [key for key, one in kept.items() if key not in wanted or wanted[key].spec != one.wanted.spec]
        comes = [key for key in wanted if key not in kept or key in goes]
        self._kept = {key: one for key, one in kept.items() if key not in goes}
        if comes and not any(not one.ended for one in self._kept.values()):
            self._awaited_s = time.perf_counter()
        for key in goes:
            self._go(kept[key])
        for key, one in self._kept.items():
            if wanted[key].policy != one.policy:
                one.policy = wanted[key].policy
                one.source.set_policy(one.policy)
        rate_fps = sum(one.policy.fps or 0.0 for one in self._kept.values())
        begun: dict[str, _RunningSource] = {}
        refused: dict[str, tuple[SourceSetting, str]] = {}
        for one_wanted in (wanted[key] for key in comes):
            then_fps = rate_fps + (one_wanted.policy.fps or 0.0)
            if reason := self._why_not(then_fps):
                refused[one_wanted.key] = one_wanted, reason
            else:
                rate_fps, begun[one_wanted.key] = then_fps, self._begun(one_wanted)
        self._kept = {**self._kept, **begun}
        told, self._refused = self._refused, refused
        for key, (one_wanted, reason) in refused.items():
            if key not in told:
                self.tell("source-refused", f"{key}: {reason}", one_wanted.name, one_wanted.tag, 0.0)
        for one in begun.values():
            self._set.add(one.source)
        without = f", {len(refused)} are refused" if refused else ""
        return f"sources: {len(begun)} come, {len(goes)} go, {len(wanted) - len(comes)} stay{without}"

    def _why_not(self, rate_fps: float) -> str:
        if self._too_much and rate_fps >= self._too_much[0]:
            return f"it is not taken, since frames were late at {self._too_much[0]:.4g} a second"
        return self.admits(rate_fps)

    def shed(self, reason: str) -> None:
        """Let the source go that came last, since frames are late; another one comes only at a lower rate."""
        key, one = list(self._kept.items())[-1]
        rate_fps = sum(kept.policy.fps or 0.0 for kept in self._kept.values())
        self._too_much = rate_fps, time.monotonic() + RETRY_S
        self._kept = {name: kept for name, kept in self._kept.items() if name != key}
        self._go(one)
        why = f"it is let go, since {reason} at {rate_fps:.4g} a second"
        self._refused = {**self._refused, key: (one.wanted, why)}
        self.tell("source-refused", f"{key}: {why}", one.wanted.name, one.wanted.tag, 0.0)

    @property
    def retries(self) -> bool:
        """Whether it is time to try sources again that were refused."""
        if self._too_much is None or time.monotonic() < self._too_much[1]:
            return False
        self._too_much = None
        return bool(self._refused)

    def count(self, source: str, index: int) -> None:
        """Count a frame, of the source with that tag or name, whose result came out and is written."""
        with self._changed:
            now, gone = self._kept.get(source), self._gone.get(source)
            # Under one tag another source may have come meanwhile, which counts on from there.
            one = gone if gone and (now is None or index < now.first) else now
            counts, every = (one.counts, one.policy.every) if one else (self._counts.of("", source), 1)
            counts[:] = max(int(counts[0]), index + every), counts[1] + 1
            self.written += 1
            if one:
                one.written += 1
            if gone:
                self._changed.notify_all()

    def statistics(self) -> dict[str, LiveStatistics]:
        """Return what became of the frames of each source, by its tag or name."""
        return {key: one.source.statistics() for key, one in self._kept.items()}

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return `statistics` as plain data, with the name of each source."""
        return {key: {"source": one.wanted.name, **asdict(one.source.statistics())} for key, one in self._kept.items()}

    def status(self) -> dict[str, dict[str, Any]]:
        """Return for each source whether it is open, why not, and its counts; also for those that went lately."""
        now_s = time.monotonic()
        fresh = {key: one for key, one in self._gone.items() if now_s - (one.gone_s or 0.0) < GONE_S}
        for key in self._gone.keys() - fresh.keys() - self._kept.keys():
            self._counts.forget("", key)
            self._gone[key].counts = np.array(self._gone[key].counts)  # not mapped: the file is closed now
        self._gone = fresh
        refused = {key: _refused(wanted, reason) for key, (wanted, reason) in self._refused.items()}
        return {key: one.status() for key, one in (fresh | dict(self._kept)).items()} | refused

    def damaged(self) -> int:
        """Return how many pieces of the sources could not be decoded."""
        return sum(one.source.counts().damaged for one in self._kept.values())

    @property
    def awaited_s(self) -> float:
        """The clock time (`time.perf_counter`) before which no frame was to be expected; now, without a source."""
        return self._awaited_s if any(not one.ended for one in self._kept.values()) else time.perf_counter()

    def place(self, device: Device) -> None:
        """Do nothing: the work around the model is in no plan, so that no device reads."""

    def close(self) -> None:
        """End the frames and all sources; one that hangs is left behind."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._set.close()
        kept, self._kept = self._kept, {}
        for one in kept.values():
            self._go(one)
        until_s = time.monotonic() + CLOSE_S
        for closer in self._closers:
            closer.join(max(0.0, until_s - time.monotonic()))

    def _begun(self, wanted: SourceSetting) -> _RunningSource:
        """Return a source that is being opened; one that can be opened once only, after it was closed."""
        counts = self._counts.of("", wanted.key, wanted.policy.every)
        one = _RunningSource(wanted, counts, int(counts[0]), wanted.policy)
        exclusive = source_kind(wanted.spec).exclusive
        before = [gone.shut for gone in self._gone.values() if exclusive and gone.wanted.spec == wanted.spec]

        def wait() -> None:
            for shut in before:
                shut.wait()

        one.source = read_ahead(
            wanted.spec,
            wanted.tag,
            wanted.policy,
            one.first,
            self._settings.stall,
            self._settings.hardware_decoding,
            before=wait,
            paced=wanted.paced,
            patient=True,
            hear=partial(self._hear, one),
        )
        if self.late_age_s:
            one.source.late_age_s = self.late_age_s
        return one

    def _go(self, one: _RunningSource) -> None:
        """Take no more frames of a source, and close it in a thread of its own."""
        self._set.remove(one.source)
        one.gone_s = time.monotonic()
        if not self._closing:  # where it comes again in this run, no index may come twice
            with self._changed:
                one.counts[0] = max(int(one.counts[0]), one.source.next_index)
        self._gone = {**self._gone, one.wanted.key: one}
        closer = threading.Thread(target=self._closed, args=(one,), name=f"closes {one.wanted.key}", daemon=True)
        self._closers = [*(thread for thread in self._closers if thread.is_alive()), closer]
        closer.start()

    def _closed(self, one: _RunningSource) -> None:
        one.source.close()
        one.shut.set()
        with self._changed:
            self._changed.wait_for(lambda: self._closing or not one.inside, INSIDE_S)
        one.closed = True
        counted = one.source.counts()
        dropped = ", ".join(f"{frames} {reason}" for reason, frames in counted.dropped.items()) or "none"
        self._tell(one, "source-closed", f"{counted.read} frames read, {one.written} results, dropped {dropped}")

    def _over(self, source: LiveSource) -> None:
        """Take note that a source ended, after its last frame."""
        for one in self._kept.values():
            if one.source is source:
                one.ended = True
                self._tell(one, "source-ended", str(source.failure or "it has no more frames"))

    def _hear(self, one: _RunningSource, kind: str, problem: str, seconds: float) -> None:
        if one.gone_s is not None:
            return
        if kind == "opened":
            one.said = ""
            self._tell(one, "source-opened", f"opened in {seconds:.2g} s", seconds)
        elif problem != one.said:  # one that is away for a week says so once
            one.said = problem
            self._tell(one, "source-failed", problem)

    def _tell(self, one: _RunningSource, kind: str, reason: str, seconds: float = 0.0) -> None:
        named = reason if one.wanted.key in reason else f"{one.wanted.key}: {reason}"
        self.tell(kind, named, one.wanted.name, one.wanted.tag, seconds)


def _refused(wanted: SourceSetting, reason: str) -> dict[str, Any]:
    """Return the status of a source that was not admitted."""
    nothing = {"opened": False, "ended": False, "frames": 0, "dropped": {}, "reconnects": 0}
    return {"source": wanted.name, "problem": reason, "refused": True, **nothing}
