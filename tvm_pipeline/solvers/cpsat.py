"""OR-tools' CP-SAT, as the schedulers and the exact layout of memory call it.

One function runs every search, so that all of them share the settings, the deadline and the handling of Ctrl-C. Next:
`planning/sat/cp_sat.py` and `memory/arena.py`, which call it.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_pipeline.solvers.ortools_parts import part

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def library() -> Any:
    """Return the module `cp_model` of ortools.

    Raises:
        OptionError: ortools is not installed.
    """
    return part("ortools.sat.python", "cp_model", "this search is OR-tools' CP-SAT")


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a search by CP-SAT.

    Attributes:
        solver: gives the values of the solution; None if none was found.
        bound: a lower bound of every solution; -inf if nothing is proven, inf if there is no solution.
        proven: whether the solution is optimal, or it is proven that there is none.
    """

    solver: cp_model.CpSolver | None
    bound: float
    proven: bool


def search(model: cp_model.CpModel, deadline: float) -> Answer:
    """Minimise the model's objective until `deadline` (of `time.monotonic`; inf for no limit)."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return Answer(None, -np.inf, False)
    cp = library()
    solver = cp.CpSolver()
    solver.parameters.num_workers = min(8, _cores())
    solver.parameters.random_seed = 1
    # The presolve of ortools 9.15 loses solutions and then "proves" that the best of the others is optimal
    # (google/or-tools issues 5274, 5293). The second setting causes the same error. With both on, 2 in 100 of our small
    # random instances ended in a wrong optimum; with both off, none of thousands did, and large ones take no longer.
    solver.parameters.cp_model_presolve = False
    solver.parameters.auto_detect_greater_than_at_least_one_of = False
    if left_s < np.inf:
        solver.parameters.max_time_in_seconds = left_s
    # The solver's own handler of Ctrl-C would replace Python's for good, and a later Ctrl-C would kill the process.
    # Without that handler, and in a separate thread, the search can be interrupted like all other code.
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
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
