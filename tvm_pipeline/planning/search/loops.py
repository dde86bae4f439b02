"""The compiled loops of `pipelines.py`: `advance` for every graph and cost, `advance_chain` for the common case.

Both fill, cut by cut, the value of every state, with the cut and the state that it came from. The arrays come in
NamedTuples, which numba takes as arguments. A stage may cost seconds, which a limit bounds, and a second figure, which
is added up; each of them has a `Costs` of its own. Shapes use these letters:

    M  cuts; cut 0 holds no operator, cut M - 1 all of them
    N  states; state 0 is the empty pipeline
    S  stages; each leads from one state to another
    D  devices; U  units, of at most W devices each
"""

from __future__ import annotations

from math import inf
from typing import Any, NamedTuple

from tvm_pipeline.cost.stage_table import DeviceTable, computing, fetched
from tvm_pipeline.planning.search.cuts import is_inside
from tvm_pipeline.solvers.hot import hot


class Lattice(NamedTuple):
    """The states of a search, and the stages that lead from one to the next.

    Attributes:
        source, target: S; the state before each stage and the state behind it.
        unit: N; the unit of a state's last stage, -1 for state 0.
        members: U x W; the devices of each unit, filled up with -1.
        sizes: U; how many devices a unit has.
    """

    source: Any
    target: Any
    unit: Any
    members: Any
    sizes: Any


class CutArrays(NamedTuple):
    """The cuts of the graph; see `cuts.py`.

    Attributes:
        param_bytes: M; parameter bytes of the operators before each cut, which never fall.
        zone: M; a cut contains all cuts of earlier zones.
        sets: M x words; the operators before a cut as bits, to compare cuts of one zone.
        usable: M; whether a stage may end here.
        ordered: M; the number of ordered operators before each cut.
        needs: M x M; the bytes that a stage between two cuts holds; 0 x 0 where these are its parameters.
    """

    param_bytes: Any
    zone: Any
    sets: Any
    usable: Any
    ordered: Any
    needs: Any


class Costs(NamedTuple):
    """The costs of stages, in seconds or in the figure that is added up; see `cost_tables.StageCosts`.

    Attributes:
        table: of the devices.
        added, work, leave: D x M.
        enter: R x M, with R distinct rows; the cost of receiving each cut.
        which: S x W; the row of `enter` for each stage and member of its unit.
        impossible: a cost that a stage only reaches if its device cannot run one of its operators.
    """

    table: DeviceTable
    added: Any
    work: Any
    leave: Any
    enter: Any
    which: Any
    impossible: float


class Window(NamedTuple):
    """The cuts at which a pipeline of fast enough stages can be in each state; see `relaxation.py`.

    Attributes:
        low, high: N; the first and the last cut of each state.
        start: U x M; the first cut at which a stage of the unit that ends at a cut can begin.
    """

    low: Any
    high: Any
    start: Any


class Goal(NamedTuple):
    """The objective and the limits of a search.

    Attributes:
        adds: whether the sum of the second costs is minimised, else the slowest stage.
        worst_member: whether a unit's second cost is that of its most expensive device; else its devices pay in
            proportion to the frames that they take.
        cap: the seconds that no stage may exceed.
        limit: the sum that no pipeline may exceed.
        to_come: N x M, or N x 1; a lower bound of what a pipeline adds to the sum after it is in a state at a cut.
        capacity: D; bytes that fit the device.
        slowdown: D; how many times slower the device is than it would be alone.
    """

    adds: bool
    worst_member: bool
    cap: float
    limit: float
    to_come: Any
    capacity: Any
    slowdown: Any


class Table(NamedTuple):
    """The results that the loops fill in.

    Attributes:
        value: N x M; the least slowest stage, or sum, of all pipelines that are in a state at a cut; else infinite.
        origin, leader: N x M; the cut and the state before the last stage of that pipeline.
        alive_from, alive_to: N; the first and the last cut with a finite value.
    """

    value: Any
    origin: Any
    leader: Any
    alive_from: Any
    alive_to: Any


class Queue(NamedTuple):
    """A queue for each state: the starts of its last stage that may still be the best, in `[head, tail)` of its row.

    Attributes:
        value: N x (M + 1); the cost of a start, without the operators up to the cut where the stage ends.
        until: N x (M + 1); the last cut at which the stage can end. It rises along the row, and so does the value.
        cut, state: N x (M + 1); the cut at which the stage starts, and the state before it.
        head, tail: N; the first entry of the queue, and the end of its entries.
    """

    value: Any
    until: Any
    cut: Any
    state: Any
    head: Any
    tail: Any


@hot
def device_cost(costs: Costs, row: int, d: int, i: int, j: int, param_bytes: float) -> Any:
    """Return the cost of the operators between cuts i and j on device d, with the given row of `enter`."""
    added, work = costs.added[d, j] - costs.added[d, i], costs.work[d, j] - costs.work[d, i]
    computed = computing(costs.table, d, added, work, fetched(costs.table, d, param_bytes))
    return computed + costs.leave[d, j] + costs.enter[row, i]


@hot
def unit_seconds(
    lattice: Lattice, seconds: Costs, goal: Goal, stage: int, unit: int, i: int, j: int, param_bytes: float,
    held_bytes: float,
) -> Any:  # fmt: skip
    """Return the seconds of a unit for a frame, and its rate while no other device works.

    A unit of several devices takes 1 / sum(1 / seconds) for a frame. The seconds are infinite if the unit cannot run
    the operators between cuts i and j.
    """
    taken, rate, idle_rate = 0.0, 0.0, 0.0
    for m in range(lattice.sizes[unit]):
        d = lattice.members[unit, m]
        taken = device_cost(seconds, seconds.which[stage, m], d, i, j, param_bytes)
        if held_bytes > goal.capacity[d] or taken >= seconds.impossible:
            return inf, 0.0
        rate += 1.0 / max(taken, 1e-12)
        idle_rate += goal.slowdown[d] / max(taken, 1e-12)
    return (1.0 / rate if lattice.sizes[unit] > 1 else taken), idle_rate


@hot
def unit_cost(
    lattice: Lattice, seconds: Costs, added: Costs, goal: Goal, stage: int, unit: int, i: int, j: int,
    param_bytes: float, idle_rate: float,
) -> Any:  # fmt: skip
    """Return what a unit adds to the sum; infinite if it cannot run the operators between cuts i and j.

    Its devices take frames in proportion to their rates while alone. If `worst_member` is set, the cost of the most
    expensive device counts instead.
    """
    total = 0.0
    for m in range(lattice.sizes[unit]):
        d = lattice.members[unit, m]
        cost = device_cost(added, added.which[stage, m], d, i, j, param_bytes)
        if cost >= added.impossible:
            return inf
        if goal.worst_member:
            total = max(total, cost)
        elif lattice.sizes[unit] == 1:
            total = cost
        else:
            taken = device_cost(seconds, seconds.which[stage, m], d, i, j, param_bytes)
            total += cost * goal.slowdown[d] / max(taken, 1e-12) / idle_rate
    return total


@hot
def advance(
    lattice: Lattice, cuts: CutArrays, window: Window, seconds: Costs, added: Costs, goal: Goal, table: Table,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Fill the values of all states at the cuts begin..end-1 from those at smaller cuts, all of which are tried."""
    for j in range(begin, end):
        if not cuts.usable[j]:
            continue
        for stage in range(len(lattice.source)):
            a, b = lattice.source[stage], lattice.target[stage]
            if j < window.low[b] or j > window.high[b]:
                continue
            unit = lattice.unit[b]
            replicated = lattice.sizes[unit] > 1
            first = max(table.alive_from[a], window.start[unit, j])
            best = table.value[b, j]
            for i in range(min(table.alive_to[a], j - 1), first - 1, -1):
                before = table.value[a, i]
                if before >= best:
                    continue
                if replicated and cuts.ordered[i] != cuts.ordered[j]:
                    continue
                param_bytes = cuts.param_bytes[j] - cuts.param_bytes[i]
                held_bytes = cuts.needs[i, j] if len(cuts.needs) else param_bytes
                new, idle_rate = unit_seconds(lattice, seconds, goal, stage, unit, i, j, param_bytes, held_bytes)
                if new == inf or new > goal.cap:
                    continue
                if goal.adds:
                    cost = unit_cost(lattice, seconds, added, goal, stage, unit, i, j, param_bytes, idle_rate)
                    new = before + cost
                    if cost == inf or new + goal.to_come[b, j] > goal.limit:
                        continue
                elif before > new:
                    new = before
                if new >= best or not cuts.usable[i] or not is_inside(cuts.zone, cuts.sets, i, j):
                    continue
                best = new
                table.value[b, j] = new
                table.origin[b, j] = i
                table.leader[b, j] = a
                table.alive_from[b] = min(table.alive_from[b], j)
                table.alive_to[b] = max(table.alive_to[b], j)


@hot
def last_end(cuts: CutArrays, seconds: Costs, goal: Goal, stage: int, d: int, i: int) -> Any:
    """Return the last cut at which a stage from cut i is possible and within the limits; i if there is none.

    Bisection finds it, since seconds and bytes never fall along the cuts.
    """
    slack = min(goal.cap, seconds.impossible) + seconds.added[d, i] - seconds.enter[seconds.which[stage, 0], i]
    near, far = i, len(cuts.param_bytes) - 1
    while near < far:
        middle = (near + far + 1) // 2
        if seconds.added[d, middle] <= slack and cuts.param_bytes[middle] - cuts.param_bytes[i] <= goal.capacity[d]:
            near = middle
        else:
            far = middle - 1
    return near


@hot
def move(queue: Queue, b: int, source: int, target: int) -> None:
    """Copy one entry of the queue of state b to another position."""
    queue.value[b, target] = queue.value[b, source]
    queue.until[b, target] = queue.until[b, source]
    queue.cut[b, target] = queue.cut[b, source]
    queue.state[b, target] = queue.state[b, source]


@hot
def insert(queue: Queue, b: int, value: float, until: int, cut: int, state: int) -> None:
    """Insert a start into the queue of state b, by its last cut, unless an entry is at least as good.

    It replaces all entries that cost no less and end no later.
    """
    left, right = queue.head[b], queue.tail[b]
    while left < right:
        middle = (left + right) // 2
        if queue.until[b, middle] < until:
            left = middle + 1
        else:
            right = middle
    if left < queue.tail[b] and queue.value[b, left] <= value:
        return
    keep = left
    while keep > queue.head[b] and queue.value[b, keep - 1] >= value:
        keep -= 1
    if left < queue.tail[b] and queue.until[b, left] == until:
        left += 1
    # The entries keep..left-1 are beaten. The new entry takes the position of one of them; if there is none, its
    # neighbours move apart.
    removed = left - keep
    if removed == 0 and queue.head[b] > 0:
        for k in range(queue.head[b], keep):
            move(queue, b, k, k - 1)
        queue.head[b] -= 1
        keep -= 1
    elif removed == 0:
        for k in range(queue.tail[b] - 1, keep - 1, -1):
            move(queue, b, k, k + 1)
        queue.tail[b] += 1
    elif removed > 1:
        for k in range(left, queue.tail[b]):
            move(queue, b, k, k - removed + 1)
        queue.tail[b] -= removed - 1
    queue.value[b, keep] = value
    queue.until[b, keep] = until
    queue.cut[b, keep] = cut
    queue.state[b, keep] = state


@hot
def advance_chain(
    lattice: Lattice, into: Any, cuts: CutArrays, window: Window, seconds: Costs, added: Costs, goal: Goal,
    queue: Queue, table: Table, begin: int, end: int,
) -> None:  # fmt: skip
    """Fill the same values for prefixes, single devices and additive costs, in O(log M) per stage instead of O(M).

    A stage from cut i can end at any cut up to a last one. Its cost is that of the operators up to its end, plus a term
    that only depends on i. So each state keeps the starts that no other start beats in both this term and the last cut.
    The cheapest of them is the first to expire, and it is the first in the queue.

    Args:
        into: N + 1; the stages are sorted by target, and the stages into[b]..into[b+1]-1 lead to state b.
    """
    for j in range(begin, end):
        i = j - 1
        for b in range(len(into) - 1):
            if into[b] == into[b + 1]:
                continue
            d = lattice.members[lattice.unit[b], 0]
            for stage in range(into[b], into[b + 1]):
                a = lattice.source[stage]
                if table.value[a, i] == inf or i < window.low[a] or i > window.high[a]:
                    continue
                until = last_end(cuts, seconds, goal, stage, d, i)
                if until > i:
                    value = table.value[a, i] - added.added[d, i] + added.enter[added.which[stage, 0], i]
                    insert(queue, b, value, until, i, a)
            while queue.head[b] < queue.tail[b] and queue.until[b, queue.head[b]] < j:
                queue.head[b] += 1
            if queue.head[b] < queue.tail[b] and cuts.usable[j] and window.low[b] <= j <= window.high[b]:
                table.value[b, j] = queue.value[b, queue.head[b]] + added.added[d, j]
                table.origin[b, j] = queue.cut[b, queue.head[b]]
                table.leader[b, j] = queue.state[b, queue.head[b]]
