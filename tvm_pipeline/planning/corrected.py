"""A partitioner that a model guides and measurements correct: it proposes, measures some segments, and proposes again.

It takes about ten seconds to compile one segment for an Edge TPU and to measure it, and a chain has thousands of
segments. A model of the device estimates all of them, but it is wrong where it is wrong about the cache or about a
kernel: its best partition may take twice as long as the best partition of all. So the model chooses the segments to
measure, and the measurements decide.

`benchmarks/profiling_partitioner.py` compares it with libcoral's search, which uses no model and measures far more.
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

# More than any segment takes. A segment that contains a refused one will likely be refused, so it is tried last.
REFUSED_S = 1e6


def corrected_partition(
    model_s: Floats,
    segments: int,
    measure: Callable[[int, int], float],
    *,
    tolerance: float = 0.01,
) -> Partition:
    """Return a cut of a chain over equal devices, with the shortest bottleneck that a few measurements find.

    The partition that the model estimates to be the best is measured first, and the measurements correct the model, see
    `believed_seconds`. Then the search considers the partitions that it estimates to be better than the best measured
    one by more than `tolerance`. It takes the one with the fewest segments that are not measured yet, and measures
    them, the slowest first, until one shows that the partition is no better. It ends when there is no such partition.
    It does end, because each turn measures a new segment or finds a better partition of measured ones. Its result is
    the best partition, up to the tolerance, if no other segment takes less than its estimate.

    This is LazySP, which follows the path of least estimated cost and evaluates its edges until one disproves it:
    Dellin and Srinivasa, "A Unifying Formalism for Shortest Path Problems with Expensive Edge Evaluations via Lazy
    Best-First Search over Paths with Edge Selectors", ICAPS 2016.

    Args:
        model_s: n+1 x n+1 for a chain of n operators; [start, end] is the model's estimate for operators start..end-1,
            infinite where the device cannot run them. Entries with start >= end do not count.
        segments: the number of segments of a partition.
        measure: (start, end) -> seconds of operators start..end-1 on the device. It returns infinity, or raises
            ModelError or PlanError, where they cannot be compiled; any other error ends the search. It is called once
            for each segment.
        tolerance: a gain of at most this share of the bottleneck is not worth a measurement.

    Returns:
        The best of the partitions whose segments were all measured. It is no worse than the model's first choice, if
        the device takes that. `evaluations` counts the measurements, and `bound_s` is None, because nothing is proven.

    Raises:
        InfeasibleError: the device refuses a segment of every partition, or there are fewer operators than segments.
        OptionError: the table, the tolerance or the number of segments is impossible.
        ProfileError: the model or `measure` gave a negative figure or NaN.
    """
    model_s = _checked(model_s, segments, tolerance)
    measured_s = np.full_like(model_s, math.nan)
    refusals: list[Exception] = []
    best: list[tuple[int, int]] = []
    best_s = math.inf

    while True:
        believed_s = believed_seconds(model_s, measured_s)
        limit_s = best_s * (1 - tolerance)
        proposed = _proposed(believed_s, measured_s, segments, limit_s)
        if not proposed:
            break
        unknown = [segment for segment in proposed if math.isnan(measured_s[segment])]
        for segment in sorted(unknown, key=lambda segment: -believed_s[segment]):
            measured_s[segment] = measured_or_refused(measure, *segment, refusals)
            if measured_s[segment] >= limit_s:
                break
        else:
            best, best_s = proposed, max(float(measured_s[segment]) for segment in proposed)
    if not best:
        raise InfeasibleError(
            f"no way to cut {len(model_s) - 1} operators into {segments} segments is possible: the device refused "
            f"{np.count_nonzero(np.isinf(measured_s))} of the {_count(measured_s)} segments compiled, and its model "
            "rules out the others that are needed; leave the operators that it cannot run to another device"
        ) from (refusals[-1] if refusals else None)
    taken_s = tuple(float(measured_s[segment]) for segment in best)
    return Partition(tuple(start for start, _ in best[1:]), taken_s, _count(measured_s))


def believed_seconds(model_s: Floats, measured_s: Floats) -> Floats:
    """Return an estimate for each segment of a chain of n operators, after some were measured; arrays are n+1 x n+1.

    A measured segment keeps its measured seconds; `measured_s` is NaN for the others. Their estimate is

        max(scale * model + excess, min(ratio) * model)

    where `ratio` is the measured seconds of a segment over the model's, `scale` is the median ratio, and `excess` is
    the sum of the excesses of the segment's operators. The seconds of a measured segment beyond `scale * model` are
    shared equally by its operators. If an operator has shares of several segments, the smallest is its excess: a low
    estimate costs one extra measurement, but a high one hides a good segment for ever. The excess is a sum and no
    factor, because parameters beyond a cache take the same time whatever else is in the segment. Excesses may be
    negative, where a long segment took less than the model says; the second term keeps many short segments from
    seeming to take no time at all.
    """
    starts, ends = np.nonzero(np.isfinite(measured_s))
    taken_s, modelled_s = measured_s[starts, ends], model_s[starts, ends]
    timed = modelled_s > 0
    # No ratio is zero, so that a segment which is impossible by the model (infinite) stays impossible.
    ratios = np.maximum(taken_s[timed] / modelled_s[timed], sys.float_info.min) if timed.any() else np.ones(1)
    scale = float(np.median(ratios))
    excess_s = np.full(len(model_s) - 1, math.inf)
    for start, end, share_s in zip(starts, ends, (taken_s - scale * modelled_s) / (ends - starts), strict=True):
        excess_s[start:end] = np.minimum(excess_s[start:end], share_s)
    excess_s[np.isinf(excess_s)] = 0.0
    total_s = np.concatenate([[0.0], np.cumsum(excess_s)])
    believed_s = np.maximum(ratios.min() * model_s, scale * model_s + (total_s - total_s[:, None]))
    for start, end in np.argwhere(np.isinf(measured_s)):
        believed_s[: start + 1, end:] += REFUSED_S
    return np.where(np.isnan(measured_s), believed_s, measured_s)


def cheapest_segments(cost: Floats, segments: int, combine: np.ufunc) -> list[tuple[int, int]]:
    """Return the (start, end) of each segment of the cheapest partition of a chain; [] if its cost is infinite.

    The result is exact, by dynamic programming over the ends of segments in O(segments n^2).

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
    """Return the predicted seconds of every segment on the last of `devices` while all are busy, as n+1 x n+1.

    The figures are those of `segments.segment_seconds`, all at the same time: the device before the last sends the
    segment's inputs. They are right for the whole pipeline where its devices and the links between them are equal. They
    are infinite where start >= end, and where the device cannot run the segment or has no memory for it.

    Raises:
        ProfileError: a device has neither measurements nor a model.
    """
    costs, param_bytes = chain_costs(problem, devices)
    last = len(devices) - 1
    ends = np.arange(len(param_bytes))
    starts = ends[:, None]
    taken_s = costs.stage(param_bytes, last, last - 1 if last else len(devices), starts, ends)
    fits = param_bytes[ends] - param_bytes[starts] <= capacities(devices)[last]
    return np.where((starts < ends) & fits & (taken_s < costs.impossible), taken_s, math.inf)


def measured_or_refused(measure: Callable[[int, int], float], start: int, end: int, refusals: list[Exception]) -> float:
    """Return the measured seconds of a segment, infinite where the device refuses it.

    Args:
        refusals: takes the errors with which it refuses.

    Raises:
        ProfileError: the seconds are negative or NaN.
    """
    try:
        seconds = float(measure(start, end))
    except (ModelError, PlanError) as error:
        refusals.append(error)
        return math.inf
    if not seconds >= 0:
        raise ProfileError(f"operators {start} to {end - 1} took {seconds} s on the device; measure again")
    return seconds


def _proposed(believed_s: Floats, measured_s: Floats, segments: int, limit_s: float) -> list[tuple[int, int]]:
    """Return the segments of the next partition, each with an estimate below `limit_s`; [] where there is none."""
    target_s = math.nextafter(limit_s, -math.inf)
    if math.isinf(limit_s):
        best = cheapest_segments(believed_s, segments, np.maximum)
        target_s = max((believed_s[segment] for segment in best), default=0.0)
    fits = believed_s <= target_s
    # Each segment that is not measured costs 1. The fourth powers break ties: they prefer estimates far below the
    # target, where noise does not matter.
    share = np.where(fits, believed_s, 0.0) / max(target_s, sys.float_info.min)
    return cheapest_segments(np.where(fits, np.isnan(measured_s) + share**4, math.inf), segments, np.add)


def _count(measured_s: Floats) -> int:
    return int(np.count_nonzero(~np.isnan(measured_s)))


def _checked(model_s: Floats, segments: int, tolerance: float) -> Floats:
    """Return the model with infinity on and below its diagonal. Raise the errors of `corrected_partition`."""
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
