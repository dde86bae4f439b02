"""One stage on one device, at work in a thread: it takes a slot, runs, and hands the slot on.

Pipelines that follow each other in a LivePipeline use the same threads again, device by device, because a backend may
never give back what it ties to a thread (TVM keeps the pool of every thread that had one until the process ends).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, TypeAlias

from tvm_pipeline.backends.contract import StageRunner
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.runtime.carried_state import StageState
from tvm_pipeline.runtime.host_work import EndOfStream, HostFunction
from tvm_pipeline.runtime.slots import Binding, Slot

_log = logging.getLogger(__name__)

FOLLOW_S = 0.05  # between two looks at whether the pipeline was stopped, while a worker waits for another one

# What travels between threads: a slot, or None for "nothing more comes". No slot ever follows a None.
SlotQueue: TypeAlias = "SimpleQueue[Slot | None]"


class Failure(NamedTuple):
    """Why a frame failed; the arguments of a StageError."""

    stage: int
    device: str
    frame: int
    error: BaseException
    operator: str = ""


class StageGate:
    """Where the replicas of a stage end: the last to see the end of the stream passes it on."""

    def __init__(self, source: SlotQueue, target: SlotQueue, replicas: int) -> None:
        self.source, self.target = source, target
        self._left = replicas
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        (self.target if last else self.source).put(None)


class StreamState:
    """Where the stream of frames ends, and why: what a pipeline and its workers share.

    The workers do not know the pipeline itself: neither then waits for the garbage collector, with all its buffers.

    Attributes:
        name: new, running, and then drained, stopped or failed.
        failure: the arguments of a StageError for the earliest frame that failed.
        end: frames from this one on are dropped.
        base: the number of frame 0 in the whole run, which other pipelines may have begun.
        lock: over the others, where more than one thread writes them.
    """

    def __init__(self, entrance: SlotQueue, free: SlotQueue) -> None:
        self.name = "new"
        self.failure: Failure | None = None
        self.end: float = math.inf
        self.base = 0
        self.lock = threading.Lock()
        self._entrance, self._free = entrance, free

    def drops(self, frame: int) -> bool:
        return frame >= self.end

    def begin(self, slot: Slot) -> None:
        """Take note that a stage begins with a call, which no frame may join any more."""
        if slot.joinable:
            with self.lock:
                slot.joinable = False

    def finish(self, frame: int) -> None:
        """Take note that no frame was left to be this one: those before it still come out."""
        with self.lock:
            if self.name in ("running", "drained"):
                self.name = "drained"
                self.end = min(self.end, frame)
                self.close_entrance()

    def fail(self, failure: Failure) -> None:
        """Take note of a failure; the earliest frame that failed is what the caller hears of."""
        with self.lock:
            if self.name == "stopped":
                return
            if self.failure is None or failure.frame < self.failure.frame:
                self.failure = failure
                self.end = min(self.end, failure.frame)
            self.name = "failed"
            self.close_entrance()

    def close_entrance(self) -> None:
        """End the stream of frames after those that are in, and wake whoever waits to submit one."""
        self._entrance.put(None)
        self._free.put(None)


class Threads:
    """Threads for stages, each for one device alone; `close` ends them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[StageThread] = set()
        self._idle: defaultdict[str, list[StageThread]] = defaultdict(list)
        self._closed = False

    def start(self, worker: Worker) -> None:
        """Run the worker in a thread that was used for its device before, or in a new one."""
        with self._lock:
            idle = self._idle[worker.record.device]
            thread = idle.pop() if idle else StageThread(self._rest)
            self._all.add(thread)
        thread.begin(worker)

    def close(self) -> None:
        """End the threads, but for those that hang; a worker that still begins takes a new one along."""
        with self._lock:
            self._closed = True
            self._idle.clear()
            threads, self._all = self._all, set()
        for thread in threads:
            thread.end()

    def _rest(self, thread: StageThread, device: str) -> bool:
        """Return whether the thread may be needed again."""
        with self._lock:
            if not self._closed:
                self._idle[device].append(thread)
            return not self._closed


class StageThread(threading.Thread):
    """Runs one worker after the other; `worker` is the one it is at."""

    def __init__(self, rest: Callable[[StageThread, str], bool]) -> None:
        super().__init__(daemon=True)
        self.worker: Worker | None = None
        self._rest = rest
        self._work: SimpleQueue[Worker | None] = SimpleQueue()

    def begin(self, worker: Worker) -> None:
        self.name = f"stage {worker.record.stage} on {worker.record.device}"
        self.worker = worker
        self._work.put(worker)
        if self.ident is None:
            self.start()

    def end(self) -> None:
        self._work.put(None)
        worker = self.worker
        if worker is None or not worker.abandoned:
            self.join()

    def run(self) -> None:
        while (worker := self._work.get()) is not None:
            worker.run()
            device, worker, self.worker = worker.record.device, None, None
            if not self._rest(self, device):
                return


class ComputingTurn:
    """The turns of one of the two workers of a stage on a device: it takes a frame, copies it there, and computes it.

    A worker takes a frame once the other one computes: until then the frame is free for another replica. The times are
    those of the last turn to compute: asked for, begun and ended.

    Args:
        door: of the stage on this device; a worker passes it with a frame, and holds it until it computes.
        computing: of the device.
    """

    def __init__(self, door: threading.Lock, computing: threading.Lock) -> None:
        self._door, self._computing = door, computing
        self._at_door = threading.Semaphore(0)
        self.asked_s = self.began_s = self.ended_s = 0.0

    def enter_door(self) -> None:
        """Wait until the frame before is computed, or was given up."""
        self.leave_door()
        self._door.acquire()
        self._at_door.release()

    def leave_door(self) -> None:
        """Let the other worker take a frame; any thread may call it, also where this worker is not at the door."""
        if self._at_door.acquire(blocking=False):
            self._door.release()

    def __enter__(self) -> None:
        self.asked_s = time.perf_counter()
        self._computing.acquire()
        self.began_s = time.perf_counter()
        self.leave_door()

    def __exit__(self, *_: object) -> None:
        self.ended_s = time.perf_counter()
        self._computing.release()


class Worker:
    """Runs frames until the end of the stream, and closes its stage.

    A failure is reported and the worker goes on, because frames that are to come out may still be behind: which
    frames are dropped is for the pipeline to say.

    Args:
        before, after: the host operators of the stage, to run before and after the model's, in turn.
        state: what the loops of the stage hand from frame to frame; None where it holds none.
        waits: the name of a host operator that waits for frames from outside, for as long as that takes.
        follows: events to wait for before the first frame.
        turn: of a device with concurrent copies, which another worker of the stage computes on as well.
    """

    def __init__(
        self,
        runner: StageRunner,
        bindings: Sequence[Binding],
        gate: StageGate,
        record: StageRecord,
        stream: StreamState,
        bound: Callable[[], object],
        follows: Sequence[threading.Event],
        before: Mapping[str, HostFunction],
        after: Mapping[str, HostFunction],
        waits: str,
        state: StageState | None = None,
        turn: ComputingTurn | None = None,
    ) -> None:
        self.record = record
        self._runner, self._bindings, self._gate = runner, bindings, gate
        self._stream, self._bound = stream, bound
        self.frame = -1
        self._since_s: float | None = None
        self.abandoned = self.is_bound = False
        self.done = threading.Event()
        self._follows = list(follows)
        self._before, self._after, self._waits = before, after, waits
        self._state, self._turn = state, turn
        self._ordered = bool(before or after or state)  # also where the stage before has replicas
        self.operator = ""  # the host operator that it is at

    @property
    def waiting(self) -> bool:
        """Whether it waits for a frame from outside."""
        return bool(self.operator) and self.operator == self._waits

    def busy_s(self) -> float:
        """Return seconds since it began with the frame it is at; 0 where it is at none."""
        since_s = self._since_s
        return 0.0 if since_s is None or self.waiting else time.perf_counter() - since_s

    def fail(self, error: BaseException) -> None:
        """Report that the frame it is at failed."""
        self._stream.fail(Failure(self.record.stage, self.record.device, self.frame, error, self.operator))

    def abandon(self) -> None:
        """Give it up where it hangs: nothing that it does counts any more, and its stage ends without it."""
        self.abandoned = True
        self._end()
        self.done.set()
        self.close()  # ends what hangs, where the backend can

    def run(self) -> None:
        """Bind the calling thread and work until the end of the stream."""
        try:
            self._work()
        finally:
            self.close()
            self.done.set()

    def close(self) -> None:
        """Close the stage: its thread does so at the end, and the pipeline where that thread never ran or hangs.

        A stage that cannot be closed is logged: its frames are out, and no other stage may wait for it.
        """
        try:
            self._runner.close()
        except Exception:
            _log.exception("stage %d on %s could not be closed", self.record.stage, self.record.device)

    def _work(self) -> None:
        try:
            self._runner.bind()
        except BaseException as error:  # whatever it is, the caller must hear of it
            self.fail(error)
        if self.done.is_set():  # it was given up, because that took too long
            return
        self.is_bound = True
        self._bound()
        give = self._gate.target.put
        idle_since = time.perf_counter()
        for slot in self._taken():
            self._stream.begin(slot)
            if self._stream.drops(slot.frame):
                continue
            self._follow()  # a frame that took a core from those before it would hold up both
            if not self._receive_state(slot):
                continue
            try:
                idle_since = self._process(slot, idle_since)
            except EndOfStream:
                self._stream.finish(slot.frame)
            except BaseException as error:
                if self.abandoned:  # its stage ended without it
                    return
                self.fail(error)
            else:
                if self.abandoned:
                    return
                give(slot)
            finally:
                self._since_s, self.operator = None, ""
        self._follow()  # whoever waits for this worker waits for those before it, too
        self._end()

    def _end(self) -> None:
        self._gate.close()
        if self._turn:
            self._turn.leave_door()

    def _follow(self) -> None:
        """Wait for the events that come before the first frame, unless no frame will come."""
        while self._follows and self._stream.end > 0:
            if self._follows[-1].wait(FOLLOW_S):
                self._follows.pop()

    def _receive_state(self, slot: Slot) -> bool:
        """Wait for what the frame before leaves, perhaps in another plan; return whether the frame is still wanted."""
        frame = self._stream.base + slot.frame
        return self._state is None or self._state.give(slot, frame, lambda: self._stream.drops(slot.frame))

    def _taken(self) -> Iterator[Slot]:
        """Yield the slots that come, in the order of their frames where that is asked for."""
        take = self._take
        if not self._ordered:
            while (slot := take()) is not None:
                yield slot
            return
        early: dict[int, Slot] = {}
        following = 0
        while (slot := take()) is not None:
            early[slot.call] = slot
            while following in early:
                yield early.pop(following)
                following += 1

    def _take(self) -> Slot | None:
        if self._turn:
            self._turn.enter_door()
        return self._gate.source.get()

    def _process(self, slot: Slot, idle_since: float) -> float:
        """Run the stage on a slot, record how long each part took, and return when it was done."""
        clock = time.perf_counter
        self.frame, self._since_s = slot.frame, (began := clock())
        binding = self._bindings[slot.number]
        waited_s, elsewhere_s = self._run_host(self._before, slot)
        prepared = clock()
        for conversion in binding.receive:
            conversion.receive()
        received = clock()
        self._runner.run(binding.inputs, binding.outputs)
        computed = clock()
        for conversion in binding.send:
            conversion.send()
        if self._state is not None and not self.abandoned:
            self._state.keep(slot, self._stream.base + slot.frame)
        sent = clock()
        self._run_host(self._after, slot)
        slot.done_s = done = clock()
        transfer_s = received - prepared + sent - computed
        if turn := self._turn:
            transfer_s += turn.asked_s - received + computed - turn.ended_s
            waited_s += turn.began_s - turn.asked_s
        compute_s = done - began - transfer_s - waited_s + elsewhere_s
        wait_s = began - idle_since + waited_s - elsewhere_s
        with self._stream.lock if turn else nullcontext():  # two workers share the record
            self.record.add(max(wait_s, 0.0), transfer_s, compute_s, slot.frame, done)
        return done

    def _run_host(self, functions: Mapping[str, HostFunction], slot: Slot) -> tuple[float, float]:
        """Run host operators; return the seconds waited for frames from outside, and spent on them elsewhere.

        Where no frame is left, the call goes on with the frames before.
        """
        waited_s = elsewhere_s = 0.0
        for name, function in functions.items():
            self.operator = name
            for index, tag in enumerate(list(slot.tags)):
                try:
                    entry = function(tag, partial(slot.part, index))
                except EndOfStream:
                    if not index:
                        raise
                    self._stream.finish(slot.frame + index)
                    del slot.tags[index:]
                    break
                if entry is not None:
                    slot.entered_s[index] = entry.entered_s
                    waited_s += entry.waited_s
                    elsewhere_s += entry.elsewhere_s
        self.operator = ""
        return waited_s, elsewhere_s
