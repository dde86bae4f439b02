"""A pipeline of devices whose model is nearly right: propose, measure some segments, correct, propose again.

To compile one segment for an Edge TPU and measure it takes some ten seconds, and a chain has thousands of segments. A
model of the device says something of all of them, and is wrong where the cache, or a kernel, is not as it supposes:
its best partition may take twice as long as the best there is. So the model says where to look, and the device decides.

Next: `coral.py`, libcoral's search, and `segments.py`, exact where a longer segment never takes less; both know no
model and measure far more. `benchmarks/profiling_partitioner.py` compares them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import InfeasibleError, ModelError, OptionError, PlanError, ProfileError
from tvm_pipeline.planning.baselines.segments import Partition, chain_costs
from tvm_pipeline.planning.search.cost_tables import capacities
from tvm_pipeline.planning.search.cuts import Floats

# More than any segment takes: what contains a refused segment will likely be refused, so all else is tried before it.
REFUSED_S = 1e6


def corrected_partition(
    model_s: Floats,
    segments: int,
    measure: Callable[[int, int], float],
    *,
    tolerance: float = 0.01,
    most_measurements: int | None = None,
) -> Partition:
    """A chain cut over equal devices, with the shortest bottleneck that measuring a few segments finds.

    First the partition that the model thinks best is measured. What it took corrects the model, see `believed_seconds`.
    Of the partitions now believed to be better than the best measured one by more than `tolerance`, the next is the one
    with fewest segments still to be measured; they are, slowest first, until one shows that it is no better. The search
    ends when the corrected model believes in no other. Each turn measures a new segment, or finds that measured ones
    make a better partition, so it does end; and what it found is the best, up to the tolerance, if none of the segments
    left takes less than is believed of it.

    To follow the path believed best, and evaluate its edges only until one disproves it, is LazySP: Dellin and
    Srinivasa, "A Unifying Formalism for Shortest Path Problems with Expensive Edge Evaluations via Lazy Best-First
    Search over Paths with Edge Selectors", ICAPS 2016.

    Args:
        model_s: n+1 x n+1 for a chain of n operators; [start, end] is what the model says of operators start..end-1,
            infinite where they are impossible. Entries with start >= end do not count.
        segments: how many to make of the chain.
        measure: (start, end) -> seconds of operators start..end-1 on the device. Infinite, or a ModelError or
            PlanError, where they cannot be compiled; any other error ends the search. Asked once for each segment.
        tolerance: a gain of at most this share of the bottleneck is not worth a measurement.
        most_measurements: end after so many, as soon as one partition was measured whole.

    Returns:
        The best of the partitions that were measured whole: no worse than the model's first choice, where the device
        takes that. `evaluations` counts the measurements, and `bound_s` is None, for nothing is proven.

    Raises:
        InfeasibleError: the device refuses a segment of every partition, or there are fewer operators than segments.
        OptionError: a table, tolerance or number of segments that cannot be.
        ProfileError: the model or `measure` gave a negative figure or NaN.
    """
    model_s = _checked(model_s, segments, tolerance)
    measured_s = np.full_like(model_s, math.nan)
    refusals: list[Exception] = []
    best: list[tuple[int, int]] = []
    best_s = math.inf

    def spent() -> bool:
        return bool(best) and most_measurements is not None and _count(measured_s) >= most_measurements

    while not spent():
        believed_s = believed_seconds(model_s, measured_s)
        limit_s = best_s * (1 - tolerance)
        proposed = _proposed(believed_s, measured_s, segments, limit_s)
        if not proposed:
            break
        unknown = [place for place in proposed if math.isnan(measured_s[place])]
        for place in sorted(unknown, key=lambda place: -believed_s[place]):
            if spent():
                break
            measured_s[place] = _ask(measure, *place, refusals)
            if measured_s[place] >= limit_s:
                break
        else:
            best, best_s = proposed, max(float(measured_s[place]) for place in proposed)
    if not best:
        raise InfeasibleError(
            f"no way to cut {len(model_s) - 1} operators into {segments} segments is possible: the device refused "
            f"{np.count_nonzero(np.isinf(measured_s))} of the {_count(measured_s)} segments compiled, and its model "
            "rules out the others that are needed; leave the operators that it cannot run to another device"
        ) from (refusals[-1] if refusals else None)
    taken_s = tuple(float(measured_s[place]) for place in best)
    return Partition(tuple(start for start, _ in best[1:]), taken_s, _count(measured_s))


def believed_seconds(model_s: Floats, measured_s: Floats) -> Floats:
    """What to believe of each segment of a chain of n operators, after some were measured; all arrays n+1 x n+1.

    What was measured (elsewhere `measured_s` is NaN) is believed. Else the model, times the median ratio of what the
    measured segments took to what it says of them, and beyond that the excess of the operators. What a segment took
    beyond the model so scaled is spread evenly over its operators, and of several such shares an operator carries the
    least: of the simple explanations the most hopeful, for an undeserved hope costs a measurement, and a segment that
    is wrongly suspected will never be measured. The excess is added, and not a factor, since what a cache does not hold
    takes the same time whatever else is in the segment. Hope ends at the least of the ratios: without that, what a long
    segment took less than the model says would make many short ones seem to take no time at all.
    """
    starts, ends = np.nonzero(np.isfinite(measured_s))
    taken_s, said_s = measured_s[starts, ends], model_s[starts, ends]
    timed = said_s > 0
    # Never zero, so that what the model knows to be impossible stays so.
    ratios = np.maximum(taken_s[timed] / said_s[timed], sys.float_info.min) if timed.any() else np.ones(1)
    scale = float(np.median(ratios))
    excess_s = np.full(len(model_s) - 1, math.inf)
    for start, end, share_s in zip(starts, ends, (taken_s - scale * said_s) / (ends - starts), strict=True):
        excess_s[start:end] = np.minimum(excess_s[start:end], share_s)
    excess_s[np.isinf(excess_s)] = 0.0
    total_s = np.concatenate([[0.0], np.cumsum(excess_s)])
    believed_s = np.maximum(ratios.min() * model_s, scale * model_s + (total_s - total_s[:, None]))
    for start, end in np.argwhere(np.isinf(measured_s)):
        believed_s[: start + 1, end:] += REFUSED_S
    return np.where(np.isnan(measured_s), believed_s, measured_s)


def cheapest_segments(cost: Floats, segments: int, combine: np.ufunc) -> list[tuple[int, int]]:
    """The (start, end) of each segment of a chain, so that their costs combine to the least; none if that is infinite.

    Exact, by dynamic programming over their ends: O(segments n^2).

    Args:
        cost: n+1 x n+1, infinite where start >= end.
        combine: np.maximum for the least bottleneck, np.add for the least sum.
    """
    reached = cost[0]
    begun: list[np.ndarray] = []
    for _ in range(segments - 1):
        through = combine(reached[:, None], cost)
        begun.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    if math.isinf(reached[-1]):
        return []
    cuts = [len(cost) - 1]
    for start in reversed(begun):
        cuts.append(int(start[cuts[-1]]))
    return list(pairwise([0, *reversed(cuts)]))


def model_seconds(problem: Problem, devices: Sequence[Device]) -> Floats:
    """n+1 x n+1: what `evaluate` says of every segment on the last of `devices`, fed by the one before, all busy.

    The figures of `segments.segment_seconds`, at once. They hold for the whole pipeline where its devices and the links
    between them are equal. Infinite where start >= end, and where the device cannot run or hold the segment.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    costs, held = chain_costs(problem, devices)
    last = len(devices) - 1
    ends = np.arange(len(held))
    starts = ends[:, None]
    taken_s = costs.stage(held, last, last - 1 if last else len(devices), starts, ends)
    fits = held[ends] - held[starts] <= capacities(devices)[last]
    return np.where((starts < ends) & fits & (taken_s < costs.impossible), taken_s, math.inf)


def _proposed(believed_s: Floats, measured_s: Floats, segments: int, limit_s: float) -> list[tuple[int, int]]:
    """The segments of the partition to look at next, each believed to take less than `limit_s`; none where none is."""
    target_s = math.nextafter(limit_s, -math.inf)
    if math.isinf(limit_s):
        target_s = max(
            (believed_s[place] for place in cheapest_segments(believed_s, segments, np.maximum)), default=0.0
        )
    fits = believed_s <= target_s
    # Those already measured cost nothing. Fourth powers keep the others far from the target, where noise is no matter.
    share = np.where(fits, believed_s, 0.0) / max(target_s, sys.float_info.min)
    return cheapest_segments(np.where(fits, np.isnan(measured_s) + share**4, math.inf), segments, np.add)


def _ask(measure: Callable[[int, int], float], start: int, end: int, refusals: list[Exception]) -> float:
    try:
        seconds = float(measure(start, end))
    except (ModelError, PlanError) as error:
        refusals.append(error)
        return math.inf
    if not seconds >= 0:
        raise ProfileError(f"operators {start} to {end - 1} took {seconds} s on the device; measure again")
    return seconds


def _count(measured_s: Floats) -> int:
    return int(np.count_nonzero(~np.isnan(measured_s)))


def _checked(model_s: Floats, segments: int, tolerance: float) -> Floats:
    """The model without what is below its diagonal, or the error that `corrected_partition` raises."""
    operators = len(model_s) - 1
    if model_s.ndim != 2 or model_s.shape != (operators + 1, operators + 1) or operators < 1:
        raise OptionError(f"the model has shape {model_s.shape}; n operators need n+1 rows and columns, n at least 1")
    if segments < 1 or not 0 <= tolerance < 1:
        raise OptionError(
            f"{segments} segments, tolerance {tolerance}: give 1 segment at least, and a tolerance from 0 to below 1"
        )
    if operators < segments:
        raise InfeasibleError(f"{segments} segments need as many operators, the chain has {operators}")
    forward = np.triu(np.ones_like(model_s, dtype=bool), 1)
    if not (model_s[forward] >= 0).all():
        start, end = np.argwhere(forward & ~(model_s >= 0))[0]
        raise ProfileError(f"the model says {model_s[start, end]} s of operators {start} to {end - 1}; correct it")
    return np.where(forward, model_s, math.inf)
