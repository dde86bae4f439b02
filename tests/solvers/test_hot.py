"""Compiled loops and plain ones make the same plans, to the last digit, whether numba is switched off or missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Prints plans of every search with a hot loop; the seeds are those of any program that runs it.
PROGRAM = """
import random, sys
{before}
from dataclasses import replace
from tests.support.graphs import LEXICOGRAPHIC, Traits, lexicographic_problem, random_problem
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.planning.search.dynamic_programming import chain
from tvm_pipeline.planning.search.dynamic_programming import hybrid
from tvm_pipeline.planning.search.dynamic_programming import ideals
from tvm_pipeline.planning.search.revisits import revisits
from tvm_pipeline.planning.search.pareto import pareto

def show(seed, search, problem):
    try:
        found = search(problem)
        for plan in found if isinstance(found, list) else [found]:
            print(seed, plan)
    except PipelineError as error:
        print(seed, search.__name__, type(error).__name__, error)

for seed in range(40):
    rng = random.Random(seed)
    objective = rng.choice(("throughput", "latency", "energy"))
    traits = rng.choice((Traits(), Traits(modelled=True, buses=True, copies=True)))
    problem = random_problem(rng, objective, operators=(2, 7), devices=(1, 4), traits=traits)
    for search in (chain, ideals, hybrid, revisits, pareto):
        show(seed, search, problem)
    if objective != "throughput":
        show(seed, chain, replace(problem, min_throughput_fps=20.0))
    for objective in LEXICOGRAPHIC:
        show(seed, ideals, lexicographic_problem(random.Random(seed), objective, children_together=seed % 3 == 0))
print("compiled" if sys.modules.get("numba") else "plain", file=sys.stderr)
"""


def printed(before: str = "", **environment: str) -> tuple[str, str]:
    """What the program prints, and whether it ran compiled or plain."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        cwd=os.path.dirname(os.path.dirname(__file__)),
    )
    return done.stdout, done.stderr.split()[-1]


@pytest.fixture(scope="module")
def plain() -> str:
    plans, way = printed(TVM_PIPELINE_PLAIN="1")
    assert way == "plain"
    assert plans.count("status optimal") > 200
    return plans


def test_compiled_loops_make_the_same_plans(plain: str) -> None:
    pytest.importorskip("numba")
    assert printed(TVM_PIPELINE_PLAIN="0") == (plain, "compiled")


def test_without_numba_the_plans_are_the_same(plain: str) -> None:
    assert printed('sys.modules["numba"] = None', TVM_PIPELINE_PLAIN="0") == (plain, "plain")
