"""The exact planner for a chain: k stages over D devices for throughput, latency or energy.

The operators are taken in the graph's topological order; every way to cut that chain into consecutive stages
is covered, so within that space the plan is optimal.

- Throughput (the slowest stage decides, each device at most once): dynamic programming over (operators done,
  devices used, last device), O(2^D D^2 N^2) in numpy. The busy factors depend only on how many devices work,
  so the number of stages is fixed first and each number gets its own run.
- Latency and energy (stages add up, a device may come again): shortest path over (operators done, device),
  O(N D^2), in layers where the number of stages is given. Velasco-Montero et al., IEEE Access 2023, treat
  the k-stage case by enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tvm_pipeline.errors import InfeasibleError, PlanError
from tvm_pipeline.evaluate import evaluate
from tvm_pipeline.plan import Plan, Problem, Stage, objective_value
from tvm_pipeline.platform import Device, disjoint_sets
from tvm_pipeline.scheduling.costs import ChainCosts, Floats, chain_costs


def chain(problem: Problem) -> Plan:
    """The best chain of stages for the problem's objective.

    Raises:
        InfeasibleError: no such chain exists; the message says what is short.
    """
    plans = chain_of(problem)
    sign = -1 if problem.objective == "throughput" else 1
    return min(plans, key=lambda plan: sign * (plan.value or 0.0))


def chain_of(problem: Problem) -> list[Plan]:
    """The best chain for every number of stages that is possible (for latency and energy: the best of all).

    Raises:
        InfeasibleError: there is none.
    """
    widest = max(map(len, disjoint_sets(problem.platform.devices)))
    if problem.objective == "throughput":
        most = min(widest, len(problem.graph))
        wanted = range(1, most + 1) if problem.stages is None else [problem.stages]
        found = [_bottleneck(problem, count) for count in wanted if count <= most]
    else:
        most = widest if widest == 1 else len(problem.graph)
        found = [_shortest(problem, group) for group in disjoint_sets(problem.platform.devices)]
        found = [min((f for f in found if f), key=lambda f: f.value, default=None)]
    plans = [_plan(problem, stages) for stages in found if stages is not None]
    if not plans:
        raise InfeasibleError(_reason(problem, most))
    return plans


@dataclass(frozen=True, slots=True)
class _Chain:
    value: float
    stages: tuple[Stage, ...]


def _plan(problem: Problem, found: _Chain) -> Plan:
    try:
        predicted = evaluate(problem, found.stages).predicted
    except PlanError as error:
        raise InfeasibleError(f"the best chain breaks a limit: {error}") from error
    bound = objective_value(predicted, problem.objective)
    return Plan(problem.graph.name, "chain", problem.objective, found.stages, predicted, "optimal", bound)


def _bottleneck(problem: Problem, count: int) -> _Chain | None:
    """The chain of exactly `count` stages on distinct devices whose slowest stage is fastest."""
    devices = problem.platform.devices
    costs = chain_costs(problem, [device.name for device in devices], working=count)
    n, size = len(problem.graph), len(devices)
    # reached[used, last][j]: least bottleneck of the first j operators on the set `used`, ending on `last`.
    reached: dict[tuple[int, int], Floats] = {}
    came: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    ends = np.arange(n + 1)
    for last in range(size):
        reached[1 << last, last] = np.where(ends > 0, costs.between(last, 0, ends), np.inf)
    frontier = list(reached)
    for _ in range(count - 1):
        following: dict[tuple[int, int], None] = {}
        for used, last in frontier:
            for new in range(size):
                if _conflicts(devices, used, new):
                    continue
                key = used | 1 << new, new
                value, cut = _append(costs, reached[used, last], last, new)
                if key not in reached:
                    reached[key] = np.full(n + 1, np.inf)
                    came[key] = np.zeros(n + 1, np.int64), np.full(n + 1, -1)
                better = value < reached[key]
                reached[key][better] = value[better]
                came[key][0][better] = cut[better]
                came[key][1][better] = last
                following[key] = None
        frontier = list(following)
    best = min(frontier, key=lambda key: reached[key][n], default=None)
    if best is None or not np.isfinite(reached[best][n]):
        return None
    return _Chain(float(reached[best][n]), _trace(problem, came, best))


def _append(costs: ChainCosts, before: Floats, last: int, new: int) -> tuple[Floats, np.ndarray]:
    """Adds one stage on `new` behind every prefix on `last`: least bottleneck and cut for each end."""
    n = len(before) - 1
    starts, ends = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
    stage = costs.between(new, starts, ends) + costs.receive[last, new][:, None]
    value = np.maximum(before[:, None], stage)
    value[starts >= ends] = np.inf
    cut = np.argmin(value, axis=0)
    return value[cut, ends[0]], cut


def _conflicts(devices: tuple[Device, ...], used: int, new: int) -> bool:
    return any(used >> index & 1 and device.overlaps(devices[new]) for index, device in enumerate(devices))


def _trace(
    problem: Problem, came: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]], key: tuple[int, int]
) -> tuple[Stage, ...]:
    names = [operator.name for operator in problem.graph.operators]
    stages: list[Stage] = []
    end = len(names)
    while key in came:
        used, device = key
        start, last = int(came[key][0][end]), int(came[key][1][end])
        stages.append(Stage((problem.platform.devices[device].name,), tuple(names[start:end])))
        key, end = (used & ~(1 << device), last), start
    stages.append(Stage((problem.platform.devices[key[1]].name,), tuple(names[:end])))
    return tuple(reversed(stages))


def _shortest(problem: Problem, devices: tuple[Device, ...]) -> _Chain | None:
    """The chain with the least sum over stages, devices of one disjoint set coming as often as they like."""
    names = [device.name for device in devices]
    costs = chain_costs(problem, names, working=1)
    n, size = len(problem.graph), len(names)
    # One layer for each stage where their number is given; else one layer that a new stage returns to.
    layers = problem.stages or 1
    step = 1 if problem.stages else 0
    value = np.full((layers, size), np.inf)
    value[0] = 0.0
    choice: list[np.ndarray] = []
    for i in range(n):
        entered = value.copy()
        origin = np.tile(np.arange(size), (layers, 1)) * layers + np.arange(layers)[:, None]
        for layer in range(layers if i else 0):
            if layer < step:
                continue
            arrive = value[layer - step][:, None] + costs.receive[:, :, i]
            np.fill_diagonal(arrive, np.inf)
            source = np.argmin(arrive, axis=0)
            better = arrive[source, np.arange(size)] < entered[layer]
            entered[layer][better] = arrive[source, np.arange(size)][better]
            origin[layer][better] = (source * layers + layer - step)[better]
        operator = np.array([float(costs.between(d, i, i + 1)) for d in range(size)])
        value = entered + operator
        choice.append(origin)
    goal = int(np.argmin(value[-1]))
    if not np.isfinite(value[-1][goal]):
        return None
    return _Chain(float(value[-1][goal]), _walk(problem, names, choice, goal, layers))


def _walk(problem: Problem, names: list[str], choice: list[np.ndarray], device: int, layers: int) -> tuple[Stage, ...]:
    """Follows the choices back from the last operator and groups them into stages."""
    layer, runs = layers - 1, [(device, [len(choice) - 1])]
    for i in range(len(choice) - 1, 0, -1):
        origin = int(choice[i][layer][device])
        previous, layer = divmod(origin, layers)
        if previous != device:
            runs.append((previous, []))
        device = previous
        runs[-1][1].append(i - 1)
    operators = problem.graph.operators
    return tuple(Stage((names[d],), tuple(operators[i].name for i in reversed(run))) for d, run in reversed(runs))


def _reason(problem: Problem, most: int) -> str:
    """Why there is no chain, in the user's terms."""
    if problem.stages is not None and problem.stages > most:
        needed = "as many" if problem.objective == "throughput" else "two"
        return (
            f"{problem.stages} stages need {needed} devices that share no cores; platform "
            f"{problem.platform.name} has {most}"
        )
    for index, operator in enumerate(problem.graph.operators):
        if all(problem.profile.device(d.name).seconds[index] is None for d in problem.platform.devices):
            return f"no device can run operator {operator.name}"
    roomy = max((d.memory_bytes or np.inf) for d in problem.platform.devices)
    for operator in problem.graph.operators:
        if operator.param_bytes > roomy:
            return (
                f"operator {operator.name} holds {operator.param_bytes} bytes of parameters, "
                f"no device has more than {roomy:.0f}"
            )
    return "no chain of stages fits what the devices can run and hold; give them more memory or more stages"
