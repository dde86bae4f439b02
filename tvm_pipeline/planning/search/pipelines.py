"""The exact search for pipelines over unequal devices: dynamic programming over (cut, devices used, last unit).

A unit is what runs a stage: one device, or several replicas. A state is the set of devices used so far and the unit of
the last stage; its value at a cut is the least slowest stage, or the least sum, of all pipelines that lead there. Three
ideas keep the search small:

- **Deepening.** A relaxation (no transfers, no comparison of sets) gives a lower bound T of the slowest stage. The
  exact search then admits stages up to a little more than T only, and more when that finds nothing, so that each
  state is alive in a narrow window of cuts. What it finds is optimal: everything better was admitted, too.
- **Bounds.** A sum is found the same way: whatever costs at least so much to come is dropped where that is too much.
- **Twins.** Of devices that are equal in all things the first free one is always taken: six Edge TPUs are six states,
  not 64 sets.

Next: `exact.py`, which asks for pipelines; `windows.py`, the relaxation; `loops.py`, the inner loops.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tvm_pipeline.planning.search import loops
from tvm_pipeline.planning.search.cost_tables import StageCosts
from tvm_pipeline.planning.search.cuts import Floats, Integers
from tvm_pipeline.planning.search.relaxation import relaxed_bottleneck, windows
from tvm_pipeline.planning.search.space import Space, Units

# How far beyond the proven bound the slowest stage, or the sum, may lie, try by try; the last admits everything.
DEEPENING = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, float("inf"))
# Values and choices of all states at all cuts must fit the memory of a small board.
MOST_CELLS = 60_000_000
# And its steps a few minutes: single stages of 11 unequal devices, or replicas of 7.
MOST_STAGES = 60_000


class TooManyError(Exception):
    """The states of a search would not fit into memory."""


@dataclass(frozen=True, slots=True)
class Found:
    """A pipeline: the unit (indices of devices) of each stage and the cut behind it; `value` as the search saw it."""

    value: float
    units: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Search:
    """What a search came to: the best pipeline if any, and what no pipeline can be better than."""

    found: Found | None
    bound: float


def least_bottleneck(space: Space, seconds: StageCosts, at_most: float, deadline: float | None) -> Search:
    """The pipeline whose slowest stage is fastest, each device once, of those not slower than `at_most`.

    Raises:
        TooManyError: too many states for memory.
    """
    twins = _twins(space, [seconds])
    space = replace(space, units=_distinct(space.units, twins))
    bound = relaxed_bottleneck(space, twins, seconds, at_most)
    if not np.isfinite(bound):
        return Search(None, bound)
    for more in DEEPENING:
        cap = min(bound * (1 + more) if more < np.inf else np.inf, at_most)
        ended, found = _run(space, twins, seconds, None, cap, np.inf, deadline)
        if found is not None or ended:
            return Search(found, found.value if found is not None and not ended else bound)
        if cap >= at_most:
            break
        bound = max(bound, cap)
    return Search(None, np.inf)


def relaxed_bound(space: Space, seconds: StageCosts) -> float:
    """What no pipeline's slowest stage is below, without a search."""
    twins = _twins(space, [seconds])
    return relaxed_bottleneck(replace(space, units=_distinct(space.units, twins)), twins, seconds, np.inf)


def least_sum(
    space: Space,
    costs: StageCosts,
    seconds: StageCosts | None,
    cap: float,
    deadline: float | None,
    *,
    slowest: bool = False,
) -> Search:
    """The pipeline with the least sum of costs; no stage of it takes more than `cap` by `seconds`.

    Replicas cost what they do in the shares in which they take frames or, if `slowest`, what the dearest does.

    Raises:
        TooManyError: too many states for memory.
    """
    twins = _twins(space, [costs] if seconds is None else [seconds, costs])
    space = replace(space, units=_distinct(space.units, twins))
    bound = float(_to_come(space, costs, [0])[0, 0])
    for more in DEEPENING:
        limit = bound * (1 + more)
        ended, found = _run(space, twins, seconds, costs, cap, limit, deadline, slowest)
        if found is not None or ended:
            return Search(found, found.value if found is not None and not ended else bound)
        bound = max(bound, limit) if limit < np.inf else bound
    return Search(None, np.inf)


def _distinct(units: Units, twins: list[int]) -> Units:
    """The units without those that pass over a twin: of equal devices the next free ones are taken."""

    def passes_over(unit: tuple[int, ...]) -> bool:
        # Of the twins in the unit only the first may have its elder outside.
        return any(
            twins[d] >= 0 and twins[d] not in unit and any(_is_elder(twins, e, twins[d]) for e in unit) for d in unit
        )

    return [unit for unit in units if not passes_over(unit)]


def _is_elder(twins: list[int], elder: int, device: int) -> bool:
    while device >= 0:
        if device == elder:
            return True
        device = twins[device]
    return False


@dataclass(frozen=True, slots=True, eq=False)
class _States:
    """States and the stages that lead from one to the next, sorted so that a stage's source comes first."""

    mask: Integers
    unit: Integers
    count: Integers
    source: Integers
    target: Integers


def _states(space: Space, twins: list[int]) -> _States:
    """All states that can be reached from the empty pipeline (state 0: no unit, no device)."""
    single_use = sum(1 << device for device in space.once)
    masks = [sum(1 << device for device in unit) for unit in space.units]
    # A device may be used once its elder twin is, or together with it.
    needs = [
        sum(1 << twins[device] for device in unit if twins[device] >= 0) & ~mask
        for unit, mask in zip(space.units, masks, strict=True)
    ]
    index = {(0, -1, 0): 0}
    order = [(0, -1, 0)]
    edges = []
    for key in order:
        mask, last, count = key
        for unit, own in enumerate(masks):
            if unit == last or own & mask & single_use or needs[unit] & ~mask:
                continue
            if space.stages is not None and count == space.stages:
                continue
            if space.working is not None and (own | mask).bit_count() > space.working:
                continue
            new = (mask | own, unit, count + 1 if space.stages is not None else 0)
            if new not in index:
                index[new] = len(order)
                order.append(new)
            edges.append((index[key], index[new]))
        if len(order) * len(space.cuts) > MOST_CELLS or len(edges) > MOST_STAGES:
            raise TooManyError
    # Contiguous, since loops are compiled anew for arrays of another layout.
    return _States(*np.array(order, np.int64).T.copy(), *np.array(edges, np.int64).reshape(-1, 2).T.copy())


def _twins(space: Space, tables: Sequence[StageCosts]) -> list[int]:
    """For each device its elder twin, equal to it in all things, or -1."""
    size = len(space.devices)

    def equal(a: int, b: int) -> bool:
        if space.devices[a].memory_bytes != space.devices[b].memory_bytes or (a in space.once) != (b in space.once):
            return False
        swap = list(range(size + 1))
        swap[a], swap[b] = b, a
        return all(
            all(np.array_equal(row[a], row[b]) for row in (t.call, t.add, t.work, t.spill, t.cached, t.leave))
            and np.array_equal(t.enter, t.enter[swap][:, swap[:-1]])
            for t in tables
        )

    twins = []
    for device in range(size):
        # A device that may come again is not used up: its twin must not wait for it.
        elders = [e for e in reversed(range(device)) if device in space.once and equal(e, device)]
        twins.append(elders[0] if elders else -1)
    return twins


def _run(
    space: Space,
    twins: list[int],
    seconds: StageCosts | None,
    costs: StageCosts | None,
    cap: float,
    limit: float,
    deadline: float | None,
    slowest: bool = False,
) -> tuple[bool, Found | None]:
    """One pass over all cuts; whether the deadline ended it, and the best pipeline with a sum of at most `limit`."""
    tables = [table for table in (seconds, costs) if table is not None]
    states = _states(space, twins)
    if len(states.source) == 0:
        return False, None
    cuts, count = space.cuts, len(space.cuts)
    held = space.held
    usable = cuts.together if space.together else np.ones(count, bool)
    allowed = windows(space, twins, seconds, cap, [int(mask) for mask in states.mask])
    value = np.full((len(states.mask), count), np.inf)
    value[0, 0] = 0.0
    origin = np.full((len(states.mask), count), -1, np.int32)
    leader = np.full((len(states.mask), count), -1, np.int32)
    first, second = tables[0], tables[-1]
    sizes = np.array([len(unit) for unit in space.units])
    members = np.full((len(space.units), max(sizes)), -1)
    for row, unit in zip(members, space.units, strict=True):
        row[: len(unit)] = unit
    cap = cap if seconds is not None else np.inf
    which1, enter1 = _entering(space, states, first)
    which2, enter2 = _entering(space, states, second)
    loop: Any
    arguments: Any
    if costs is not None and max(sizes) == 1 and cuts.zone[-1] == count - 1 and first.adds_up and second.adds_up:
        loop = loops.advance_chain
        order = np.argsort(states.target, kind="stable")
        into = np.searchsorted(states.target[order], np.arange(len(states.mask) + 1))
        device = np.array([space.units[unit][0] for unit in states.unit])
        room = (len(states.mask), count + 1)
        waiting = (np.zeros(room), np.zeros(room, np.int32), np.zeros(room, np.int32), np.zeros(room, np.int32))
        ends = (np.zeros(len(states.mask), np.int64), np.zeros(len(states.mask), np.int64))
        arguments = (
            states.source[order], states.target[order], into, device, value, origin, leader, allowed.low, allowed.high,
            usable, held, space.capacity, cap, first.impossible, first.add, which1[order, 0], enter1,
            second.add, which2[order, 0], enter2, *waiting, *ends,
        )  # fmt: skip
    else:
        loop = loops.advance
        masks = [int(mask) for mask in states.mask]
        to_come = np.zeros((len(masks), 1)) if costs is None else _to_come(space, costs, masks)
        alive_from, alive_to = np.full(len(states.mask), count), np.full(len(states.mask), -1)
        alive_from[0] = alive_to[0] = 0
        arguments = (
            states.source, states.target, states.unit, members, sizes, value, origin, leader, allowed.low, allowed.high,
            allowed.start, usable, cuts.zone, cuts.members, held, space.capacity, cap, costs is not None, slowest,
            np.array(space.slowdown or [1.0] * len(space.devices)), to_come, limit, alive_from, alive_to,
            first.impossible, second.impossible,
            first.call, first.add, first.work, first.spill, first.cached, first.leave, which1, enter1,
            second.call, second.add, second.work, second.spill, second.cached, second.leave, which2, enter2,
        )  # fmt: skip
    step = count if deadline is None else max(1, min(2048, 20_000_000 // (count * len(states.source))))
    for begin in range(1, count, step):
        if deadline is not None and time.monotonic() >= deadline:
            return True, None
        loop(*arguments, begin, min(begin + step, count))
    return False, _best(space, states, value, origin, leader)


def _to_come(space: Space, costs: StageCosts, masks: Sequence[int]) -> Floats:
    """For each set of used devices and each cut, what no continuation costs less than.

    Every operator costs at least what it does where it is cheapest. Where every device has a cache and serves once, so
    does the overflow: what the caches of the devices left cannot hold.
    """
    least: Floats = np.tile(costs.least[-1] - costs.least, (len(masks), 1))
    if len(space.once) < len(space.devices) or not costs.spill.all():
        return least
    for row, mask in zip(least, masks, strict=True):
        left = sorted((c for d, c in enumerate(costs.cached) if not mask >> d & 1), reverse=True)
        room = sum(left[: max(0, space.most_devices - mask.bit_count())])
        beyond = np.maximum(0.0, space.held[-1] - space.held - room)
        np.maximum(row, costs.spill.min() * beyond + costs.least_added[-1] - costs.least_added, out=row)
    return least


def _entering(space: Space, states: _States, costs: StageCosts) -> tuple[Integers, Floats]:
    """The distinct rows of what a transfer costs, and which row holds for each stage and member of its unit.

    From several replicas the cheapest link counts: no frame comes cheaper, so that the search stays a bound.
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


def _best(space: Space, states: _States, value: Floats, origin: Any, leader: Any) -> Found | None:
    full = value[:, -1].copy()
    if space.stages is not None:
        full[states.count != space.stages] = np.inf
    if space.working is not None:
        full[[int(mask).bit_count() != space.working for mask in states.mask]] = np.inf
    state, cut = int(np.argmin(full)), value.shape[1] - 1
    if not np.isfinite(full[state]):
        return None
    best = float(full[state])
    units, ends = [], []
    while cut > 0:
        units.append(space.units[int(states.unit[state])])
        ends.append(cut)
        state, cut = int(leader[state, cut]), int(origin[state, cut])
    return Found(best, tuple(reversed(units)), tuple(reversed(ends)))
