"""The thread of one stage on one device: take a slot, run, hand it on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeAlias

from tvm_pipeline.backend import StageRunner
from tvm_pipeline.runtime.slots import Binding, Slot
from tvm_pipeline.runtime.statistics import StageRecord

# What travels between threads: a slot, or None for "nothing more comes".
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
    """Runs frames until the end of the stream; a failure is reported once and ends the pipeline."""

    def __init__(
        self,
        runner: StageRunner,
        bindings: Sequence[Binding],
        gate: StageGate,
        record: StageRecord,
        ready: Callable[[], object],
        halted: Callable[[], bool],
        failed: Callable[[int, str, int, BaseException], None],
    ) -> None:
        super().__init__(name=f"stage {record.stage} on {record.device}", daemon=True)
        self._runner, self._bindings, self._gate, self._record = runner, bindings, gate, record
        self._ready, self._halted, self._failed = ready, halted, failed

    def run(self) -> None:
        frame = -1
        try:
            self._runner.bind()
            self._ready()
            take, give, halted = self._gate.source.get, self._gate.target.put, self._halted
            run, clock, record = self._runner.run, time.perf_counter, self._record.add
            idle_since = clock()
            while (slot := take()) is not None and not halted():
                frame = slot.frame
                began = clock()
                binding = self._bindings[slot.number]
                for conversion in binding.receive:
                    conversion.receive()
                received = clock()
                run(binding.inputs, binding.outputs)
                computed = clock()
                for conversion in binding.send:
                    conversion.send()
                slot.done_s = clock()
                give(slot)
                record(began - idle_since, received - began + slot.done_s - computed, computed - received)
                idle_since = slot.done_s
            self._gate.close()
        except BaseException as error:  # whatever it is, the caller must hear of it
            self._failed(self._record.stage, self._record.device, frame, error)
