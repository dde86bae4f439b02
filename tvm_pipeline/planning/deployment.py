"""Several models on one platform, each at its own rate: which device runs which stage of which model.

Every model is a pipeline with its own order of devices; a device may serve several models, and what it does in a
second is the sum over them. The least greatest share of a second decides: at 1 or less all rates are met. Placed
together and proven by CP-SAT; co-deployment is from Yin et al., SEC 2022, who merge the graphs under one source and
sink (that is `merge_graphs`, for models that run at one rate); separate rates are ours.

Next: `cp_devices.py`, what the solver is told of devices.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from tvm_pipeline.core.graph import crossing_tensors
from tvm_pipeline.core.plan import Plan, Stage, Status
from tvm_pipeline.core.platform import Platform, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import DeviceCosts, busy_factor, cost_of
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError, OptionError, PlanError, SearchTimeError
from tvm_pipeline.planning.sat.placement import Loads, Placement, break_symmetry, second_rows, unit_of
from tvm_pipeline.planning.sat.staging import Staging, dag_of, weighted
from tvm_pipeline.planning.stage_orders import fitting_orders
from tvm_pipeline.solvers.cpsat import library, search


@dataclass(frozen=True, slots=True)
class Demand:
    """A model that is to run at so many frames a second."""

    problem: Problem
    rate_fps: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """Plans for several models that run at the same time, in the order of the demands.

    Attributes:
        rates_fps: what was asked.
        reachable_fps: the rates themselves, or the nearest in the same proportions that all can be met.
        utilisation: for each device and bus in use, the share of a second it works a second at the rates asked;
            1 or less is met.
        bound: no deployment has a lower greatest utilisation.
        status: `optimal` where the greatest utilisation is proven the least.
        why: what is met; where something is not, which models are too slow even alone.
    """

    plans: tuple[Plan, ...]
    rates_fps: tuple[float, ...]
    reachable_fps: tuple[float, ...]
    utilisation: dict[str, float]
    bound: float
    status: Status
    why: str


def deploy(demands: Sequence[Demand], time_limit_s: float | None = None) -> Deployment:
    """Places all models so that the busiest device (or bus) is as little busy as can be.

    The space: for each model what `cp_sat` names for throughput (any downset cuts, each device in at most one of its
    stages), `stages`, `children_together` and `max_latency_s` of its problem included. A device's memory holds the
    stages of all models; devices that share cores are not used both. All devices are as slow as when all of the
    largest set that can work at the same time do.

    A modelled cache is shared by the stages on its device in proportion to their parameters, and what is beyond is
    fetched anew for every frame. The search takes this as a linear lower bound (no stage fetches less than if it were
    alone, all together no less than the overflow), so that a plan where stages share too small a cache may be
    `feasible` with a bound below it, and not the best.

    Raises:
        OptionError: there are no demands, a rate is not positive, platforms differ, or an objective is not throughput.
        InfeasibleError: the models cannot be placed together at any rate, or nothing was found in time.
    """
    _check(demands)
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    plans, bound = _place(demands, deadline)
    utilisation = judge_deployment(demands, plans)
    most = max(utilisation.values(), default=0.0)
    rates = tuple(demand.rate_fps for demand in demands)
    proven = bound >= most * (1 - 1e-6)
    return Deployment(
        tuple(_plan(demand.problem, stages) for demand, stages in zip(demands, plans, strict=True)),
        rates,
        tuple(rate / max(most, 1.0) for rate in rates),
        utilisation,
        most if proven else bound,
        "optimal" if proven else "feasible",
        _why(demands, utilisation, deadline),
    )


def _check(demands: Sequence[Demand]) -> None:
    if not demands:
        raise OptionError("a deployment needs at least one model and its rate")
    platform = demands[0].problem.platform
    for demand in demands:
        name, problem = demand.problem.graph.name, demand.problem
        if not 0 < demand.rate_fps < math.inf:
            raise OptionError(f"the rate of {name} is {demand.rate_fps}; it must be positive")
        if problem.platform != platform:
            raise OptionError(f"{name} is planned on platform {problem.platform.name}, others on {platform.name}")
        if problem.objective != "throughput":
            raise OptionError(f"the objective of {name} is {problem.objective}; models with rates need throughput")


def _plan(problem: Problem, stages: tuple[Stage, ...]) -> Plan:
    predicted = evaluate(problem, stages).predicted
    return Plan(problem.graph.name, "deployment", problem.objective, stages, predicted)


def _why(demands: Sequence[Demand], utilisation: dict[str, float], deadline: float) -> str:
    most, busiest = max(((share, name) for name, share in utilisation.items()), default=(0.0, "nothing"))
    if most <= 1 + 1e-9:
        return f"all rates are met; {busiest} works {most:.1%} of the time"
    words = [f"the rates need {most:.1%} of {busiest}; at {1 / most:.1%} of them all are met"]
    for demand in demands:
        bound = _place([demand], deadline)[1] if len(demands) > 1 and time.monotonic() < deadline else 0.0
        if bound > 1 + 1e-9:
            rate = demand.rate_fps
            words.append(
                f"{demand.problem.graph.name} alone cannot make more than {rate / bound:.4g} of {rate:.4g} fps"
            )
    return "; ".join(words)


def _busy(problem: Problem) -> dict[str, float]:
    devices = problem.platform.devices
    return {device.name: busy_factor(problem, device.name, len(devices)) for device in devices}


def _place(demands: Sequence[Demand], deadline: float) -> tuple[list[tuple[Stage, ...]], float]:
    """Stages for each model, and a lower bound of the greatest utilisation."""
    model = library().CpModel()
    unit = _unit(demands)
    placements, loads = [], []
    for demand in demands:
        problem, rate = demand.problem, demand.rate_fps
        dag = dag_of(problem.graph, problem.children_together)
        widest = max(len(group) for group in disjoint_sets(problem.platform.devices))
        staging = Staging(model, dag, problem.stages or min(len(dag), widest))
        placement = Placement(staging, problem, optional=problem.stages is None, again=False)
        factors = {name: factor * rate for name, factor in _busy(problem).items()}
        placements.append(placement)
        loads.append(Loads(placement, unit, factors, bus_factor=rate))
        if problem.max_latency_s is not None:
            unit_s = unit_of(*second_rows(problem))
            alone = Loads(placement, unit_s, dict.fromkeys(factors, 1.0))
            model.add(sum(alone.device) <= math.floor(problem.max_latency_s * (1 + 5e-10) / unit_s))
    break_symmetry(placements)
    _share_devices(placements)
    _share_caches(demands, loads)
    most = model.new_int_var(0, 2**60, "")
    for d in range(len(placements[0].devices)):
        model.add(sum(load.device[d] for load in loads) <= most)
    for bus in {name for load in loads for name in load.bus}:
        model.add(sum(load.bus.get(bus, 0) for load in loads) <= most)
    model.minimize(most)
    answer = search(model, deadline)
    if answer.solver is None:
        names = ", ".join(demand.problem.graph.name for demand in demands)
        where = f"of {names} on platform {placements[0].problem.platform.name}"
        if answer.proven:
            raise InfeasibleError(f"no deployment exists {where}; use fewer models, or devices with more memory")
        raise SearchTimeError(f"no deployment was found in the time allowed {where}; allow more time")
    solver = answer.solver
    stages = [fitting_orders(placement.problem, placement.stages(solver)) for placement in placements]
    return stages, max(0.0, answer.bound) * unit


def _unit(demands: Sequence[Demand]) -> float:
    """Of shares of a second: seconds of a frame times frames a second."""
    rows: list[list[float | None]] = [[] for _ in demands[0].problem.platform.devices]
    other = 0.0
    for demand in demands:
        own, extra_s = second_rows(demand.problem)
        other += extra_s * demand.rate_fps
        for row, figures in zip(rows, own, strict=True):
            row += [None if s is None else s * demand.rate_fps for s in figures]
    return unit_of(rows, other)


def _share_devices(placements: Sequence[Placement]) -> None:
    """Memory holds the stages of all models, and of two devices that share cores only one is used, by anyone."""
    model, devices = placements[0].model, placements[0].devices
    for d, device in enumerate(devices):
        if device.memory_bytes is not None:
            held = [weighted(p.weights(d, p.staging.dag.param_bytes)) for p in placements]
            model.add(sum(held) <= device.memory_bytes)
    for (d, one), (e, two) in combinations(enumerate(devices), 2):
        if one.overlaps(two):
            for first in placements:
                for second in placements:
                    model.add_bool_or(~first.used[d], ~second.used[e])


def _share_caches(demands: Sequence[Demand], loads: Sequence[Loads]) -> None:
    """What all stages on a device wait for parameters is no less than the overflow of its cache by all of them."""
    # Loads are in multiples of the rate: to add seconds of a frame, each is divided by its own rate. In small whole
    # numbers, which the usual rates have; for others they are rounded so that the bound stays one.
    slowest = min(demand.rate_fps for demand in demands)
    ratios = [slowest / demand.rate_fps for demand in demands]
    whole = next((n for n in range(1, 60) if all(abs(n * r - round(n * r)) < 1e-12 for r in ratios)), 60)
    for d in set[int].intersection(*(set(load.spilled) for load in loads)):
        fetched = [load.fetch(d, slowest) for load in loads]
        waits = sum(
            math.ceil(whole * ratio - 1e-12) * load.spilled[d] for ratio, load in zip(ratios, loads, strict=True)
        )
        overflow = sum(weighted(terms) for terms, _ in fetched) - fetched[0][1]
        rounding = sum(len(terms) for terms, _ in fetched)
        loads[0].model.add(waits >= whole * (overflow - rounding))
        for demand, load in zip(demands, loads, strict=True):
            load.model.add(load.spilled[d] <= weighted(load.fetch(d, demand.rate_fps)[0]))


def judge_deployment(demands: Sequence[Demand], plans: Sequence[tuple[Stage, ...]]) -> dict[str, float]:
    """The share of a second that each device and each bus in use works a second, recomputed from the profiles.

    Raises:
        PlanError: a plan does not fit its problem, or together they do not fit a device's memory or cores.
    """
    platform = demands[0].problem.platform
    for demand, stages in zip(demands, plans, strict=True):
        evaluate(demand.problem, stages)
    held = _held(demands, plans)
    _check_together(platform, held)
    work: dict[str, float] = defaultdict(float)
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        problem, rate = demand.problem, demand.rate_fps
        boundaries = crossing_tensors(problem.graph, [stage.operators for stage in stages])
        crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
        for number, stage in enumerate(stages):
            name = stage.devices[0]
            costs = cost_of(problem, name)
            seconds, spill_s = _stage_seconds(problem, costs, stage, held[name], index)
            if costs.whole_s(stage.operators) is None:
                seconds += costs.receive.seconds(crossing[number]) + costs.send.seconds(crossing[number + 1])
            if number:
                link = problem.link(stages[number - 1].devices[0], name)
                seconds += link.seconds(crossing[number])
                if link.bus:
                    work[link.bus] += rate * link.seconds(crossing[number])
            if costs.shared_bus:
                work[costs.shared_bus] += rate * spill_s
            work[name] += rate * busy_factor(problem, name, len(platform.devices)) * seconds
    return dict(work)


def _held(demands: Sequence[Demand], plans: Sequence[tuple[Stage, ...]]) -> dict[str, list[int]]:
    """Parameter bytes of each model on each device in use."""
    held: dict[str, list[int]] = defaultdict(lambda: [0] * len(demands))
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        sizes = {operator.name: operator.param_bytes for operator in demand.problem.graph.operators}
        for stage in stages:
            held[stage.devices[0]][index] += sum(sizes[name] for name in stage.operators)
    return held


def _check_together(platform: Platform, held: dict[str, list[int]]) -> None:
    for name, sizes in held.items():
        capacity = platform.device(name).memory_bytes
        if capacity is not None and sum(sizes) > capacity:
            raise PlanError(
                f"device {name} would hold {sum(sizes)} bytes of parameters of all models, it has {capacity}"
            )
    for one, two in combinations(map(platform.device, held), 2):
        if one.overlaps(two):
            raise PlanError(f"devices {one.name} and {two.name} share cores, one deployment cannot use both")


def _stage_seconds(
    problem: Problem, costs: DeviceCosts, stage: Stage, held: list[int], index: int
) -> tuple[float, float]:
    """Return the seconds that a frame computes on an idle device, and those of them that wait for parameters.

    A cache is shared in proportion to the parameters that each model has there.
    """
    members = set(stage.operators)
    operators = [operator for operator in problem.graph.operators if operator.name in members]
    spill_s = costs.spill_s(sum(held)) * held[index] / sum(held) if held[index] else 0.0
    whole_s = costs.whole_s(stage.operators)
    return costs.operators_s(operators, spill_s) if whole_s is None else whole_s, spill_s
