"""PredPar and Pred-ProfPar: bisect the bottleneck of a pipeline by predicted, and by measured, seconds of segments.

Source: Zou et al., "A Performance Prediction-based DNN Partitioner for Edge TPU Pipelining", MILCOM 2024, after
libcoral's profiling partitioner (`coral.py`). What the paper leaves open is chosen here, and marked so.

Next: `predpar.py`, the schedulers; `corrected.py`, which finds the best partition under the same predictions exactly,
and corrects them by what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm_pipeline.errors import InfeasibleError, ProfileError
from tvm_pipeline.planning import Partition, measured_or_refused

Segment = tuple[int, int]
# Seconds of many segments (start, end), that is of operators start..end-1, at once.
Predict = Callable[[Sequence[Segment]], Sequence[float]]

# The paper does not state these. A factor of 2 would raise LB to T, as libcoral does. With 4, Pred-ProfPar's
# bottlenecks are 1 to 3 % longer in the mean, for as many measurements; 32 is no better (networks kept for such
# choices, `benchmarks/predpar.py`).
RELAXING_FACTOR = 16.0
THRESHOLD = 0.01
# Longer and longer segments are asked for in blocks of this size, until a whole block takes this many times the target.
# Still longer ones are taken to be worse, too.
_BLOCK, _FAR_BEYOND = 16, 1.5


def predpar_partition(
    predict: Predict,
    operators: int,
    initial: Sequence[int],
) -> Partition:
    """Return PredPar's partition of a chain: the search by predictions alone.

    1. UB and LB are the slowest and the fastest segment of the first partition.
    2. While UB - LB > THRESHOLD * UB, the target T is halfway between them.
    3. Each segment in turn takes the most operators that take at most T. The search steps back where a later segment
       has none. The last segment takes the rest, however long that takes.
    4. A partition with a bottleneck b < UB is kept, and UB = b. Unless b < T, LB += (UB - LB) / RELAXING_FACTOR.

    The paper says of step 4 that a target which is too low raises LB. libcoral lowers UB to T, and not to b, where the
    last segment takes less than T.

    Args:
        predict: the predicted seconds of segments, infinite where they are impossible. The predictor of a segment
            should be asked once; see `SegmentPredictor`.
        operators: the number of operators of the chain.
        initial: the cuts of the first partition, one less than there are segments. (Paper: the compiler's. Chosen:
            equal parameters.)

    Returns:
        The last partition that was kept, with predicted seconds. `evaluations` counts the predicted segments. `found`
        is False where no partition is better than the first, which is then the result.

    Raises:
        InfeasibleError: there are fewer operators than segments.
        ProfileError: a prediction is negative or NaN.

    Example:
        >>> taken_s = [3, 1, 1, 1]
        >>> predpar_partition(lambda segments: [sum(taken_s[start:end]) for start, end in segments], 4, (2,)).cuts
        (1,)
    """
    search = _Search(predict, operators, len(initial) + 1)
    first = search.segments_of(initial)

    def better_s(found: Sequence[Segment], best_s: float) -> float:
        slowest_s = max(search.asked(found))
        return slowest_s if slowest_s < best_s else math.inf

    kept = _bisected(search, first, better_s)
    segments = kept or first
    return Partition(_cuts(segments), tuple(search.asked(segments)), len(search.known), found=kept is not None)


def pred_profpar_partition(
    predict: Predict,
    measure: Callable[[int, int], float],
    operators: int,
    initial: Sequence[int],
) -> Partition:
    """Return Pred-ProfPar's partition of a chain: the search of `predpar_partition`, whose partitions are measured.

    UB and LB begin with predicted seconds. A partition that is found is measured if all of its segments are predicted
    below UB. Measured seconds decide step 4, and are UB. Chosen: the segments are measured in the order of their
    predictions, the slowest first, until one shows that the partition is no better; from then on a segment has its
    measured seconds in place of the predicted ones; the first partition is measured only where the search keeps none.

    Args:
        predict, operators, initial: as of `predpar_partition`.
        measure: (start, end) -> seconds of operators start..end-1 on the device. It returns infinity, or raises
            ModelError or PlanError, where they cannot be compiled, which is as if they took forever. It is called once
            for each segment, and any other error ends the search.

    Returns:
        The best of the partitions whose segments were all measured. `evaluations` counts the measured segments.

    Raises:
        InfeasibleError: the device refuses a segment of every partition that the search finds.
        ProfileError: a prediction or a measurement is negative or NaN.
        And what `predpar_partition` raises.
    """
    search = _Search(predict, operators, len(initial) + 1)
    first = search.segments_of(initial)
    measured_s: dict[Segment, float] = {}
    refusals: list[Exception] = []

    def one_s(segment: Segment) -> float:
        if segment not in measured_s:
            measured_s[segment] = measured_or_refused(measure, *segment, refusals)
            search.known[segment] = measured_s[segment]
        return measured_s[segment]

    best_s = math.inf

    def better_s(found: Sequence[Segment], upper_s: float) -> float:
        nonlocal best_s
        predicted_s = search.asked(found)
        if max(predicted_s) >= upper_s:
            return math.inf
        slowest_s = 0.0
        for _, segment in sorted(zip(predicted_s, found, strict=True), reverse=True):
            slowest_s = max(slowest_s, one_s(segment))
            if slowest_s >= best_s:  # also where both are infinite
                return math.inf
        best_s = slowest_s
        return slowest_s

    kept = _bisected(search, first, better_s)
    if kept is None and math.isfinite(better_s(first, math.inf)):
        kept = first
    if kept is None:
        raise InfeasibleError(
            f"the device refused {sum(map(math.isinf, measured_s.values()))} of the {len(measured_s)} segments that "
            f"were compiled, one of every partition of {operators} operators into {len(first)} segments that the "
            "search found; leave the operators that it cannot run to another device"
        ) from (refusals[-1] if refusals else None)
    taken_s = tuple(measured_s[segment] for segment in kept)
    return Partition(_cuts(kept), taken_s, len(measured_s), found=kept != first)


def _bisected(
    search: _Search,
    first: list[Segment],
    better_s: Callable[[Sequence[Segment], float], float],
) -> list[Segment] | None:
    """Return the partition that the bisection keeps last, None where it keeps none.

    Args:
        better_s: (partition, UB) -> its bottleneck, infinite where it is not to be kept.
    """
    taken_s = search.asked(first)
    lower_s, upper_s = min(taken_s), max(taken_s)
    if math.isinf(upper_s):
        raise InfeasibleError(
            "a segment of the first partition is impossible, by the predictions; use scheduler measured"
        )
    kept = None
    while upper_s - lower_s > THRESHOLD * upper_s:
        target_s = (lower_s + upper_s) / 2
        found = search.partition(target_s)
        bottleneck_s = math.inf if found is None else better_s(found, upper_s)
        if math.isfinite(bottleneck_s):
            kept, upper_s = found, bottleneck_s
        if not bottleneck_s < target_s:
            lower_s += (upper_s - lower_s) / RELAXING_FACTOR
    return kept


@dataclass(slots=True)
class _Search:
    """The predicted segments, and the search for one target."""

    predict: Predict
    operators: int
    count: int
    known: dict[Segment, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.operators < self.count:
            raise InfeasibleError(f"{self.count} segments need as many operators, the chain has {self.operators}")

    def segments_of(self, cuts: Sequence[int]) -> list[Segment]:
        return list(pairwise((0, *cuts, self.operators)))

    def asked(self, segments: Sequence[Segment]) -> list[float]:
        """Return the predicted seconds of segments; raises ProfileError where they are none."""
        unknown = [segment for segment in segments if segment not in self.known]
        if unknown:
            self.known.update(zip(unknown, map(float, self.predict(unknown)), strict=True))
        taken_s = [self.known[segment] for segment in segments]
        for (start, end), seconds in zip(segments, taken_s, strict=True):
            if not seconds >= 0:
                raise ProfileError(f"operators {start} to {end - 1} are predicted to take {seconds} s; train anew")
        return taken_s

    def partition(self, target_s: float) -> list[Segment] | None:
        """Return the first partition whose segments but the last take at most the target; None without one."""
        ends: list[int] = []
        tried: list[list[int]] = []  # for each segment, the ends that are left to try, the most operators last
        stuck: set[tuple[int, int]] = set()
        while len(ends) < self.count - 1:
            state = len(ends), ends[-1] if ends else 0
            if len(tried) == len(ends):
                tried.append([] if state in stuck else self.ends(*state, target_s))
            if tried[-1]:
                ends.append(tried[-1].pop())
                continue
            stuck.add(state)
            tried.pop()
            if not ends:
                return None
            ends.pop()
        return self.segments_of(ends)

    def ends(self, segment: int, start: int, target_s: float) -> list[int]:
        """Return the ends of a segment that takes at most the target and leaves operators for those behind it."""
        last = self.operators - (self.count - 1 - segment)
        found: list[int] = []
        for block in range(start + 1, last + 1, _BLOCK):
            ends = range(block, min(block + _BLOCK, last + 1))
            taken_s = self.asked([(start, end) for end in ends])
            found += [end for end, seconds in zip(ends, taken_s, strict=True) if seconds <= target_s]
            if min(taken_s) > _FAR_BEYOND * target_s:
                break
        return found


def _cuts(segments: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(start for start, _ in segments[1:])
