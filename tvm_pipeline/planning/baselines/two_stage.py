"""Two stages on two devices: Algorithm 1 of Velasco-Montero et al., IEEE Access 2023.

The operators, in topological order, are cut in two. Every cut is tried in O(N), for both orders of the two devices.
The transfer is counted on the receiving side.

Two details of the printed algorithm are missing here, and `algorithm_1.py` has them:

- The paper's cut n runs from 1 to N, and n = N is one device alone. Here both stages have operators. A single device
  is the scheduler `single`, which `best` compares with this one.
- The paper charges both stages for their input, the first one for the network's. Here the first stage pays for it on a
  modelled device only: a profile has no figure of the way from the host to a measured device (see `evaluate.py`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import idle_w, lock_s
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.planning.search.cost_tables import StageCosts, capacities, stage_joules, stage_seconds
from tvm_pipeline.planning.search.cuts import Floats, Integers, prefixes
from tvm_pipeline.planning.search.lexicographic import lexicographic


def two_stage(problem: Problem) -> Plan:
    """Return the best two-stage pipeline over all ordered pairs of devices that can work at the same time.

    For throughput the value of a cut is that of its slower stage (Algorithm 1), for latency and energy the sum of both.
    To the energy the idle power adds its joules for the seconds of the slower stage. The search ignores buses,
    `children_together` and the limits; a plan that breaks a limit is refused.

    Raises:
        InfeasibleError: there are no two such devices, or no cut that both can run.
    """
    cuts = prefixes(problem.graph)
    if problem.is_lexicographic:
        return lexicographic(replace(problem, stages=2), cuts, "two-stage")
    param_bytes = cuts.param_bytes.astype(np.float64)
    inner = np.arange(1, len(cuts) - 1)
    best: tuple[float, tuple[Stage, ...]] | None = None
    for pair in permutations(problem.platform.devices, 2):
        if pair[0].overlaps(pair[1]) or not len(inner):
            continue
        if problem.objective == "energy":
            costs = stage_joules(problem, cuts, pair)
        else:
            costs = stage_seconds(problem, cuts, pair, 2 if problem.objective == "throughput" else 0)
        front, back = _both(costs, param_bytes, inner)
        value = np.maximum(front, back) if problem.objective == "throughput" else front + back
        if problem.objective == "energy" and idle_w(problem):
            slower_s = np.maximum(*_both(stage_seconds(problem, cuts, pair, 2), param_bytes, inner))
            value += idle_w(problem) * np.maximum(slower_s, lock_s(problem))
        capacity = capacities(pair)
        fits = (param_bytes[inner] <= capacity[0]) & (param_bytes[-1] - param_bytes[inner] <= capacity[1])
        value[~fits | (np.maximum(front, back) >= costs.impossible)] = np.inf
        index = int(np.argmin(value))
        if np.isfinite(value[index]) and (best is None or value[index] < best[0]):
            stages = cuts.stages([int(inner[index]), len(cuts) - 1])
            best = float(value[index]), tuple(Stage((d.name,), s) for d, s in zip(pair, stages, strict=True))
    if best is None:
        names = ", ".join(device.name for device in problem.platform.devices)
        raise InfeasibleError(
            f"two stages need two operators, and two devices that share no cores and can run and hold them; "
            f"{problem.graph.name} has {len(problem.graph)} and platform {problem.platform.name} has {names}"
        )
    try:
        predicted = evaluate(problem, best[1]).predicted
    except PlanError as error:
        raise LimitMissedError(f"the best plan of two stages breaks a limit: {error}") from error
    plan = Plan(problem.graph.name, "two-stage", problem.objective, best[1], predicted, "optimal")
    return replace(plan, bound=plan.value)


def _both(costs: StageCosts, param_bytes: Floats, inner: Integers) -> tuple[Floats, Floats]:
    """Return the costs of the stages in front of the inner cuts, and of those behind them."""
    return costs.stage(param_bytes, 0, 2, 0, inner), costs.stage(param_bytes, 1, 0, inner, len(param_bytes) - 1)
