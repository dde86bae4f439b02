"""libcoral's two partitioners for pipelines of Edge TPUs, as baselines.

They cut the model in execution order, here the graph's own order. The first one balances parameters. The second one
compiles and measures segments on the device. Its search is `profiling_partition`, which gets the seconds of a segment
from a function, and so runs on hardware or on a model of it. Both are rewritten from google-coral/libcoral,
coral/tools/partitioner/ at commit 6589d0b. Next: `planning/corrected.py`, which measures less, guided by a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from tvm_pipeline import Device, OperatorGraph, Plan, Problem
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning import Partition, Scheduler, best_pipeline, even_cuts, segment_seconds

# libcoral counts time in whole nanoseconds.
LEAST_THRESHOLD_S = 1e-9


def coral_parameters(problem: Problem) -> Plan:
    """Return the plan of libcoral's parameter-count partitioner, whose segments end before they exceed the average.

    The last segment takes the rest, and always every operator from the first one whose outputs no operator reads.

    Source: parameter_count_based_partitioner.cc, GetNumOpsPerSegment. It aborts where one operator is larger than the
    average, because a segment would stay empty; so does this function.

    Raises:
        InfeasibleError: it aborts, there are too few devices, or they cannot run or hold their segments.
    """
    return best_pipeline(problem, "coral-parameters", lambda devices: parameter_cuts(problem.graph, len(devices)))


def coral_profiling(problem: Problem) -> Plan:
    """Return the plan of libcoral's profiling partitioner without its defect, see `profiling_partition`.

    The partitioner supposes that all devices are equal: the seconds of every segment are those predicted for the last
    device of the pipeline, which receives from the device before it. The initial partition has equal parameters; it is
    the result where the search finds nothing better.

    Raises:
        InfeasibleError: it aborts, there are too few devices, or they cannot run or hold their segments.
        ProfileError: a device has neither measurements nor a model.
    """
    return best_pipeline(
        problem, "coral-profiling", lambda devices: partition_by_profiling(problem, devices, original=False).cuts
    )


def coral_profiling_original(problem: Problem) -> Plan:
    """Return the plan of libcoral's profiling partitioner as published, which often aborts from five segments on.

    Raises:
        InfeasibleError: as for `coral_profiling`, or the defect ends the search.
        ProfileError: a device has neither measurements nor a model.
    """
    return best_pipeline(
        problem,
        "coral-profiling-original",
        lambda devices: partition_by_profiling(problem, devices, original=True).cuts,
    )


def partition_by_profiling(problem: Problem, devices: Sequence[Device], *, original: bool) -> Partition:
    """Return the `profiling_partition` of a problem, with the seconds that `coral_profiling` describes."""
    timed = segment_seconds(problem, devices)
    return profiling_partition(
        len(problem.graph),
        len(devices),
        lambda start, end: timed(len(devices) - 1, start, end),
        original=original,
        initial=even_cuts(problem.graph, len(devices)),
        tail=len(problem.graph) - _first_unread(problem.graph),
    )


def parameter_cuts(graph: OperatorGraph, segments: int) -> tuple[int, ...]:
    """Return the cuts of the parameter-count partitioner; raise InfeasibleError where it aborts."""
    sizes = [operator.param_bytes for operator in graph.operators]
    average = sum(sizes) // segments + 1
    first_unread = _first_unread(graph)
    cuts = [0]
    for left in range(segments - 1, 0, -1):
        end, param_bytes = cuts[-1], 0
        while end <= first_unread - left and param_bytes + sizes[end] <= average:
            param_bytes += sizes[end]
            end += 1
        if end == cuts[-1]:
            raise InfeasibleError(
                f"libcoral's parameter-count partitioner leaves segment {len(cuts) - 1} of {segments} empty and "
                f"aborts: operator {graph.operators[end].name} of {graph.name} has {sizes[end]} bytes of parameters, "
                f"the average is {average}, and {left} later segments need operators up to the first that nothing "
                f"reads, {graph.operators[first_unread].name}"
            )
        cuts.append(end)
    return tuple(cuts[1:])


def _first_unread(graph: OperatorGraph) -> int:
    """Return the index of the first operator whose outputs no other reads; the last segment begins there at latest."""
    return next(index for index, readers in enumerate(graph.edges.after) if not readers)


def profiling_partition(
    operators: int,
    segments: int,
    seconds: Callable[[int, int], float],
    *,
    threshold_s: float = 1e-3,
    step: int = 1,
    original: bool = False,
    initial: Sequence[int] | None = None,
    tail: int = 1,
) -> Partition:
    """Return the partition of libcoral's profiling partitioner, which bisects the seconds of the bottleneck.

    The bounds of the bisection are the slowest and the fastest segment of an initial partition. While they differ by
    more than `threshold_s`, the target is halfway between them. Each segment in turn takes as many operators as meet
    the target: it begins with all of them, and gives up `step` at a time. The search steps back where the later
    segments are impossible. The last segment takes the rest, without regard to the target. If the last segment is
    faster than the target, the target is the new upper bound. Else it is the new lower bound, and the seconds of the
    last segment are the new upper bound if they are less than the old one.

    Source: profiling_based_partitioner.cc, BisectPartition and SearchPartition. Before a segment is searched, the
    segments behind it are reset to `step` operators. The loop that does so begins at index `step + 1`, and should begin
    at the segment's own index + 1: from the fourth segment on it overwrites sizes that are already fixed, the sizes no
    longer add up, and a CHECK ends the program. `original` keeps this defect. libcoral searches some states again that
    are known to fail; here they are searched once, with the same result.

    Zou et al. (MILCOM 2024, Table II) ran the published partitioner on Edge TPUs: it succeeded with all of their
    networks in 2 to 7 segments and with 5.5 % in 8. With `original`, nearly all random networks of
    `benchmarks/profiling_partitioner.py` abort from 5 segments on. The reason for the difference is not known.

    Args:
        operators: the number of operators of the chain.
        segments: the number of segments of the partition.
        seconds: (start, end) -> seconds of operators start..end-1 on the device; infinite where they cannot be
            compiled. It is called once for each segment, and `Partition.evaluations` counts the calls. (libcoral
            compiles every segment of a candidate to measure one of them.)
        threshold_s: the bisection ends at this difference, a nanosecond at least; libcoral's default is 1 ms.
        step: the number of operators by which a segment grows or shrinks; libcoral's default is 1.
        original: whether to keep the defect.
        initial: the cuts of the initial partition (libcoral: those of the Edge TPU compiler); None makes segments of
            equally many operators.
        tail: the number of last operators that stay together (libcoral: from the first one that no other reads).

    Returns:
        The last partition that was accepted. It is the initial one, with `found` False, where none was accepted:
        because the initial one is within the threshold, or because no target below its bottleneck can be met.

    Raises:
        InfeasibleError: the search aborts, as libcoral does; with `original` also where it accepts nothing.
        OptionError: the threshold, the step or the number of segments is impossible.
    """
    if not threshold_s >= LEAST_THRESHOLD_S or step < 1 or segments < 1:
        raise OptionError(
            f"{segments} segments, step {step}, threshold {threshold_s} s: the first two must be 1 at least, the "
            f"threshold {LEAST_THRESHOLD_S}"
        )
    if operators < segments:
        raise InfeasibleError(f"{segments} segments need as many operators, the chain has {operators}")
    search = _ProfilingSearch(operators, segments, seconds, step, original, tail)
    first = tuple(initial) if initial is not None else tuple(operators * i // segments for i in range(1, segments))
    taken = search.all_seconds(first)
    lower_s, upper_s = min(taken), max(taken)
    if math.isinf(upper_s):
        raise search.aborted("it cannot compile the initial partition")
    if upper_s - lower_s <= threshold_s:
        return Partition(first, tuple(taken), len(search.known), found=False)
    accepted: tuple[int, ...] | None = None
    while upper_s - lower_s > threshold_s:
        target_s = (lower_s + upper_s) / 2
        cuts = search.partition(target_s)
        last_s = math.inf if cuts is None else search.measured_s(cuts[-1], operators)
        if last_s < upper_s:
            accepted = cuts
        if last_s < target_s:
            upper_s = target_s
        else:
            lower_s, upper_s = target_s, min(last_s, upper_s)
    if accepted is None and original:
        raise search.aborted("it finds no partition that is faster than the initial one")
    cuts = first if accepted is None else accepted
    return Partition(cuts, tuple(search.all_seconds(cuts)), len(search.known), found=accepted is not None)


@dataclass(slots=True)
class _ProfilingSearch:
    """The segments measured so far, and the search for one target. A candidate lists the sizes of its segments."""

    operators: int
    count: int  # of segments
    seconds: Callable[[int, int], float]
    step: int
    original: bool
    tail: int
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    def aborted(self, why: str) -> InfeasibleError:
        version = "libcoral's profiling partitioner" + (" (original)" if self.original else "")
        return InfeasibleError(
            f"{version} aborts with {self.count} segments of {self.operators} operators: {why}; use another scheduler"
        )

    def measured_s(self, start: int, end: int) -> float:
        """Return the seconds of a segment, which are measured once."""
        if (start, end) not in self.known:
            self.known[start, end] = self.seconds(start, end)
        return self.known[start, end]

    def all_seconds(self, cuts: Sequence[int]) -> list[float]:
        return [self.measured_s(start, end) for start, end in pairwise((0, *cuts, self.operators))]

    def partition(self, target_s: float) -> tuple[int, ...] | None:
        """Return the cuts of the first candidate whose segments but the last meet the target; None without one."""
        sizes = [self.operators - (self.count - 1) * self.step] + [self.step] * (self.count - 1)
        if sizes[0] <= 0:
            raise self.aborted(f"at {self.step} operators a step there are not enough")
        if not self.extend(sizes, 0, target_s, set()):
            return None
        self.check_sum(sizes)
        return tuple(accumulate(sizes[:-1]))

    def extend(self, candidate: list[int], segment: int, target_s: float, stuck: set[tuple[int, int, int]]) -> bool:
        """Choose the sizes of `segment` and of those behind it, and return whether that is possible.

        As in the source, `candidate` is reset even where it is not. `stuck` are the states that are known to fail.
        """
        last = self.count - 1
        if segment == last:
            return True
        total = sum(candidate[segment:])
        candidate[last] = max(self.tail, self.step)
        for index in range((self.step if self.original else segment) + 1, last):
            candidate[index] = self.step
        candidate[segment] = total - (last - 1 - segment) * self.step - candidate[last]
        if candidate[segment] <= 0 or sum(candidate[segment:]) != total:
            raise self.aborted(f"no operators are left for segment {segment}")
        # The rest of the search depends on nothing else.
        state = (segment, sum(candidate[:segment]), total)
        if state in stuck:
            return False
        sizes = list(candidate)
        while sizes[segment] > 0:
            if self.measure(sizes, segment) <= target_s and self.extend(sizes, segment + 1, target_s, stuck):
                candidate[:] = sizes
                return True
            given_up = min(sizes[segment], self.step)
            sizes[segment] -= given_up
            sizes[segment + 1] += given_up
        stuck.add(state)
        return False

    def measure(self, sizes: Sequence[int], segment: int) -> float:
        start = sum(sizes[:segment])
        end = start + sizes[segment]
        if (start, end) not in self.known:
            self.check_sum(sizes)
        return self.measured_s(start, end)

    def check_sum(self, sizes: Sequence[int]) -> None:
        """Raise where the sizes of a candidate no longer add up, which is where libcoral aborts."""
        if sum(sizes) != self.operators:
            raise self.aborted(f"it overwrote segments that were fixed: {list(sizes)} are {sum(sizes)} operators")


CORAL_PARAMETERS = Scheduler(coral_parameters, "libcoral's partitioner by parameters")
CORAL_PROFILING = Scheduler(coral_profiling, "libcoral's partitioner by profile, mended")
CORAL_PROFILING_ORIGINAL = Scheduler(coral_profiling_original, "libcoral's partitioner by profile, as published")
