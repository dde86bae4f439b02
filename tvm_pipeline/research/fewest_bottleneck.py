"""Consecutive segments of a chain, one for each device: the shortest bottleneck, whatever they cost.

It is exact where a longer segment never takes less. What a segment takes is asked of a function, so that it may be
anything: a model, or a compilation and a measurement. Next: `baselines/segments.py`, which gives such functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm_pipeline.errors import InfeasibleError, OptionError, ProfileError
from tvm_pipeline.planning.baselines.segments import Partition, Seconds


def fewest_bottleneck(
    operators: int, devices: int, seconds: Seconds, *, idle: bool = False, most_evaluations: int | None = None
) -> Partition:
    """The partition of a chain over devices in the given order whose slowest segment takes least.

    Bisection over the target. For one target each device takes as many operators as it can in that time, the furthest
    end being found by binary search. Where a longer segment never takes less, that greedy fill is exact: whoever
    begins further along has less left, and whatever another partition gives the next device then contains what is
    left for it, so that it gets at least as far. Only where a device must have a segment, and cannot take the operator
    that it would stand before, may stopping earlier help; then shorter ends are tried, each place once.

    The end is exact, not a tolerance: a partition found lowers the target to its own bottleneck, and a target refused
    raises it to the least figure that was too long for it, for with any target below that every comparison, and hence
    the answer, would be the same. There are finitely many figures, so the two meet.

    Args:
        operators: how many the chain has.
        devices: how many there are; each has one segment.
        seconds: (device, start, end) -> seconds of operators start..end-1 there, infinite where that is impossible;
            asked once for each segment. Where a longer segment can take less, the partition is legal and its seconds
            are right, but `bound_s` is not to be trusted.
        idle: devices may stay without a segment.
        most_evaluations: begin no further target once so many segments were asked about; `bound_s` then says how
            much better the best may be.

    Raises:
        InfeasibleError: no partition takes finite time, or there are fewer operators than segments.
        OptionError: no operators or no devices.
        ProfileError: `seconds` gave a negative figure or NaN.
    """
    if operators < 1 or devices < 1:
        raise OptionError(f"{operators} operators on {devices} devices: there must be at least one of both")
    if devices > operators and not idle:
        raise InfeasibleError(f"{devices} segments need as many operators, the chain has {operators}")
    chain = _Chain(operators, devices, seconds, idle)
    lower_s, upper_s = 0.0, math.inf
    best_ends: list[int] | None = None
    while lower_s < upper_s:
        if most_evaluations is not None and best_ends is not None and len(chain.known) >= most_evaluations:
            break
        target_s = min((lower_s + upper_s) / 2, sys.float_info.max)
        # Between two neighbouring numbers there is no third; the lower one is always worth a try.
        target_s = target_s if target_s < upper_s else lower_s
        chain.least_refused_s = math.inf
        ends = chain.fill(target_s)
        if ends is None:
            lower_s = chain.least_refused_s
        else:
            best_ends, upper_s = ends, max(chain.taken(ends))
    if best_ends is None:
        raise InfeasibleError(
            f"no way to cut {operators} operators into {'at most ' if idle else ''}{devices} segments gives each "
            "device, in this order, operators that it can run and hold; drop a device, or change their order"
        )
    return Partition(
        tuple(best_ends[:-1]), tuple(chain.taken(best_ends)), len(chain.known), bound_s=min(lower_s, upper_s)
    )


@dataclass(slots=True)
class _Chain:
    """The segments asked about so far, and the greedy fill for one target."""

    operators: int
    devices: int
    seconds: Seconds
    idle: bool
    known: dict[tuple[int, int, int], float] = field(default_factory=dict)
    least_refused_s: float = math.inf

    def taken(self, ends: Sequence[int]) -> list[float]:
        places = enumerate(pairwise((0, *ends)))
        return [self.ask(device, start, end) if start < end else 0.0 for device, (start, end) in places]

    def ask(self, device: int, start: int, end: int) -> float:
        segment = (device, start, end)
        if segment not in self.known:
            figure = float(self.seconds(device, start, end))
            if not figure >= 0:
                raise ProfileError(
                    f"operators {start} to {end - 1} took {figure} s on device {device} of the chain; measure again"
                )
            self.known[segment] = figure
        return self.known[segment]

    def fits(self, device: int, start: int, end: int, target_s: float) -> bool:
        figure = self.ask(device, start, end)
        if figure > target_s:
            self.least_refused_s = min(self.least_refused_s, figure)
        return figure <= target_s

    def furthest(self, device: int, start: int, most: int, target_s: float) -> int:
        """The last end, up to `most`, that `device` reaches from `start` in time; `start` where it takes nothing."""
        least, beyond = start, most + 1
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if self.fits(device, start, middle, target_s):
                least = middle
            else:
                beyond = middle
        return least

    def fill(self, target_s: float) -> list[int] | None:
        """Where each device ends; None where there is no partition in time."""
        ends = [0]
        for device in range(self.devices):
            ends.append(self.furthest(device, ends[-1], self.operators, target_s))
        if ends[-1] < self.operators:
            return None  # not even with devices that stay idle
        return ends[1:] if self.idle else self.fill_each(0, 0, target_s, set())

    def fill_each(self, device: int, start: int, target_s: float, stuck: set[tuple[int, int]]) -> list[int] | None:
        """Where `device` and those after it end, each with a segment; `stuck` are the places known to lead nowhere."""
        if (device, start) in stuck:
            return None
        after = self.devices - device - 1
        if after == 0:
            return [self.operators] if self.fits(device, start, self.operators, target_s) else None
        for end in range(self.furthest(device, start, self.operators - after, target_s), start, -1):
            rest = self.fill_each(device + 1, end, target_s, stuck)
            # Asked again, for a shorter segment may take longer: then it is no partition in time.
            if rest is not None and self.fits(device, start, end, target_s):
                return [end, *rest]
        stuck.add((device, start))
        return None
