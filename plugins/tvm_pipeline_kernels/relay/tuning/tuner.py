"""Tune a model for one target: search where it is worth it, race what was found in the whole network, keep what wins.

1. Compile the network as the static rule has it, and time each of its convolutions alone, with what is fused to it.
2. Take the convolution that loses most against the core's peak, try its candidates, and note the best. Go on until the
   budget is used up, or until less than 1 % is left to gain. Where a guide says which of them to search, ask it anew
   when these are done.
3. Compile the network with all that was found and run both in turns. Each choice that does not win is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.target.x86 import get_simd_32bit_lanes

from tvm_pipeline import Model
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline_kernels.relay.schedules.choices import (
    Choice,
    Choices,
    Workload,
    is_winograd,
    possible_choices,
    static_choice,
    winograd_choices,
)
from tvm_pipeline_kernels.relay.tuning.candidates import Candidate, Stopwatch, compile_candidates
from tvm_pipeline_kernels.relay.tuning.race import ROUNDS, Times, race, winners
from tvm_pipeline_kernels.relay.tuning.tasks import Task, optimized, tasks_of
from tvm_pipeline_kernels.relay.tuning.tuning_records import (
    Record,
    append_record,
    best_of,
    read_records,
    recorded_choices,
)
from tvm_pipeline_tvm.relay.build import as_compiled, build_library
from tvm_pipeline_tvm.relay.child_process import raise_if_stopped
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.tvm_errors import reason

CANDIDATES = 10  # of a workload, the choice of the static rule among them
FINALISTS = 3  # of a workload that several functions hold: measured in all of them
WARM_RUNS = 20  # of the kernel that tells the core's peak
MOST_SAVED = 4  # of the multiply-accumulates of a convolution by Winograd's algorithm
WORTHWHILE = 0.01  # of the seconds of all convolutions: less is not searched for

_log = logging.getLogger(__name__)


def tune(model: Model, target: str, seconds: float, guide: Guide | None = None) -> TuningReport:
    """Tune a model on the core that the thread is bound to; see `TuningReport` and `Backend.tune`.

    Raises:
        ModelError: TVM cannot import or compile the model.
        PipelineError: a record cannot be written.
    """
    default = build_library(model, target, choices={})
    begin = time.monotonic()
    workloads: set[Any] = set(default.tuning.workloads.values())
    known = (record for record in read_records(target) if record.winograd == (model.tolerance > 0))
    records = [record for record in known if record.workload in workloads]
    proven = best_of(record for record in records if record.proven)
    found = {workload: record for workload, record in best_of(records).items() if workload not in proven}
    wanted = workloads - proven.keys() - found.keys()
    search = _Search(model, target, begin + seconds)
    if wanted and seconds > 0:
        search.run(wanted, guide or _everything(wanted))
        found.update(search.found)
    elif wanted:
        search.stopped = "there was no time for it"
    elif workloads:
        search.stopped = "all of it was measured before"
    else:
        search.stopped = "the model has no convolution of float32 that a schedule of ours computes"
    times = _proven(model, default, found) if found and seconds > 0 else None
    return TuningReport(
        model.name,
        target,
        len(workloads),
        len(workloads & recorded_choices(target, winograd=model.tolerance > 0).keys()),
        len(search.found),
        search.candidates,
        time.monotonic() - begin,
        search.stopped,
        **(figures(*times) if times else {}),
    )


class _Search:
    """The search for the best choice of each convolution, until a deadline.

    Attributes:
        found: the best of each workload that was searched; each is recorded at once.
        candidates: how many were compiled and timed.
        stopped: why the search ended.
    """

    def __init__(self, model: Model, target: str, deadline: float) -> None:
        self.found: dict[Workload, Record] = {}
        self.candidates = 0
        self.stopped = ""
        self._model, self._target, self._deadline = model, target, deadline
        self._parsed = tvm.target.Target(target)
        self._watch = Stopwatch()
        self._defaults: dict[Workload, Candidate] = {}

    def run(self, wanted: Set[Workload], guide: Guide) -> None:
        """Search those of the wanted workloads that the guide asks for."""
        begin = time.monotonic()
        raise_if_stopped()
        _log.info(f"looking for what to tune in {self._model.name}")
        mod, params = import_model(self._model)
        tasks = tasks_of(optimized(as_compiled(mod, params), self._parsed, params))
        self._defaults = {task.workload: self._candidates(task)[0] for task in tasks}
        peak = self._time_defaults(list(self._defaults.values()))
        self._peak = max(peak, *(_speed(task, self._defaults[task.workload].seconds) for task in tasks))
        self._total = sum(default.seconds for default in self._defaults.values())
        took = time.monotonic() - begin
        self._kernel_s = took / len(tasks)  # what a candidate takes, at first by a guess
        # The network is compiled once more for the comparison, which takes about as long as what has just been done.
        self._last_start = self._deadline - (took + 2 * ROUNDS * self._total)
        gains: dict[Workload, float] = {}
        is_over = False
        while (asked := guide(gains)) and not is_over:
            waiting = [task for task in tasks if task.workload in asked and task.workload in wanted - gains.keys()]
            is_over = self._search_all(waiting, gains)

    def _search_all(self, waiting: list[Task], gains: dict[Workload, float]) -> bool:
        """Search tasks, the largest loss first, and note what each gained; return whether the time is over."""
        self.stopped = "all was searched"
        while waiting:
            losses = [max(0.0, self._defaults[t.workload].seconds - self._products(t) / self._peak) for t in waiting]
            if sum(losses) < WORTHWHILE * self._total:
                self.stopped = f"less than {WORTHWHILE:.0%} is left to gain"
                break
            task = waiting.pop(int(np.argmax(losses)))
            candidates = self._candidates(task)
            kernels = len(candidates) * len(task.functions)
            now = time.monotonic()
            if now + kernels * self._kernel_s > self._last_start:
                self.stopped = "the time was over"
                return True
            raise_if_stopped()
            _log.info(
                f"tuning {self._model.name}: {len(self.found)} convolutions searched, {len(waiting) + 1} to go; "
                f"at most {max(0.0, self._deadline - now):.0f} s left"
            )
            gains[task.workload] = self._search(task, [self._defaults[task.workload], *candidates[1:]])
            self._kernel_s = 0.5 * self._kernel_s + 0.5 * (time.monotonic() - now) / kernels
        return False

    def _time_defaults(self, defaults: Sequence[Candidate]) -> float:
        """Time what the static rule chooses; return the core's peak, in multiply-accumulates a second."""
        reference = max(tasks_of(optimized(_reference(), self._parsed)), key=lambda task: task.macs)
        warm = self._candidates(reference)[0]
        compile_candidates([*defaults, warm], self._parsed)
        for _ in range(WARM_RUNS):
            self._watch.time(warm, evicts=False)
        for default in defaults:
            self._watch.halve([default])
        return _speed(reference, warm.seconds)

    def _candidates(self, task: Task[Workload]) -> list[Candidate]:
        """Return the static rule's candidate, then others in the order of their estimates, spread over chunks.

        Those of Winograd's algorithm follow, where the model allows it.
        """
        return [Candidate(task.workload, choice, task.functions) for choice in self._choices(task)]

    def _choices(self, task: Task[Workload]) -> list[Choice]:
        with self._parsed:
            lanes = get_simd_32bit_lanes()
        taken: Counter[int] = Counter()
        spread: list[Choice] = []
        for choice in possible_choices(task.workload, lanes):
            if taken[choice[0]] <= CANDIDATES // 3 and len(spread) < CANDIDATES:
                taken[choice[0]] += 1
                spread.append(choice)
        allowed = self._model.tolerance > 0
        forms = winograd_choices(task.workload, lanes) if allowed else []
        rule = static_choice(task.workload, lanes, winograd=allowed)
        return [rule, *(choice for choice in (*spread, *forms) if choice != rule)]

    def _products(self, task: Task[Workload]) -> float:
        """Return the multiply-accumulates of a task that no candidate can do without."""
        products = float(task.macs * task.calls)
        return products / MOST_SAVED if any(map(is_winograd, self._choices(task))) else products

    def _search(self, task: Task[Workload], candidates: Sequence[Candidate]) -> float:
        """Measure the candidates of a task, of which the first is compiled already, and record the best.

        Returns:
            How many times faster than the first the best is.
        """
        default, *others = candidates
        try:
            finalists = self._finalists(default, others)
        except RuntimeError as error:  # TVM's errors are RuntimeErrors
            _log.warning("%s of %s is not tuned: %s", task.workload[:3], self._model.name, reason(error))
            return 1.0
        self.candidates += len(candidates)
        best = self._watch.halve([default, *finalists])
        record = Record(task.workload, best.choice, best.seconds / task.calls, False, self._model.tolerance > 0)
        append_record(self._target, record)
        self.found[task.workload] = record
        return default.seconds / best.seconds

    def _finalists(self, default: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
        """Compile candidates and return them; of many with several functions the best by the one called most."""
        functions = default.functions
        if len(functions) == 1 or len(others) <= FINALISTS:
            if others:
                compile_candidates(others, self._parsed)
            return list(others)
        most = max(range(len(functions)), key=lambda index: functions[index][1])
        tried = [Candidate(other.workload, other.choice, functions[most : most + 1]) for other in others]
        compile_candidates(tried, self._parsed)
        self._watch.halve(tried)
        tried.sort(key=lambda candidate: candidate.seconds)
        rest = [*functions[:most], *functions[most + 1 :]]
        left = [Candidate(best.workload, best.choice, rest) for best in tried[:FINALISTS]]
        compile_candidates(left, self._parsed)
        return [
            Candidate(a.workload, a.choice, functions, [*b.kernels[:most], *a.kernels, *b.kernels[most:]])
            for a, b in zip(tried, left, strict=False)
        ]


def _everything(wanted: Set[Workload]) -> Guide:
    """Return the guide that asks for all, once."""
    left: list[Set[Workload]] = [wanted]
    return lambda _: left.pop() if left else ()


def _reference() -> tvm.IRModule:
    """Return a convolution whose numbers stay in the near caches, so that it runs almost at the core's peak."""
    body = relay.var("data", shape=(1, 64, 14, 14))
    for kernel in (3, 1):  # the second reads blocks, so that the first stores them
        weights = relay.const(np.ones((64, 64, kernel, kernel), "float32"))
        body = relay.nn.conv2d(body, weights, padding=[kernel // 2] * 2, channels=64, kernel_size=[kernel] * 2)
    function = relay.Function(relay.analysis.free_vars(body), body)
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def _speed(task: Task[Workload], seconds: float) -> float:
    """Return multiply-accumulates a second."""
    return task.macs * task.calls / seconds


def _proven(model: Model, default: Library, found: Mapping[Workload, Record]) -> tuple[Times, Times] | None:
    """Race what was found against the static rule, and record as proven what wins.

    Returns:
        The times without and with all that is tuned now; None where nothing new is.
    """
    target = default.target
    with tvm.target.Target(target):
        lanes, allowed = get_simd_32bit_lanes(), model.tolerance > 0
        rule = {workload: static_choice(workload, lanes, winograd=allowed) for workload in found}
    before = recorded_choices(target, winograd=model.tolerance > 0)

    def raced(choices: Choices) -> tuple[Times, Times]:
        tuned = build_library(model, target, choices={**before, **choices})
        raise_if_stopped()
        _log.info(f"comparing {model.name} with and without {len(choices)} tuned convolutions")
        return race(model.name, default, tuned)

    tried = {workload: record.choice for workload, record in found.items() if record.choice != rule[workload]}
    times = raced(tried) if tried else None
    kept: dict[Workload, Choice] = {}
    if times:
        left = winners(*times, tried)
        kept = {workload: tried[workload] for workload in left}
        if kept and len(kept) < len(tried):
            times = raced(kept)
        if np.median(times[0].whole / times[1].whole) <= 1:
            kept = {}
    for workload, record in found.items():
        seconds = record.seconds
        if times:
            taken, kernels = times[workload in kept].workloads[workload]
            seconds = float(np.median(taken)) / kernels
        append_record(target, Record(workload, kept.get(workload, rule[workload]), seconds, True, allowed))
    return times if kept else None


def figures(default: Times, tuned: Times) -> dict[str, Any]:
    """Return what a report says of a race."""
    ratios = default.whole / tuned.whole
    return {
        "default_s": float(np.median(default.whole)),
        "tuned_s": float(np.median(tuned.whole)),
        "ratio": float(np.median(ratios)),
        "spread": (float(ratios.min()), float(ratios.max())),
    }
