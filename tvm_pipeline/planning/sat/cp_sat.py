"""The general exact planner: CP-SAT over all stage assignments, for graphs with too many downsets to list.

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
    """Return the best plan with one device for each stage, with a proof if time allows.

    The space of plans has `s_u <= s_v` on every edge u -> v, and exactly `problem.stages` stages, each with operators.
    If `problem.stages` is None:

    - throughput: any number of stages; each device serves at most one.
    - latency and energy: up to `min(operators, 2 * D)` stages, where D is the largest number of devices that can work
      at the same time. A device may serve several stages that are not consecutive, unless stages of the graph can need
      more than its `memory_bytes`, or it has a model with `cached_bytes` and no measurements. If this is so of all
      devices, up to D stages.
    - objectives of bytes: D stages (or one for each operator, if there are fewer; with `children_together` as many as
      are possible), stage b on the b-th device.

    Seconds and joules are rounded to whole units of about 1e-10 of a frame. The plan is `optimal` if CP-SAT proved its
    bound and the value by `evaluate` agrees with the bound within 1e-6.

    Args:
        problem: its `time_limit_s` is for the whole search; without a limit, the search ends with the proof.
        hint: a plan to start from. It is the answer if nothing better is found in time. A plan outside of the space is
            not used.

    Raises:
        InfeasibleError: there is no plan, or none was found in time.
        OptionError: ortools is missing; or the objective counts overflow, and `equal_cache_bytes` refuses the devices.
        ProfileError: the objective is energy, and the power of a device is unknown.

    The lexicographic problem is that of Yin et al., SEC 2022; its stage variables are ours (see `staging.py`).
    """
    deadline = math.inf if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    if problem.is_lexicographic:
        return least_bytes(problem, hint, deadline)
    return least_seconds(problem, hint, deadline)
