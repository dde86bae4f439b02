"""Tune a model for a GPU: AutoTVM's genetic search over TOPI's templates, then a race of the whole network.

1. Compile the network as TOPI has it by default, and time its kernels where they run.
2. Take what the most time is spent in, and measure a generation of candidates. Go on until the budget is used up, or
   until nothing has become faster for some generations.
3. Compile the network with the best of all and run both in turns. What does not win is dropped.

This runs in a child (`device_child.py`), since a kernel may hang or lose the device.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import autotvm
from tvm.autotvm.task.space import SplitEntity

from tvm_pipeline import Device, Model
from tvm_pipeline.backends.contract import TuningReport
from tvm_pipeline.errors import RunError
from tvm_pipeline_kernels.relay.schedules.device_choices import (
    DEFAULT,
    DeviceChoice,
    DeviceWorkload,
    choice_of,
    task_of,
)
from tvm_pipeline_kernels.relay.tuning.device_candidates import Bench, DeviceCandidate
from tvm_pipeline_kernels.relay.tuning.device_records import (
    FAILED,
    DeviceRecord,
    append_device_record,
    proven_choices,
    read_device_records,
)
from tvm_pipeline_kernels.relay.tuning.runners import DeviceRunner
from tvm_pipeline_kernels.relay.tuning.tasks import device_tasks_of, optimized
from tvm_pipeline_kernels.tuning.candidates import Task
from tvm_pipeline_kernels.tuning.device_child import CANDIDATE_S, PASS_S
from tvm_pipeline_kernels.tuning.race import COMPARISONS, ROUNDS, Times, race, winners
from tvm_pipeline_kernels.tuning.tuner import figures
from tvm_pipeline_tvm.devices.targets import compiler_target, index_of, kind_of, plain_target
from tvm_pipeline_tvm.relay.build import as_compiled, build_library
from tvm_pipeline_tvm.relay.fold import building
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library

GENERATION = 12  # candidates of a workload, of which the next ones are bred
BATCH = 4  # candidates that are compiled together
PATIENCE = 3  # generations without a gain, after which a workload is not searched further
GAIN = 0.01  # that counts as one
MOST_SUMS = 64  # of a thread
LEAST_THREADS = 16  # of the blocks of the first generation
OVER = "the time was over"
COMPILE_S = 60.0  # that a batch may take
RACED = 0.2  # of the budget, which the comparison may take

_log = logging.getLogger(__name__)

# Takes what is being tried, and the seconds within which something is said again; None where that may take any time.
Trying = Callable[[Sequence["tuple[DeviceWorkload, DeviceChoice]"], "float | None"], None]


def tune_device(
    model: Model,
    device: Device,
    host: str,
    seconds: float,
    begun: int,
    trying: Trying,
    only: Collection[DeviceWorkload] | None = None,
) -> TuningReport:
    """Tune a model on a GPU; see `TuningReport` and `Backend.tune`.

    Args:
        host: the target of the code that launches kernels.
        begun: how many records there were when the search began, perhaps in another process.
        trying: is called before anything that may hang.
        only: what is searched; all of the model without it.

    Raises:
        ModelError: TVM cannot import or compile the model.
        RunError: the device fails without any candidate.
        PipelineError: a record cannot be written.
    """
    target = device.target
    default = build_library(model, compiler_target(target), host, choices={})
    begin = time.monotonic()
    workloads: set[DeviceWorkload] = {str(workload) for workload in default.tuning.workloads.values()}
    search = _DeviceSearch(model, device, host, begin + seconds, trying)
    search.remember(workloads, read_device_records(target))
    wanted = {workload for workload, state in search.states.items() if state.stale < PATIENCE * GENERATION}
    if only is not None:
        wanted &= set(only)
    times = None
    if wanted and seconds > 0:
        search.run(default, wanted)
    elif wanted:
        search.stopped = "there was no time for it"
    elif workloads:
        search.stopped = "all of it was measured before"
    else:
        search.stopped = "the model has no kernel whose schedule TVM can tune without changing results"
    found = {workload: state.best for workload, state in search.states.items() if state.is_new}
    if found and seconds > 0:
        times = _proven(search, default, found, seconds)
    records = read_device_records(target)
    tried = [record for record in records[begun:] if record.workload in workloads and record.choice != DEFAULT]
    measured = [record.workload for record in tried if not record.proven]
    return TuningReport(
        model.name,
        target,
        len(workloads),
        len(workloads & proven_choices(records).keys()),
        len(set(measured)),
        len(measured),
        time.monotonic() - begin,
        search.stopped,
        **(figures(*times) if times else {}),
    )


@dataclass(slots=True)
class _State:
    """What is known of a workload.

    Attributes:
        known: seconds of each choice that was measured; infinite where it failed.
        stale: candidates since the best became faster.
        is_new: no comparison of whole networks has met the best choice yet.
        in_place_s: what its kernels take in a pass of the network as it is by default.
    """

    known: dict[DeviceChoice, float] = field(default_factory=dict)
    stale: int = 0
    is_new: bool = False
    in_place_s: float = 0.0
    tuner: Any = None

    def note(self, record: DeviceRecord) -> None:
        """Take a record into account."""
        if record.proven:
            self.is_new = False
            return
        before, before_s, is_again = self.best, self.best_s, record.choice in self.known
        self.known[record.choice] = record.seconds
        if self.best != before:
            self.is_new = self.best != DEFAULT
        is_faster = self.best_s < before_s * (1 - GAIN)
        self.stale = 0 if is_faster else self.stale + (not is_again)

    @property
    def best(self) -> DeviceChoice:
        """The fastest choice."""
        return min(self.known, key=self.known.__getitem__, default=DEFAULT)

    @property
    def best_s(self) -> float:
        """Seconds of the fastest choice."""
        return self.known.get(self.best, float("inf"))

    @property
    def promise_s(self) -> float:
        """What its kernels may take in a pass of the network now, less where generations have found nothing faster."""
        default_s = self.known.get(DEFAULT)
        left_s = self.in_place_s * (self.best_s / default_s if default_s else 1.0)
        return left_s / (1 + self.stale // GENERATION)


class _DeviceSearch:
    """The search for the best choice of each workload, until a deadline.

    Attributes:
        states: of each workload of the model.
        candidates: how many were compiled and timed.
        stopped: why the search ended.
    """

    def __init__(self, model: Model, device: Device, host: str, deadline: float, trying: Trying) -> None:
        self.network, self.device, self.host, self.trying = model, device, host, trying
        self.states: dict[DeviceWorkload, _State] = {}
        self.candidates = 0
        self.stopped = ""
        self._deadline = deadline
        self._target = tvm.target.Target(compiler_target(device.target), host)
        self._batch_s = 0.0  # that a batch of candidates takes

    def remember(self, workloads: Collection[DeviceWorkload], records: Sequence[DeviceRecord]) -> None:
        """Begin with what was measured before."""
        self.states = {workload: _State() for workload in workloads}
        for record in records:
            if record.workload in self.states:
                self.states[record.workload].note(record)

    def run(self, default: Library, wanted: set[DeviceWorkload]) -> None:
        """Search these workloads of the model, generation by generation, where most time is spent."""
        begin = time.monotonic()
        _log.info(f"looking for what to tune in {self.network.name}")
        tasks = {task.workload: task for task in self._tasks()}
        compile_s = 4 * (time.monotonic() - begin)  # about what relay.build takes for the comparison
        pass_s = self._time_default(default)
        race_s = min(2 * ROUNDS * pass_s, RACED * (self._deadline - begin))
        self._deadline -= compile_s + race_s
        bench = Bench(self._target, tvm.device(kind_of(self.device.target), index_of(self.device.target)))
        waiting = wanted & tasks.keys()
        while waiting and not self.stopped:
            workload = max(waiting, key=lambda workload: self.states[workload].promise_s)
            state = self.states[workload]
            left_s = max(0.0, self._deadline - time.monotonic()) + compile_s + race_s
            _log.info(
                f"tuning {self.network.name}: {len(self.states) - len(waiting)} of {len(self.states)} kernels done, "
                f"{self.candidates} candidates; at most {left_s:.0f} s left"
            )
            if not self._generation(tasks[workload], state, bench) or state.stale >= PATIENCE * GENERATION:
                waiting.remove(workload)
        self.stopped = self.stopped or "nothing became faster any more"

    def _tasks(self) -> list[Task[DeviceWorkload]]:
        """Return the tasks of the network, for the target that its library has been compiled for (`build.py`)."""
        mod, params = import_model(self.network)
        mod = as_compiled(mod, params)
        try:
            return device_tasks_of(optimized(mod, self._target, params), self._target)
        except Exception:  # as where the library was compiled: TVM's passes raise whatever their author had at hand
            plain = plain_target(compiler_target(self.device.target))
            self._target = tvm.target.Target(plain, self._target.host)
            return device_tasks_of(optimized(mod, self._target, params), self._target)

    def _time_default(self, default: Library) -> float:
        """Time the kernels of the network as it is by default; return the seconds of a pass."""
        self.trying((), PASS_S)
        runner = DeviceRunner(self.network.name, default, self.device)
        runner.run()
        times = runner.times(np.array([runner.run()]))
        self.trying((), None)
        for workload, (seconds, _) in times.workloads.items():
            self.states[workload].in_place_s = float(seconds[0])
        return float(times.whole[0])

    def _generation(self, task: Task[DeviceWorkload], state: _State, bench: Bench) -> bool:
        """Measure a generation of candidates of a workload; return whether there may be others."""
        first = state.tuner is None
        if first:
            try:
                state.tuner = _tuner(task.workload, state, self._target, bench.most_threads)
            except RuntimeError as error:
                _log.warning("%s is not tuned: %s", task.workload[:100], error)
                return False
        tuner = state.tuner
        configs = tuner.next_batch(GENERATION)
        chosen = [choice_of(config) for config in configs]
        sensible = [choice_of(config) for config in configs if _is_sensible(config, bench.most_threads)]
        fresh = [choice for choice in dict.fromkeys(sensible) if choice not in state.known]
        if not fresh:
            state.stale += GENERATION
        # The default is run first in any case: its results are those that others must have.
        to_measure = [DEFAULT, *fresh] if first else fresh
        while to_measure:
            begin = time.monotonic()
            if begin + self._batch_s <= self._deadline:
                self._measure(task, state, to_measure[:BATCH], bench)
            else:
                self.stopped = OVER
            if self.stopped:
                return True
            to_measure = to_measure[BATCH:]
            self._batch_s = 0.5 * (self._batch_s or time.monotonic() - begin) + 0.5 * (time.monotonic() - begin)
        failed = float("inf")
        results = [(config, state.known.get(choice, failed)) for config, choice in zip(configs, chosen, strict=True)]
        tuner.update(
            [autotvm.MeasureInput(self._target, tuner.task, config) for config, _ in results],
            [
                autotvm.MeasureResult((seconds,), 0 if seconds < failed else FAILED, 0.0, time.time())
                for _, seconds in results
            ],
        )
        return bool(configs and tuner.has_next())

    def _measure(
        self, task: Task[DeviceWorkload], state: _State, choices: Sequence[DeviceChoice], bench: Bench
    ) -> None:
        """Compile choices of a workload together, time one after the other, and record each."""
        candidates = [DeviceCandidate(task.workload, choice, task.functions) for choice in choices]
        self.trying([(task.workload, choice) for choice in choices], COMPILE_S)
        bench.compile(candidates)
        for candidate in candidates:
            if time.monotonic() > self._deadline:
                self.stopped = OVER
                break
            self.trying([(task.workload, candidate.choice)], PASS_S if candidate.choice == DEFAULT else CANDIDATE_S)
            if not candidate.why:
                bench.time(candidate, state.best_s * task.calls)
            if candidate.choice == DEFAULT and candidate.why:
                raise RunError(f"{self.network.name}: {task.workload[:100]} fails without tuning: {candidate.why}")
            self.candidates += candidate.choice != DEFAULT
            record = DeviceRecord(task.workload, candidate.choice, candidate.seconds / task.calls)
            append_device_record(self.device.target, record)
            state.note(record)
        self.trying((), None)
        bench.forget()


def _tuner(workload: DeviceWorkload, state: _State, target: Any, most_threads: int) -> Any:
    """Return AutoTVM's genetic tuner, whose first generation has as many threads as are sensible."""
    with building():
        task = task_of(workload, target)
    tuner, space = (
        autotvm.tuner.GATuner(task, pop_size=GENERATION, elite_num=max(1, GENERATION // 4)),
        task.config_space,
    )
    points = [point for point in (_point(space, choice) for choice in _fastest(state)) if point is not None]
    for _ in range(100 * GENERATION):
        if len(points) >= tuner.pop_size:
            break
        [point] = space.sample_ints(1)
        config = space.get(int(point))
        if _threads(config) >= LEAST_THREADS and _is_sensible(config, most_threads):
            points.append(int(point))
    points += [int(point) for point in space.sample_ints(tuner.pop_size)]  # where few are sensible
    points = list(dict.fromkeys(points))[: tuner.pop_size]
    tuner.genes, tuner.visited = [space.point2knob(point) for point in points], set(points)
    return tuner


def _fastest(state: _State) -> list[DeviceChoice]:
    """Return the fastest choices that are known, which an earlier search has found."""
    known = sorted((seconds, choice) for choice, seconds in state.known.items() if seconds < float("inf"))
    return [choice for _, choice in known[: GENERATION // 3]]


def _point(space: Any, choice: DeviceChoice) -> int | None:
    """Return the place of a choice in a space; None where it is not in it, as TOPI's default may be."""
    by_name = {name: value for name, _, value in json.loads(choice)}
    knobs = []
    for name, entities in space.space_map.items():
        places = [place for place, entity in enumerate(entities.entities) if _value(entity) == by_name.get(name)]
        if not places:
            return None
        knobs.append(places[0])
    return int(space.knob2point(knobs))


def _value(entity: Any) -> Any:
    """Return what an entity of AutoTVM's holds."""
    [value] = vars(entity).values()
    return value


def _is_sensible(config: Any, most_threads: int) -> bool:
    """Return whether a block may have so many threads, and a thread so many sums: code for more takes too long."""
    sums = [math.prod(size[1:]) // size[-2] for size in _splits(config)]
    return _threads(config) <= most_threads and math.prod(sums) <= MOST_SUMS


def _threads(config: Any) -> int:
    """Return how many threads a block has."""
    return math.prod(size[-2] for size in _splits(config))


def _splits(config: Any) -> list[list[int]]:
    """Return how each axis of the result is split: blocks, perhaps virtual threads, threads, and a thread's own."""
    splits = [config[name].size for name in config if isinstance(config[name], SplitEntity) and name != "tile_rc"]
    return [size for size in splits if len(size) > 2]


def _proven(
    search: _DeviceSearch, default: Library, found: dict[DeviceWorkload, DeviceChoice], seconds: float
) -> tuple[Times, Times] | None:
    """Race what was found against TOPI's default, and record as proven what wins.

    Returns:
        The times without and with all that is tuned now; None where nothing new is.
    """
    target = search.device.target
    before = proven_choices(read_device_records(target))

    def raced(choices: dict[DeviceWorkload, DeviceChoice]) -> tuple[Times, Times]:
        tuned = build_library(search.network, compiler_target(target), search.host, choices={**before, **choices})
        _log.info(f"comparing {search.network.name} with and without {len(choices)} tuned kernels")
        search.trying((), PASS_S)
        runner = DeviceRunner(search.network.name, default, search.device)
        runner.run()
        pass_s = float(runner.run().sum())  # node by node, and whole
        fitting = int(RACED * seconds / max(2 * pass_s, 1e-6))
        rounds = min(max(fitting, COMPARISONS), ROUNDS) // COMPARISONS * COMPARISONS
        # Where one of them hangs here, the next search goes without them.
        pulse = partial(search.trying, tuple(choices.items()), PASS_S)
        runners = [DeviceRunner(search.network.name, library, search.device) for library in (default, tuned)]
        times = race(runners, rounds, pulse)
        search.trying((), None)
        return times

    times = raced(found)
    kept = winners(*times, found)
    if kept and len(kept) < len(found):
        times = raced({workload: found[workload] for workload in kept})
    if np.median(times[0].whole / times[1].whole) <= 1:
        kept = set()
    for workload, choice in found.items():
        taken, kernels = times[workload in kept].workloads[workload]
        record = DeviceRecord(
            workload, choice if workload in kept else DEFAULT, float(np.median(taken)) / kernels, proven=True
        )
        append_device_record(target, record)
    return times if kept else None
