"""Live sources: cameras and streams that stall, break off and come back, and several of them at once.

    with LiveSource("rtsp://gate/1", parse_policy("latest")) as gate, LiveSource("camera:0") as hall:
        for frame in merge([gate, hall]):
            ...  # a Frame that knows its source and its age

A LiveSource has two threads. The reader opens the source and puts its frames into a queue, which the policy keeps
short. The keeper waits until the reader ends, or has given no frame for too long. A driver that hangs cannot be
interrupted, so the keeper leaves such a reader behind and starts a new one. All times are monotonic.
Read next: policies.py (which frames are dropped), kinds.py (how a source is opened), analysis.py (how frames go through
a pipeline).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from av.error import FFmpegError

from tvm_pipeline.core.statistics import WINDOW
from tvm_pipeline.errors import OptionError, RunError, VideoError
from tvm_pipeline.video.decoding import without_password
from tvm_pipeline.video.kinds import open_source
from tvm_pipeline.video.policies import BLOCK, RECONNECT, Policy, Reconnect
from tvm_pipeline.video.sources import Frame, Source

MOST_WAITING = 8  # frames in a queue: some 50 MB of full HD
MOST_HANGING = 3  # readers left behind that still hang; over weeks there would be ever more
SILENT = 0.8  # of a stall: an address is given up earlier, so that its last data are still decoded
OPENING = 3  # stalls: to connect, to learn what is sent, and the first frame
CLOSE_S = 1.0  # how long closing waits for a thread

_log = logging.getLogger(__name__)
_BREAKS = (VideoError, FFmpegError, OSError)  # anything else would fail again in the same way


@dataclass(frozen=True, slots=True, eq=False)
class LiveFrame(Frame):
    """A frame of a LiveSource. `index` and `time_s` go on over reconnections; a dropped frame leaves a gap.

    Attributes:
        captured_s: the monotonic time at which it was decoded: no program can see for how long a camera or a network
            held it back before.
        read_s: seconds for which the reader's thread computed to get it.
    """

    captured_s: float
    read_s: float = 0.0

    @property
    def age_s(self) -> float:
        """Seconds since it was decoded."""
        return time.monotonic() - self.captured_s


@dataclass(frozen=True, slots=True)
class LiveStatistics:
    """The counts of a source's frames: read = delivered + waiting + all that were dropped.

    Attributes:
        dropped: by reason. `every`, `latest` and `max-age` are the policy's; `full`: with a max-age, the queue
            was full; `closed`: the frame waited when the source was closed, or came after it was given up.
        fps, age_p50_s, age_p99_s: rate of the frames delivered lately, and their age then; None before two frames.
        reconnects: how often it was opened again, successfully or not.
        damaged: as in Source, over all connections.
    """

    read: int
    delivered: int
    waiting: int
    dropped: Mapping[str, int]
    reconnects: int
    damaged: int
    fps: float | None = None
    age_p50_s: float | None = None
    age_p99_s: float | None = None


class LiveSource:
    """A source that is read ahead in a thread, and opened again if it is live and breaks.

    Iterate over it, or over several by `merge`, in one thread. A file ends where it ends. A live source
    (`Source.live`) that stalls, breaks or ends is closed and opened again; each attempt is logged and counted.

    Args:
        spec: what `open_source` takes.
        policy: which frames are dropped.
        open: opens the spec, without a limit; `open_source` unless given.
        reconnect: the back-off, None to open it only once.
        stall_s: the longest wait for a frame; opening may take three times as long.
        first_index: the index of the first frame, where an earlier run gave those before it.

    Attributes:
        name, fps: as in Source, of the first connection.
        failure: why it ended; None while it runs, and if it ended well.

    Raises:
        OptionError: the spec or an option is out of range.
        VideoError: the source cannot be opened, or does not answer.
    """

    def __init__(
        self,
        spec: str,
        policy: Policy = BLOCK,
        *,
        open: Callable[[str], Source] | None = None,
        reconnect: Reconnect | None = RECONNECT,
        stall_s: float = 10.0,
        first_index: int = 0,
    ) -> None:
        self.name = without_password(spec)
        if not 0 < stall_s < float("inf"):
            raise OptionError(f"stall_s is {stall_s} for source {self.name}; give seconds above 0")
        self.failure: Exception | None = None
        self._policy, self._reconnect, self._stall_s = policy, reconnect, stall_s
        self._first_index = first_index
        self._open_spec = partial(open or partial(open_source, timeout_s=SILENT * stall_s), spec)
        self._changed = threading.Condition()  # over what follows, where more than one thread writes it
        self._waiting: deque[LiveFrame] = deque()
        self._read = self._delivered = self._reconnects = self._damaged = 0
        self._dropped: Counter[str] = Counter()
        self._deliveries: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # when, and the age then
        self._started_s: float | None = None
        self._time_s = self._offset_s = 0.0
        self._finished = False
        self._listener: Callable[[], None] = lambda: None
        self._cores: tuple[int, ...] = ()
        self._closing = threading.Event()
        self._hanging: list[_Reader] = []
        self._reader = reader = _Reader(self.name, self._open, self._receive)
        reader.start()
        if not reader.opened.wait(OPENING * stall_s):
            raise self._given_up(reader)
        if reader.source is None and reader.failure is not None:
            raise reader.failure
        self.fps = reader.source.fps if reader.source else None
        self._live = reader.source is not None and reader.source.live
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of {self.name}", daemon=True)
        self._keeper.start()

    def __iter__(self) -> Iterator[LiveFrame]:
        return merge([self])

    def statistics(self) -> LiveStatistics:
        """Return the counts of frames until now."""
        with self._changed:
            deliveries = list(self._deliveries)
            counted = LiveStatistics(
                read=self._read,
                delivered=self._delivered,
                waiting=len(self._waiting),
                dropped=dict(+self._dropped),
                reconnects=self._reconnects,
                damaged=self._damaged + (self._reader.source.damaged if self._reader.source else 0),
            )
        if len(deliveries) < 2 or deliveries[0][0] == deliveries[-1][0]:
            return counted
        when, ages = np.array(deliveries).T
        p50, p99 = (float(q) for q in np.quantile(ages, [0.5, 0.99]))
        return replace(counted, fps=(len(when) - 1) / float(when[-1] - when[0]), age_p50_s=p50, age_p99_s=p99)

    def close(self) -> None:
        """End the threads and the iteration, also from another thread (start one in a signal handler).

        It does not wait long: a reader that hangs in a driver is left behind, and ends with the program.
        """
        if self._closing.is_set():
            return
        with self._changed:
            self._closing.set()
            self._reader.abandoned = True
            self._dropped["closed"] += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        self._reader.over.set()
        self._keeper.join(CLOSE_S)
        if self._reader in self._hanging:  # a message was logged then
            return
        self._reader.join(CLOSE_S)
        if self._reader.is_alive():
            _log.warning("%s does not answer; its reader is left behind", self.name)

    def __enter__(self) -> LiveSource:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def take(self) -> LiveFrame | None:
        """Return the oldest frame that waits and is young enough; None if there is none."""
        with self._changed:
            self._drop_old()
            if not self._waiting:
                return None
            frame = self._waiting.popleft()
            self._delivered += 1
            self._deliveries.append((time.monotonic(), frame.age_s))
            self._changed.notify_all()
            return frame

    @property
    def ended(self) -> bool:
        """Return whether no frame waits and none will come."""
        with self._changed:
            return self._finished and not self._waiting

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from another thread, whenever a frame came or the source ended."""
        self._listener = listener

    def place(self, cores: Sequence[int]) -> None:
        """Let the threads that read run on these cores alone, from now on."""
        with self._changed:
            self._cores = tuple(cores)
            self._reader.place(self._cores)

    # The reader's side

    def _receive(self, reader: _Reader, frame: Frame, read_s: float) -> bool:
        """Queue a frame as the policy says; return False if the reader has been given up."""
        captured_s = time.monotonic()
        policy = self._policy
        capacity = 1 if policy.latest else MOST_WAITING
        with self._changed:
            kept = self._read % policy.every == 0
            if kept and not policy.latest and policy.max_age_s is None:
                self._changed.wait_for(lambda: reader.abandoned or len(self._waiting) < capacity)
            index, self._read = self._first_index + self._read, self._read + 1
            if reader.abandoned:
                self._dropped["closed"] += 1
                return False
            self._started_s = captured_s if self._started_s is None else self._started_s
            if frame.index == 0:  # a new connection, whose clock starts at 0
                self._offset_s = max(captured_s - self._started_s, self._time_s)
            self._time_s = self._offset_s + frame.time_s
            if not kept:
                self._dropped["every"] += 1
                return True
            self._drop_old()
            if len(self._waiting) >= capacity:
                self._waiting.popleft()
                self._dropped["latest" if policy.latest else "full"] += 1
            self._waiting.append(LiveFrame(index, self._time_s, frame.image, self.name, captured_s, read_s))
        self._listener()
        return True

    def _drop_old(self) -> None:
        if self._policy.max_age_s is not None:
            while self._waiting and self._waiting[0].age_s > self._policy.max_age_s:
                self._waiting.popleft()
                self._dropped["max-age"] += 1

    def _open(self) -> Source:
        hanging = sum(reader.is_alive() for reader in self._hanging)
        if hanging >= MOST_HANGING:
            raise VideoError(
                f"{self.name} is not opened again while {hanging} attempts to read it hang; "
                "switch it off and on, or restart the program"
            )
        return self._open_spec()

    # The keeper's side

    def _keep(self) -> None:
        """Keep a reader at work until the source has ended, does not come back, or is closed."""
        waits: Iterator[float] = iter(())
        while True:
            failure = self._watch(self._reader)
            breaks = failure is None or isinstance(failure, _BREAKS)
            if self._closing.is_set() or not self._live or self._reconnect is None or not breaks:
                break
            if self._reader.frames:
                waits = self._reconnect.waits()
            wait_s = next(waits, None)
            if wait_s is None:
                failure = VideoError(
                    f"{self.name} did not come back in {self._reconnect.attempts} attempts; "
                    f"the last: {failure or 'it ended at once'}"
                )
                break
            _log.warning("%s; opening it again in %g s", failure or f"{self.name} ended", wait_s)
            if self._closing.wait(wait_s) or not self._reopen():
                break
        with self._changed:
            self.failure = None if self._closing.is_set() else failure
            self._finished = True
        self._listener()

    def _watch(self, reader: _Reader) -> Exception | None:
        """Wait until the reader is over or has given no frame for too long; return the reason, None for a plain end."""
        while not reader.over.is_set():
            owing_since_s = reader.owing_since_s
            left_s = self._limit_s(reader) - (0.0 if owing_since_s is None else time.monotonic() - owing_since_s)
            if left_s <= 0:
                return self._given_up(reader)
            reader.over.wait(left_s)
        return reader.failure

    def _limit_s(self, reader: _Reader) -> float:
        return self._stall_s * (1 if reader.opened.is_set() else OPENING)

    def _given_up(self, reader: _Reader) -> VideoError:
        with self._changed:
            reader.abandoned = True
        self._hanging = [one for one in self._hanging if one.is_alive()] + [reader]
        return VideoError(
            f"{self.name} gave no frame for {self._limit_s(reader):g} s; check that it is switched on and sends, "
            "and its cable or network; a slow one needs a longer stall_s"
        )

    def _reopen(self) -> bool:
        with self._changed:
            if self._closing.is_set():
                return False
            self._damaged += self._reader.source.damaged if self._reader.source else 0
            self._reconnects += 1
            self._reader = _Reader(self.name, self._open, self._receive)
            self._reader.start()
            self._reader.place(self._cores)
        return True


class _Reader(threading.Thread):
    """One connection, from opening to closing; the only thread that touches its Source."""

    def __init__(self, name: str, open: Callable[[], Source], receive: Callable[[_Reader, Frame, float], bool]) -> None:
        super().__init__(name=f"reader of {name}", daemon=True)  # a hanging driver must not hold up the exit
        self.source: Source | None = None
        self.failure: Exception | None = None
        self.frames = 0
        self.owing_since_s: float | None = time.monotonic()  # None while a frame waits for a place in the queue
        self.opened = threading.Event()  # or failed to
        self.over = threading.Event()  # it has ended, or is not waited for any more
        self.abandoned = False
        self._open, self._receive = open, receive

    def place(self, cores: Sequence[int]) -> None:
        """Run on these cores alone; on any where there are none."""
        if cores and self.native_id is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(self.native_id, cores)

    def run(self) -> None:
        try:
            with self._open() as self.source:
                self.opened.set()
                computed_s = time.thread_time()
                for frame in self.source:
                    self.frames += 1
                    self.owing_since_s = None
                    if not self._receive(self, frame, time.thread_time() - computed_s):
                        break
                    self.owing_since_s = time.monotonic()
                    computed_s = time.thread_time()
        except Exception as error:  # the keeper decides what it means
            self.failure = error
        except BaseException as error:  # would end this thread alone
            self.failure = RunError(
                f"{self.name} was ended by {type(error).__name__}: {error}; mend the kind of source"
            )
        finally:
            self.opened.set()
            self.over.set()


def merge(sources: Sequence[LiveSource]) -> Iterator[LiveFrame]:
    """Yield frames of several sources as they come: of those with a frame waiting, the one served longest ago is next.

    The order within a source holds. A source that breaks for good is logged, keeps the reason in its `failure`, and
    the others go on.

    Raises:
        VideoError: every source broke; the frames before that have been yielded.
    """
    news = threading.Event()
    for source in sources:
        source.listen(news.set)
    turn = list(sources)
    while turn:
        news.clear()  # before looking, so that a frame that comes meanwhile is not missed
        for source in tuple(turn):
            frame = source.take()
            if frame is not None:
                turn.remove(source)
                turn.append(source)
                yield frame
                break
            if source.ended:
                turn.remove(source)
                if source.failure and len(sources) > 1:
                    _log.warning("%s; the other sources go on", source.failure)
        else:
            if turn:
                news.wait()
    failures = [source.failure for source in sources if source.failure]
    if len(failures) == len(sources) == 1:
        raise failures[0]
    if failures and len(failures) == len(sources):
        raise VideoError(f"every source broke: {'; '.join(map(str, failures))}") from failures[0]
