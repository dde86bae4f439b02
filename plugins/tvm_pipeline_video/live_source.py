"""Live sources: cameras and streams that stall, break off and come back, and several of them at once.

    with LiveSource("rtsp://gate/1", parse_policy("latest")) as gate, LiveSource("camera:0") as hall:
        for frame in merge([gate, hall]):
            ...  # a Frame that knows its source and its age

A LiveSource has two threads. The reader opens the source and puts its frames into a queue, which the policy keeps
short. The keeper waits until the reader ends, or has given no frame for too long. A driver that hangs cannot be
interrupted, so the keeper leaves such a reader behind and starts a new one. All times are monotonic.
Read next: live_sets.py (several sources), policies.py (which frames are dropped), kinds.py (how a source is opened),
analysis.py (how frames go through a pipeline).
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
from av.error import FFmpegError

from tvm_pipeline.addresses import shown
from tvm_pipeline.core.statistics import WINDOW
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.kinds import open_source
from tvm_pipeline_video.live_sets import merge
from tvm_pipeline_video.policies import BLOCK, RECONNECT, Policy, Reconnect
from tvm_pipeline_video.sources import Frame, LiveFrame, Source

MOST_WAITING = 8  # frames in a queue: some 50 MB of full HD
MOST_HANGING = 3  # readers left behind that still hang; over weeks there would be ever more
SILENT = 0.8  # of a stall: an address is given up earlier, so that its last data are still decoded
OPENING = 3  # stalls: to connect, to learn what is sent, and the first frame
CLOSE_S = 1.0  # how long closing waits for a thread
ROUNDING_S = 1e-6  # of the times of frames

_log = logging.getLogger(__name__)
_BREAKS = (VideoError, FFmpegError, OSError)  # anything else would fail again in the same way

# Hears that a source was `opened`, after how many seconds, or `failed`: it did not open or broke, and why.
Hear = Callable[[str, str, float], None]


@dataclass(frozen=True, slots=True)
class LiveStatistics:
    """The counts of a source's frames: read = delivered + waiting + all that were dropped.

    Attributes:
        dropped: by reason. `every`, `latest`, `max-age` and `fps` are the policy's; `late`: the frame could not be
            in time any more; `full`: with a max-age, the queue was full; `closed`: it waited when the source was
            closed, or came after it was given up.
        fps, age_p50_s, age_p99_s: rate of the frames delivered lately, and their age then; None before two frames.
        reconnects: how often it was opened again, successfully or not.
        damaged: as in Source, over all connections.
        problem: why no frames come now; empty where they do.
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
    problem: str = ""


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
        tag: a text that its frames carry.
        paced: read a source that does not film by itself at its own times by the clock, as if it did.
        patient: return before the source is open, and open one that does not open again and again, as one that broke.
        hear: hears when it was opened and why it fails, which is logged otherwise; it is called from other threads.

    Attributes:
        name, fps: as in Source, of the first connection.
        opened: whether it is open now.
        late_age_s: the age from which a frame of a source that films by itself is too old to be in time.
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
        tag: str = "",
        paced: bool = False,
        patient: bool = False,
        hear: Hear | None = None,
    ) -> None:
        self.name = shown(spec)
        if not 0 < stall_s < float("inf"):
            raise OptionError(f"stall_s is {stall_s} for source {self.name}; give seconds above 0")
        self.tag = tag
        self.fps: float | None = None
        self.failure: Exception | None = None
        self._problem, self.opened = "", False
        self.late_age_s: Callable[[], float] = lambda: math.inf
        self._policy, self._reconnect, self._stall_s = policy, reconnect, stall_s
        self._first_index = self.next_index = first_index
        self._paced, self._hear = paced, hear
        self._open_spec = partial(open or partial(open_source, timeout_s=SILENT * stall_s), spec)
        self._changed = threading.Condition()  # over what follows, where more than one thread writes it
        self._waiting: deque[LiveFrame] = deque()
        self._read = self._delivered = self._reconnects = self._damaged = 0
        self._dropped: Counter[str] = Counter()
        self._deliveries: deque[tuple[float, float]] = deque(maxlen=WINDOW)  # when, and the age then
        self._started_s: float | None = None
        self._time_s = self._offset_s = 0.0
        self._thins_since_s: float | None = None  # since when `fps` lets no frame pass, though some come
        self._due_s = -math.inf  # the source's time from which the policy's `fps` lets a frame pass
        self._live = self._was_opened = self._finished = False
        self._listener: Callable[[], None] = lambda: None
        self._cores: tuple[int, ...] = ()
        self._closing = threading.Event()
        self._hanging: list[SourceReader] = []
        self._reader = reader = SourceReader(self.name, self._open, self._note_open, self._receive)
        reader.start()
        if not patient:
            if not reader.ready.wait(OPENING * stall_s):
                raise self._given_up(reader)
            if reader.source is None and reader.failure is not None:
                raise reader.failure
        self._keeper = threading.Thread(target=self._keep, name=f"keeper of {self.name}", daemon=True)
        self._keeper.start()

    def __iter__(self) -> Iterator[LiveFrame]:
        return merge([self])

    @property
    def problem(self) -> str:
        """Why it gives no frames; empty where it does."""
        with self._changed:
            since_s, fps = self._thins_since_s, self._policy.fps
            if not self.opened or not fps or since_s is None or time.monotonic() - since_s < self._stall_s + 1 / fps:
                return self._problem
            return (
                f"{self.name} sends frames, and fps={fps:g} has let none pass for {self._stall_s:g} s, since the times "
                "of the frames hardly grow; set the clock of the camera right, or give a policy without fps"
            )

    def counts(self) -> LiveStatistics:
        """Return the counts of frames until now, without rate and ages."""
        with self._changed:
            return LiveStatistics(
                read=self._read,
                delivered=self._delivered,
                waiting=len(self._waiting),
                dropped=dict(+self._dropped),
                reconnects=self._reconnects,
                damaged=self._damaged + (self._reader.source.damaged if self._reader.source else 0),
                problem=self.problem,
            )

    def statistics(self) -> LiveStatistics:
        """Return the counts of frames until now, with their rate and ages."""
        with self._changed:
            deliveries = list(self._deliveries)
            counted = self.counts()
        if len(deliveries) < 2 or deliveries[0][0] == deliveries[-1][0]:
            return counted
        when, ages = np.fromiter(chain.from_iterable(deliveries), float).reshape(-1, 2).T
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
            self.next_index = frame.index + 1
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

    def set_policy(self, policy: Policy) -> None:
        """Drop frames by another policy from now on."""
        with self._changed:
            self._policy, self._due_s, self._thins_since_s = policy, -math.inf, None

    def place(self, cores: Sequence[int]) -> None:
        """Let the threads that read run on these cores alone, from now on."""
        with self._changed:
            self._cores = tuple(cores)
            self._reader.place(self._cores)

    # The reader's side

    def _note_open(self, reader: SourceReader) -> None:
        with self._changed:
            if reader.abandoned or reader.source is None:
                return
            if not self._was_opened:
                self.fps, self._live = reader.source.fps, reader.source.live
            self._was_opened = self.opened = True
            self._problem, self._thins_since_s = "", None
        if self._hear:
            self._hear("opened", "", time.monotonic() - reader.began_s)

    def _receive(self, reader: SourceReader, frame: Frame, read_s: float) -> bool:
        """Queue a frame as the policy says; return False if the reader has been given up."""
        by_clock = self._live or self._paced
        if by_clock and not self._live:
            self._wait_until_due(reader, frame.time_s)
        captured_s = time.monotonic()
        with self._changed:
            policy = self._policy
            newest = policy.latest or (policy.fps is not None and by_clock)
            capacity = 1 if newest else MOST_WAITING
            started_s = captured_s if self._started_s is None else self._started_s
            # A new connection's clock starts at 0.
            offset_s = self._offset_s if frame.index else max(captured_s - started_s, self._time_s)
            time_s = offset_s + frame.time_s
            thinned = self._thinned(policy, time_s)
            if not thinned and not newest and policy.max_age_s is None:
                self._changed.wait_for(lambda: reader.abandoned or len(self._waiting) < capacity)
            index, self._read = self._first_index + self._read, self._read + 1
            if reader.abandoned:
                self._dropped["closed"] += 1
                return False
            self._started_s, self._offset_s, self._time_s = started_s, offset_s, time_s
            if thinned:
                self._dropped[thinned] += 1
                if thinned == "fps" and self._live and self._thins_since_s is None:
                    self._thins_since_s = captured_s
                return True
            self._thins_since_s = None
            self._drop_old()
            if len(self._waiting) >= capacity:
                self._waiting.popleft()
                self._dropped["latest" if newest else "full"] += 1
            self._waiting.append(
                LiveFrame(index, time_s, frame.image, self.name, captured_s, read_s, self.tag, self._live)
            )
        self._listener()
        return True

    def _wait_until_due(self, reader: SourceReader, time_s: float) -> None:
        """Wait until the clock has come to a time of the source."""
        if reader.clock_s is None:
            reader.clock_s = time.monotonic() - time_s
        self._closing.wait(max(0.0, reader.clock_s + time_s - time.monotonic()))

    def _thinned(self, policy: Policy, time_s: float) -> str:
        """Return why the policy lets the frame of this time go before it waits; empty where it keeps it."""
        if self._read % policy.every:
            return "every"
        if policy.fps is not None:
            if time_s < self._due_s - ROUNDING_S:
                return "fps"
            # Frames that come late do not slow the ones after them down, and those after a gap do not make up for it.
            period_s = 1 / policy.fps
            self._due_s = (time_s if time_s - self._due_s >= period_s else self._due_s) + period_s
        return ""

    def _drop_old(self) -> None:
        limits = {"max-age": self._policy.max_age_s, "late": self.late_age_s() if self._live else None}
        for reason, most_s in limits.items():
            while most_s is not None and self._waiting and self._waiting[0].age_s > most_s:
                self._waiting.popleft()
                self._dropped[reason] += 1
                self._changed.notify_all()  # there is room for the next one

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
        waits: Iterator[float] = self._reconnect.waits() if self._reconnect else iter(())
        while True:
            failure = self._watch(self._reader)
            breaks = failure is None or isinstance(failure, _BREAKS)
            returns = self._live or not self._was_opened
            if self._closing.is_set() or not returns or self._reconnect is None or not breaks:
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
            self._tell_break(str(failure or f"{self.name} ended"), wait_s)
            if self._closing.wait(wait_s) or not self._reopen():
                break
        with self._changed:
            self.failure = None if self._closing.is_set() else failure
            self.opened, self._problem = False, str(self.failure or "")
            self._finished = True
        self._listener()

    def _tell_break(self, problem: str, wait_s: float) -> None:
        with self._changed:
            self.opened, self._problem = False, problem
        if self._hear:
            self._hear("failed", problem, 0.0)
        else:
            _log.warning("%s; opening it again in %g s", problem, wait_s)

    def _watch(self, reader: SourceReader) -> Exception | None:
        """Wait until the reader is over or has given no frame for too long; return the reason, None for a plain end."""
        while not reader.over.is_set():
            owing_since_s = reader.owing_since_s
            left_s = self._limit_s(reader) - (0.0 if owing_since_s is None else time.monotonic() - owing_since_s)
            if left_s <= 0:
                return self._given_up(reader)
            reader.over.wait(left_s)
        return reader.failure

    def _limit_s(self, reader: SourceReader) -> float:
        return self._stall_s * (1 if reader.ready.is_set() else OPENING)

    def _given_up(self, reader: SourceReader) -> VideoError:
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
            self._reader = SourceReader(self.name, self._open, self._note_open, self._receive)
            self._reader.start()
            self._reader.place(self._cores)
        return True


class SourceReader(threading.Thread):
    """One connection, from opening to closing; the only thread that touches its Source.

    Args:
        open: opens the source.
        opened: is called, in this thread, once the source is open.
        receive: takes a frame, with the seconds for which this thread computed to get it; returns whether to go on.

    Attributes:
        source: once it is open.
        failure: why it ended; None where the source ended.
        frames: how many it handed on.
        began_s, clock_s: the monotonic time at which opening began, and of the source's time 0; None before a frame.
        owing_since_s: since when a frame is missing; None while one waits for a place in the queue.
        ready: set once it is open, or failed to open.
        over: set once it has ended, or is not waited for any more.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], Source],
        opened: Callable[[SourceReader], None],
        receive: Callable[[SourceReader, Frame, float], bool],
    ) -> None:
        super().__init__(name=f"reader of {name}", daemon=True)  # a hanging driver must not hold up the exit
        self.source: Source | None = None
        self.failure: Exception | None = None
        self.frames = 0
        self.began_s = time.monotonic()
        self.clock_s: float | None = None
        self.owing_since_s: float | None = self.began_s
        self.ready = threading.Event()
        self.over = threading.Event()
        self.abandoned = False
        self._open, self._opened, self._receive = open, opened, receive

    def place(self, cores: Sequence[int]) -> None:
        """Run on these cores alone; on any where there are none."""
        if cores and self.native_id is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(self.native_id, cores)

    def run(self) -> None:
        try:
            with self._open() as self.source:
                self._opened(self)
                self.ready.set()
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
            self.ready.set()
            self.over.set()
