"""Two stages on two devices: Algorithm 1 of Velasco-Montero et al., IEEE Access 2023.

The operators in topological order are cut in two. Every cut is tried in O(N), for both orders of the two
devices, with the transfer counted on the receiving side.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.evaluate import evaluate
from tvm_pipeline.plan import Plan, Problem, Stage, objective_value
from tvm_pipeline.scheduling.costs import chain_costs


def two_stage(problem: Problem) -> Plan:
    """The best two-stage pipeline over all ordered pairs of devices that can work at the same time.

    For throughput a cut is judged by its slower stage (Algorithm 1), for latency and energy by the sum.

    Raises:
        InfeasibleError: there are no two such devices, or no cut that both can run.
    """
    operators = tuple(operator.name for operator in problem.graph.operators)
    cuts = np.arange(1, len(operators))
    best: tuple[float, tuple[Stage, ...]] | None = None
    for first, second in permutations(problem.platform.devices, 2):
        if first.overlaps(second) or not len(cuts):
            continue
        costs = chain_costs(problem, (first.name, second.name), working=2)
        front = costs.between(0, 0, cuts)
        back = costs.between(1, cuts, len(operators)) + costs.receive[0, 1, cuts]
        value = np.maximum(front, back) if problem.objective == "throughput" else front + back
        at = int(np.argmin(value))
        if np.isfinite(value[at]) and (best is None or value[at] < best[0]):
            cut = int(cuts[at])
            stages = (Stage((first.name,), operators[:cut]), Stage((second.name,), operators[cut:]))
            best = float(value[at]), stages
    if best is None:
        names = ", ".join(device.name for device in problem.platform.devices)
        raise InfeasibleError(
            f"two stages need two operators, and two devices that share no cores and can run and hold them; "
            f"{problem.graph.name} has {len(operators)} and platform {problem.platform.name} has {names}"
        )
    predicted = evaluate(problem, best[1]).predicted
    bound = objective_value(predicted, problem.objective)
    return Plan(problem.graph.name, "two-stage", problem.objective, best[1], predicted, "optimal", bound)
