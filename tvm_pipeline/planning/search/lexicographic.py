"""Memory, DRAM overflow and communication in lexicographic order: dynamic programming over downsets.

The problem is that of Yin et al., "Exact Memory- and Communication-aware Scheduling", SEC 2022: exactly k non-empty
stages on equal devices, where

- memory M is the peak of the parameter bytes of a stage,
- dram D is the sum over stages of the parameter bytes beyond the device's cache,
- communication C is the bytes handed on across the widest boundary; a tensor counts once, however many operators read
  it. The paper's equations 9 and 10 count each edge once, at the boundary in front of its reader's stage: that
  figure is one of two cuts, so this search cannot take it; `sat/least_bytes.py` can.

One pass finds the optimum of (sum, then max), since a prefix with a worse sum can never become better. It does not find
the optimum of (max, then max), so there the first optimum becomes a cap of a second pass:

    memory, communication           M* = least M;            then least C under the cap M*
    memory, dram, communication     M* = least M;            then least (D, C) under the cap M*
    dram, memory, communication     (D*, M*) = least (D, M); then least (D, C) under the cap M*;
                                    or as the line above, if its D is max(0, P - k caches), the least possible

P is the parameter bytes of the graph. Windows make this fast: if no stage holds more than U bytes, a cut after j of k
stages holds between P - (k-j) U and j U bytes. Next: `cuts.py`.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.core.problem import Problem, counts_edges
from tvm_pipeline.cost.device_costs import equal_cache_bytes
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.search.cost_tables import capacities
from tvm_pipeline.planning.search.cuts import Cuts, Floats, Integers, is_inside
from tvm_pipeline.solvers.hot import hot

NEVER = np.iinfo(np.int64).max // 4
# By how much the largest stage may exceed its lower bound in each pass; the last pass admits everything.
DEEPENING = (0.003, 0.03, 0.3)


def equal_devices(problem: Problem, count: int) -> tuple[tuple[str, ...], int]:
    """Return the devices of `count` stages in order, and their parameter cache in bytes (0 where it does not matter).

    Raises:
        InfeasibleError: there are fewer devices than stages.
        OptionError: `equal_cache_bytes` refuses the devices.
    """
    platform = problem.platform
    devices = max(disjoint_sets(platform.devices), key=len)[:count]
    if len(devices) < count:
        raise InfeasibleError(
            f"{count} stages need {count} devices that share no cores, platform {platform.name} has {len(devices)}; "
            "give a platform with more, or fewer `stages`"
        )
    return tuple(device.name for device in devices), equal_cache_bytes(problem, devices)


def lexicographic(problem: Problem, cuts: Cuts, scheduler: str, *, windows: bool = True) -> Plan:
    """Return the best chain of `cuts` for a lexicographic objective.

    If the problem does not say how many stages it has, it has as many as there are devices, or as are possible.

    Args:
        windows: whether the cuts of each stage are limited; without, the chain has the same value.

    Raises:
        InfeasibleError: no chain has so many stages (the message says how many are possible), or none fits the
            `memory_bytes` of the devices.
        OptionError: `equal_cache_bytes` refuses the devices, or the objective counts edges.
    """
    if counts_edges(problem.objective):
        raise OptionError(
            f"`objective` {problem.objective}: dynamic programming counts communication by tensors; use `scheduler` "
            "cp-sat or best",
            option="objective",
            value=problem.objective,
        )
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    most = max(map(len, disjoint_sets(problem.platform.devices)))
    devices, cache = equal_devices(problem, problem.stages or min(most, len(problem.graph)))
    space = _Space.of(cuts, problem, len(devices), cache, windows)
    possible = space.longest_chain() if problem.children_together else len(problem.graph)
    if possible < len(devices):
        if problem.stages is not None:
            raise InfeasibleError(
                f"{problem.stages} stages are not possible: with all readers of an operator in one stage "
                f"(`children_together`), {problem.graph.name} can be cut into at most {possible}"
            )
        devices = devices[:possible]
    capacity = capacities([problem.platform.device(name) for name in devices])
    space = replace(space, stages=len(devices), capacity=capacity)
    chosen, bound = _solve(space, problem.objective, deadline)
    stages = tuple(map(Stage, ((name,) for name in devices), cuts.stages([int(space.index[cut]) for cut in chosen])))
    predicted = evaluate(problem, stages).predicted
    plan = Plan(problem.graph.name, scheduler, problem.objective, stages, predicted, bound=bound)
    return replace(plan, status="optimal", bound=plan.value) if bound in (None, plan.value) else plan


class _Cuts(NamedTuple):
    """The usable cuts, for the loops.

    Attributes:
        zone, members, param_bytes: as in `Cuts`.
        handed_on: the bytes that are handed on across each cut.
        needs: as in `Cuts`; 0 x 0 where a stage holds its parameters alone.
    """

    zone: Any
    members: Any
    param_bytes: Any
    handed_on: Any
    needs: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The usable cuts, and the limits of their stages.

    Attributes:
        index: the index of each usable cut among all cuts.
        stages: the number of stages.
        cache: the parameter cache of every device, in bytes.
        heaviest: the parameter bytes of the largest operator.
        capacity: the bytes that fit the device of each stage.
        windows: whether the cuts of each stage are limited by the bytes that stages hold.
    """

    index: Integers
    cuts: _Cuts
    stages: int
    cache: int
    heaviest: int
    capacity: Floats
    windows: bool

    @classmethod
    def of(cls, cuts: Cuts, problem: Problem, stages: int, cache: int, windows: bool) -> _Space:
        index = np.flatnonzero(cuts.together) if problem.children_together else np.arange(len(cuts))
        heaviest = max(operator.param_bytes for operator in problem.graph.operators)
        needs = np.zeros((0, 0)) if cuts.needs is None else np.ascontiguousarray(cuts.needs[np.ix_(index, index)])
        zone, members, param_bytes = cuts.zone[index], cuts.members[index], cuts.param_bytes[index]
        usable = _Cuts(zone, members, param_bytes, cuts.handed_on_bytes[index], needs)
        return cls(index, usable, stages, cache, heaviest, np.full(stages, np.inf), windows)

    def longest_chain(self) -> int:
        """Return the largest number of stages that a chain of usable cuts can have."""
        longest = np.zeros(len(self.index), np.int64)
        _longest(self.cuts.zone, self.cuts.members, longest)
        return int(longest[-1])

    @property
    def total(self) -> int:
        """Return the parameter bytes of the graph."""
        return int(self.cuts.param_bytes[-1])

    @property
    def least_memory(self) -> int:
        """Return a lower bound of the peak: an even share of the bytes, or the largest operator."""
        return max(ceil(self.total / self.stages), self.heaviest)

    @property
    def least_dram(self) -> int:
        """Return a lower bound of the overflow: the bytes that all caches together do not hold."""
        return max(0, self.total - self.stages * self.cache)


def _solve(space: _Space, objective: str, deadline: float | None) -> tuple[list[int], tuple[float, ...] | None]:
    """Return the chosen cuts, and a bound if the deadline ended the search before it proved that they are the best."""
    overflow_matters = "dram" in objective

    def ended() -> bool:
        return deadline is not None and time.monotonic() >= deadline

    def bound() -> tuple[float, ...]:
        bounds = {"memory": space.least_memory, "dram": space.least_dram, "communication": 0}
        return tuple(bounds[part] for part in objective.split(","))

    least = _least_peak(space)
    under = least.second
    if ended():
        return least.cuts, (least.second, *bound()[1:]) if objective.startswith("memory") else bound()
    final = _chain(space, under, add_overflow=overflow_matters, balance=False)
    if objective.startswith("memory") or final.first == space.least_dram:
        return final.cuts, None
    # A peak above the least one may overflow less. No stage of it holds more than its cache and the overflow found so
    # far, since a larger stage would overflow more by itself.
    most = min(space.total, space.cache + final.first)
    found = _chain(space, most, add_overflow=True, balance=True)
    if ended():
        return found.cuts, (found.first, found.second, 0)
    return _chain(space, found.second, add_overflow=True, balance=False).cuts, None


def _least_peak(space: _Space) -> _Chain:
    """Return a chain whose largest stage is as small as possible. Caps that rise from a bound keep the windows narrow.

    Raises:
        InfeasibleError: no chain fits the devices.
    """
    for more in DEEPENING if space.windows else ():
        with suppress(InfeasibleError):
            return _chain(space, ceil(space.least_memory * (1 + more)), add_overflow=False, balance=True)
    return _chain(space, space.total, add_overflow=False, balance=True)


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain by the cuts at which its stages end, and the two figures by which chains are compared."""

    first: int
    second: int
    cuts: list[int]


def _chain(space: _Space, most: int, *, add_overflow: bool, balance: bool) -> _Chain:
    """Return the best chain of exactly k stages that hold at most `most` bytes.

    Args:
        add_overflow: compare chains by the sum of their overflow first.
        balance: compare chains by their peak next, else by their widest boundary.
    """
    count, k = len(space.index), space.stages
    layers = [_Layer(*_nothing(count), 0, 1)]
    layers[0].first[0] = layers[0].second[0] = 0
    for stage in range(1, k + 1):
        low, high = 1, count
        if space.windows:
            # The stages behind this cut hold at most `most` bytes each, and so do the stages in front of it.
            least = space.total - (k - stage) * most
            low = max(int(np.searchsorted(space.cuts.param_bytes, least, side="left")), 1)
            high = int(np.searchsorted(space.cuts.param_bytes, stage * most, side="right"))
        if stage == k:
            low, high = count - 1, count
        layers.append(_Layer(*_nothing(count), low, high))
        capacity = float(space.capacity[stage - 1])
        rule = _Rule(int(min(most, capacity)), capacity, space.cache, add_overflow, balance)
        _extend(space.cuts, layers[-2], layers[-1], rule)
    first, second = layers[-1].first, layers[-1].second
    if second[-1] >= NEVER:
        raise InfeasibleError(
            f"no cut into {k} stages keeps the memory_bytes of the devices, in order "
            f"{', '.join(f'{size:.0f}' for size in space.capacity)}; give them more memory, or ask for other `stages`"
        )
    chosen = [count - 1]
    for layer in reversed(layers[2:]):
        chosen.append(int(layer.choice[chosen[-1]]))
    return _Chain(int(first[-1]), int(second[-1]), chosen[::-1])


def _nothing(count: int) -> tuple[Integers, Integers, Integers]:
    """Return the arrays of a layer without chains."""
    return np.full(count, NEVER), np.full(count, NEVER), np.full(count, -1)


class _Layer(NamedTuple):
    """The best chains of so many stages, by the cut at which they end.

    Attributes:
        first, second: the sum and the maximum by which they are compared; NEVER where there is no chain.
        choice: the cut before their last stage.
        low, high: all chains end at one of the cuts low..high-1.
    """

    first: Any
    second: Any
    choice: Any
    low: int
    high: int


class _Rule(NamedTuple):
    """The limits of a stage, and the figures by which chains are compared.

    Attributes:
        most: the parameter bytes that no stage exceeds.
        capacity: the bytes that fit the device.
        cache: the parameter bytes beyond which a stage overflows.
        add_overflow: whether the sum of the overflow is compared first.
        balance: whether the peak of the parameter bytes is compared next, else the widest boundary.
    """

    most: int
    capacity: float
    cache: int
    add_overflow: bool
    balance: bool


@hot
def _longest(zone: Any, members: Any, longest: Any) -> None:
    """Fill the number of stages of the longest chain that ends at each cut."""
    before = 0  # the longest chain that ends in an earlier zone
    start = 0
    for j in range(1, len(zone)):
        if zone[j] != zone[j - 1]:
            for i in range(start, j):
                before = max(before, longest[i])
            start = j
        best = before + 1 if start > 0 else 1
        for i in range(start, j):
            if is_inside(zone, members, i, j):
                best = max(best, longest[i] + 1)
        longest[j] = best


@hot
def _extend(cuts: _Cuts, last: _Layer, new: _Layer, rule: _Rule) -> None:
    """Fill a layer with the best chains of one stage more than those of the last."""
    for j in range(new.low, new.high):
        best_first, best_second, best = NEVER, NEVER, -1
        for i in range(min(j, last.high) - 1, last.low - 1, -1):
            stage = cuts.param_bytes[j] - cuts.param_bytes[i]
            if stage > rule.most:
                break
            if last.second[i] >= NEVER:
                continue
            total = last.first[i]
            if rule.add_overflow and stage > rule.cache:
                total += stage - rule.cache
            widest = stage if rule.balance else cuts.handed_on[i]
            if last.second[i] > widest:
                widest = last.second[i]
            if total > best_first or (total == best_first and widest >= best_second):
                continue
            if len(cuts.needs) and cuts.needs[i, j] > rule.capacity:
                continue
            if is_inside(cuts.zone, cuts.members, i, j):
                best_first, best_second, best = total, widest, i
        new.first[j], new.second[j], new.choice[j] = best_first, best_second, best
