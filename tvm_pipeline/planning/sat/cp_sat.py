"""The general exact planner: CP-SAT over all stage assignments, for graphs with too many ideals to list.

A plan is a chain of nested downsets (not only prefixes of one order) with a device for each stage. The solver proves
the optimum, or gives a lower bound when its time is over. Other schedulers are faster where they apply; this one
takes every graph and every limit of a Problem.

Next: `staging.py` (the booleans), then `least_bytes.py` and `least_seconds.py` (the two families of objectives).
"""

from __future__ import annotations

import math
import time

from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.planning.sat.least_bytes import least_bytes
from tvm_pipeline.planning.sat.least_seconds import least_seconds


def cp_sat(problem: Problem, hint: tuple[Stage, ...] | None = None) -> Plan:
    """The best plan with one device a stage, proven where time allows.

    The space: `s_u <= s_v` on every edge u -> v, exactly `problem.stages` stages, each with operators. Where
    `problem.stages` is None:

    - throughput: any number of stages; each device serves at most one.
    - latency and energy: up to `min(operators, 2 * D)` stages, D being the most devices that can work at the same
      time. A device may come again in stages that are not consecutive, unless what it holds is limited
      (`memory_bytes`, or a model with `cached_bytes`); with all devices limited so, up to D stages.
    - objectives of bytes: D stages (or one an operator, if those are fewer; with `children_together` as many as are
      possible): stage b on the b-th of the devices.

    Seconds and joules are rounded to whole units of about 1e-10 of a frame. The plan is `optimal` where CP-SAT
    proved its bound and the judge's figure agrees with that within 1e-6.

    Args:
        problem: with `time_limit_s` for the whole search; without, the search ends with the proof.
        hint: a plan to begin with, and to return when time is over and nothing better was found. One that is not in
            the space is not used.

    Raises:
        InfeasibleError: there is no plan, or none was found in time.
        OptionError: ortools is missing; or the objective asks for `dram` where the devices state no cache, or
            different ones.
        ProfileError: the objective is energy and nothing is known of a device's power.

    The lexicographic problem is that of Yin et al., SEC 2022; its stage variables are ours (see `staging.py`).
    """
    deadline = math.inf if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    if problem.is_lexicographic:
        return least_bytes(problem, hint, deadline)
    return least_seconds(problem, hint, deadline)
