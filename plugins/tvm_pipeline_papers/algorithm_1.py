"""Algorithm 1 of Velasco-Montero et al. (IEEE Access 2023) as it is printed: the scheduler `algorithm-1`.

For both orders of two devices, and for every n from 1 to N, the first n operators in the graph's order run on the first
device and the others on the second. A stage takes the sum of its operators' seconds and the transfer into its device,
`t = k * bytes`. The cut with the least of the slower stage's seconds is chosen. What that means here:

- n = N is one device, the first one, with its input.
- Both stages pay for their input, the first one for the network's. The listing gives both transfers the index of the
  cut; this follows equations (6) and (7), where each stage pays for what is copied to its own device.
- k of a device is what a byte costs on its way from the other device of the pair: the link's and the device's own
  rate. The listing has no latency of a transfer, no cost of a result, and no device that slows another one down.
- The second stage of n = N is empty, and pays for no transfer; in print it pays for the network's result.
- Suffixes are summed up, instead of taken off the whole, so that an operator that a device cannot run is no exception.
- The paper has two devices. Of more devices, all pairs that share no cores are tried.
- For latency and energy the value is the sum of both stages (equations 4 and 5), and energy has no transfers.

The scheduler `two-stage` values each cut as the judge does, so the judge finds this plan better only where it is a plan
of one device, or where a bus counts. benchmarks/algorithm_1.py shows how much it loses.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, permutations

from tvm_pipeline import Device, Plan, Problem, Stage, evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.planning import Scheduler, known_cost_of, prefixes


def algorithm_1(problem: Problem) -> Plan:
    """Return the plan of the printed algorithm, of one stage or two, with the judge's prediction.

    Raises:
        InfeasibleError: there are no two devices that share no cores, or no cut that both can run and hold.
        LimitMissedError: the plan that the algorithm chose breaks a limit, of which it knows nothing.
        ProfileError: a device has neither measurements nor a model.
    """
    names = [operator.name for operator in problem.graph.operators]
    best = math.inf
    chosen: tuple[Stage, ...] = ()
    for pair in permutations(problem.platform.devices, 2):
        if pair[0].overlaps(pair[1]):
            continue
        for n, value in _values(problem, *pair):
            if value < best and problem.stages in (None, 2 if n < len(names) else 1):
                parts = (names[:n], names[n:])
                best = value
                chosen = tuple(Stage((d.name,), tuple(part)) for d, part in zip(pair, parts, strict=True) if part)
    if not chosen:
        listed = ", ".join(device.name for device in problem.platform.devices)
        raise InfeasibleError(
            f"algorithm-1 needs two devices that share no cores and can run and hold a cut of {problem.graph.name}; "
            f"platform {problem.platform.name} has {listed}"
        )
    try:
        predicted = evaluate(problem, chosen).predicted
    except PlanError as error:
        raise LimitMissedError(f"the plan of algorithm-1 breaks a limit: {error}") from error
    return Plan(problem.graph.name, "algorithm-1", problem.objective, chosen, predicted)


def _values(problem: Problem, first: Device, second: Device) -> Iterator[tuple[int, float]]:
    """Yield each n and the value of its cut; infinite where a device cannot run or hold its stage."""
    crossing_bytes, param_bytes = prefixes(problem.graph).crossing_bytes, prefixes(problem.graph).param_bytes
    front = list(accumulate(_figures(problem, first), initial=0.0))
    back = list(accumulate(reversed(_figures(problem, second)), initial=0.0))[::-1]
    k_first, k_second = _k(problem, second, first), _k(problem, first, second)
    for n in range(1, len(front)):
        held = ((first, param_bytes[n]), (second, param_bytes[-1] - param_bytes[n]))
        if any(device.memory_bytes is not None and size > device.memory_bytes for device, size in held):
            yield n, math.inf
            continue
        into_second = k_second * float(crossing_bytes[n]) if n < len(front) - 1 else 0.0
        stages = front[n] + k_first * float(crossing_bytes[0]), back[n] + into_second
        yield n, max(stages) if problem.objective == "throughput" else sum(stages)


def _figures(problem: Problem, device: Device) -> list[float]:
    """Return the seconds (for energy the joules) of each operator; infinite where the device cannot run it."""
    costs = known_cost_of(problem, device)
    seconds = [costs.alone_s(operator) for operator in problem.graph.operators]
    if problem.objective != "energy":
        return seconds
    joules = (
        costs.energy_j([operator], alone_s, 0.0) if math.isfinite(alone_s) else math.inf
        for operator, alone_s in zip(problem.graph.operators, seconds, strict=True)
    )
    return [math.inf if figure is None else figure for figure in joules]


def _k(problem: Problem, source: Device, target: Device) -> float:
    """Return the seconds that a byte takes on its way to a device; for energy, which has no transfers, 0."""
    if problem.objective == "energy":
        return 0.0
    link = problem.link(source.name, target.name).transfer
    return link.s_per_byte + known_cost_of(problem, target).receive.s_per_byte


ALGORITHM_1 = Scheduler(
    algorithm_1,
    "one stage or two, by Velasco-Montero et al.'s Algorithm 1 as printed",
    frozenset({"throughput", "latency", "energy"}),
    stages=(1, 2),
    instead="two-stage or best",
)
