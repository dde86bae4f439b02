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
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from tvm_pipeline.backends.contract import StageRunner
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.runtime.slots import Binding, Slot

_log = logging.getLogger(__name__)

# What travels between threads: a slot, or None for "nothing more comes". No slot ever follows a None.
SlotQueue: TypeAlias = "SimpleQueue[Slot | None]"


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
        failure: stage, device, frame and error of the earliest frame that failed.
        end: frames from this one on are dropped.
        lock: over the others, where more than one thread writes them.
    """

    def __init__(self, entrance: SlotQueue, free: SlotQueue) -> None:
        self.name = "new"
        self.failure: tuple[int, str, int, BaseException] | None = None
        self.end: float = math.inf
        self.lock = threading.Lock()
        self._entrance, self._free = entrance, free

    def drops(self, frame: int) -> bool:
        return frame >= self.end

    def fail(self, stage: int, device: str, frame: int, error: BaseException) -> None:
        """Take note of a failure; the earliest frame that failed is what the caller hears of."""
        with self.lock:
            if self.name == "stopped":
                return
            if self.failure is None or frame < self.failure[2]:
                self.failure = (stage, device, frame, error)
                self.end = min(self.end, frame)
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


class Worker:
    """Runs frames until the end of the stream, and closes its stage.

    A failure is reported and the worker goes on, because frames that are to come out may still be behind: which
    frames are dropped is for the pipeline to say.
    """

    def __init__(
        self,
        runner: StageRunner,
        bindings: Sequence[Binding],
        gate: StageGate,
        record: StageRecord,
        stream: StreamState,
        bound: Callable[[], object],
        after: Sequence[threading.Event],
    ) -> None:
        self.record = record
        self._runner, self._bindings, self._gate = runner, bindings, gate
        self._stream, self._bound = stream, bound
        self.frame = -1
        self._since_s: float | None = None
        self.abandoned = False
        self.done = threading.Event()
        self._after = list(after)

    def busy_s(self) -> float:
        """Return seconds since it began with the frame it is at; 0 where it is at none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.perf_counter() - since_s

    def abandon(self) -> None:
        """Give it up where it hangs: nothing that it does counts any more, and its stage ends without it."""
        self.abandoned = True
        self._gate.close()
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
            self._stream.fail(self.record.stage, self.record.device, -1, error)
        self._bound()
        take, give = self._gate.source.get, self._gate.target.put
        idle_since = time.perf_counter()
        while (slot := take()) is not None:
            if self._stream.drops(slot.frame):
                continue
            while self._after:  # a frame that took a core from those before it would hold up both
                self._after.pop().wait()
            try:
                idle_since = self._process(slot, idle_since)
            except BaseException as error:
                if self.abandoned:  # its stage ended without it
                    return
                self._stream.fail(self.record.stage, self.record.device, slot.frame, error)
            else:
                if self.abandoned:
                    return
                give(slot)
            finally:
                self._since_s = None
        self._gate.close()

    def _process(self, slot: Slot, idle_since: float) -> float:
        """Run the stage on a slot, record how long each part took, and return when it was done."""
        clock = time.perf_counter
        self.frame, self._since_s = slot.frame, (began := clock())
        binding = self._bindings[slot.number]
        for conversion in binding.receive:
            conversion.receive()
        received = clock()
        self._runner.run(binding.inputs, binding.outputs)
        computed = clock()
        for conversion in binding.send:
            conversion.send()
        slot.done_s = sent = clock()
        transfer_s = received - began + sent - computed
        self.record.add(began - idle_since, transfer_s, computed - received, slot.frame, sent)
        return sent
