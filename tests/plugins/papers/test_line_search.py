"""Algorithm 2: the search against the listing written out for itself, its trigger, and trials while frames run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.runtime.conftest import _no_thread_left  # noqa: F401
from tests.runtime.machine import Machine, plan_of, problem_of
from tests.support.examples import examples
from tests.support.fake_backend import chain_model, numbers, values
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.runtime import LivePipeline
from tvm_pipeline.runtime.replanning import without
from tvm_pipeline.runtime.strategy import TICK_S, CoreLoad
from tvm_pipeline_papers.line_search import LineSearch, line_search

EQUAL = {"d0": [4e-3] * 8, "d1": [4e-3] * 8}


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    return tmp_path / "stat"


def cut_of(plan: Plan) -> int:
    return sum(len(stage.operators) for stage in plan.stages if stage.devices == ("d0",))


class Curve:
    """A pipeline whose period is what a list says of its cut, whatever the stages would take."""

    def __init__(self, problem: Problem, plan: Plan, strategy: LineSearch) -> None:
        strategy._cores = CoreLoad(Path("/nowhere"))
        self.problem, self.strategy, self.now_s = problem, strategy, 0.0
        self.visited: list[int] = []
        self.run_by(plan)

    def run_by(self, plan: Plan) -> None:
        self.cut, self.done_s = cut_of(plan), self.now_s
        self.visited.append(self.cut)
        self.records = [StageRecord(index, stage.devices[0]) for index, stage in enumerate(plan.stages)]
        self.strategy.begin(self.problem, plan)

    def run(self, periods_s: list[float], seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            while self.done_s + periods_s[self.cut] <= self.now_s:
                self.done_s += periods_s[self.cut]
                for record in self.records:
                    record.add(0.0, 0.0, periods_s[self.cut], record.frames, self.done_s)
            if proposal := self.strategy.look(self.records, self.problem):
                self.run_by(proposal[0])


def listing(measure: Callable[[int], float], n: int, last: int) -> int:
    """Algorithm 2 with the decisions of the docstring, written out for itself; return the chosen cut."""
    chosen, t = n, measure(n)
    i = n + 1
    while i <= last:
        if (found := measure(i)) <= t:
            chosen, t = i, found
        else:
            break
        i += 1
    if chosen == n:
        i = n - 1
        while i >= 0:
            if (found := measure(i)) <= t:
                chosen, t = i, found
            else:
                break
            i -= 1
    return chosen


@given(st.data())
def test_a_search_is_that_of_the_listing(data: st.DataObject) -> None:
    periods = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=8))
    last = len(periods) - 1
    n = data.draw(st.integers(0, last))
    wanted: list[int] = []
    chosen = listing(lambda i: wanted.append(i) or periods[i], n, last)
    search = line_search(n, last)
    tried = [next(search)]
    for _ in wanted[1:]:
        tried.append(search.send(periods[tried[-1]]))
    with pytest.raises(StopIteration) as end:
        search.send(periods[tried[-1]])
    assert (end.value.value, tried) == (chosen, wanted)


@examples(30)
@given(data=st.data(), alpha=st.sampled_from([0.25, 0.5, 1.0]), keeps_m=st.booleans())
def test_m_is_an_average_and_a_search_begins_where_it_is_wrong(
    data: st.DataObject, alpha: float, keeps_m: bool
) -> None:
    last = data.draw(st.integers(2, 5))
    problem = problem_of({"d0": [1e-3] * last, "d1": [1e-3] * last})
    strategy = LineSearch(alpha, keeps_m=keeps_m)
    curve = Curve(problem, plan_of(problem, ("d0", 1), ("d1", last - 1)), strategy)
    n, m = 1, dict[int, float]()
    for load in range(2):
        now = [ms * 1e-3 for ms in data.draw(st.lists(st.integers(4, 40), min_size=last + 1, max_size=last + 1))]
        walked = [n]

        def measure(i: int, now: list[float] = now, walked: list[int] = walked) -> float:
            m[i] = (1 - alpha) * m[i] + alpha * now[i] if i in m else now[i]
            assume(all(j == i or abs(m[j] / m[i] - 1) > 1e-6 for j in m))  # a tie is a matter of rounding
            walked.append(i)
            return m[i]

        searches = 0
        while abs(now[n] / m[n] - 1) > 0.1 if n in m else not load:
            searches += 1
            assume(searches < 5)
            if not keeps_m:
                m.clear()
            n = listing(measure, n, last)
            measure(n)  # the first measurement at rest
        assume(abs(abs(now[n] / m[n] - 1) - 0.1) > 1e-3)
        curve.run(now, 1.6 * len(walked) + 4.0)
        assert [*curve.visited] == [
            cut for at, cut in enumerate(walked) if at == 0 == load or (at and cut != walked[at - 1])
        ]
        assert strategy.m == pytest.approx(m, rel=1e-6)
        curve.visited.clear()


def test_both_ends_are_reached_and_left_again(stat: Path):
    """A device is a fifth as fast, then the other: an operator takes 20 ms there, and all three 12 elsewhere."""
    problem = problem_of({name: [4e-3] * 3 for name in ("d0", "d1")})
    load = {"d1": 0.8}
    machine = Machine(problem, plan_of(problem, ("d0", 1), ("d1", 2)), LineSearch(), stat, loads=lambda _: load)
    found = []
    for device in ("d1", "d0", "d1"):
        load = {device: 0.8}
        machine.run(30)
        found.append([(stage.devices, len(stage.operators)) for stage in machine.plan.stages])
    assert found == [[(("d0",), 3)], [(("d1",), 3)], [(("d0",), 3)]]
    steps = [abs(cut_of(b) - cut_of(a)) for (_, a, _), (_, b, _) in pairwise(machine.switches)]
    assert set(steps) <= {1, 2}  # one operator, or back over the start to try the other side


@pytest.mark.parametrize(("keeps_m", "found"), [(True, 9), (False, 11)])
def test_averages_with_the_periods_of_another_load_end_the_walk_too_early(keeps_m: bool, found: int, stat: Path):
    """Without a load cuts 8 and 9 take 16 and 18 ms; then 8 to 12 take 30.4, 26.6, 22.8, 22 and 24."""
    problem = problem_of({name: [2e-3] * 16 for name in ("d0", "d1")})
    load = dict[str, float]()
    first, strategy = plan_of(problem, ("d0", 8), ("d1", 8)), LineSearch(keeps_m=keeps_m)
    machine = Machine(problem, first, strategy, stat, loads=lambda _: load, noise=0.0)
    machine.run(5)
    load = {"d1": 1 - 1 / 1.9}
    machine.run(15)
    assert cut_of(machine.plan) == found


def test_a_load_that_ends_where_the_running_cut_does_not_feel_it_begins_no_search(stat: Path):
    """The signal is the period alone: that of one device is the same whatever becomes of the other."""
    problem = problem_of({name: [4e-3] * 3 for name in ("d0", "d1")})
    load = {"d0": 0.8}
    machine = Machine(problem, plan_of(problem, ("d0", 1), ("d1", 2)), LineSearch(), stat, loads=lambda _: load)
    machine.run(15)
    load = {}
    machine.run(15)
    assert cut_of(machine.plan) == 0


def test_a_plan_that_has_no_such_cut_becomes_that_of_algorithm_1(stat: Path):
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, ("d0+d1", 8)), LineSearch(), stat)
    machine.run(1)
    assert [(stage.devices, len(stage.operators)) for stage in machine.switches[0][1].stages] == [
        (("d0",), 4),
        (("d1",), 4),
    ]
    assert "begins by Algorithm 1" in machine.switches[0][2]


def test_without_two_devices_it_says_that_there_is_no_cut(stat: Path, caplog: pytest.LogCaptureFixture):
    problem = problem_of({"d0": [4e-3] * 4})
    machine = Machine(problem, plan_of(problem, ("d0", 4)), LineSearch(), stat)
    machine.run(5)
    assert not machine.switches
    assert [record.message for record in caplog.records] == [
        "line-search has no cut to move: algorithm-1 needs two devices that share no cores and can run and hold a cut "
        "of chain; platform fake machine has d0"
    ]


def test_another_objective_is_told(caplog: pytest.LogCaptureFixture):
    problem = problem_of(EQUAL)
    LineSearch().begin(replace(problem, objective="latency"), plan_of(problem, ("d0", 4), ("d1", 4)))
    assert "line-search searches for throughput, and the objective is latency" in caplog.text


def test_while_the_source_is_slow_nothing_is_tried(stat: Path):
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, ("d0", 1), ("d1", 7)), LineSearch(), stat, source_fps=5)
    machine.run(20)
    assert not machine.switches


def test_a_cut_that_is_refused_ends_the_walk(stat: Path):
    """As a device does that cannot be bound: 5 is refused, so that the search goes the other way."""
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, ("d0", 4), ("d1", 4)), LineSearch(), stat, loads=lambda _: {"d0": 0.7})
    run_by = machine.run_by
    machine.run_by = lambda plan: None if cut_of(plan) == 5 else run_by(plan)
    machine.run(10)
    assert [cut_of(plan) for _, plan, _ in machine.switches] == [5, 3, 2, 1, 2]


def test_what_a_device_cannot_run_is_not_tried(stat: Path):
    seconds = {"d0": [4e-3] * 8, "d1": [4e-3, 4e-3, 4e-3, None, 4e-3, 4e-3, 4e-3, 4e-3]}
    problem = problem_of(seconds)
    machine = Machine(problem, plan_of(problem, ("d0", 5), ("d1", 3)), LineSearch(), stat, loads=lambda _: {"d0": 0.8})
    machine.run(15)
    assert [cut_of(plan) for _, plan, _ in machine.switches] == [6, 4]


def test_a_device_that_is_gone_and_back_begins_a_search(stat: Path):
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, ("d0", 4), ("d1", 4)), LineSearch(), stat)
    machine.run(5)
    machine.problem = without(problem, {"d1"})
    machine.run_by(plan_of(problem, ("d0", 8)))
    machine.switches.clear()
    machine.run(10)
    assert not machine.switches
    machine.problem = problem
    machine.run(20)
    assert cut_of(machine.plan) == 4


@pytest.mark.thorough
def test_trials_cost_no_frame_while_a_device_really_slows_down(monkeypatch: pytest.MonkeyPatch):
    """Operators sleep for 2 ms, those of d1 from frame 120 on for 8 ms: the best cut goes from 3 to 5."""
    monkeypatch.setattr("tvm_pipeline_papers.line_search.WINDOW_S", 0.1)
    slow = threading.Event()

    def sleeping(device: str) -> Callable[[int], None]:
        return lambda _: time.sleep(8e-3 if device == "d1" and slow.is_set() else 2e-3)

    names = [f"op{index}" for index in range(6)]
    model = chain_model(6, hooks={(name, device): sleeping(device) for name in names for device in ("d0", "d1")})
    problem = problem_of({"d0": [2e-3] * 6, "d1": [2e-3] * 6})
    results = []
    with LivePipeline(model, problem, plan_of(problem, ("d0", 3), ("d1", 3)), adaptation=LineSearch()) as pipeline:
        for result in pipeline.map(numbers(360)):
            results.append(result)
            if len(results) == 120:
                slow.set()
    assert values(results) == [value + 6 for value in range(360)]
    assert [result.frame for result in results] == list(range(360))
    assert cut_of(pipeline.plan) > 3
    assert pipeline.version >= 3
