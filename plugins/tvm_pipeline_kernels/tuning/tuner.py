"""Tune a model for one target: search where it is worth it, race what was found in the whole network, keep what wins.

1. Compile the network as the static rule has it, and time each of its convolutions alone, with what is fused to it.
2. Take the convolution that loses most against the core's peak; on a GPU, whose peak is not known, the one of the most
   time. Try its candidates, and note the best. Go on until the budget is used up, or until less than 1 % is left to
   gain. Where a guide says which of them to search, ask it anew when these are done.
3. Compile the network with all that was found and run both in turns. Each choice that does not win is dropped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from tvm_pipeline import Model
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline_kernels.choices import (
    Choice,
    Choices,
    Workload,
    is_winograd,
    possible_choices,
    static_choice,
    winograd_choices,
)
from tvm_pipeline_kernels.gpu_tiles import Gpu
from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_kernels.tuning.candidates import Candidate, Stopwatch, Task
from tvm_pipeline_kernels.tuning.race import ROUNDS, Runner, Times, race, winners
from tvm_pipeline_kernels.tuning.tuning_records import (
    Record,
    append_record,
    best_of,
    read_records,
    recorded_choices,
)
from tvm_pipeline_tvm.child_process import raise_if_stopped
from tvm_pipeline_tvm.tvm_errors import reason

CANDIDATES = 10  # of a workload, the choice of the static rule among them
FINALISTS = 3  # of a workload that several functions hold: measured in all of them
WARM_RUNS = 20  # of the kernel that tells the core's peak
MOST_SAVED = 4  # of the multiply-accumulates of a convolution by Winograd's algorithm
WORTHWHILE = 0.01  # of the seconds of all convolutions: less is not searched for

_log = logging.getLogger(__name__)


class Emitter(Protocol):
    """What the search asks of an IR, for one model and one target.

    Attributes:
        network: what is tuned; without a tolerance where no other algorithm is there.
        target: of CPU cores or of a GPU, as the platform has it.
    """

    network: Model
    target: str

    @property
    def cores(self) -> Cores | Gpu:
        """The cores of the target, or its GPU."""

    def build(self, choices: Choices) -> Any:
        """Return the library of the model under choices, perhaps from the cache."""

    def workloads(self, library: Any) -> Mapping[str, Workload]:
        """Return the workload of each function of a library that can be tuned."""

    def tasks(self) -> list[Task[Workload]]:
        """Return the workloads of the model, with the functions that hold them."""

    def reference(self) -> Task[Workload] | None:
        """Return a task that runs almost at the core's peak; None where nobody knows one.

        Then what takes the most time is searched first.
        """

    def compile(self, candidates: Sequence[Candidate]) -> None:
        """Give all candidates their kernels, in one compilation; raise RuntimeError where TVM cannot."""

    def stopwatch(self) -> Stopwatch:
        """Return what times the kernels of candidates."""

    def runner(self, library: Any) -> Runner:
        """Return the whole network of a library as what runs node by node."""


def tune(emitter: Emitter, seconds: float, guide: Guide | None = None) -> TuningReport:
    """Tune a model on the core that the thread is bound to, or on a GPU; see `TuningReport` and `Backend.tune`.

    Raises:
        ModelError: TVM cannot import or compile the model.
        PipelineError: a record cannot be written.
    """
    model, target = emitter.network, emitter.target
    default = emitter.build({})
    begin = time.monotonic()
    workloads: set[Any] = set(emitter.workloads(default).values())
    known = (record for record in read_records(target) if record.winograd == (model.tolerance > 0))
    records = [record for record in known if record.workload in workloads]
    proven = best_of(record for record in records if record.proven)
    found = {workload: record for workload, record in best_of(records).items() if workload not in proven}
    wanted = workloads - proven.keys() - found.keys()
    search = _Search(emitter, begin + seconds)
    if wanted and seconds > 0:
        search.run(wanted, guide or once(wanted))
        found.update(search.found)
    elif wanted:
        search.stopped = "there was no time for it"
    elif workloads:
        search.stopped = "all of it was measured before"
    else:
        search.stopped = "the model has no convolution of float32 that a schedule of ours computes"
    times = _proven(emitter, default, found) if found and seconds > 0 else None
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

    def __init__(self, emitter: Emitter, deadline: float) -> None:
        self.found: dict[Workload, Record] = {}
        self.candidates = 0
        self.stopped = ""
        self._emitter, self._model, self._deadline = emitter, emitter.network, deadline
        self._watch = emitter.stopwatch()
        self._defaults: dict[Workload, Candidate] = {}

    def run(self, wanted: Set[Workload], guide: Guide) -> None:
        """Search those of the wanted workloads that the guide asks for."""
        begin = time.monotonic()
        raise_if_stopped()
        _log.info(f"looking for what to tune in {self._model.name}")
        tasks = self._emitter.tasks()
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
        """Time what the static rule chooses; return the core's peak, in multiply-accumulates a second.

        It is infinite where nobody knows it.
        """
        reference = self._emitter.reference()
        warm = [] if reference is None else self._candidates(reference)[:1]
        self._emitter.compile([*defaults, *warm])
        for _ in range(WARM_RUNS):
            for each in warm:
                self._watch.time(each, evicts=False)
        for default in defaults:
            self._watch.halve([default])
        return float("inf") if reference is None else _speed(reference, warm[0].seconds)

    def _candidates(self, task: Task[Workload]) -> list[Candidate]:
        """Return the static rule's candidate, then others in the order of their estimates, spread over chunks.

        Those of Winograd's algorithm follow, where the model allows it.
        """
        return [Candidate(task.workload, choice, task.functions) for choice in self._choices(task)]

    def _choices(self, task: Task[Workload]) -> list[Choice]:
        cores = self._emitter.cores
        taken: Counter[int] = Counter()
        spread: list[Choice] = []
        for choice in possible_choices(task.workload, cores):
            if taken[choice[0]] <= CANDIDATES // 3 and len(spread) < CANDIDATES:
                taken[choice[0]] += 1
                spread.append(choice)
        allowed = self._model.tolerance > 0
        forms = winograd_choices(task.workload, cores) if allowed else []
        rule = static_choice(task.workload, cores, winograd=allowed)
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
        append_record(self._emitter.target, record)
        self.found[task.workload] = record
        return default.seconds / best.seconds

    def _finalists(self, default: Candidate, others: Sequence[Candidate]) -> list[Candidate]:
        """Compile candidates and return them; of many with several functions the best by the one called most."""
        functions = default.functions
        if len(functions) == 1 or len(others) <= FINALISTS:
            if others:
                self._emitter.compile(others)
            return list(others)
        most = max(range(len(functions)), key=lambda index: functions[index][1])
        tried = [Candidate(other.workload, other.choice, functions[most : most + 1]) for other in others]
        self._emitter.compile(tried)
        self._watch.halve(tried)
        tried.sort(key=lambda candidate: candidate.seconds)
        rest = [*functions[:most], *functions[most + 1 :]]
        left = [Candidate(best.workload, best.choice, rest) for best in tried[:FINALISTS]]
        self._emitter.compile(left)
        return [
            Candidate(a.workload, a.choice, functions, [*b.kernels[:most], *a.kernels, *b.kernels[most:]])
            for a, b in zip(tried, left, strict=False)
        ]


def once(wanted: Set[Workload]) -> Guide:
    """Return the guide that asks for all of these, once."""
    left: list[Set[Workload]] = [wanted]
    return lambda _: left.pop() if left else ()


def _speed(task: Task[Workload], seconds: float) -> float:
    """Return multiply-accumulates a second."""
    return task.macs * task.calls / seconds


def _proven(emitter: Emitter, default: Any, found: Mapping[Workload, Record]) -> tuple[Times, Times] | None:
    """Race what was found against the static rule, and record as proven what wins.

    Returns:
        The times without and with all that is tuned now; None where nothing new is.
    """
    model, target, allowed = emitter.network, emitter.target, emitter.network.tolerance > 0
    rule = {workload: static_choice(workload, emitter.cores, winograd=allowed) for workload in found}
    before = recorded_choices(target, winograd=model.tolerance > 0)

    def raced(choices: Choices) -> tuple[Times, Times]:
        tuned = emitter.build({**before, **choices})
        raise_if_stopped()
        _log.info(f"comparing {model.name} with and without {len(choices)} tuned convolutions")
        return race([emitter.runner(default), emitter.runner(tuned)])

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
