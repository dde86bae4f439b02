"""The schedulers of the plug-in: listed, chosen by name, judged, and loaded when they are asked for alone."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.support.brute_force import figure
from tests.support.graphs import TIMED, Traits, random_problem
from tests.test_docs import declared_row
from tvm_pipeline import evaluate, plan, read_graph, read_platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.errors import NoPlanError, OptionError
from tvm_pipeline.planning import SCHEDULERS

PROFILES = Path(__file__).parents[3] / "profiles"
NAMES = sorted(
    entry.name
    for entry in entry_points(group="tvm_pipeline.schedulers")
    if entry.value.startswith("tvm_pipeline_papers")
)
PREDICTING = [name for name in NAMES if not SCHEDULERS[name].cut]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("scheduler", [name for name in PREDICTING if name != "predpar"])  # predpar plans for Edge TPUs
def test_a_plan_is_legal_and_never_better_than_the_best(scheduler: str) -> None:
    made = 0
    for seed in range(15):
        rng = random.Random(seed)
        problem = random_problem(rng, rng.choice(TIMED), operators=(2, 4), traits=Traits(modelled=True))
        problem = replace(problem, time_limit_s=0.2)
        try:
            decision, best_plan = plan(problem, scheduler), plan(problem).plan
        except NoPlanError:
            continue
        except OptionError:
            if problem.stages is None:
                raise
            continue
        made += 1
        assert decision.plan.scheduler == scheduler
        assert scheduler in decision.why
        assert problem.stages in (None, len(decision.plan.stages))
        assert decision.plan.predicted == evaluate(problem, decision.plan.stages).predicted
        assert decision.plan.gap is not None
        best = figure(problem, best_plan.predicted)
        assert figure(problem, decision.plan.predicted) >= best - 1e-9 * abs(best)
    assert made > 0


# predpar asks its network for each segment, 6 seconds in plain Python; test_predpar.py has a small network for it.
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scheduler", [name for name in PREDICTING if name != "predpar"])
def test_each_plans_a_published_network_on_edge_tpus(published: tuple[Problem, float], scheduler: str) -> None:
    problem, best = published
    found = plan(problem, scheduler).plan
    assert found.scheduler == scheduler
    assert found.predicted == evaluate(problem, found.stages).predicted
    assert found.value is not None
    assert found.value <= best


@pytest.fixture(scope="module")
def published() -> tuple[Problem, float]:
    """A network on two Edge TPUs, and the value of its best plan."""
    graph = read_graph(PROFILES / "keras" / "ResNet50.json")
    problem = Problem(graph, read_platform(PROFILES / "platforms" / "coral-usb-2.toml"), unmeasured(graph))
    best = plan(problem).plan.value
    assert best is not None
    return problem, best


def test_the_page_of_the_papers_states_what_each_takes() -> None:
    page = (PROFILES.parent / "docs/papers/index.md").read_text()
    assert "\n".join(declared_row(name, SCHEDULERS[name]) for name in PREDICTING) in page


def test_they_are_listed_and_nothing_loads_them_before_they_are_asked_for() -> None:
    """`import tvm_pipeline` and a plan by the default scheduler load nothing of the plug-in."""
    program = """
import contextlib, io, re, sys
import tvm_pipeline
from tvm_pipeline.testing import example_problem
tvm_pipeline.plan(example_problem())
tvm_pipeline.plan(example_problem(), "chain")
assert not [name for name in sys.modules if name.startswith("tvm_pipeline_papers")]
from tvm_pipeline.cli import app
written = io.StringIO()
with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
    app(["plan", "x", "--scheduler", "help"], prog_name="tvm-pipeline")
listed = re.sub(r"[\\s│]", "", written.getvalue())
assert "respect" in listed
assert "pred-profpar" in listed
assert tvm_pipeline.plan(example_problem(), "respect").plan.scheduler == "respect"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
