"""The thread of one stage on one device: take a slot, run, hand it on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from tvm_pipeline.backend import StageRunner
from tvm_pipeline.runtime.slots import Binding, Slot
from tvm_pipeline.statistics import StageRecord

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


class Worker(threading.Thread):
    """Runs frames until the end of the stream.

    A failure is reported and the worker goes on, because frames that are to come out may still be behind: which
    frames are dropped is for the pipeline to say.
    """

    def __init__(
        self,
        runner: StageRunner,
        bindings: Sequence[Binding],
        gate: StageGate,
        record: StageRecord,
        bound: Callable[[], object],
        dropped: Callable[[int], bool],
        failed: Callable[[int, str, int, BaseException], None],
    ) -> None:
        super().__init__(name=f"stage {record.stage} on {record.device}", daemon=True)
        self.record = record
        self._runner, self._bindings, self._gate = runner, bindings, gate
        self._bound, self._dropped, self._failed = bound, dropped, failed
        self.frame = -1
        self._since_s: float | None = None
        self.abandoned = False

    def busy_s(self) -> float:
        """Seconds since it began with the frame it is at; 0 where it is at none."""
        since_s = self._since_s
        return 0.0 if since_s is None else time.perf_counter() - since_s

    def abandon(self) -> None:
        """Gives it up where it hangs: nothing that it does counts any more, and its stage ends without it."""
        self.abandoned = True
        self._gate.close()

    def run(self) -> None:
        try:
            self._runner.bind()
        except BaseException as error:  # whatever it is, the caller must hear of it
            self._failed(self.record.stage, self.record.device, -1, error)
        self._bound()
        take, give = self._gate.source.get, self._gate.target.put
        idle_since = time.perf_counter()
        while (slot := take()) is not None:
            if self._dropped(slot.frame):
                continue
            try:
                idle_since = self._process(slot, idle_since)
            except BaseException as error:
                if self.abandoned:  # its stage ended without it
                    return
                self._failed(self.record.stage, self.record.device, slot.frame, error)
            else:
                if self.abandoned:
                    return
                give(slot)
            finally:
                self._since_s = None
        self._gate.close()

    def _process(self, slot: Slot, idle_since: float) -> float:
        """Runs the stage on a slot, writes down what took how long, and returns when it was done."""
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
