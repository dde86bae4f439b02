"""A plan that runs: one thread for each stage and replica, frames in order, once each.

    with Pipeline(compiled, plan, platform) as pipeline:
        for result in pipeline.map(frames):
            ...

`map` feeds from a thread of its own; `submit` and `result` are for callers that have their own loop. Both sides
block when the pipeline is full or empty, with a time limit if one is given. Any thread may submit; one thread takes the
results. Read `slots.py` first: it says where the data of a frame is.

A device with `concurrent_copies` has two threads for each stage. They take frames in turns, and one of them computes at
a time (`worker.ComputingTurn`), so that one copies a frame while the other computes another.

With a batch (`OperatorGraph.batch`) a slot carries a call: frames join it until its first stage begins, so under load
each call is full, and a frame that meets an idle pipeline waits for no other.

How it ends: a None follows the last frame through the stages and to the reader. A failure sends a None after the
frames that are inside; those before the failed one still come out. `stop` puts a None into every queue.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np

from tvm_pipeline.backends.contract import Array, CompiledModel, StageRunner
from tvm_pipeline.core.number_types import is_float
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import most_bytes
from tvm_pipeline.core.statistics import RunRecord, RunStatistics, StageRecord, StageStatistics
from tvm_pipeline.cost.evaluate import check_stages
from tvm_pipeline.errors import (
    ModelError,
    OptionError,
    PipelineClosedError,
    PipelineTimeoutError,
    PlanError,
    StageError,
)
from tvm_pipeline.runtime.carried_state import CarriedState
from tvm_pipeline.runtime.frame_stream import FrameStream, Inputs, Result, Tagged
from tvm_pipeline.runtime.host_work import HostStage, HostWork, StageWork, stage_work
from tvm_pipeline.runtime.slots import Binding, Slot, bind_slots, keep_on_devices, new_slot, slot_ports
from tvm_pipeline.runtime.worker import ComputingTurn, SlotQueue, StageGate, StreamState, Threads, Worker
from tvm_pipeline.signals import WAIT_S

SOURCE_S = 1.0  # how long `stop` waits for a frame from outside


class Pipeline(FrameStream):
    """A running plan. Use it as a context manager; leaving it stops every thread.

    Args:
        compiled: the model, compiled for the plan's devices.
        plan: which device runs which operators.
        platform: the devices, settled on this machine.
        in_flight: calls inside at once, mostly of one frame; the default, `Plan.calls_inside`, keeps workers busy.
        threads: where the workers run; its own unless given.
        after: a pipeline that ends; a stage begins when that pipeline has left the cores of its device, and, where the
            stage holds host operators, when that pipeline has no more frames for these.
        host: the host operators around the model's, where the plan holds some. Frames then come from the first of
            these: submit `{}` for each, with the tag that the operators share.
        state: what goes from frame to frame, where other pipelines have a part of the frames; its own unless given.

    Raises:
        OptionError: `in_flight` is less than one.
        PlanError: the plan does not fit the model or the platform.

    Examples:
        >>> import numpy
        >>> from tvm_pipeline.testing import example_model, example_problem
        >>> problem = example_problem()
        >>> with Pipeline(example_model(), plan(problem).plan, problem.platform) as pipeline:
        ...     for result in pipeline.map(numpy.full(4, number, "float32") for number in range(3)):
        ...         print(result.frame, result.outputs["y"])
        0 [1. 1. 1. 1.]
        1 [3. 3. 3. 3.]
        2 [5. 5. 5. 5.]
    """

    def __init__(
        self,
        compiled: CompiledModel,
        plan: Plan,
        platform: Platform,
        *,
        in_flight: int | None = None,
        threads: Threads | None = None,
        after: Pipeline | None = None,
        host: HostWork | None = None,
        state: CarriedState | None = None,
    ) -> None:
        if in_flight is not None and in_flight < 1:
            raise OptionError(f"in_flight is {in_flight}; a pipeline holds at least one frame")
        self._graph = compiled.graph if host is None else host.graph
        check_stages(self._graph, platform, plan.stages)
        self.plan, self._host = plan, host
        self._work = [stage_work(stage.operators, host) for stage in plan.stages]
        self._inputs = {tensor.name: tensor for tensor in self._graph.inputs}
        self._state = CarriedState(compiled.graph) if state is None else state
        self._forgets = state is None  # else frames of others may need what the state was before these
        with ExitStack() as opened:  # what follows may fail, and stages may hold devices
            served = [_workers_of(stage, platform) for stage in plan.stages]
            runners = [
                [opened.enter_context(closing(_runner(compiled, work, device))) for device in devices]
                for devices, work in zip(served, self._work, strict=True)
            ]
            ports = slot_ports(compiled.graph, runners)
            inside = in_flight or plan.calls_inside
            self._slots = [new_slot(number, ports, self._graph.batch) for number in range(inside)]
            bindings = [[bind_slots(self._slots, ports, runner) for runner in stage] for stage in runners]
            most = most_bytes(compiled.graph)
            room = {device.name: (device.memory_bytes or math.inf) - most for device in platform.devices}
            keep_on_devices(plan.stages, runners, bindings, compiled.graph.outputs, room)
            self._prepare(served, runners, bindings, threads, after)
            opened.pop_all()

    def _prepare(
        self,
        served: Sequence[Sequence[Device]],
        runners: Sequence[Sequence[StageRunner]],
        bindings: Sequence[Sequence[list[Binding]]],
        threads: Threads | None,
        after: Pipeline | None,
    ) -> None:
        """Make the workers of each stage.

        Args:
            served: of each stage, the device of each of its workers.
        """
        functions = self._host.functions if self._host else {}
        source = next(iter(functions), "")
        self._free: SlotQueue = SimpleQueue()
        self._queues: list[SlotQueue] = [SimpleQueue() for _ in range(len(runners) + 1)]
        self._stream = StreamState(self._queues[0], self._free)
        self._record = RunRecord()
        self._bound = threading.Semaphore(0)
        self._workers: list[Worker] = []
        self._devices = list(chain.from_iterable(served))
        locks = {device.name: threading.Lock() for device in self._devices}
        self._places: list[Device] = []  # where the first host operator runs
        self._started: list[Worker] = []
        self._threads, self._keeps_threads = threads or Threads(), threads is not None
        for index, (devices, work) in enumerate(zip(served, self._work, strict=True)):
            gate = StageGate(self._queues[index], self._queues[index + 1], len(devices))
            records = {device.name: StageRecord(index, device.label) for device in devices}
            doors = {device.name: threading.Lock() for device in devices}
            for device, runner, bound in zip(devices, runners[index], bindings[index], strict=True):
                turn = ComputingTurn(doors[device.name], locks[device.name]) if device.concurrent_copies else None
                if turn and not runner.take_turns(turn):
                    raise PlanError(
                        f"stage {index} on device {device.label} cannot compute one frame and copy another, as its "
                        "`concurrent_copies` says: leave that out of the platform file, or, where the stage is to have "
                        "a process of its own, run it in this one"
                    )
                self._workers.append(
                    Worker(
                        runner,
                        bound,
                        gate,
                        records[device.name],
                        self._stream,
                        self._bound.release,
                        after.leaving(device, work) if after else (),
                        {name: functions[name] for name in work.before},
                        {name: functions[name] for name in work.after},
                        source,
                        self._state.of(work.model),
                        turn,
                    )
                )
                if self._host and source in work.before:
                    self._places.append(device)
        self._submitted = self._delivered = 0  # frames
        self._calls_in = self._calls_out = 0
        self._last_entry_s = 0.0
        self._joinable: Slot | None = None  # the call that came in last, where it was not full then
        self._early: dict[int, Slot] = {}
        self._results: deque[Result] = deque()  # of the call that came out last

    def begin_at(self, base: int) -> None:
        """Take note, before the first frame, of its number in a run that another pipeline began."""
        self._stream.base = base

    def start(self, limit_s: float | None = None) -> None:
        """Start the threads and return when every one is tied to its device.

        Args:
            limit_s: a device that takes longer to tie its thread to has failed; None waits for ever.

        Raises:
            PipelineClosedError: it was started before.
            StageError: a thread could not be tied to its device; its `frame` is -1.
        """
        until_s = math.inf if limit_s is None else time.monotonic() + limit_s
        with self._stream.lock:
            if self._stream.name != "new":
                raise PipelineClosedError("this pipeline was started before; make a new one")
            self._stream.name = "running"
        for slot in self._slots:
            self._free.put(slot)
        if self._host:
            for device in self._places:
                self._host.place(device)
        try:
            for worker in self._workers:
                self._threads.start(worker)
                self._started.append(worker)
            for _ in self._workers:
                left_s = until_s - time.monotonic()
                if not self._bound.acquire(timeout=None if math.isinf(left_s) else max(left_s, 0.0)):
                    self._give_up(f"its thread was not tied to the device within {limit_s:g} s")
                    break
            self._raise_failure()
        except BaseException:
            self.stop()
            raise

    def submit(self, inputs: Inputs, timeout_s: float | None = None, *, tag: Any = None) -> int:
        """Copy one frame's inputs in and return its index; wait while the pipeline is full.

        Args:
            inputs: arrays by input name, or the one array of a model with one input.
            tag: comes back as `Result.tag`; it is not copied.

        Raises:
            ModelError: an input is missing, or has another shape, or its numbers do not fit the input's type.
            PipelineTimeoutError: the pipeline stayed full for `timeout_s`.
            PipelineClosedError: the pipeline is not running.
            StageError: a stage failed.
        """
        arrays, what = self._checked(inputs), "no room for a frame"
        if self._stream.name != "running":
            self.refuse(what)
        if self._joinable is not None and (joined := self._join(arrays, tag)) is not None:
            return joined
        slot = self._take(self._free, timeout_s, what)
        _copy(arrays, slot, 0)
        with self._stream.lock:  # no frame may follow the None of `drain`
            if self._stream.name != "running":
                self._free.put(slot)
                self.refuse(what)
            slot.call, slot.frame = self._calls_in, self._submitted
            slot.tags, slot.entered_s = [], []
            slot.joinable = slot.batch > 1
            self._joinable = slot if slot.joinable else None
            self._calls_in += 1
            frame = self._entered(slot, tag)
            self._queues[0].put(slot)
        return frame

    def _join(self, arrays: Mapping[str, Array], tag: Any) -> int | None:
        """Add a frame to the call that came in last and return its index; None where that has begun or is full."""
        with self._stream.lock:
            slot = self._joinable
            if slot is None or not slot.joinable or self._stream.name != "running":
                return None
            _copy(arrays, slot, len(slot.tags))
            frame = self._entered(slot, tag)
            slot.joinable = len(slot.tags) < slot.batch
            return frame

    def _entered(self, slot: Slot, tag: Any) -> int:
        """Take note of a frame that a slot carries, and return its index."""
        slot.tags.append(tag)
        self._last_entry_s = time.perf_counter()
        slot.entered_s.append(self._last_entry_s)
        self._submitted += 1
        return self._submitted - 1

    def result(self, timeout_s: float | None = None) -> Result:
        """Return the next frame's result, in the order of submission.

        Raises:
            PipelineTimeoutError: it did not come in `timeout_s`.
            PipelineClosedError: every result was taken, and no frame can come any more.
            StageError: a stage failed; the results of the frames before were given.
        """
        if self._stream.name in ("new", "stopped"):
            self.refuse("no result")
        if not self._results:
            self._take_call(timeout_s)
        result = self._results.popleft()
        self._delivered += 1
        if self._forgets:
            self._state.forget(self._delivered)
        return result

    def _take_call(self, timeout_s: float | None) -> None:
        """Take the results of the call that is next in order, and give its slot back."""
        give_up_s = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._calls_out not in self._early:
            left_s = None if give_up_s is None else max(give_up_s - time.perf_counter(), 0.0)
            slot = self._take(self._queues[-1], left_s, "no result")
            self._early[slot.call] = slot
        slot = self._early.pop(self._calls_out)
        self._calls_out += 1
        names = [name for name in self._graph.outputs if name in slot.buffers]
        for index, (tag, entered_s) in enumerate(zip(slot.tags, slot.entered_s, strict=False)):
            outputs = {name: slot.part(index, name).copy() for name in names}
            self._results.append(Result(slot.frame + index, outputs, slot.done_s - entered_s, tag))
            self._record.add(entered_s, slot.done_s)
        slot.tags = []  # a picture would stay in memory until the slot is used again
        self._free.put(slot)

    def drain(self) -> None:
        """Take no more frames; those inside come out, and then the threads end."""
        with self._stream.lock:
            if self._stream.name == "running":
                self._stream.name = "drained"
                self._stream.close_entrance()

    def unfinished(self) -> list[Tagged]:
        """Return inputs and tag of every frame that went in and whose result was not taken, in order.

        Only for a pipeline that takes no frames any more; its slots keep them until it is collected.
        """
        waiting = {slot.call: slot for slot in self._slots if slot.call >= self._calls_out}
        return [
            Tagged({name: slot.part(index, name) for name in self._inputs}, tag)
            for _, slot in sorted(waiting.items())
            for index, tag in enumerate(slot.tags)
        ]

    def overdue(self, limit_s: float) -> None:
        """Let every stage fail that works at one frame for longer than `limit_s`.

        Its thread cannot be ended; it is left behind, and `stop` does not wait for it.
        """
        known_as = self._host.known_as if self._host else {}
        for worker in self._workers:
            if worker.busy_s() > limit_s and not worker.abandoned:
                what = known_as.get(worker.operator, "it")
                worker.fail(PipelineTimeoutError(f"{what} did not end within {limit_s:g} s"))
                worker.abandon()

    def _give_up(self, why: str) -> None:
        """Let every stage fail whose thread is not tied to its device."""
        for worker in self._workers:
            if not worker.is_bound:
                worker.fail(PipelineTimeoutError(why))
                worker.abandon()

    def stop(self) -> None:
        """End every thread after its current frame, and close the stages; frames inside are dropped.

        It may be called twice.
        """
        with self._stream.lock:
            if self._stream.name != "failed":
                self._stream.name = "stopped"
            self._stream.end = 0
        for queue in (self._free, *self._queues):
            queue.put(None)
        for worker in self._started:
            # A source may give no frame for long; its thread is left behind, and ends with the source.
            while not worker.abandoned and not worker.done.wait(SOURCE_S):
                if worker.waiting:
                    worker.abandon()
        for worker in self._workers:
            worker.close()
        if not self._keeps_threads:
            self._threads.close()

    def leaving(self, device: Device, work: StageWork) -> list[threading.Event]:
        """Return the events that are set when the workers on the device, or with the host operators, have ended."""
        workers = zip(self._workers, self._devices, strict=True)
        return [w.done for w, own in workers if own.overlaps(device) or self._work[w.record.stage].shares(work)]

    @property
    def state(self) -> str:
        return self._stream.name

    @property
    def submitted(self) -> int:
        """Return the number of frames that went in."""
        return self._submitted

    @property
    def delivered(self) -> int:
        """Return the number of frames whose results were taken."""
        return self._delivered

    def waiting(self) -> list[int]:
        """Return how many frames wait in front of each stage."""
        return [queue.qsize() for queue in self._queues[:-1]]

    def records(self) -> list[StageRecord]:
        """Return the record of each stage on each of its devices, in the order of the plan."""
        return list({id(worker.record): worker.record for worker in self._workers}.values())

    def statistics(self) -> RunStatistics:
        """Return what was measured until now, in steady state."""
        filling = len(self._slots) * self._graph.batch
        return self._record.summary(filling, self._last_entry_s, self.stage_statistics())

    def stage_statistics(self) -> tuple[StageStatistics, ...]:
        """Return what was measured of each stage on each of its devices, in the order of `records`."""
        return tuple(record.summary(len(self._slots)) for record in self.records())

    def reset_statistics(self) -> None:
        """Forget what was measured until now, for instance after a warm-up."""
        self._record = RunRecord()
        fresh = {id(record): StageRecord(record.stage, record.device) for record in self.records()}
        for worker in self._workers:
            worker.record = fresh[id(worker.record)]

    def _checked(self, inputs: Inputs) -> Mapping[str, Array]:
        expected = self._inputs
        if not isinstance(inputs, Mapping):
            inputs = {next(iter(expected)): inputs}
        if inputs.keys() != expected.keys():
            raise ModelError(f"the model has the inputs {', '.join(expected)}; it was given {', '.join(inputs)}")
        for name, array in inputs.items():
            if not hasattr(array, "dtype"):
                kind = type(array).__name__
                raise ModelError(f"input {name} was given a {kind}; a frame is an array, or arrays by input name")
            tensor = expected[name]
            rounds = is_float(tensor.dtype) or tensor.dtype.startswith(
                "complex"
            )  # fractions may lose digits, integers would wrap around
            fits = np.can_cast(array.dtype, tensor.dtype, "same_kind" if rounds else "safe")
            if array.shape != tensor.shape or not fits:
                raise ModelError(
                    f"input {name} is {tensor.dtype} of shape {list(tensor.shape)}; "
                    f"it was given {array.dtype} of shape {list(array.shape)}"
                )
        return inputs

    def _take(self, queue: SlotQueue, timeout_s: float | None, what: str) -> Slot:
        """Return the next slot of a queue; a None in it means that no more will come."""
        left_s = math.inf if timeout_s is None else timeout_s
        while True:
            try:
                slot = queue.get(timeout=min(left_s, WAIT_S))
                break
            except Empty:
                left_s -= WAIT_S
                if left_s <= 0:
                    inside = self._submitted - self._delivered
                    raise PipelineTimeoutError(f"{what} in the time allowed; {inside} frames are inside") from None
        if slot is None:
            queue.put(None)  # for the next call
            self.refuse(what)
        return slot

    def _raise_failure(self) -> None:
        if self._stream.failure is not None:
            raise StageError(*self._stream.failure) from self._stream.failure[3]

    def refuse(self, what: str) -> NoReturn:
        """Raise why nothing goes in or comes out any more."""
        self._raise_failure()
        todo = "call start() first, or use `with`" if self._stream.name == "new" else "make a new one"
        raise PipelineClosedError(f"{what}: the pipeline is {self._stream.name}; {todo}")


def _copy(arrays: Mapping[str, Array], slot: Slot, index: int) -> None:
    """Copy the inputs of a frame into its part of a slot."""
    for name, array in arrays.items():
        np.copyto(slot.part(index, name), array, casting="same_kind")


def _workers_of(stage: Stage, platform: Platform) -> list[Device]:
    """Return the device of each worker of a stage: twice where one is to copy while the other computes."""
    devices = map(platform.device, stage.devices)
    return [device for device in devices for _ in range(2 if device.concurrent_copies else 1)]


def _runner(compiled: CompiledModel, work: StageWork, device: Device) -> StageRunner:
    return compiled.stage(work.model, device) if work.model else HostStage(work.host, device)
