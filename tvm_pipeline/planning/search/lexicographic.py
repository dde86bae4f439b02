"""Memory, DRAM overflow and communication in lexicographic order: dynamic programming over ideals.

The problem is that of Yin et al., "Exact Memory- and Communication-aware Scheduling", SEC 2022: exactly k non-empty
stages on equal devices, where

- memory M is the parameter bytes of the fullest stage,
- dram D is the sum over stages of the parameter bytes beyond the device's cache,
- communication C is the bytes handed on across the widest boundary, a tensor once however many read it. The paper's
  equations 9 and 10 count each edge once, at the boundary in front of its reader's stage: see `handed_on_bytes`.

A lexicographic (sum, then max) is found in one pass, since a prefix that is worse in its sum can never catch up. A
lexicographic (max, then max) is not: there the first optimum becomes a cap of the second pass. So

    memory, communication           M* = least M;            then least C under the cap M*
    memory, dram, communication     M* = least M;            then least (D, C) under the cap M*
    dram, memory, communication     (D*, M*) = least (D, M); then least (D, C) under the cap M*;
                                    or as the line above, where its D is max(0, P - k caches) already

Windows make this fast: with no stage above U, a cut after j of k stages holds between P - (k-j) U and j U bytes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np

from tvm_pipeline.core.plan import Plan, Problem, Stage
from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, OptionError
from tvm_pipeline.planning.search.cuts import Cuts, Integers
from tvm_pipeline.planning.search.even_split import even_split
from tvm_pipeline.solvers.hot import hot

NEVER = np.iinfo(np.int64).max // 4


def equal_devices(problem: Problem, count: int) -> tuple[tuple[str, ...], int]:
    """The devices of `count` stages in order, and their parameter cache in bytes (0 where it does not matter).

    Raises:
        InfeasibleError: there are fewer devices than stages.
        OptionError: overflow is asked for, and the devices' caches are unknown or differ.
    """
    platform = problem.platform
    devices = max(disjoint_sets(platform.devices), key=len)[:count]
    if len(devices) < count:
        raise InfeasibleError(
            f"{count} stages need {count} devices that share no cores, platform {platform.name} has {len(devices)}; "
            "give a platform with more, or fewer `stages`"
        )
    caches = {device.cache_bytes for device in devices}
    if "dram" in problem.objective and (None in caches or len(caches) > 1):
        raise OptionError(
            f"`objective` {problem.objective}: the devices of platform {platform.name} need equal parameter caches; "
            "give each `cache_bytes` in the platform file"
        )
    return tuple(device.name for device in devices), (devices[0].cache_bytes or 0) if len(caches) == 1 else 0


def lexicographic(problem: Problem, cuts: Cuts, scheduler: str) -> Plan:
    """The best chain of `cuts` for a lexicographic objective, with as many stages as there are devices or can be.

    Raises:
        InfeasibleError: no such chain has so many stages, and the message says how many are possible; or none fits the
            devices' `memory_bytes`.
        OptionError: the platform does not say what the objective needs.
    """
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    most = max(map(len, disjoint_sets(problem.platform.devices)))
    devices, cache = equal_devices(problem, problem.stages or min(most, len(problem.graph)))
    space = _Space.of(cuts, problem, len(devices), cache)
    possible = space.longest_chain() if problem.children_together else len(problem.graph)
    if possible < len(devices):
        if problem.stages is not None:
            raise InfeasibleError(
                f"{problem.stages} stages are not possible: with all readers of an operator in one stage "
                f"(`children_together`), {problem.graph.name} can be cut into at most {possible}"
            )
        devices = devices[:possible]
    memory = [problem.platform.device(name).memory_bytes for name in devices]
    room = np.array([space.total if size is None else size for size in memory], np.int64)
    space = replace(space, stages=len(devices), room=room)
    chosen, bound = _solve(space, problem.objective, deadline)
    stages = tuple(map(Stage, ((name,) for name in devices), cuts.stages([int(space.index[cut]) for cut in chosen])))
    predicted = evaluate(problem, stages).predicted
    plan = Plan(problem.graph.name, scheduler, problem.objective, stages, predicted, bound=bound)
    return replace(plan, status="optimal", bound=plan.value) if bound in (None, plan.value) else plan


@dataclass(frozen=True, slots=True, eq=False)
class _Space:
    """The cuts that may be used, as arrays, and how many stages there are to be; `index` leads back to the cuts.

    `room` has the parameter bytes that fit the device of each stage.
    """

    index: Integers
    zone: Integers
    members: Any
    held: Integers
    handed_on: Integers
    stages: int
    cache: int
    heaviest: int
    room: Integers

    @classmethod
    def of(cls, cuts: Cuts, problem: Problem, stages: int, cache: int) -> _Space:
        index = np.flatnonzero(cuts.together) if problem.children_together else np.arange(len(cuts))
        heaviest = max(operator.param_bytes for operator in problem.graph.operators)
        return cls(
            index,
            cuts.zone[index],
            cuts.members[index],
            cuts.param_bytes[index],
            cuts.handed_on_bytes[index],
            stages,
            cache,
            heaviest,
            np.full(stages, cuts.param_bytes[-1]),
        )

    def longest_chain(self) -> int:
        """How many stages can be told apart."""
        longest = np.zeros(len(self.index), np.int64)
        _longest(self.zone, self.members, longest)
        return int(longest[-1])

    @property
    def total(self) -> int:
        return int(self.held[-1])

    @property
    def least_memory(self) -> int:
        """No stage split can be better than the even one, nor than the largest operator."""
        return max(ceil(self.total / self.stages), self.heaviest)

    @property
    def least_dram(self) -> int:
        return max(0, self.total - self.stages * self.cache)


def _solve(space: _Space, objective: str, deadline: float | None) -> tuple[list[int], tuple[float, ...] | None]:
    """The chosen cuts, and the bound where the search was ended before it could prove them best."""
    overflow_matters = "dram" in objective
    chosen = _even_prefixes(space)
    if chosen and np.any(_held(space, chosen) > space.room):
        chosen = []
    most = _fullest(space, chosen) if chosen else space.total

    def ended() -> bool:
        return deadline is not None and time.monotonic() >= deadline

    def bound() -> tuple[float, ...]:
        bounds = {"memory": space.least_memory, "dram": space.least_dram, "communication": 0}
        return tuple(bounds[part] for part in objective.split(","))

    if ended() and chosen:
        return chosen, bound()
    least = _chain(space, most, add_overflow=False, balance=True)
    under = least.second
    if ended():
        return least.cuts, (least.second, *bound()[1:]) if objective.startswith("memory") else bound()
    final = _chain(space, under, add_overflow=overflow_matters, balance=False)
    if objective.startswith("memory") or final.first == space.least_dram:
        return final.cuts, None
    # Less overflow may be had above the least memory. No stage holds more than its cache and all that is known to do.
    most = min(space.total, space.cache + final.first)
    found = _chain(space, most, add_overflow=True, balance=True)
    if ended():
        return found.cuts, (found.first, found.second, 0)
    return _chain(space, found.second, add_overflow=True, balance=False).cuts, None


def _even_prefixes(space: _Space) -> list[int]:
    """A good chain at once: bisection on the fullest stage, filling stages greedily along one order of nested cuts."""
    order = [0]
    last = len(space.index) - 1
    # The last cut of each zone is nested in all of the next; a graph of one zone offers only a path of parents.
    ends = np.flatnonzero(np.append(space.zone[1:] != space.zone[:-1], True))
    starts = np.flatnonzero(np.insert(space.zone[1:] != space.zone[:-1], 0, True))
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if start != order[-1]:
            order.append(start)
        if start < end:
            order.extend(_path(space, start, end))
    path = np.array(order, np.int64)
    filled = even_split(space.held[path].tolist(), space.stages)
    return [int(path[position]) for position in filled] if filled and path[filled[-1]] == last else []


def _path(space: _Space, start: int, end: int) -> list[int]:
    """Nested cuts from `start` to `end` of one zone, each the next in order that holds the one before."""
    path, at = [], start
    for cut in range(start + 1, end + 1):
        if not np.any(space.members[at] & ~space.members[cut]):
            path.append(cut)
            at = cut
        if len(path) > 4096:
            break
    return path


def _held(space: _Space, chosen: list[int]) -> Integers:
    return np.diff(space.held[[0, *chosen]])


def _fullest(space: _Space, chosen: list[int]) -> int:
    return int(_held(space, chosen).max())


def _overflow(space: _Space, chosen: list[int]) -> int:
    return int(np.maximum(0, _held(space, chosen) - space.cache).sum())


@dataclass(frozen=True, slots=True)
class _Chain:
    first: int
    second: int
    cuts: list[int]


def _chain(space: _Space, most: int, *, add_overflow: bool, balance: bool) -> _Chain:
    """The chain of exactly k stages, none above `most`, that is least by (overflow if added, fullest or widest)."""
    count, k = len(space.index), space.stages
    first, second = np.full(count, NEVER), np.full(count, NEVER)
    first[0] = second[0] = 0
    low, high = 0, 1
    choices = []
    for stage in range(1, k + 1):
        least = space.total - (k - stage) * most
        new_low = max(int(np.searchsorted(space.held, least, side="left")), 1)
        new_high = int(np.searchsorted(space.held, stage * most, side="right"))
        if stage == k:
            new_low, new_high = count - 1, count
        new_first, new_second = np.full(count, NEVER), np.full(count, NEVER)
        choice = np.full(count, -1)
        _extend(
            space.zone, space.members, space.held, space.handed_on, first, second, low, high, new_first, new_second,
            choice, new_low, new_high, min(most, int(space.room[stage - 1])), space.cache, add_overflow, balance,
        )  # fmt: skip
        choices.append(choice)
        first, second, low, high = new_first, new_second, new_low, new_high
    if second[-1] >= NEVER:
        raise InfeasibleError(
            f"no cut into {k} stages keeps the memory_bytes of the devices, in order "
            f"{', '.join(map(str, space.room.tolist()))}; give them more memory, or ask for other `stages`"
        )
    cuts = [count - 1]
    for choice in reversed(choices[1:]):
        cuts.append(int(choice[cuts[-1]]))
    return _Chain(int(first[-1]), int(second[-1]), cuts[::-1])


@hot
def _longest(zone: Any, members: Any, longest: Any) -> None:
    before = 0  # the longest chain that ends in an earlier zone
    start = 0
    for j in range(1, len(zone)):
        if zone[j] != zone[j - 1]:
            for i in range(start, j):
                before = max(before, longest[i])
            start = j
        best = before + 1 if start > 0 else 1
        for i in range(start, j):
            inside = True
            for word in range(members.shape[1]):
                if members[i, word] & ~members[j, word]:
                    inside = False
                    break
            if inside:
                best = max(best, longest[i] + 1)
        longest[j] = best


@hot
def _extend(
    zone: Any,
    members: Any,
    held: Any,
    handed_on: Any,
    first: Any,
    second: Any,
    low: int,
    high: int,
    new_first: Any,
    new_second: Any,
    choice: Any,
    new_low: int,
    new_high: int,
    most: int,
    cache: int,
    add_overflow: bool,
    balance: bool,
) -> None:
    """One more stage behind every cut in low..high-1, ending at every cut in new_low..new_high-1."""
    words = members.shape[1]
    for j in range(new_low, new_high):
        best_first, best_second, best = NEVER, NEVER, -1
        for i in range(min(j, high) - 1, low - 1, -1):
            stage = held[j] - held[i]
            if stage > most:
                break
            if second[i] >= NEVER:
                continue
            if balance and not add_overflow and stage >= best_second:
                break
            total = first[i]
            if add_overflow and stage > cache:
                total += stage - cache
            widest = stage if balance else handed_on[i]
            if second[i] > widest:
                widest = second[i]
            if total > best_first or (total == best_first and widest >= best_second):
                continue
            inside = True
            if zone[i] == zone[j]:
                for word in range(words):
                    if members[i, word] & ~members[j, word]:
                        inside = False
                        break
            if inside:
                best_first, best_second, best = total, widest, i
        new_first[j], new_second[j], choice[j] = best_first, best_second, best
