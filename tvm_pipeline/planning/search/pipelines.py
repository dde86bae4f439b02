"""The exact search for pipelines over unequal devices: dynamic programming over (cut, devices used, last unit).

A unit is one device or several replicas that run a stage. A state is the set of devices used so far and the unit of
the last stage. Its value at a cut is the least slowest stage, or the least sum, of all pipelines that end there.
`Pruning` lists the ideas that keep the search small.

The search deepens: it first admits only stages, or sums, that are a little above a lower bound. If it finds no
pipeline, it admits more. A pipeline that it finds is optimal, since every better one was admitted, too.

Next: `dynamic_programming.py`, which calls these searches; `space.py`; `relaxation.py`, for the bound and the windows;
`loops.py`, the inner loops.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_pipeline.planning.search import loops
from tvm_pipeline.planning.search.cost_tables import StageCosts
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.planning.search.relaxation import relaxed_bottleneck, windows
from tvm_pipeline.planning.search.space import Space, States, elders_of, first_free_units, reachable

# By how much the slowest stage, or the sum, may exceed the proven bound in each pass; the last pass admits everything.
DEEPENING = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, float("inf"))


@dataclass(frozen=True, slots=True)
class Pruning:
    """The ideas that keep the search small; with any of them switched off it finds a pipeline of the same value.

    Attributes:
        bound: a lower bound of the slowest stage, or of the sum, is computed first, and the search deepens from there.
        known: a stage slower than a pipeline that the caller already has is not admitted.
        windows: a state is only tried at the cuts that it can have if all stages are fast enough.
        to_come: a sum is dropped if a lower bound of its remaining stages brings it above the admitted sum.
        equal_devices: of devices with equal costs and limits the first free one is used.
        queue: if the cuts are nested and the costs additive, a queue of the starts of a stage that can still be the
            best replaces the trial of every earlier cut.
    """

    bound: bool = True
    known: bool = True
    windows: bool = True
    to_come: bool = True
    equal_devices: bool = True
    queue: bool = True


@dataclass(frozen=True, slots=True)
class FoundPipeline:
    """A pipeline: the unit (indices of devices) of each stage, the cut behind each stage, and its value."""

    value: float
    units: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search: the best pipeline, None if there is none, and a lower bound of the value of all."""

    found: FoundPipeline | None
    bound: float


def least_bottleneck(
    space: Space, seconds: StageCosts, at_most: float, deadline: float | None, pruning: Pruning | None = None
) -> Search:
    """Return the pipeline with the least slowest stage, if that is at most `at_most` seconds.

    Args:
        deadline: of `time.monotonic`; None for no limit.
        pruning: tests switch ideas off; by default all are on.

    Raises:
        TooManyError: the states would not fit into memory.
    """
    pruning = pruning or Pruning()
    elders, space = _without_equals(space, [seconds], pruning)
    highest = at_most if pruning.known else np.inf
    bound = relaxed_bottleneck(space, elders, seconds, highest) if pruning.bound else 0.0
    if not np.isfinite(bound):
        return Search(None, bound)
    for more in DEEPENING if pruning.bound else DEEPENING[-1:]:
        cap = min(bound * (1 + more) if more < np.inf else np.inf, highest)
        ended, found = _Pass(space, elders, seconds, None, cap, np.inf, pruning).run(deadline)
        if found is not None and found.value > at_most:
            break
        if found is not None or ended:
            return Search(found, found.value if found is not None and not ended else bound)
        if cap >= highest:
            break
        bound = max(bound, cap)
    return Search(None, np.inf)


def relaxed_bound(space: Space, seconds: StageCosts) -> float:
    """Return a lower bound of the seconds of every pipeline's slowest stage, without a search."""
    elders, space = _without_equals(space, [seconds], Pruning())
    return relaxed_bottleneck(space, elders, seconds, np.inf)


def least_sum(
    space: Space,
    costs: StageCosts,
    seconds: StageCosts | None,
    cap: float,
    deadline: float | None,
    *,
    least: float = 0.0,
    below: float = math.inf,
    slowest: bool = False,
    pruning: Pruning | None = None,
) -> Search:
    """Return the pipeline with the least sum of `costs` whose stages take at most `cap` by `seconds`.

    Args:
        deadline: of `time.monotonic`; None for no limit.
        least: a lower bound of the sum that the caller knows.
        below: larger sums are of no use; if all are larger, none is found, and the bound is infinite.
        slowest: whether replicas cost what the most expensive one costs; else each pays for the frames that it takes.
        pruning: tests switch ideas off; by default all are on.

    Raises:
        TooManyError: the states would not fit into memory.
    """
    pruning = pruning or Pruning()
    elders, space = _without_equals(space, [costs] if seconds is None else [seconds, costs], pruning)
    bound = max(float(_to_come(space, costs, [0])[0, 0]), least) if pruning.bound else 0.0
    for more in DEEPENING if pruning.bound else DEEPENING[-1:]:
        limit = min(bound * (1 + more) if more < np.inf else np.inf, below)
        ended, found = _Pass(space, elders, seconds, costs, cap, limit, pruning, slowest).run(deadline)
        if found is not None or ended:
            return Search(found, found.value if found is not None and not ended else bound)
        if limit >= below:
            break
        bound = max(bound, limit) if limit < np.inf else bound
    return Search(None, np.inf)


def _without_equals(space: Space, tables: Sequence[StageCosts], pruning: Pruning) -> tuple[list[int], Space]:
    """Return the elder of each device, or -1, and the space without the units that pass over an elder."""
    elders = elders_of(space, tables) if pruning.equal_devices else [-1] * len(space.devices)
    return elders, replace(space, units=first_free_units(space.units, elders))


class _Pass:
    """One pass over all cuts, which admits stages up to `cap` and sums up to `limit`."""

    def __init__(
        self,
        space: Space,
        elders: list[int],
        seconds: StageCosts | None,
        costs: StageCosts | None,
        cap: float,
        limit: float,
        pruning: Pruning,
        slowest: bool = False,
    ) -> None:
        self.space, self.pruning = space, pruning
        self.states = reachable(space, elders)
        if len(self.states.source) == 0:
            return
        tables = [table for table in (seconds, costs) if table is not None]
        self.first, self.second, self.adds = tables[0], tables[-1], costs is not None
        cap = cap if seconds is not None else np.inf
        masks = [int(mask) for mask in self.states.mask]
        to_come = np.zeros((len(masks), 1))
        if costs is not None and pruning.to_come:
            to_come = _to_come(space, costs, masks)
        elif costs is not None:
            to_come = np.zeros((len(masks), len(space.cuts)))
        slowdown = np.array(space.slowdown or [1.0] * len(space.devices))
        self.goal = loops.Goal(self.adds, slowest, float(cap), float(limit), to_come, space.capacity, slowdown)
        self.window = _window(space, elders, seconds, cap, masks, pruning)

    def run(self, deadline: float | None) -> tuple[bool, FoundPipeline | None]:
        """Return whether the deadline ended the pass, and the best pipeline with a sum of at most the limit."""
        if len(self.states.source) == 0:
            return False, None
        count = len(self.space.cuts)
        table = _empty_table(len(self.states.mask), count)
        advance = self._by_queue(table) if self._can_queue() else self._by_trial(table)
        step = count if deadline is None else max(1, min(2048, 20_000_000 // (count * len(self.states.source))))
        for begin in range(1, count, step):
            if deadline is not None and time.monotonic() >= deadline:
                return True, None
            advance(begin, min(begin + step, count))
        return False, _best(self.space, self.states, table)

    def _can_queue(self) -> bool:
        cuts = self.space.cuts
        nested = cuts.zone[-1] == len(cuts) - 1 and cuts.needs is None
        single = all(len(unit) == 1 for unit in self.space.units)
        return self.pruning.queue and self.adds and single and nested and self.first.adds_up and self.second.adds_up

    def _both_costs(self, states: States) -> tuple[loops.Costs, loops.Costs]:
        seconds = _costs(self.space, states, self.first)
        return seconds, seconds if self.second is self.first else _costs(self.space, states, self.second)

    def _by_trial(self, table: loops.Table) -> Callable[[int, int], None]:
        lattice, cuts = _lattice(self.space, self.states), _cut_arrays(self.space)
        seconds, added = self._both_costs(self.states)
        return lambda begin, end: loops.advance(
            lattice, cuts, self.window, seconds, added, self.goal, table, begin, end
        )

    def _by_queue(self, table: loops.Table) -> Callable[[int, int], None]:
        size = len(self.states.mask)
        order = np.argsort(self.states.target, kind="stable")
        states = replace(self.states, source=self.states.source[order], target=self.states.target[order])
        into = np.searchsorted(states.target, np.arange(size + 1))
        lattice, cuts = _lattice(self.space, states), _cut_arrays(self.space)
        seconds, added = self._both_costs(states)
        shape = (size, len(self.space.cuts) + 1)
        entries = (np.zeros(shape), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
        queue = loops.Queue(*entries, np.zeros(size, np.int64), np.zeros(size, np.int64))
        return lambda begin, end: loops.advance_chain(
            lattice, into, cuts, self.window, seconds, added, self.goal, queue, table, begin, end
        )


def _window(
    space: Space, elders: list[int], seconds: StageCosts | None, cap: float, masks: list[int], pruning: Pruning
) -> loops.Window:
    count = len(space.cuts)
    if pruning.windows:
        return windows(space, elders, seconds, cap, masks)
    start = np.zeros((len(space.units), count), np.int64)
    return loops.Window(np.zeros(len(masks), np.int64), np.full(len(masks), count - 1), start)


def _empty_table(states: int, count: int) -> loops.Table:
    value = np.full((states, count), np.inf)
    value[0, 0] = 0.0
    origin, leader = np.full((states, count), -1, np.int32), np.full((states, count), -1, np.int32)
    alive_from, alive_to = np.full(states, count), np.full(states, -1)
    alive_from[0] = alive_to[0] = 0
    return loops.Table(value, origin, leader, alive_from, alive_to)


def _lattice(space: Space, states: States) -> loops.Lattice:
    sizes = np.array([len(unit) for unit in space.units])
    members = np.full((len(space.units), max(sizes)), -1)
    for row, unit in zip(members, space.units, strict=True):
        row[: len(unit)] = unit
    return loops.Lattice(states.source, states.target, states.unit, members, sizes)


def _cut_arrays(space: Space) -> loops.CutArrays:
    cuts = space.cuts
    usable = cuts.together if space.together else np.ones(len(cuts), bool)
    needs = np.zeros((0, 0)) if cuts.needs is None else cuts.needs
    return loops.CutArrays(space.param_bytes, cuts.zone, cuts.members, usable, space.ordered, needs)


def _costs(space: Space, states: States, costs: StageCosts) -> loops.Costs:
    which, enter = _entering(space, states, costs)
    return loops.Costs(costs.table, costs.added, costs.work, costs.leave, enter, which, float(costs.impossible))


def _to_come(space: Space, costs: StageCosts, masks: Sequence[int]) -> Floats:
    """Return a lower bound of the remaining cost, for each set of used devices and each cut.

    Every operator costs at least as much as on its cheapest device. If every device has a cache and serves once, the
    bytes that the caches of the unused devices cannot hold cost something, too.
    """
    least: Floats = np.tile(costs.least[-1] - costs.least, (len(masks), 1))
    if len(space.once) < len(space.devices) or not costs.table.spill.all():
        return least
    param_bytes = space.param_bytes
    for row, mask in zip(least, masks, strict=True):
        left = sorted((c for d, c in enumerate(costs.table.cached) if not mask >> d & 1), reverse=True)
        capacity = sum(left[: max(0, space.most_devices - mask.bit_count())])
        beyond = np.maximum(0.0, param_bytes[-1] - param_bytes - capacity)
        np.maximum(row, costs.table.spill.min() * beyond + costs.least_added[-1] - costs.least_added, out=row)
    return least


def _entering(space: Space, states: States, costs: StageCosts) -> tuple[Integers, Floats]:
    """Return for each stage and member of its unit a row of transfer costs, and the distinct rows.

    If several replicas send, the cheapest link counts. No frame costs less, so the value of the search stays a bound.
    """
    rows: dict[bytes, int] = {}
    table: list[Floats] = []
    known: dict[tuple[int, int], int] = {}
    which = np.zeros((len(states.source), max(map(len, space.units))), np.int64)
    for stage, (source, target) in enumerate(zip(states.source, states.target, strict=True)):
        before, unit = int(states.unit[source]), int(states.unit[target])
        for position, device in enumerate(space.units[unit]):
            if (before, device) not in known:
                senders = list(space.units[before]) if before >= 0 else [len(space.devices)]
                row = costs.enter[senders, device].min(axis=0)
                key = row.tobytes()
                if key not in rows:
                    rows[key] = len(table)
                    table.append(row)
                known[before, device] = rows[key]
            which[stage, position] = known[before, device]
    return which, np.array(table)


def _best(space: Space, states: States, table: Any) -> FoundPipeline | None:
    """Return the best pipeline that ends at the last cut and has the prescribed numbers of stages and devices."""
    full = table.value[:, -1].copy()
    if space.stages is not None:
        full[states.count != space.stages] = np.inf
    if space.working is not None:
        full[[int(mask).bit_count() != space.working for mask in states.mask]] = np.inf
    state, cut = int(np.argmin(full)), table.value.shape[1] - 1
    if not np.isfinite(full[state]):
        return None
    best = float(full[state])
    units, ends = [], []
    while cut > 0:
        units.append(space.units[int(states.unit[state])])
        ends.append(cut)
        state, cut = int(table.leader[state, cut]), int(table.origin[state, cut])
    return FoundPipeline(best, tuple(reversed(units)), tuple(reversed(ends)))
