"""The least bottleneck of consecutive segments of a chain, one for each device, for any costs.

The answer is exact if a longer segment never takes less. A function returns the seconds of a segment, by a model or by
compiling and measuring it. Next: `planning/baselines/segments.py`, which provides such functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tvm_pipeline.errors import InfeasibleError, OptionError, ProfileError
from tvm_pipeline.planning import Partition

# (device, start, end) -> seconds of that segment on the device; infinite where the device cannot take it.
Seconds = Callable[[int, int, int], float]


def fewest_bottleneck(
    operators: int, devices: int, seconds: Seconds, *, idle: bool = False, most_evaluations: int | None = None
) -> Partition:
    """Return the partition of a chain over devices in the given order whose slowest segment takes least.

    The target is bisected. For one target each device takes as many operators as it can in that time, and binary search
    finds the furthest end. If a longer segment never takes less, this greedy fill is exact: a device that starts
    further along has fewer operators left. The segment that another partition gives to the device contains these, so
    the device reaches at least as far. An earlier end may only help if every device must have a segment, and the next
    device cannot run the operator at the furthest end. Then shorter ends are tried, each (device, start) once.

    The bisection ends exactly and not at a tolerance. A partition that is found lowers the upper bound to its own
    bottleneck. A target that is refused raises the lower bound to the least figure that exceeded it, since every
    comparison, and so the answer, is the same for any target below that. There are finitely many figures, so the two
    bounds meet.

    Args:
        operators: the number of operators of the chain.
        devices: the number of devices; each has one segment.
        seconds: (device, start, end) -> seconds of operators start..end-1 on the device, infinite if it cannot run or
            hold them. It is called once for each segment. If a longer segment can take less, the partition is legal and
            its seconds are right, but `bound_s` may be wrong.
        idle: whether devices may stay without a segment.
        most_evaluations: begin no further target after `seconds` was called so often; `bound_s` then says how much
            better the best partition may be.

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
        # Two neighbouring floats have no number between them, so the lower one is tried.
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
    """The seconds of the segments evaluated so far, and the greedy fill for one target."""

    operators: int
    devices: int
    seconds: Seconds
    idle: bool
    known: dict[tuple[int, int, int], float] = field(default_factory=dict)
    least_refused_s: float = math.inf

    def taken(self, ends: Sequence[int]) -> list[float]:
        """Return the seconds of each device's segment; 0 for a device without one."""
        segments = enumerate(pairwise((0, *ends)))
        return [self.seconds_of(device, start, end) if start < end else 0.0 for device, (start, end) in segments]

    def seconds_of(self, device: int, start: int, end: int) -> float:
        """Return the seconds of a segment, by one call of the function; raise ProfileError if they cannot be."""
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
        """Return whether a segment takes at most the target; if it does not, note the least such figure."""
        figure = self.seconds_of(device, start, end)
        if figure > target_s:
            self.least_refused_s = min(self.least_refused_s, figure)
        return figure <= target_s

    def furthest(self, device: int, start: int, most: int, target_s: float) -> int:
        """Return the last end, up to `most`, that `device` reaches from `start` in time; `start` if there is none."""
        least, beyond = start, most + 1
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if self.fits(device, start, middle, target_s):
                least = middle
            else:
                beyond = middle
        return least

    def fill(self, target_s: float) -> list[int] | None:
        """Return the end of each device's segment; None if no partition takes at most the target."""
        ends = [0]
        for device in range(self.devices):
            ends.append(self.furthest(device, ends[-1], self.operators, target_s))
        if ends[-1] < self.operators:
            return None  # not even with devices that stay idle
        return ends[1:] if self.idle else self.fill_all(0, 0, target_s, set())

    def fill_all(self, device: int, start: int, target_s: float, stuck: set[tuple[int, int]]) -> list[int] | None:
        """Return the ends of `device` and the devices after it, each with a segment; None if there are none in time.

        Args:
            stuck: the pairs of device and start from which no partition is in time, which this function adds to.
        """
        if (device, start) in stuck:
            return None
        after = self.devices - device - 1
        if after == 0:
            return [self.operators] if self.fits(device, start, self.operators, target_s) else None
        for end in range(self.furthest(device, start, self.operators - after, target_s), start, -1):
            rest = self.fill_all(device + 1, end, target_s, stuck)
            # The segment is compared again, since a shorter one may take longer and is then not in time.
            if rest is not None and self.fits(device, start, end, target_s):
                return [end, *rest]
        stuck.add((device, start))
        return None
