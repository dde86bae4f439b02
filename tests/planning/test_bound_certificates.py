"""Certificates of bounds, as `tools/check_bound.py` checks them, against every assignment of operators to devices."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support import certificates
from tests.support.certificates import mutated
from tests.support.graphs import Traits, random_problem, randoms
from tools import check_bound
from tvm_pipeline import planning
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.certificate import bound_certificate, check_certifiable

Stated = dict[str, Any]


def some_problem(rng: random.Random) -> Problem:
    return random_problem(rng, "throughput", operators=(1, 4), devices=(1, 3), traits=Traits(joules=False, copies=True))


def certified(rng: random.Random) -> Stated:
    try:
        stated: Stated = json.loads(bound_certificate(some_problem(rng)))
    except OptionError:
        assume(False)
    return stated


def is_checked(stated: Stated) -> bool:
    return certificates.is_checked(check_bound, stated)


def best_fps(stated: Stated) -> float:
    """Return the frames a second of the best assignment of whole operators to devices of which no two share cores."""
    devices, best = stated["devices"], 0.0
    for assigned in itertools.product(devices, repeat=len(stated["operators"])):
        load: dict[str, float] = {}
        for index, device in enumerate(assigned):
            taken = device["seconds"][index]
            load[device["name"]] = load.get(device["name"], 0.0) + (float("inf") if taken is None else taken)
        used = [set(device["cores"]) for device in devices if device["name"] in load]
        if all(a.isdisjoint(b) for a, b in itertools.combinations(used, 2)):
            best = max(best, 1 / max(*load.values(), 1e-300))
    return best


@given(rng=randoms())
def test_bounds_are_checked_and_no_plan_exceeds_them(rng: random.Random) -> None:
    problem = some_problem(rng)
    try:
        stated = json.loads(bound_certificate(problem))
        best = planning.plan(problem, "best").plan
    except (OptionError, InfeasibleError):
        assume(False)
    assert is_checked(stated)
    assert (best.predicted.throughput_fps or 0.0) <= stated["bound_fps"] * (1 + 1e-9)
    assert best_fps(stated) <= stated["bound_fps"] * (1 + 1e-9)
    assert not is_checked({**stated, "bound_fps": stated["bound_fps"] * 0.999})


@given(rng=randoms(), many=st.just(5))
def test_a_broken_bound_is_refused_or_true(rng: random.Random, many: int) -> None:
    stated = certified(rng)
    names = [*stated["operators"], *(device["name"] for device in stated["devices"])]
    for _ in range(many):
        other = mutated(rng, stated, names)
        if is_checked(other):
            assert best_fps(other) <= other["bound_fps"] * (1 + 1e-9), other


def test_the_checker_stands_alone(tmp_path: Path) -> None:
    certificates.check_stands_alone(check_bound, certified(random.Random(1)), tmp_path)


@pytest.mark.parametrize("bound", [1e250, 10**400])
def test_figures_that_no_machine_has_are_refused(bound: float) -> None:
    assert not is_checked({**certified(random.Random(1)), "bound_fps": bound})


@pytest.mark.parametrize("written", ["", "[]", "{}", "\xff", '{"certificate": 1}', "1e999", "[" * 100_000])
def test_other_files_are_refused(written: str) -> None:
    with pytest.raises(check_bound.Refused):
        check_bound.check(written.encode("latin-1"))


def test_what_has_no_bound_is_refused_in_a_line() -> None:
    problem = random_problem(random.Random(0), "latency")
    with pytest.raises(OptionError, match=r"certificates of plans by .* and bounds of throughput"):
        check_certifiable(problem, "best")
