"""Pipelines where the cost of a stage is any function of the set of its operators: an exact search over all downsets.

This is the most general form of costs, such as those of a device with a parameter cache, of a compiler that fuses, or
of a measurement. The only assumption is that a larger set never takes less. The fast searches of `planning/search` know
such costs only in the form of `cost_tables.py`. Here the function is called once for each set, so a call may be
expensive. Next: `fewest_bottleneck.py`, which needs fewer calls along one order of the operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning import Cuts

# (device, operators in the graph's order) -> seconds; infinite if the device cannot run or hold them.
SetSeconds = Callable[[str, tuple[str, ...]], float]


@dataclass(frozen=True, slots=True)
class SetPipeline:
    """The operators and the seconds of each stage, and the number of sets whose seconds were evaluated."""

    stages: tuple[tuple[str, ...], ...]
    seconds: tuple[float, ...]
    evaluations: int

    @property
    def bottleneck_s(self) -> float:
        """Return the seconds of the slowest stage."""
        return max(self.seconds)


def least_bottleneck_of_sets(
    cuts: Cuts, devices: Sequence[str], seconds: SetSeconds, at_most_s: float = math.inf
) -> SetPipeline:
    """Return the pipeline over `devices` in the given order, one non-empty stage each, with the least slowest stage.

    The method is dynamic programming over the downsets, stage by stage. From each downset the larger ones are tried in
    ascending order. If a set takes too long, every set that contains it does, too, and is not evaluated.

    Args:
        cuts: `ideals(graph)`; with `prefixes(graph)` the result is that of `fewest_bottleneck`.
        seconds: a larger set never takes less; else the result is legal, but may not be the best.
        at_most_s: the bottleneck of a known pipeline; slower stages are not considered.

    Raises:
        OptionError: there are no devices.
        InfeasibleError: no pipeline takes at most `at_most_s`, or there are more devices than operators.
    """
    if not devices:
        raise OptionError("a pipeline needs at least one device")
    last, known = len(cuts) - 1, _SetCosts(cuts, seconds)
    reached = {0: 0.0}
    came: list[dict[int, int]] = []
    for stage, device in enumerate(devices):
        final = stage == len(devices) - 1
        following: dict[int, float] = {}
        origin: dict[int, int] = {}
        for start, before in sorted(reached.items()):
            too_long: list[int] = []
            ends = [last] if final else list(range(start + 1, last))
            for end in ends:
                limit = min(following.get(end, math.inf), math.nextafter(at_most_s, math.inf))
                if before >= limit or not cuts.inside(np.array([start]), end)[0]:
                    continue
                if too_long and cuts.inside(np.array(too_long), end).any():
                    continue
                took = known.seconds_of(device, start, end)
                if took > at_most_s:
                    too_long.append(end)
                elif max(before, took) < limit:
                    following[end], origin[end] = max(before, took), start
        reached = following
        came.append(origin)
    if last not in reached:
        raise InfeasibleError(
            f"no pipeline over {', '.join(devices)}, in this order, takes at most {at_most_s:g} s a stage; the graph "
            f"has {len(cuts.graph)} operators, and each device needs one that it can run and hold"
        )
    chosen = [last]
    for origin in reversed(came[1:]):
        chosen.append(origin[chosen[-1]])
    chosen.reverse()
    taken = tuple(known.seconds_of(d, a, b) for d, a, b in zip(devices, [0, *chosen], chosen, strict=False))
    return SetPipeline(tuple(cuts.stages(chosen)), taken, len(known.sets))


class _SetCosts:
    """The seconds of every set that was evaluated so far."""

    def __init__(self, cuts: Cuts, seconds: SetSeconds) -> None:
        self.cuts, self.seconds = cuts, seconds
        self.sets: dict[tuple[str, tuple[str, ...]], float] = {}
        self.inside: dict[int, frozenset[int]] = {}

    def seconds_of(self, device: str, start: int, end: int) -> float:
        """Return the seconds of the operators between two cuts, by one call of the function for each set."""
        indices = sorted(self._operators(end) - self._operators(start))
        names = tuple(self.cuts.graph.operators[index].name for index in indices)
        if (device, names) not in self.sets:
            self.sets[device, names] = self.seconds(device, names)
        return self.sets[device, names]

    def _operators(self, cut: int) -> frozenset[int]:
        if cut not in self.inside:
            self.inside[cut] = frozenset(self.cuts.operators(cut))
        return self.inside[cut]
