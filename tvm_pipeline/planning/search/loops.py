"""The loops of `pipelines.py`: one for every shape of graph and cost, one for chains and costs that add up.

Both fill, cut by cut, the value of every state, with the cut and the state it came from. Costs 1 are seconds, which a
cap bounds; costs 2 are what is added up, where anything is.
"""

from __future__ import annotations

from math import inf
from typing import Any

from tvm_pipeline.solvers.hot import hot


@hot
def stage_cost(
    call: Any, add: Any, work: Any, spill: Any, cached: Any, leave: Any, d: int, i: int, j: int, bytes_held: float
) -> Any:
    """What device d pays for the operators between cuts i and j, the receiving apart; see `costs.py`."""
    busy = max(work[d, j] - work[d, i], spill[d] * max(0.0, bytes_held - cached[d]))
    return call[d] + add[d, j] - add[d, i] + busy + leave[d, j]


@hot
def advance(
    source: Any, target: Any, state_unit: Any, members: Any, sizes: Any, value: Any, origin: Any, leader: Any,
    low: Any, high: Any, start: Any, usable: Any, zone: Any, sets: Any, held: Any, capacity: Any, cap: float,
    adds: bool, slowest: bool, slowdown: Any, to_come: Any, limit: float, alive_from: Any, alive_to: Any,
    impossible1: float, impossible2: float,
    call1: Any, add1: Any, work1: Any, spill1: Any, cached1: Any, leave1: Any, which1: Any, enter1: Any,
    call2: Any, add2: Any, work2: Any, spill2: Any, cached2: Any, leave2: Any, which2: Any, enter2: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    """Fills the values of all states at the cuts begin..end-1 from those of smaller cuts.

    Every earlier cut is looked at. A unit of several devices takes 1 / sum(1 / seconds) a frame, and costs what its
    members cost in the shares in which they take frames while idle, `slowdown` times as fast, or, if `slowest`, what
    the dearest does.
    """
    words = sets.shape[1]
    for j in range(begin, end):
        if not usable[j]:
            continue
        for stage in range(len(source)):
            a, b = source[stage], target[stage]
            if j < low[b] or j > high[b]:
                continue
            unit = state_unit[b]
            size = sizes[unit]
            first = max(alive_from[a], start[unit, j])
            best = value[b, j]
            for i in range(min(alive_to[a], j - 1), first - 1, -1):
                before = value[a, i]
                if before >= best:
                    continue
                bytes_held = held[j] - held[i]
                seconds, rate, idle_rate, possible = 0.0, 0.0, 0.0, True
                for m in range(size):
                    d = members[unit, m]
                    seconds = stage_cost(call1, add1, work1, spill1, cached1, leave1, d, i, j, bytes_held)
                    seconds += enter1[which1[stage, m], i]
                    if bytes_held > capacity[d] or seconds >= impossible1:
                        possible = False
                        break
                    rate += 1.0 / max(seconds, 1e-12)
                    idle_rate += slowdown[d] / max(seconds, 1e-12)
                if not possible:
                    continue
                if size > 1:
                    seconds = 1.0 / rate
                if seconds > cap:
                    continue
                new = seconds
                if adds:
                    cost = 0.0
                    for m in range(size):
                        d = members[unit, m]
                        one = stage_cost(call2, add2, work2, spill2, cached2, leave2, d, i, j, bytes_held)
                        one += enter2[which2[stage, m], i]
                        if one >= impossible2:
                            possible = False
                        if slowest:
                            cost = max(cost, one)
                        elif size == 1:
                            cost = one
                        else:
                            taken = stage_cost(call1, add1, work1, spill1, cached1, leave1, d, i, j, bytes_held)
                            taken += enter1[which1[stage, m], i]
                            cost += one * slowdown[d] / max(taken, 1e-12) / idle_rate
                    if not possible:
                        continue
                    new = before + cost
                    if new + to_come[b, j] > limit:
                        continue
                elif before > new:
                    new = before
                if new >= best:
                    continue
                if zone[i] == zone[j]:
                    inside = True
                    for word in range(words):
                        if sets[i, word] & ~sets[j, word]:
                            inside = False
                            break
                    if not inside:
                        continue
                if not usable[i]:
                    continue
                best = new
                value[b, j] = new
                origin[b, j] = i
                leader[b, j] = a
                alive_from[b] = min(alive_from[b], j)
                alive_to[b] = j


@hot
def advance_chain(
    source: Any, target: Any, into: Any, state_device: Any, value: Any, origin: Any, leader: Any,
    low: Any, high: Any, usable: Any, held: Any, capacity: Any, cap: float, impossible: float,
    add1: Any, which1: Any, enter1: Any, add2: Any, which2: Any, enter2: Any,
    waiting_value: Any, waiting_until: Any, waiting_cut: Any, waiting_state: Any, head: Any, tail: Any,
    begin: int, end: int,
) -> None:  # fmt: skip
    """The same for prefixes, single devices and additive costs, in O(log M) a state and stage instead of O(M).

    A stage from cut i is possible up to a last cut, which bisection finds; until then it costs what it costs at i plus
    what all others cost besides. So each state keeps the beginnings that no other beats in both cost and last cut,
    the first to expire in front: that is the cheapest. `into[b]..into[b+1]-1` are the stages that lead to state b.
    """
    count = len(held)
    for j in range(begin, end):
        i = j - 1
        for b in range(len(into) - 1):
            if into[b] == into[b + 1]:
                continue
            d = state_device[b]
            for stage in range(into[b], into[b + 1]):
                a = source[stage]
                if value[a, i] == inf or i < low[a] or i > high[a]:
                    continue
                new = value[a, i] - add2[d, i] + enter2[which2[stage], i]
                # The last cut at which the stage is not too slow, too large or impossible.
                slack = min(cap, impossible) + add1[d, i] - enter1[which1[stage], i]
                near, far = i, count - 1
                while near < far:
                    middle = (near + far + 1) // 2
                    if add1[d, middle] <= slack and held[middle] - held[i] <= capacity[d]:
                        near = middle
                    else:
                        far = middle - 1
                if near <= i:
                    continue
                # Where it belongs among those that wait, by expiry.
                left, right = head[b], tail[b]
                while left < right:
                    middle = (left + right) // 2
                    if waiting_until[b, middle] < near:
                        left = middle + 1
                    else:
                        right = middle
                if left < tail[b] and waiting_value[b, left] <= new:
                    continue
                keep = left
                while keep > head[b] and waiting_value[b, keep - 1] >= new:
                    keep -= 1
                if left < tail[b] and waiting_until[b, left] == near:
                    left += 1
                # It takes the place of keep..left-1, which it beats.
                removed = left - keep
                if removed == 0:
                    if head[b] > 0:
                        for k in range(head[b], keep):
                            waiting_value[b, k - 1] = waiting_value[b, k]
                            waiting_until[b, k - 1] = waiting_until[b, k]
                            waiting_cut[b, k - 1] = waiting_cut[b, k]
                            waiting_state[b, k - 1] = waiting_state[b, k]
                        head[b] -= 1
                        keep -= 1
                    else:
                        for k in range(tail[b] - 1, keep - 1, -1):
                            waiting_value[b, k + 1] = waiting_value[b, k]
                            waiting_until[b, k + 1] = waiting_until[b, k]
                            waiting_cut[b, k + 1] = waiting_cut[b, k]
                            waiting_state[b, k + 1] = waiting_state[b, k]
                        tail[b] += 1
                elif removed > 1:
                    for k in range(left, tail[b]):
                        waiting_value[b, k - removed + 1] = waiting_value[b, k]
                        waiting_until[b, k - removed + 1] = waiting_until[b, k]
                        waiting_cut[b, k - removed + 1] = waiting_cut[b, k]
                        waiting_state[b, k - removed + 1] = waiting_state[b, k]
                    tail[b] -= removed - 1
                waiting_value[b, keep] = new
                waiting_until[b, keep] = near
                waiting_cut[b, keep] = i
                waiting_state[b, keep] = a
            while head[b] < tail[b] and waiting_until[b, head[b]] < j:
                head[b] += 1
            if head[b] < tail[b] and usable[j] and low[b] <= j <= high[b]:
                value[b, j] = waiting_value[b, head[b]] + add2[d, j]
                origin[b, j] = waiting_cut[b, head[b]]
                leader[b, j] = waiting_state[b, head[b]]
