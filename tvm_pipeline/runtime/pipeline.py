"""A plan that runs: one thread for each stage and replica, frames in order, once each.

    with Pipeline(compiled, plan, platform) as pipeline:
        for result in pipeline.map(frames):
            ...

`map` feeds from a thread of its own; `submit` and `result` are for callers that have their own loop. Both sides
block when the pipeline is full or empty, with a time limit if wanted. Read `slots.py` first for how the data goes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType

import numpy as np

from tvm_pipeline.backend import Array, CompiledModel, Port
from tvm_pipeline.errors import ModelError, PipelineClosedError, PipelineTimeoutError, StageError
from tvm_pipeline.evaluate import check_stages
from tvm_pipeline.layout import to_logical
from tvm_pipeline.plan import Plan
from tvm_pipeline.platform import Platform
from tvm_pipeline.runtime.slots import Slot, bind_slot, new_slot, slot_ports
from tvm_pipeline.runtime.statistics import RunRecord, RunStatistics, StageRecord
from tvm_pipeline.runtime.worker import SlotQueue, StageGate, Worker

Inputs = Mapping[str, Array] | Array


@dataclass(frozen=True, slots=True)
class Result:
    """What came out for one frame: its index, the model's outputs by name, and the seconds it was inside."""

    frame: int
    outputs: dict[str, Array]
    latency_s: float


class Pipeline:
    """A running plan. Use it as a context manager; leaving it stops every thread.

    Args:
        compiled: the model, compiled for the plan's devices.
        plan: which device runs which operators.
        platform: the devices, settled on this machine.
        in_flight: frames inside at once; the default keeps every worker busy with one more waiting.

    Raises:
        PlanError: the plan does not fit the model or the platform.
    """

    def __init__(
        self, compiled: CompiledModel, plan: Plan, platform: Platform, *, in_flight: int | None = None
    ) -> None:
        check_stages(compiled.graph, platform, plan.stages)
        self.plan, self._graph = plan, compiled.graph
        runners = [[compiled.stage(s.operators, platform.device(d)) for d in s.devices] for s in plan.stages]
        self._ports = ports = slot_ports(compiled.graph, runners)
        workers = sum(len(stage) for stage in runners)
        self._slots = [new_slot(number, ports) for number in range(in_flight or 2 * workers)]
        self._free: SlotQueue = SimpleQueue()
        self._queues: list[SlotQueue] = [SimpleQueue() for _ in range(len(runners) + 1)]
        self._record = RunRecord()
        self._records = [StageRecord(i, d) for i, stage in enumerate(plan.stages) for d in stage.devices]
        self._bound = threading.Barrier(workers + 1)
        self._halted = threading.Event()
        self._workers: list[Worker] = []
        records = iter(self._records)
        for index, stage in enumerate(runners):
            gate = StageGate(self._queues[index], self._queues[index + 1], len(stage))
            for runner in stage:
                scratch: dict[Port, Array] = {}
                bindings = [bind_slot(slot, ports, runner, scratch) for slot in self._slots]
                self._workers.append(
                    Worker(
                        runner,
                        bindings,
                        gate,
                        next(records),
                        self._bound.wait,
                        self._halted.is_set,
                        self._fail,
                    )
                )
        self._state = "new"
        self._error: StageError | None = None
        self._submitted = self._delivered = 0
        self._last_entry_s = 0.0
        self._early: dict[int, Slot] = {}

    def start(self) -> None:
        """Starts the threads and returns when each is tied to its device."""
        if self._state != "new":
            raise PipelineClosedError("this pipeline was started before; make a new one")
        self._state = "running"
        for slot in self._slots:
            self._free.put(slot)
        for worker in self._workers:
            worker.start()
        try:
            self._bound.wait()
        except threading.BrokenBarrierError:
            self.stop()
            self._raise_failure()

    def submit(self, inputs: Inputs, timeout_s: float | None = None) -> int:
        """Copies one frame's inputs in and returns its index; waits while the pipeline is full.

        Args:
            inputs: arrays by input name, or the one array of a model with one input.

        Raises:
            ModelError: an input is missing, or has another shape.
            PipelineTimeoutError: the pipeline stayed full for `timeout_s`.
            StageError: a stage failed.
        """
        arrays = self._checked(inputs)
        if self._state != "running":
            self._raise_failure()
            raise PipelineClosedError(f"cannot submit: the pipeline is {self._state}")
        slot = self._take(self._free, timeout_s, "is full: no result was taken")
        for name, array in arrays.items():
            np.copyto(slot.buffers[name], array, casting="same_kind")
        slot.frame, self._submitted = self._submitted, self._submitted + 1
        slot.entered_s = self._last_entry_s = time.perf_counter()
        self._queues[0].put(slot)
        return slot.frame

    def result(self, timeout_s: float | None = None) -> Result:
        """The next frame's result, in the order of submission.

        Raises:
            PipelineTimeoutError: none came in `timeout_s`.
            PipelineClosedError: every result was taken, and no frame can come any more.
            StageError: a stage failed.
        """
        while self._delivered not in self._early:
            if self._state == "drained":
                raise PipelineClosedError("every result has been taken")
            slot = self._take(self._queues[-1], timeout_s, "gave no result")
            self._early[slot.frame] = slot
        slot = self._early.pop(self._delivered)
        outputs = {name: self._output(slot, name) for name in self._graph.outputs}
        result = Result(slot.frame, outputs, slot.done_s - slot.entered_s)
        self._record.add(slot.entered_s, slot.done_s)
        self._delivered += 1
        self._free.put(slot)
        return result

    def results(self, timeout_s: float | None = None) -> Iterator[Result]:
        """Every result until the pipeline is drained; call `drain` (or submit from another thread) before."""
        while True:
            try:
                yield self.result(timeout_s)
            except PipelineClosedError:
                return

    def map(self, frames: Iterable[Inputs], timeout_s: float | None = None) -> Iterator[Result]:
        """Runs every frame and yields the results in order; ends when `frames` does, and drains the pipeline.

        `frames` is read from another thread. What it raises is raised here, after the results of the frames before.
        """
        failure: list[BaseException] = []

        def feed() -> None:
            try:
                for inputs in frames:
                    self.submit(inputs)
            except (PipelineClosedError, StageError):
                pass  # the reader of the results hears of it
            except BaseException as error:
                failure.append(error)
            finally:
                self.drain()

        feeder = threading.Thread(target=feed, name="feeder", daemon=True)
        feeder.start()
        try:
            yield from self.results(timeout_s)
        finally:
            if feeder.is_alive():
                self.stop()
            feeder.join()
        if failure:
            raise failure[0]

    def drain(self) -> None:
        """Takes no more frames; those inside come out, and then the threads end."""
        if self._state == "running":
            self._state = "draining"
            self._queues[0].put(None)

    def stop(self) -> None:
        """Ends every thread after the frame it is at; frames inside are dropped. Safe to call twice."""
        if self._state in ("running", "draining"):
            self._state = "stopped"
        self._wake()
        for worker in self._workers:
            if worker.ident is not None:
                worker.join()

    def statistics(self) -> RunStatistics:
        """What was measured until now, in steady state."""
        skip = len(self._slots)
        stages = tuple(record.summary(skip) for record in self._records)
        return self._record.summary(skip, self._last_entry_s, stages)

    def reset_statistics(self) -> None:
        """Forgets what was measured until now, for instance after a warm-up."""
        self._record = RunRecord()
        for record in self._records:
            record.clear()

    def __enter__(self) -> Pipeline:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _checked(self, inputs: Inputs) -> dict[str, Array]:
        if not isinstance(inputs, Mapping):
            inputs = {self._graph.inputs[0].name: inputs}
        wanted = {tensor.name: tensor for tensor in self._graph.inputs}
        if inputs.keys() != wanted.keys():
            raise ModelError(
                f"the model has the inputs {', '.join(wanted)}; it was given {', '.join(inputs)}"
            )
        for name, array in inputs.items():
            if array.shape != wanted[name].shape or not np.can_cast(
                array.dtype, wanted[name].dtype, "same_kind"
            ):
                raise ModelError(
                    f"input {name} is {wanted[name].dtype} of shape {list(wanted[name].shape)}; "
                    f"it was given {array.dtype} of shape {list(array.shape)}"
                )
        return dict(inputs)

    def _output(self, slot: Slot, name: str) -> Array:
        return to_logical(slot.buffers[name], self._ports[name].layout).copy()

    def _take(self, queue: SlotQueue, timeout_s: float | None, what: str) -> Slot:
        """The next slot; None in the queue means that the pipeline ended, for a reason or by a drain."""
        try:
            slot = queue.get(timeout=timeout_s)
        except Empty:
            raise PipelineTimeoutError(f"the pipeline {what} for {timeout_s} s") from None
        if slot is not None:
            return slot
        queue.put(None)  # for whoever asks next
        self._raise_failure()
        if self._state == "draining":
            self._state = "drained"
        raise PipelineClosedError(f"the pipeline is {self._state}")

    def _fail(self, stage: int, device: str, frame: int, error: BaseException) -> None:
        if self._error is None and self._state in ("running", "draining"):
            self._error = StageError(stage, device, frame, error)
            self._error.__cause__ = error
            self._state = "failed"
        self._bound.abort()
        self._wake()

    def _wake(self) -> None:
        """Ends every wait: each worker, whoever submits and whoever reads finds None."""
        self._halted.set()
        for queue in self._queues:
            for _ in self._workers:
                queue.put(None)
        self._free.put(None)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error
