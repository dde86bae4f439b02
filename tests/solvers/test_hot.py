"""Compiled and plain loops make the same plans, to the last digit; numba is imported when a loop is first called."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# Prints plans of every search with a hot loop; the seeds are those of any program that runs it.
PROGRAM = """
import random, sys
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

for seed in range(6):
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
from numba import config
print("plain" if config.DISABLE_JIT else "compiled", file=sys.stderr)
"""

ROOT = Path(__file__).parents[2]


def run(program: str, **environment: str) -> tuple[str, str]:
    """Return the output of a program, and the last word of its error output."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
        cwd=ROOT,
    )
    return done.stdout, (done.stderr.split() or [""])[-1]


@pytest.mark.thorough
def test_compiled_and_plain_loops_make_the_same_plans() -> None:
    plain, way = run(PROGRAM, NUMBA_DISABLE_JIT="1")
    assert way == "plain"
    assert plain.count("status optimal") > 30
    assert run(PROGRAM, NUMBA_DISABLE_JIT="0") == (plain, "compiled")


def test_numba_is_imported_by_the_first_loop_only() -> None:
    """Commands that plan nothing do not pay the half second that its import takes."""
    program = "import sys, tvm_pipeline.cli, tvm_pipeline.planning, tvm_pipeline.memory; print('numba' in sys.modules)"
    assert run(program) == ("False\n", "")


@pytest.mark.thorough
def test_threads_may_make_the_first_call_together() -> None:
    program = """
from concurrent.futures import ThreadPoolExecutor
from tvm_pipeline.planning.search import pareto
import numpy as np

first = pareto._sift
def sift(_):
    kept = np.zeros(3, np.bool_)
    first(np.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0], [2.0, 3.0, 3.0]]), kept, np.zeros(3, np.int64))
    return kept.tolist()
with ThreadPoolExecutor(8) as pool:
    print(set(map(tuple, pool.map(sift, range(64)))) == {(True, True, False)})
print(pareto._sift is not first)
"""
    assert run(program, NUMBA_DISABLE_JIT="0")[0] == "True\nTrue\n"


@pytest.mark.thorough
def test_a_renamed_tuple_does_not_break_what_is_kept_on_disk(tmp_path: Path) -> None:
    """The line of the loop stays the same, so that numba finds its old file, which names a class that is gone."""
    module = """
from typing import Any, NamedTuple
from tvm_pipeline.solvers.hot import hot
class {name}(NamedTuple):
    number: Any
@hot
def double(numbers):
    return 2 * numbers.number
"""
    program = "import sys; sys.path.insert(0, {path!r}); import kept; print(kept.double(kept.{name}(21)))"
    for name in ("Old", "Brandnew"):
        (tmp_path / "kept.py").write_text(module.format(name=name))
        assert run(program.format(path=str(tmp_path), name=name))[0] == "42\n"


@pytest.mark.thorough
def test_a_loop_calls_those_of_other_modules_as_these_are_now(tmp_path: Path) -> None:
    """numba keeps the machine code of the caller, whose own file did not change, with the former code of the callee."""
    head = "from tvm_pipeline.solvers.hot import hot\n"
    caller = "from callee import times\n@hot\ndef call(n):\n    return times(n) + 1\n"
    (tmp_path / "caller.py").write_text(head + caller)
    not_yet_compiled = "import caller; print(caller.call(10))"
    compiled_before = "import callee; callee.times(1); import caller; print(caller.call(10))"
    for factor, programs in ((2, [not_yet_compiled]), (31, [not_yet_compiled, compiled_before])):
        (tmp_path / "callee.py").write_text(f"{head}@hot\ndef times(n):\n    return {factor} * n\n")
        for program in programs:
            path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
            found, _ = run(path + program, NUMBA_DISABLE_JIT="0", TVM_PIPELINE_CACHE=str(tmp_path / "cache"))
            assert found == f"{10 * factor + 1}\n"


@pytest.mark.thorough
def test_processes_that_begin_together_compile_once(tmp_path: Path) -> None:
    (tmp_path / "shared.py").write_text(
        "from tvm_pipeline.solvers.hot import hot\n@hot\ndef double(number):\n    return 2 * number\n"
    )
    program = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
import shared
assert shared.double(21) == 42
print(sum(shared.double.stats.cache_misses.values()))
"""
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda _: run(program, TVM_PIPELINE_CACHE=str(tmp_path / "cache"))[0], range(2)))
    assert sorted(compiled) == ["0\n", "1\n"]
