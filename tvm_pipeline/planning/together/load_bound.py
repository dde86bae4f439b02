"""A bound of all deployments: the least load of every model, if no stage is busier than the busiest device may be.

If all devices are busy for at most a part T of the time, then the loads of D devices are at most D T, and each stage
takes at most T. So for every T in reach the least loads of pipelines of stages of at most T, added up over the models,
are at most D T. The fewer and longer the stages, the fewer bytes cross: a small T needs more stages and more load. The
least T is found by bisection.

The models share caches. If a byte of cache has the price p, then the loads and the price of the cached bytes are at
most D T + p C, where C is the size of all caches; a stage chooses what it caches. Any price gives a bound, and the best
one is found by ternary search, because the least load is concave in it.

If the downsets of a model can be listed, a shortest path over them gives its least load. Else `least_crossing.py`
bounds the bytes that cross a cut by the work in front of it, and the path leads over intervals of work. On unequal
devices every figure is that of the best device for it, and the bound is weak.

Next: `deployment.py`, which compares a deployment with it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from tvm_pipeline.core.platform import disjoint_sets
from tvm_pipeline.cost.device_costs import lock_s
from tvm_pipeline.cost.stage_table import DeviceTable, computing, fetched
from tvm_pipeline.cost.whole_stages import least_ratio
from tvm_pipeline.planning.local.cut_flow import Network
from tvm_pipeline.planning.local.least_crossing import Crossing, least_crossing
from tvm_pipeline.planning.local.least_load import least_of
from tvm_pipeline.planning.search.cost_tables import buses, least_bus_seconds
from tvm_pipeline.planning.search.cuts import Floats, is_inside
from tvm_pipeline.planning.together.deployment_judge import Demand, busy_factors
from tvm_pipeline.planning.together.model_figures import listed_cuts
from tvm_pipeline.solvers.hot import hot

# Of the bisection, of the search for a price, and how often the two take turns.
STEPS, PRICE_STEPS, TURNS = 20, 10, 4
# Shares of the fetches, against multiplications, for which the crossing bytes of a graph without listed downsets are
# bounded; each takes some seconds.
SHARES = (0.0, 0.5, 1.0)
# A bound so near to the known utilisation is a proof, and the bisection ends where it is so sure.
PRECISION, SURE = 1e-7, 1e-5
# Utilisations between which one in reach is looked for where none is known.
LEAST, MOST = 1e-9, 1e12


def least_utilisation(demands: Sequence[Demand], known: float = math.inf, deadline: float = math.inf) -> float:
    """Return a lower bound, at most `known`, of the utilisation of the busiest device or bus of every deployment.

    The plans are those of `deploy`: downset cuts, each device in one stage of a model at most. Limits of memory and
    latency are left out.

    Args:
        known: the utilisation of a deployment; infinite where none is known.
        deadline: of `time.monotonic`; the bound is weaker where it ends the work. The simplest bound is always there.
    """
    ratio = min(least_ratio(demand.problem) for demand in demands)
    simple = max(_carried(demands), _held(demands))
    return min(known, max(_held(demands), simple * ratio, _of_loads(demands, known / ratio, deadline) * ratio))


def _held(demands: Sequence[Demand]) -> float:
    """Return the part of a second for which the lock of the interpreter is held."""
    return sum(demand.rate_fps * lock_s(demand.problem) for demand in demands)


def _carried(demands: Sequence[Demand]) -> float:
    """Return the least load of the busiest bus, by the parameters that all caches cannot hold for a model."""
    platform = demands[0].problem.platform
    found = []
    for devices in disjoint_sets(platform.devices):
        names = {name for demand in demands for name in buses(demand.problem, devices)}
        loads = [
            sum(d.rate_fps * least_bus_seconds(d.problem, devices, name, len(devices)) for d in demands)
            for name in names
        ]
        found.append(max(loads, default=0.0))
    return min(found)


def _of_loads(demands: Sequence[Demand], known: float, deadline: float) -> float:
    """Return the bound by the least loads."""
    widest = max(map(len, disjoint_sets(demands[0].problem.platform.devices)))
    models = [_LeastLoad(demand, deadline) for demand in demands]
    low, high = sum(model.simple for model in models) / widest, known * (1 - PRECISION)
    shares = all(model.least.spill > 0 and (model.least.caches == models[0].least.caches).all() for model in models)
    cached = float(models[0].least.caches[:widest].sum()) if shares else 0.0

    def excess(most: float, price: float) -> float:
        """Return by how much the loads exceed what the devices have; if they do, `most` is out of reach."""
        return sum(model.load(most, price, deadline) for model in models) - price * cached - widest * most

    if not math.isfinite(known):
        high = 2 * max(low, LEAST)
    for _ in range(TURNS):
        if time.monotonic() >= deadline or low >= high:
            break
        price = _best_price(partial(excess, low * (1 + SURE)), models, deadline) if shares else 0.0
        while excess(high, price) > 0:
            if math.isfinite(known) or high > MOST:
                return known
            high *= 2
        before, above = low, high
        for _ in range(STEPS):
            middle = (low + above) / 2
            if time.monotonic() < deadline and excess(middle, price) > 0:
                low = middle
            else:
                above = middle
            if above - low <= SURE * above:
                break
        if low <= before * (1 + SURE):
            break
    return min(low, known)


def _best_price(excess: Callable[[float], float], models: Sequence[_LeastLoad], deadline: float) -> float:
    """Return the price of a byte of cache for which the excess is about the largest."""
    most = max(model.least.spill for model in models)
    if not all(model.cuts is not None for model in models):
        return max((share * model.least.spill for share in SHARES for model in models), key=excess)
    low, high = 0.0, most
    known = {price: excess(price) for price in (low, high)}
    for _ in range(PRICE_STEPS):
        if time.monotonic() >= deadline:
            break
        one, two = (2 * low + high) / 3, (low + 2 * high) / 3
        known |= {price: excess(price) for price in (one, two)}
        if known[one] < known[two]:
            low = one
        else:
            high = two
    return max(known, key=known.__getitem__)


class _Figures(NamedTuple):
    """The least figures of a model for the loops.

    Attributes:
        enter, leave: M; the cost of receiving a cut and of sending it, the fixed cost included.
        link: M; the cost of the hop over a link.
        table: of the one device that `LeastCosts` imagines.
        capacity: the most parameter bytes of a stage.
    """

    enter: Floats
    leave: Floats
    link: Floats
    table: DeviceTable
    capacity: float


class _LeastLoad:
    """The least load of one model.

    Attributes:
        least: the least figures of the devices, multiplied by the rate of the model.
        simple: a bound of the load of all its plans.
        cuts: all its downsets; None where they are too many.
    """

    def __init__(self, demand: Demand, deadline: float) -> None:
        self.problem = problem = demand.problem
        busy = busy_factors(problem)
        self.least = least = least_of(problem, [demand.rate_fps * busy[d.name] for d in problem.platform.devices])
        self.simple = least.total(problem.stages)
        self.cuts = listed_cuts(problem.graph) if time.monotonic() < deadline else None
        self.crossing: dict[float, Crossing] = {}
        memory = [math.inf if d.memory_bytes is None else d.memory_bytes for d in problem.platform.devices]
        self.capacity = max(memory)
        if self.cuts is not None:
            every = np.arange(len(self.cuts))
            together = self.cuts.together | (every == 0) | (every == len(every) - 1)
            self.usable = together if problem.children_together else np.ones(len(every), bool)
            self.sums = self.cuts.sums(least.added), self.cuts.sums(least.work)

    def load(self, most: float, price: float, deadline: float) -> float:
        """Return a lower bound of the load, and of the price of the cached bytes, of stages of at most `most`."""
        least = self.least
        if self.cuts is not None:
            figures = self._figures(self.cuts.crossing_bytes.astype(float))
            added, work = self.sums
            cuts = self.cuts
            found = least_path(
                cuts.zone, cuts.members, self.usable, added, work, cuts.param_bytes, figures, float(most), float(price)
            )
            return float(found)
        share = max(s for s in SHARES if s * least.spill <= price * (1 + 1e-9)) if least.spill else 0.0
        work = least.mean_work(1 - share)
        if share not in self.crossing:
            self.crossing[share] = self._crossing(work, deadline)
        crossing = self.crossing[share]
        figures = self._figures(crossing.least)
        first = least.receive[0] + least.receive[1] * least.first_bytes
        last = least.send[0] + least.send[1] * least.last_bytes
        saved = share * least.spill * least.most_cached
        return float(work.sum()) + float(interval_path(crossing.work, figures, first, last, saved, float(most)))

    def _figures(self, crossing: Floats) -> _Figures:
        least = self.least
        known = np.where(np.isfinite(crossing), crossing, 0.0)  # no cut lies in an interval of infinite bytes
        never = np.where(np.isfinite(crossing), 0.0, np.inf)
        enter, leave, link = (pair[0] + pair[1] * known + never for pair in (least.receive, least.send, least.link))
        return _Figures(enter, leave, link, least.table, self.capacity)

    def _crossing(self, work: Floats, deadline: float) -> Crossing:
        # The tables of all shares have to be ready before the deadline.
        now, network = time.monotonic(), Network(self.problem.graph, leaders=self.least.leaders)
        until = now + max(0.0, deadline - now) / (2 * len(SHARES))
        return least_crossing(network, work, self.least.most_price, until)


@hot
def least_path(
    zone: Any, members: Any, usable: Any, added: Any, work: Any, params: Any, f: Any, most: Any, price: Any
) -> Any:
    """Return the least sum over the stages of a chain of cuts, of which none takes more than `most`.

    A stage costs its seconds and the price of the parameters that it caches, which it chooses.
    """
    count, spill = len(zone), f.table.spill[0]
    value = np.full(count, np.inf)
    value[0] = 0.0
    # Of all cuts up to one, the most of each sum, so that a stage from any of these costs at least the rest.
    most_work, most_params = np.empty(count), np.empty(count)
    for index in range(count):
        most_work[index] = added[index] + work[index]
        most_params[index] = params[index]
        if index:
            most_work[index] = max(most_work[index], most_work[index - 1])
            most_params[index] = max(most_params[index], most_params[index - 1])
    for end in range(1, count):
        if not usable[end]:
            continue
        for start in range(end - 1, -1, -1):
            left = f.table.call[0] + added[end] + work[end] - most_work[start]
            if left > most or spill * fetched(f.table, 0, params[end] - most_params[start]) > most:
                break
            if not value[start] < np.inf:
                continue
            size = params[end] - params[start]
            if size > f.capacity or size < 0:
                continue
            if not is_inside(zone, members, start, end):
                continue
            moved = f.enter[start] + f.leave[end] + (f.link[start] if start > 0 else 0.0)
            there, here, cached = added[end] - added[start], work[end] - work[start], 0.0
            if price < spill:
                cached = min(min(f.table.cached[0], size), max(0.0, size - here / spill))
            if computing(f.table, 0, there, here, fetched(f.table, 0, size)) + moved > most:
                continue
            total = computing(f.table, 0, there, here, size - cached) + moved + price * cached
            value[end] = min(value[end], value[start] + total)
    return value[count - 1]


@hot
def interval_path(edges: Any, f: Any, first: Any, last: Any, saved: Any, most: Any) -> Any:
    """Return the least calls and transfers of a chain of cuts, of which each lies in an interval of work.

    Args:
        first, last: the costs of receiving the inputs of the model, and of sending its outputs.
        saved: what a stage saves at most by its cache.
    """
    count = len(edges) - 1
    value = np.full(count, np.inf)
    best = np.inf
    total = edges[count]
    call = f.table.call[0]
    fixed = call - saved
    if total + fixed + first + last <= most:
        best = call + first + last
    for end in range(count):
        out = f.leave[end]
        if not out < np.inf:
            continue
        if edges[end] + fixed + first + out <= most:
            value[end] = call + first + out
        for start in range(end, -1, -1):
            if edges[end] - edges[start + 1] + fixed + out > most:
                break
            enters = f.enter[start] + f.link[start]
            if edges[end] - edges[start + 1] + fixed + out + enters <= most:
                value[end] = min(value[end], value[start] + call + enters + out)
        enters = f.enter[end] + f.link[end]
        if total - edges[end + 1] + fixed + last + enters <= most:
            best = min(best, value[end] + call + enters + last)
    return best
