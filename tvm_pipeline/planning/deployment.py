"""Several models on one platform, each at its own rate: the choice of a device for every stage of every model.

Every model is a pipeline with its own order of devices. A device may serve several models; its utilisation is the sum
of their shares of a second. CP-SAT places the stages of all models together, so that the greatest utilisation is as
small as possible: at 1 or less all rates are met.

Co-deployment is from Yin et al., SEC 2022, who merge the graphs under one source and sink (that is `merge_graphs`, for
models that run at one rate). Separate rates are an addition of this project.

Next: `sat/placement.py`, the devices in the solver's model.
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
from tvm_pipeline.cost.device_costs import INTERPRETER, DeviceCosts, busy_factor, cost_of, lock_s
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
        rates_fps: the requested rates.
        reachable_fps: the requested rates where all are met; else the highest rates in the same proportions.
        utilisation: for each device and bus in use, the seconds of work in each second at the requested rates; the
            rates are met where it is 1 or less. The lock of the Python interpreter is the bus `interpreter`.
        bound: no deployment has a lower greatest utilisation.
        status: `optimal` where no deployment has a lower greatest utilisation, which is proven.
        why: a sentence that says whether the rates are met; where they are not, it names the models that are too slow
            even alone.
    """

    plans: tuple[Plan, ...]
    rates_fps: tuple[float, ...]
    reachable_fps: tuple[float, ...]
    utilisation: dict[str, float]
    bound: float
    status: Status
    why: str


def deploy(demands: Sequence[Demand], time_limit_s: float | None = None) -> Deployment:
    """Return the plans of all models for which the busiest device (or bus) has the least utilisation.

    Each model may have the plans that `cp_sat` searches for throughput (downset cuts, each device in at most one of its
    stages), within the `stages`, `children_together` and `max_latency_s` of its problem. A device's memory must hold
    the stages of all models, and of devices that share cores only one is used. Every device is as slow as when all
    devices of the largest set that can work at the same time do work.

    The stages on a device share its modelled cache in proportion to their parameters, and the parameters beyond it are
    fetched for every frame. The search counts a linear lower bound of these fetches: no stage fetches less than if it
    were alone, and all together fetch no less than the overflow. So where stages share too small a cache, the result
    may be `feasible` with a lower bound, and may not be the best.

    Raises:
        OptionError: there are no demands, a rate is not positive, platforms differ, or an objective is not throughput.
        InfeasibleError: the models cannot be placed together at any rate.
        SearchTimeError: no deployment was found in time.
    """
    _check(demands)
    deadline = math.inf if time_limit_s is None else time.monotonic() + time_limit_s
    plans, bound = _solved(demands, deadline)
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
    mode = problem.profile.power_mode
    return Plan(problem.graph.name, "deployment", problem.objective, stages, predicted, power_mode=mode)


def _why(demands: Sequence[Demand], utilisation: dict[str, float], deadline: float) -> str:
    most, busiest = max(((share, name) for name, share in utilisation.items()), default=(0.0, "nothing"))
    if most <= 1 + 1e-9:
        return f"all rates are met; {busiest} works {most:.1%} of the time"
    words = [f"the rates need {most:.1%} of {busiest}; at {1 / most:.1%} of them all are met"]
    for demand in demands:
        bound = _solved([demand], deadline)[1] if len(demands) > 1 and time.monotonic() < deadline else 0.0
        if bound > 1 + 1e-9:
            rate = demand.rate_fps
            words.append(
                f"{demand.problem.graph.name} alone cannot make more than {rate / bound:.4g} of {rate:.4g} fps"
            )
    return "; ".join(words)


def _busy(problem: Problem) -> dict[str, float]:
    """Return the busy factor of each device while all devices that can work at the same time do."""
    devices = problem.platform.devices
    return {device.name: busy_factor(problem, device.name, len(devices)) for device in devices}


def _solved(demands: Sequence[Demand], deadline: float) -> tuple[list[tuple[Stage, ...]], float]:
    """Return the stages of each model, and a lower bound of the greatest utilisation."""
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
    held = sum(demand.rate_fps * lock_s(demand.problem) for demand in demands)
    most = model.new_int_var(round(held / unit), 2**60, "")
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
    """Return the solver's unit of utilisation, which is seconds of a frame times frames a second."""
    rows: list[list[float | None]] = [[] for _ in demands[0].problem.platform.devices]
    other = 0.0
    for demand in demands:
        own, extra_s = second_rows(demand.problem)
        other += extra_s * demand.rate_fps
        for row, figures in zip(rows, own, strict=True):
            row += [None if s is None else s * demand.rate_fps for s in figures]
    return unit_of(rows, other)


def _share_devices(placements: Sequence[Placement]) -> None:
    """Require that memory holds the stages of all models, and that of devices which share cores only one is used."""
    model, devices = placements[0].model, placements[0].devices
    for d, device in enumerate(devices):
        if device.memory_bytes is not None:
            param_bytes = [weighted(p.weights(d, p.staging.dag.param_bytes)) for p in placements]
            model.add(sum(param_bytes) <= device.memory_bytes)
    for (d, one), (e, two) in combinations(enumerate(devices), 2):
        if one.overlaps(two):
            for first in placements:
                for second in placements:
                    model.add_bool_or(~first.used[d], ~second.used[e])


def _share_caches(demands: Sequence[Demand], loads: Sequence[Loads]) -> None:
    """Require that the stages on a device wait for parameters no less than for the overflow of its cache by all."""
    # Loads are multiplied by their rates, so each is divided by its own rate to add up seconds of a frame. The ratios
    # of usual rates are small whole numbers; others are rounded so that the bound stays a bound.
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
    """Return the utilisation of each device and each bus in use, computed from the profiles.

    Raises:
        PlanError: a plan does not fit its problem, or together they do not fit a device's memory or cores.
    """
    platform = demands[0].problem.platform
    for demand, stages in zip(demands, plans, strict=True):
        evaluate(demand.problem, stages)
    param_bytes = _param_bytes(demands, plans)
    _check_together(platform, param_bytes)
    work: dict[str, float] = defaultdict(float)
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        problem, rate, busy = demand.problem, demand.rate_fps, _busy(demand.problem)
        if held_s := lock_s(problem):
            work[INTERPRETER] += rate * held_s
        boundaries = crossing_tensors(problem.graph, [stage.operators for stage in stages])
        crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
        for number, stage in enumerate(stages):
            name = stage.devices[0]
            costs = cost_of(problem, name)
            seconds, spill_s = _stage_seconds(problem, costs, stage, param_bytes[name], index)
            if costs.whole_s(stage.operators) is None:
                seconds += costs.receive.seconds(crossing[number]) + costs.send.seconds(crossing[number + 1])
            if number:
                link = problem.link(stages[number - 1].devices[0], name)
                seconds += link.seconds(crossing[number])
                if link.bus:
                    work[link.bus] += rate * link.seconds(crossing[number])
            if costs.shared_bus:
                work[costs.shared_bus] += rate * spill_s
            work[name] += rate * busy[name] * seconds
    return dict(work)


def _param_bytes(demands: Sequence[Demand], plans: Sequence[tuple[Stage, ...]]) -> dict[str, list[int]]:
    """Return the parameter bytes of each model on each device in use."""
    param_bytes: dict[str, list[int]] = defaultdict(lambda: [0] * len(demands))
    for index, (demand, stages) in enumerate(zip(demands, plans, strict=True)):
        sizes = {operator.name: operator.param_bytes for operator in demand.problem.graph.operators}
        for stage in stages:
            param_bytes[stage.devices[0]][index] += sum(sizes[name] for name in stage.operators)
    return param_bytes


def _check_together(platform: Platform, param_bytes: dict[str, list[int]]) -> None:
    """Raise PlanError where the models together do not fit a device's memory, or use devices that share cores."""
    for name, sizes in param_bytes.items():
        capacity = platform.device(name).memory_bytes
        if capacity is not None and sum(sizes) > capacity:
            raise PlanError(
                f"device {name} would hold {sum(sizes)} bytes of parameters of all models, it has {capacity}"
            )
    for one, two in combinations(map(platform.device, param_bytes), 2):
        if one.overlaps(two):
            raise PlanError(f"devices {one.name} and {two.name} share cores, one deployment cannot use both")


def _stage_seconds(
    problem: Problem, costs: DeviceCosts, stage: Stage, param_bytes: list[int], index: int
) -> tuple[float, float]:
    """Return the seconds of computing a frame on an idle device, and the part of them that waits for parameters.

    The models share a cache in proportion to their parameters on the device.

    Args:
        param_bytes: the parameters of each model on the device.
        index: the index of the stage's model.
    """
    members = set(stage.operators)
    operators = [operator for operator in problem.graph.operators if operator.name in members]
    total = sum(param_bytes)
    spill_s = costs.spill_s(total) * param_bytes[index] / total if param_bytes[index] else 0.0
    whole_s = costs.whole_s(stage.operators)
    return costs.operators_s(operators, spill_s) if whole_s is None else whole_s, spill_s
