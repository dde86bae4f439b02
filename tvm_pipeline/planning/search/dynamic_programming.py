"""The exact planner by dynamic programming: the schedulers `chain`, `two-stage`, `ideals` and `hybrid`.

`chain` cuts the graph's own order, `two-stage` cuts it once, `ideals` cuts the graph anywhere, and `hybrid` also
replicates stages. All of them turn a problem into searches of `pipelines.py` (or, for objectives of bytes, of
`lexicographic.py`), take the best plan of all searches, and state its bound. Next: `pipelines.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import accumulate, pairwise

from tvm_pipeline.core.plan import Plan, Stage, cost_key
from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, counts_period, idle_w, lock_s
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, NoPlanError, OptionError, PlanError, SearchTimeError
from tvm_pipeline.planning.baselines.segments import even_parameters, greedy
from tvm_pipeline.planning.baselines.whole_model import single
from tvm_pipeline.planning.conflict import explain
from tvm_pipeline.planning.search.cost_tables import (
    StageCosts,
    bus_seconds,
    buses,
    least_bus_seconds,
    stage_joules,
    stage_seconds,
)
from tvm_pipeline.planning.search.cuts import Cuts, prefixes, reordered
from tvm_pipeline.planning.search.cuts import ideals as all_ideals
from tvm_pipeline.planning.search.lexicographic import lexicographic
from tvm_pipeline.planning.search.pipelines import (
    FoundPipeline,
    Search,
    least_bottleneck,
    least_sum,
    relaxed_bound,
)
from tvm_pipeline.planning.search.space import (
    Space,
    TooManyError,
    Units,
    is_steady,
    replica_units,
    serving_once,
    single_units,
)
from tvm_pipeline.planning.search.with_activations import SegmentBytes, check_operators
from tvm_pipeline.planning.stage_orders import fitting_plan

# Relative; two figures closer than this are the same figure summed in another order.
ROUNDING = 1e-9
# Relative; periods closer than this are the same period, and a search ends where its bound is so close to its value.
SAME, PROVEN = 1e-11, 1e-10
# The seconds for which pipelines are proposed and checked with their activations if no limit is given.
FITTING_S = 30.0


def chain(problem: Problem) -> Plan:
    """Return the best pipeline of consecutive operators in the graph's own order, each stage on one device.

    For throughput, under a limit of throughput, and for energy with an idle power each device serves one stage. Else,
    for latency and energy, a device may serve several stages, unless it has a memory limit or a parameter cache.
    Algorithm 1 of Velasco-Montero et al. (IEEE Access 2023) is the case of two stages (`two_stage`); they enumerate the
    cuts for k stages.

    Raises:
        InfeasibleError: there is no such pipeline; the message names the limits that are in conflict.
    """
    cuts = prefixes(problem.graph)
    plan = plan_over(replace(problem, activations=False), cuts, single_units, "chain")
    if not problem.counts_activations:
        return plan
    try:
        return fitting_plan(problem, plan)
    except PlanError as error:
        found = _fitting_chain(problem, cuts, str(error))
        return replace(found, status="optimal" if found.value == plan.bound else "feasible", bound=plan.bound)


def two_stage(problem: Problem) -> Plan:
    """Return the best pipeline of two stages along the graph's order.

    This is Algorithm 1 of Velasco-Montero et al., IEEE Access 2023, with the judge's costs. Two details of the printed
    algorithm are missing here, and the scheduler `algorithm-1` of the papers has them:

    - The paper's cut n runs from 1 to N, and n = N is one device alone. Here both stages have operators. A single
      device is the scheduler `single`, which `best` compares with this one.
    - The paper charges both stages for their input, the first one for the network's. Here the first stage pays for it
      on a modelled device only: a profile has no figure of the way from the host to a measured device (`evaluate.py`).

    Raises:
        InfeasibleError: there is no such pipeline; the message names the limits that are in conflict.
    """
    return replace(chain(replace(problem, stages=2)), scheduler="two-stage")


def _fitting_chain(problem: Problem, cuts: Cuts, refused: str) -> Plan:
    """Return the best pipeline of consecutive operators that fits with its activations, see `with_activations.py`.

    Args:
        refused: why the best pipeline by parameters alone does not fit; the message says so if no other one fits.

    Raises:
        InfeasibleError: an operator fits no device.
        LimitMissedError: no such pipeline was found.
    """
    check_operators(problem)
    deadline = time.monotonic() + (FITTING_S if problem.time_limit_s is None else problem.time_limit_s)
    segments = SegmentBytes(problem.graph, cuts)
    none_fits = LimitMissedError(
        f"no pipeline was found along the order of {problem.graph.name} whose stages fit into memory_bytes with "
        f"their activations, and of the best without them {refused}"
    )
    while (left_s := deadline - time.monotonic()) > 0:
        limited = replace(problem, activations=False, time_limit_s=left_s)
        try:
            plan = plan_over(limited, replace(cuts, needs=segments.bytes), single_units, "chain")
        except InfeasibleError as error:
            raise none_fits from error
        ends = accumulate((len(stage.operators) for stage in plan.stages), initial=0)
        devices = [problem.platform.device(stage.devices[0]) for stage in plan.stages]
        # All are checked, so that the next proposal avoids every segment of this one that is too large.
        fits = [segments.fit(device, *segment) for device, segment in zip(devices, pairwise(ends), strict=True)]
        if all(fits):
            try:
                return fitting_plan(problem, plan)
            except PlanError as error:
                raise LimitMissedError(f"the best pipeline whose activations fit misses a limit: {error}") from error
    raise none_fits


def ideals(problem: Problem) -> Plan:
    """Return the best pipeline over all downsets of the graph; in all else it is like `chain`.

    Raises:
        InfeasibleError: there is no such pipeline; the message names the limits that are in conflict.
        OptionError: the graph has too many downsets to list.
    """
    return plan_over(problem, _listed(problem), single_units, "ideals")


def hybrid(problem: Problem) -> Plan:
    """Return the best pipeline whose stages run on one device or on several replicas, which take frames in turns.

    One device, the whole model on every device, and the plain pipeline are points of this space. The cuts are all
    downsets of the graph if these can be listed, else the prefixes of its own order. If replicas pay unequal transfers,
    the search counts the cheapest transfer, so its bound may be better than every plan.

    Raises:
        InfeasibleError: there is no such pipeline; the message names the limits that are in conflict.
        OptionError: the objective is one of bytes, which replicas do not change.
    """
    return plan_over(problem, all_ideals(problem.graph) or prefixes(problem.graph), replica_units, "hybrid")


def along(problem: Problem, order: Sequence[int], name: str) -> Plan:
    """Return the best pipeline of single devices whose stages are consecutive pieces of another topological order.

    Args:
        order: indices into `problem.graph.operators`.
        name: of the scheduler that the plan bears.

    Raises:
        NoPlanError: there is none along this order, or none was found in time.
        OptionError: there are more states than the search can hold.
    """
    in_order = replace(problem, graph=reordered(problem.graph, order))
    return plan_over(in_order, prefixes(in_order.graph), single_units, name)


def _listed(problem: Problem) -> Cuts:
    cuts = all_ideals(problem.graph)
    if cuts is None:
        raise OptionError(f"{problem.graph.name} has too many downsets to list; use `scheduler` cp-sat, or chain")
    return cuts


def plan_over(
    problem: Problem,
    cuts: Cuts,
    units_of: Callable[[tuple[Device, ...]], Units],
    name: str,
    known: Plan | None = None,
) -> Plan:
    """Return the best pipeline over `cuts` of the units of every set of devices that can work together.

    Args:
        name: the scheduler that the plan names.
        known: a plan of this problem; if no pipeline is better, it is the answer, with the bound proven here.
    """
    if problem.is_lexicographic:
        return lexicographic(problem, cuts, name)
    at_most = math.inf if known is None else _period_or_sum(known)
    best, bound = _found(problem, cuts, units_of, name, at_most)
    if best is not None:
        return _proven(problem, best[1], min(bound, best[0]), name)
    if known is not None:
        return _proven(problem, known.stages, min(bound, at_most), known.scheduler)
    if math.isinf(bound) or problem.time_limit_s is None:
        raise InfeasibleError(explain(problem, lambda other: math.isfinite(_found(other, cuts, units_of, name)[1])))
    return _proven(problem, _at_hand(problem).stages, bound, name)


def least_period(problem: Problem, cuts: Cuts, units_of: Callable[[tuple[Device, ...]], Units]) -> float:
    """Return a lower bound of the seconds between frames of these units' pipelines.

    It follows from the relaxation, the buses and the lock of the interpreter.
    """
    bounds = [math.inf]
    for space in _spaces(problem, cuts, units_of):
        busy = stage_seconds(problem, cuts, space.devices, space.working or 1)
        carried = (
            least_bus_seconds(problem, space.devices, b, space.most_devices) for b in buses(problem, space.devices)
        )
        bounds.append(max(relaxed_bound(space, busy), *carried, lock_s(problem)))
    return min(bounds)


def _found(
    problem: Problem,
    cuts: Cuts,
    units_of: Callable[[tuple[Device, ...]], Units],
    name: str,
    at_most: float = math.inf,
) -> tuple[tuple[float, tuple[Stage, ...]] | None, float]:
    """Return the best value below `at_most` with its stages, and a lower bound: infinite if there is no plan."""
    deadline = None if problem.time_limit_s is None else time.monotonic() + problem.time_limit_s
    best: tuple[float, tuple[Stage, ...]] | None = None
    bound = math.inf
    # Every plan holds the lock of the interpreter for as long, so it takes no part in the search.
    held_s = lock_s(problem)
    if problem.min_throughput_fps is not None and held_s * problem.min_throughput_fps > 1 + ROUNDING:
        return None, math.inf
    least = held_s if problem.objective == "throughput" else 0.0
    try:
        for space in _spaces(problem, cuts, units_of):
            search = _search(problem, space, best[0] if best else at_most, deadline)
            if search.found and _serves_too_often(space, search.found):
                search = _search(problem, replace(space, counted=True), best[0] if best else at_most, deadline)
            bound = min(bound, max(search.bound, least))
            if search.found:
                value = max(search.found.value, least)
                if value < (best[0] if best else at_most) * (1 - ROUNDING):
                    best = value, _stages(space, search.found)
    except TooManyError:
        raise OptionError(
            f"{problem.graph.name} has {len(cuts)} cuts for {len(problem.platform.devices)} different devices: more "
            f"states than scheduler {name} can hold; use `scheduler` cp-sat"
        ) from None
    return best, bound


def _period_or_sum(plan: Plan) -> float:
    """Return the value that the searches minimise: seconds between frames for throughput, else the plan's value."""
    value = plan.value[0] if plan.value else math.inf
    return 1 / value if plan.objective == "throughput" else value


def _proven(problem: Problem, stages: tuple[Stage, ...], least: float, name: str) -> Plan:
    """Return the plan of the stages, with its bound and status; `least` is a lower bound in seconds or joules."""
    try:
        predicted = evaluate(problem, stages).predicted
    except PlanError as error:
        # The search does not count buses, unequal transfers to replicas or activations; one of them breaks a limit.
        raise LimitMissedError(f"scheduler {name} found no plan that keeps the limit ({error}); try best") from error
    plan = Plan(problem.graph.name, name, problem.objective, stages, predicted)
    if plan.value is None:
        raise PlanError(f"nothing is known of the {problem.objective} of the devices of {problem.platform.name}")
    reached = _period_or_sum(plan)
    if reached <= least * (1 + ROUNDING):
        return replace(plan, status="optimal", bound=plan.value)
    bound = 1 / max(least, 1e-12) if problem.objective == "throughput" else least
    return replace(plan, bound=(bound,))


def _at_hand(problem: Problem) -> Plan:
    """Return the best plan that costs no search."""
    plans = []
    for make in (single, greedy, even_parameters):
        try:
            plan = make(problem)
        except NoPlanError:
            continue
        if problem.stages in (None, len(plan.stages)):
            plans.append(plan)
    if not plans:
        raise SearchTimeError(f"no plan was found in {problem.time_limit_s:g} s; give more `time_limit_s`")
    return min(plans, key=cost_key)


def _spaces(problem: Problem, cuts: Cuts, units_of: Callable[[tuple[Device, ...]], Units]) -> Iterator[Space]:
    """Yield a space for each set of devices that can work together, and for each number of them if they slow down."""
    apart = counts_period(problem)
    for devices in disjoint_sets(problem.platform.devices):
        once = serving_once(problem, devices, apart)
        # A frame costs the mean of its replicas, or the worst. Without a limit of throughput one device is never worse.
        units = units_of(devices) if apart else single_units(devices)
        space = Space(cuts, devices, units, once, problem.stages, together=problem.children_together)
        if not apart or is_steady(problem, devices):
            yield space
            continue
        for working in range(problem.stages or 1, len(devices) + 1):
            slowdown = tuple(busy_factor(problem, device.name, working) for device in devices)
            yield replace(space, working=working, slowdown=slowdown)


def _search(problem: Problem, space: Space, at_most: float, deadline: float | None) -> Search:
    """Search one space for the problem's objective, under its limits of throughput and latency."""
    cuts, devices = space.cuts, space.devices
    busy = stage_seconds(problem, cuts, devices, space.working or 1)
    if problem.objective != "throughput":
        make = stage_joules if problem.objective == "energy" else stage_seconds
        costs = make(problem, cuts, devices)
        slowest = problem.objective == "latency"
        if problem.objective == "energy" and idle_w(problem):
            return _least_energy(problem, space, busy, costs, at_most, deadline)
        if problem.min_throughput_fps is None:
            return least_sum(space, costs, None, math.inf, deadline, slowest=slowest)
        cap = (1 + ROUNDING / 2) / problem.min_throughput_fps
        search = least_sum(space, costs, busy, cap, deadline, slowest=slowest)
        if search.found and _links_matter(space, busy):
            return replace(search, bound=_least_alone(space, costs, deadline))
        return search
    search = least_bottleneck(space, busy, at_most, deadline)
    limit_s = problem.max_latency_s
    if limit_s is not None and search.found:
        idle = stage_seconds(problem, cuts, devices)

        def in_time(slowest_s: float, latency_s: float) -> float:
            return slowest_s if latency_s <= limit_s * (1 + ROUNDING) else math.inf

        return _tighten(space, busy, idle, search, deadline, in_time, slowest=True)
    for bus in buses(problem, devices):
        if search.found:
            carried = bus_seconds(problem, cuts, devices, bus)
            least = least_bus_seconds(problem, devices, bus, space.most_devices)
            search = _tighten(space, busy, carried, search, deadline, max, least=least)
    return search


def _least_alone(space: Space, costs: StageCosts, deadline: float | None) -> float:
    """Return a bound of the sum where a state does not say which replica sent a frame, see `_links_matter`.

    It is the least cost of a path of single devices.
    """
    alone = replace(space, units=single_units(space.devices), working=None, slowdown=())
    return least_sum(alone, costs, None, math.inf, deadline).bound


def _least_energy(
    problem: Problem, space: Space, busy: StageCosts, costs: StageCosts, at_most: float, deadline: float | None
) -> Search:
    """Search one space for the least energy, of which the idle power for the seconds between frames is a part.

    This is branch and bound over the seconds between frames. A range of them has a bound: its least seconds at idle
    power, and the least sum of active joules that is known for it. A search under its upper end finds a pipeline: those
    of the range that are slower cost no less than this one. What is left of the range is halved.

    The seconds that a plan's links need of a bus are not counted, so under buses the bound may be better than any plan.
    """
    floor_fps, watts = problem.min_throughput_fps, idle_w(problem)
    most_s = math.inf if floor_fps is None else (1 + ROUNDING / 2) / floor_fps
    carried_s = [
        least_bus_seconds(problem, space.devices, b, space.most_devices) for b in buses(problem, space.devices)
    ]
    least_s = max(relaxed_bound(space, busy), lock_s(problem), *carried_s, 0.0)
    if math.isinf(least_s):
        return Search(None, math.inf)
    best: FoundPipeline | None = None
    value, bound, ended = at_most, at_most, False
    ranges = [(watts * least_s, least_s, most_s, 0.0)]
    while ranges and not ended:
        bound, low_s, high_s, least_j = heappop(ranges)
        if bound >= value * (1 - PROVEN):
            break
        search = least_sum(space, costs, busy, high_s, deadline, least=least_j, below=value - watts * low_s)
        found, period_s = search.found, math.inf
        if found is not None:
            period_s = max(_figures(space, busy, costs, found, slowest=False)[0], least_s)
            if found.value + watts * period_s < value:
                value = found.value + watts * period_s
                best = replace(found, value=value)
        ended = search.bound < (math.inf if found is None else found.value)  # the deadline passed
        if found is None:
            continue
        below_s = min(period_s, high_s) * (1 - SAME)
        middle_s = (low_s + below_s) / 2
        if low_s < middle_s < below_s:
            heappush(ranges, (found.value + watts * middle_s, middle_s, below_s, found.value))
            below_s = middle_s
        if low_s < below_s:
            heappush(ranges, (found.value + watts * low_s, low_s, below_s, found.value))
    bound = min(bound, value) if ended else value
    if math.isfinite(bound) and _links_matter(space, busy):
        bound = min(bound, _least_alone(space, costs, deadline) + watts * least_s)
    return Search(best, bound)


def _links_matter(space: Space, seconds: StageCosts) -> bool:
    """Return whether there are replicas, and a device whose cost of receiving depends on the sender."""
    if all(len(unit) == 1 for unit in space.units):
        return False
    devices = range(len(space.devices))
    received = [[seconds.enter[p, d] for p in devices if p != d] for d in devices]
    return any((row != rows[0]).any() for rows in received for row in rows)


def _tighten(
    space: Space,
    busy: StageCosts,
    costs: StageCosts,
    free: Search,
    deadline: float | None,
    judge: Callable[[float, float], float],
    *,
    least: float = 0.0,
    slowest: bool = False,
) -> Search:
    """Return the best period if a sum of costs counts in addition to the slowest stage.

    The cap on the seconds of a stage is bisected. Under each cap the pipeline with the least sum is found. If its
    period exceeds the cap, then no pipeline has a period up to the cap, since none has a smaller sum.

    Args:
        free: the result of the search without the sum.
        judge: returns the period of a slowest stage and a sum; infinite if the sum breaks a limit.
        least: a lower bound of the sum alone.
        slowest: whether replicas cost the sum as much as the most expensive of them does.
    """
    if free.found is None:
        return free
    best = free.found
    low, high = max(free.bound, least), judge(*_figures(space, busy, costs, best, slowest))
    cap = low * (1 + ROUNDING / 2)
    while high > low * (1 + ROUNDING):
        attempt = least_sum(space, costs, busy, cap, deadline, slowest=slowest)
        if attempt.found is None and not math.isinf(attempt.bound):
            return Search(replace(best, value=high) if math.isfinite(high) else None, low)  # the deadline passed
        period = math.inf
        if attempt.found:
            period = judge(*_figures(space, busy, costs, attempt.found, slowest))
        if period < high and attempt.found:
            best, high = attempt.found, period
        if math.isinf(cap) and math.isinf(high):
            return Search(None, math.inf)
        if period > cap:
            low = max(low, cap)
        # The first cap is the bound itself, which is often reached. Each later cap halves the open interval.
        cap = (low + high) / 2
        if math.isfinite(cap) and not low < cap < high:
            break
    return Search(replace(best, value=high), high)


def _figures(
    space: Space, busy: StageCosts, costs: StageCosts, found: FoundPipeline, slowest: bool
) -> tuple[float, float]:
    """Return the seconds of the slowest stage and the sum of the costs, as the search counts them."""
    start, longest, total, param_bytes = 0, 0.0, 0.0, space.param_bytes
    before: tuple[int, ...] = (len(space.devices),)
    for unit, end in zip(found.units, found.cuts, strict=True):
        seconds = [min(float(busy.stage(param_bytes, d, p, start, end)) for p in before) for d in unit]
        cost = [min(float(costs.stage(param_bytes, d, p, start, end)) for p in before) for d in unit]
        rates = [1 / max(s, 1e-12) for s in seconds]
        longest = max(longest, 1 / sum(rates))
        total += max(cost) if slowest else sum(c * rate / sum(rates) for c, rate in zip(cost, rates, strict=True))
        start, before = end, unit
    return longest, total


def _serves_too_often(space: Space, found: FoundPipeline) -> bool:
    counts = [sum(index in unit for unit in found.units) for index in range(len(space.devices))]
    return any(device.most_stages and n > device.most_stages for device, n in zip(space.devices, counts, strict=True))


def _stages(space: Space, found: FoundPipeline) -> tuple[Stage, ...]:
    names = [tuple(space.devices[index].name for index in unit) for unit in found.units]
    return tuple(map(Stage, names, space.cuts.stages(found.cuts)))
