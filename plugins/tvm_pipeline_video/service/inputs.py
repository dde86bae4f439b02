"""The sources of a run: which of them are read ahead, where each begins, and which frames are done.

Read next: changing_inputs.py (sources that come and go), progress.py (the counts of frames that outlive a run),
live_source.py (reading ahead).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

from tvm_pipeline import Device
from tvm_pipeline.addresses import shown
from tvm_pipeline_video.service.progress import Counts
from tvm_pipeline_video.service.video_extra import (
    Frame,
    LiveSource,
    LiveStatistics,
    Policy,
    Source,
    merge,
    open_source,
    parse_policy,
    source_kind,
)

DECODING_FPS = 10.0  # slower than any file is decoded, to know how long skipping frames may take


class HeldFrames(Iterator[Frame]):
    """The frames of a file, which can be held back for a while.

    Attributes:
        given: how many were given.
        left: how many are still to come, as far as the file says; infinite where it does not.
        awaited_s: as in `ModelSources`.
    """

    def __init__(self, frames: Iterable[Frame], length: int | None) -> None:
        self._frames, self._length = iter(frames), length
        self._changed, self._is_held, self._released_s = threading.Condition(), False, 0.0
        self.given = 0

    @property
    def left(self) -> float:
        return math.inf if self._length is None else self._length - self.given

    @property
    def awaited_s(self) -> float:
        return time.perf_counter() if self._is_held else self._released_s

    def __next__(self) -> Frame:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held)
            frame = next(self._frames)
            self.given += 1
            return frame

    @contextmanager
    def held(self) -> Iterator[None]:
        """Give no frame while the block lasts."""
        self._is_held = True
        try:
            with self._changed:
                pass  # now the frame that was being read is given
            yield
        finally:
            with self._changed:
                self._is_held, self._released_s = False, time.perf_counter()
                self._changed.notify()


@dataclass(frozen=True, slots=True)
class ModelSources:
    """The sources of one model: one as it is, or several that are read ahead.

    Attributes:
        name: of all of them, for people.
        frames: of all of them, as they come.
        damaged: counts the pieces that could not be decoded.
        live: those that are read ahead.
        counts: for each source, the frame to go on at and how many results came out.
        every: for each source, only each frame that this number divides is taken.

    The keys of sources are their tags, or their names where they have none.
    """

    name: str
    fps: float | None
    frames: Iterable[Frame]
    damaged: Callable[[], int]
    counts: Mapping[str, Counts]
    live: tuple[LiveSource, ...] = ()
    every: Mapping[str, int] = field(default_factory=dict)

    @property
    def file(self) -> HeldFrames | None:
        """The frames, where they are those of one file and can be held back."""
        return self.frames if isinstance(self.frames, HeldFrames) else None

    def statistics(self) -> dict[str, LiveStatistics]:
        """Return what became of the frames of each source that is read ahead."""
        return {source.tag or source.name: source.statistics() for source in self.live}

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return `statistics` as plain data, with the name of each source."""
        return {s.tag or s.name: {"source": s.name, **asdict(s.statistics())} for s in self.live}

    @property
    def awaited_s(self) -> float:
        """Return the clock time (`time.perf_counter`) before which no frame was to be expected; 0 for any."""
        return self.file.awaited_s if self.file else 0.0

    def close(self) -> None:
        """End those that are read ahead, which might wait long for a frame."""
        for source in self.live:
            source.close()

    def place(self, device: Device) -> None:
        """Let the threads that read ahead run on the cores of a device."""
        for source in self.live:
            source.place(device.cores)

    def count(self, source: str, index: int) -> None:
        """Count a frame of a source whose result came out and is written."""
        counts = self.counts[source]
        counts[:] = index + self.every.get(source, 1), counts[1] + 1


def is_live(spec: str) -> bool:
    """Return whether a source films by itself, so that a frame that waits grows old."""
    return source_kind(spec).live


@contextmanager
def opened_sources(
    specs: Sequence[str],
    tags: Sequence[str],
    policies: Sequence[str | None],
    stall_s: float,
    limit: int | None,
    counts_of: Callable[[str, int], Counts],
    hardware: str = "off",
) -> Iterator[ModelSources]:
    """Open the sources of one model, each where it is to go on.

    A source is read ahead where it has a policy or a tag, is live or is one of several; else it is read as frames are
    needed.

    Args:
        specs: what `video.open_source` takes.
        tags: a text for each source, empty for none.
        policies: for each source, what `video.parse_policy` takes, or None.
        stall_s: seconds without a frame after which a source that is read ahead counts as broken.
        limit: how many results are wanted, over all runs.
        counts_of: gives the counts of a source, by its tag or name, of which each so many-th frame is taken.
        hardware: what decodes video, as `video.open_source` takes it.
    """
    if len(specs) == 1 and policies[0] is None and not tags[0] and not is_live(specs[0]):
        with open_source(specs[0], hardware=hardware) as only:
            counts = counts_of(only.name, 1)
            _skip(only, int(counts[0]))
            left = _left(limit, [counts])
            known = (left, None if only.frames is None else only.frames - int(counts[0]))
            length = min((frames for frames in known if frames is not None), default=None)
            file = HeldFrames(islice(only, left), length)
            yield ModelSources(only.name, only.fps, file, lambda: only.damaged, {only.name: counts})
        return
    live: list[LiveSource] = []
    counted: dict[str, Counts] = {}
    every: dict[str, int] = {}
    with ExitStack() as stack:
        for spec, tag, text in zip(specs, tags, policies, strict=True):
            policy = source_policy(spec, text)
            key = tag or shown(spec)
            counted[key], every[key] = counts_of(key, policy.every), policy.every
            live.append(stack.enter_context(read_ahead(spec, tag, policy, int(counted[key][0]), stall_s, hardware)))
        yield ModelSources(
            ", ".join(source.name for source in live),
            live[0].fps,
            islice(merge(live), _left(limit, counted.values())),
            lambda: sum(source.statistics().damaged for source in live),
            counted,
            tuple(live),
            every,
        )


def taken_fps(first_fps: float, specs: Sequence[str], policies: Sequence[str | None]) -> float:
    """Return the frames a second that cameras give together by their policies, if each films as fast as the first."""
    kept = [source_policy(spec, text) for spec, text in zip(specs, policies, strict=True) if is_live(spec)]
    return sum(min(first_fps, policy.fps or first_fps) / policy.every for policy in kept)


def source_policy(spec: str, text: str | None) -> Policy:
    """Return the policy of a source that is read ahead, as it is given or is usual."""
    return parse_policy(text or ("latest" if is_live(spec) else "block"))


def read_ahead(
    spec: str,
    tag: str,
    policy: Policy,
    first: int,
    stall_s: float,
    hardware: str,
    *,
    before: Callable[[], object] = lambda: None,
    **options: Any,
) -> LiveSource:
    """Return a source that is read ahead from its frame `first` on; a live one begins anew and counts from there.

    Args:
        stall_s: seconds without a frame after which it counts as broken.
        before: is called in the thread that opens it, before it is opened.
        options: of `LiveSource`.
    """

    def opened(_: str) -> Source:
        before()
        source = open_source(spec, timeout_s=0.8 * stall_s, hardware=hardware)
        _skip(source, first)
        return source

    patience_s = stall_s if is_live(spec) else stall_s + first / DECODING_FPS
    return LiveSource(spec, policy, open=opened, stall_s=patience_s, first_index=first, tag=tag, **options)


def _left(limit: int | None, counts: Iterable[Counts]) -> int | None:
    return None if limit is None else max(0, limit - sum(int(count[1]) for count in counts))


def _skip(source: Source, frames: int) -> None:
    """Leave out the first frames of a source that begins again; a live one does not."""
    if not source.live:
        for _ in islice(source, frames):
            pass
