"""OR-tools' CP-SAT, as the schedulers and the exact layout of memory call it."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_pipeline.errors import OptionError

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def library() -> Any:
    """The module `cp_model` of ortools, imported when first needed: it takes a second, and may be missing.

    Raises:
        OptionError: ortools is not installed.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError as error:
        raise OptionError("this search is OR-tools' CP-SAT; install it with `pip install ortools`") from error
    return cp_model


@dataclass(frozen=True, slots=True)
class Answer:
    """What a search of CP-SAT ended with.

    Attributes:
        solver: gives the values of the solution; None where none was found.
        bound: no solution has less; -inf where nothing is known, inf where it is proven that there is no solution.
    """

    solver: cp_model.CpSolver | None
    bound: float
    proven: bool


def search(model: cp_model.CpModel, deadline: float) -> Answer:
    """Minimizes the model's objective until `deadline` (of `time.monotonic`; inf for no limit)."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return Answer(None, -np.inf, False)
    cp = library()
    solver = cp.CpSolver()
    solver.parameters.num_workers = min(8, _cores())
    solver.parameters.random_seed = 1
    # The presolve of ortools 9.15 loses solutions and then "proves" the best of what is left (google/or-tools issues
    # 5274, 5293), and so did the second: 2 in 100 of our small random instances ended in a wrong optimum. Without
    # the two none of thousands did, and large ones take no longer.
    solver.parameters.cp_model_presolve = False
    solver.parameters.auto_detect_greater_than_at_least_one_of = False
    if left_s < np.inf:
        solver.parameters.max_time_in_seconds = left_s
    # Its own handler of Ctrl-C would replace Python's for good, and a later Ctrl-C kill the process; without it, and
    # in a thread of its own, the search can be interrupted as everything else.
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solver.solve, model)
        try:
            status = solving.result()
        except BaseException:
            solver.stop_search()
            raise
    if status == cp.MODEL_INVALID:
        raise AssertionError(f"CP-SAT refuses its model: {model.validate()}")
    if status == cp.INFEASIBLE:
        return Answer(None, np.inf, True)
    if status == cp.UNKNOWN:
        return Answer(None, -np.inf, False)
    return Answer(solver, solver.best_objective_bound, status == cp.OPTIMAL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
