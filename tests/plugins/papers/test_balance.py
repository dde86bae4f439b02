"""It moves one operator at a time, to where no move helps, and takes back what did not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.machine import Machine, plan_of, problem_of
from tests.support.graphs import random_dag
from tvm_pipeline import Plan, Problem
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.cost.evaluate import check_stages
from tvm_pipeline.runtime.strategy import CoreLoad
from tvm_pipeline_papers.balance import Balance, moved

EQUAL = {"d0": [4e-3] * 8, "d1": [4e-3] * 8}


@pytest.fixture
def stat(tmp_path: Path) -> Path:
    return tmp_path / "stat"


def counts(plan: Plan) -> list[int]:
    return [len(stage.operators) for stage in plan.stages]


def visited(first: Plan, machine: Machine) -> list[list[int]]:
    return [counts(first), *(counts(plan) for _, plan, _ in machine.switches)]


def test_it_moves_one_operator_at_a_time_and_stops_where_the_stages_are_equal(stat: Path):
    problem = problem_of(EQUAL)
    first = plan_of(problem, ("d0", 1), ("d1", 7))
    machine = Machine(problem, first, Balance(), stat)
    machine.run(20)
    assert visited(first, machine) == [[1, 7], [2, 6], [3, 5], [4, 4]]
    assert "one operator moves from stage 1 to 0" in machine.switches[0][2]


def test_a_move_that_does_not_help_is_taken_back_and_it_rests_until_a_load_comes(stat: Path):
    seconds = [4e-3, 4e-3, 4e-3, 12e-3, 4e-3, 4e-3]  # 12 | 20 ms, and with the long one moved 24 | 8
    problem = problem_of({"d0": seconds, "d1": seconds})
    first = plan_of(problem, ("d0", 3), ("d1", 3))
    machine = Machine(problem, first, Balance(), stat, loads=lambda now: {"d0": 0.5} if now >= 10 else {})
    machine.run(10)
    assert visited(first, machine) == [[3, 3], [4, 2], [3, 3]]
    assert machine.switches[1][2].startswith("taken back: the stages take 24")
    machine.run(10)  # d0 half as fast: 24 | 20, then 16 | 24
    assert visited(first, machine)[3:] == [[2, 4], [3, 3]]


def test_of_three_stages_the_slowest_gives_to_the_faster_neighbour(stat: Path):
    problem = problem_of({name: [4e-3] * 12 for name in ("d0", "d1", "d2")})
    first = plan_of(problem, ("d0", 3), ("d1", 8), ("d2", 1))
    machine = Machine(problem, first, Balance(), stat)
    machine.run(30)
    assert visited(first, machine)[:3] == [[3, 8, 1], [3, 7, 2], [3, 6, 3]]
    assert counts(machine.plan) == [4, 4, 4]


def test_it_reaches_the_best_cut_under_a_load(stat: Path):
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, ("d0", 4), ("d1", 4)), Balance(), stat, loads=lambda _: {"d1": 0.66})
    machine.run(20)
    assert counts(machine.plan) == [6, 2]


def test_a_difference_below_the_noise_moves_nothing(stat: Path):
    """The stages take 16 and 20 ms in the median, and frames of each differ by more."""
    problem = problem_of(EQUAL)
    strategy = Balance()
    strategy._cores = CoreLoad(stat)
    strategy.begin(problem, plan_of(problem, ("d0", 4), ("d1", 4)))
    records = [StageRecord(0, "d0"), StageRecord(1, "d1")]
    for frame in range(100):
        for record, seconds in zip(records, (0.016, 0.020), strict=True):
            record.add(0.0, 0.0, seconds * (0.6 if frame % 4 < 2 else 1.4), frame, 0.02 * frame)
    assert strategy.look(records, problem) is None


@pytest.mark.parametrize("stages", [[("d0", 8)], [("d0+d1", 8)]])
def test_where_there_is_no_cut_nothing_moves(stat: Path, stages: list[tuple[str, int]]):
    problem = problem_of(EQUAL)
    machine = Machine(problem, plan_of(problem, *stages), Balance(), stat, loads=lambda _: {"d0": 0.8})
    machine.run(10)
    assert not machine.switches


def test_what_a_device_cannot_run_does_not_move_there(stat: Path):
    problem = problem_of(EQUAL)
    able = tuple(None if index == 2 else 4e-3 for index in range(8))
    devices = {**problem.profile.devices, "d0": DeviceProfile.in_order(problem.graph, able)}
    problem = replace(problem, profile=replace(problem.profile, devices=devices))
    machine = Machine(problem, plan_of(problem, ("d0", 1), ("d1", 7)), Balance(), stat)
    machine.run(10)
    assert counts(machine.plan) == [2, 6]


def test_operators_that_take_next_to_nothing_move_along():
    problem = problem_of({name: [4e-3, 4e-3, 1e-6, 1e-6, 4e-3, 1e-6] for name in ("d0", "d1")})
    stages = plan_of(problem, ("d0", 4), ("d1", 2)).stages
    assert [len(stage.operators) for stage in moved(problem, stages, 0, 1)] == [1, 5]
    stages = plan_of(problem, ("d0", 2), ("d1", 4)).stages
    assert [len(stage.operators) for stage in moved(problem, stages, 1, 0)] == [5, 1]
    assert moved(problem, plan_of(problem, ("d0", 4), ("d1", 2)).stages, 1, 0) is not None
    assert moved(problem, plan_of(problem, ("d0", 1), ("d1", 5)).stages, 0, 1) is None


@given(seed=st.integers(0, 2**32), length=st.integers(4, 12), count=st.integers(2, 4))
def test_stages_stay_legal_wherever_operators_move(seed: int, length: int, count: int):
    rng = random.Random(seed)
    graph = random_dag(rng, length)
    platform = Platform("p", tuple(Device(f"d{index}") for index in range(count)))
    measured = {device.name: DeviceProfile.in_order(graph, (1e-3,) * length) for device in platform.devices}
    problem = Problem(graph, platform, Profile(graph.name, graph.fingerprint, measured))
    names = graph.operator_names
    cuts = [0, *sorted(rng.sample(range(1, length), count - 1)), length]
    stages = tuple(Stage((f"d{i}",), tuple(names[a:b])) for i, (a, b) in enumerate(pairwise(cuts)))
    for _ in range(20):
        source = rng.randrange(count)
        target = source + 1 if source == 0 else source - 1 if source == count - 1 else source + rng.choice((-1, 1))
        stages = moved(problem, stages, source, target) or stages
        check_stages(graph, platform, stages)


def test_a_plan_that_was_refused_is_not_under_trial(stat: Path):
    problem = problem_of(EQUAL)
    strategy = Balance()
    first = plan_of(problem, ("d0", 2), ("d1", 6))
    machine = Machine(problem, first, strategy, stat)
    machine.run_by = lambda plan: None  # as where a device cannot be bound
    machine.run(5)
    assert {tuple(counts(plan)) for _, plan, _ in machine.switches} == {(3, 5)}
