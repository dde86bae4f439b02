"""A bound of all plans, whatever stages their devices share: the work of a frame, spread over the devices.

The searches prove their bounds for plans in which a replica serves no other stage. `baselines/whole_model.py` makes
plans without that restriction, so `best` states a bound that holds for these, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, cost_of, counts_period, lock_s
from tvm_pipeline.planning.search.cost_tables import operator_costs
from tvm_pipeline.planning.search.cuts import Floats

# The weights of unequal devices settle to about a per cent within so many rounds.
ROUNDS = 200
# Graphs of many operators get fewer rounds: so many figures are weighed in a second or two.
MOST_WEIGHED = 50_000_000
FEWEST_ROUNDS = 10


def shares_replicas(problem: Problem) -> bool:
    """Return whether `best` considers plans in which a replica serves other stages, and one may be the best.

    It does so for graphs with ordered operators. A single frame meets one replica of each stage, so no such plan is
    better for it than a pipeline of single devices, unless the seconds between frames count, or a number of stages is
    required.
    """
    if problem.is_lexicographic or not any(operator.ordered for operator in problem.graph.operators):
        return False
    if not counts_period(problem) and problem.stages is None:
        return False
    groups = disjoint_sets(problem.platform.devices)
    return any(len(group) > 1 and not all(cost_of(problem, d).serves_once for d in group) for group in groups)


def least_period_of_all(problem: Problem) -> float:
    """Return a lower bound of the seconds between frames of every plan, in which devices may share any stages.

    An ordered operator runs on one device for all frames, any other operator in parts on all devices. Calls of stages,
    transfers and fetches of parameters cost nothing.
    """
    ordered = np.array([operator.ordered for operator in problem.graph.operators])
    bounds = []
    for devices in disjoint_sets(problem.platform.devices):
        seconds = least_seconds(problem, devices)
        least = seconds.min(axis=0)
        if np.isinf(least).any():
            continue  # these devices cannot run the model
        bounds.append(max(spread(seconds)[0], float(least[ordered].max(initial=0.0))))
    return max(min(bounds, default=math.inf), lock_s(problem))


def least_seconds(problem: Problem, devices: Sequence[Device]) -> Floats:
    """Return the least seconds of each operator on each device (D x N), infinite where it cannot run."""
    # A device may be faster while others work; then the bound is that of its fastest.
    scale = [min(busy_factor(problem, device, n) for n in (1, len(devices))) for device in devices]
    added, work = operator_costs(problem, devices, scale)
    return added + work


def spread(seconds: Floats) -> tuple[float, Floats]:
    """Return a lower bound of the load of the busiest device if the operators are spread over all, also in parts.

    For weights w of the devices that add up to 1, no plan has a busiest device with less than

        sum over operators of the least w_d * seconds_d

    because the mean of the loads by these weights is at least that. Equal weights give the least work divided by the
    number of devices. The others are found by multiplicative weights: Plotkin, Shmoys and Tardos, "Fast approximation
    algorithms for fractional packing and covering problems", Mathematics of Operations Research 20, 1995.

    Args:
        seconds: D x N; the seconds of each operator on each device, infinite where it cannot run; on one of them it
            can.

    Returns:
        The bound, and the weights of the devices that prove it.
    """
    count = len(seconds)
    weights, best = np.full(count, 1 / count), (0.0, np.full(count, 1 / count))
    if (seconds == seconds[0]).all():
        return float(seconds[0].sum()) / count, weights
    finite = np.where(np.isinf(seconds), 0.0, seconds)
    for turn in range(max(FEWEST_ROUNDS, min(ROUNDS, MOST_WEIGHED // seconds.size))):
        weighted = weights[:, None] * seconds
        chosen = weighted.argmin(axis=0)
        best = max(best, (float(weighted.min(axis=0).sum()), weights.copy()), key=lambda found: found[0])
        loads = np.bincount(chosen, finite[chosen, np.arange(seconds.shape[1])], count)
        if not loads.any():
            break
        # The busiest device gains weight, in smaller and smaller steps.
        weights *= np.exp((loads / loads.max() - 1) / math.sqrt(turn + 1))
        weights /= weights.sum()
    return best
