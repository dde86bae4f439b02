"""What a plan costs, recomputed from the graph, the platform and the profile alone.

This is the one judge of every scheduler: no scheduler's own figure is trusted. The model of the runtime:

- A stage takes the sum of its operators' seconds on its device, and before that receives every tensor that
  crosses the boundary in front of it, hop by hop, at the price of the link; the receiver pays.
- Replicas take frames as they become free, so a stage's rate is the sum of its replicas' rates. A device that
  serves several stages gives each frame the sum of their times.
- While n of the devices that can work at the same time do, each is slower by its measured `busy_factor`,
  in proportion to how many of the others work. A single frame (latency, energy) meets idle devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from tvm_pipeline.errors import GraphError, PlanError, PlatformError, ProfileError
from tvm_pipeline.graph import OperatorGraph, crossing_tensors
from tvm_pipeline.plan import Plan, Prediction, Problem, Stage
from tvm_pipeline.platform import Device, Platform, disjoint_sets


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds a frame of one stage on one of its devices, while the whole pipeline is busy."""

    stage: int
    device: str
    compute_s: float
    transfer_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The prediction, and what it is made of; `bottleneck` is the index of the stage that sets the pace."""

    predicted: Prediction
    costs: tuple[StageCost, ...]
    bottleneck: int


def evaluate(problem: Problem, stages: tuple[Stage, ...]) -> Evaluation:
    """Judges `stages` as a plan for `problem`.

    Raises:
        PlanError: the stages do not fit the graph or the platform; the message names the operator or device.
    """
    check_stages(problem.graph, problem.platform, stages)
    used = tuple(dict.fromkeys(name for stage in stages for name in stage.devices))
    alone = _stage_costs(problem, stages, dict.fromkeys(used, 1.0))
    busy = _stage_costs(problem, stages, {name: busy_factor(problem, name, len(used)) for name in used})

    device_load_s: dict[str, float] = defaultdict(float)
    for cost in busy:
        device_load_s[cost.device] += cost.seconds
    rates = [sum(1 / max(device_load_s[name], 1e-12) for name in stage.devices) for stage in stages]
    bottleneck = min(range(len(stages)), key=rates.__getitem__)
    predicted = Prediction(
        throughput_fps=rates[bottleneck],
        latency_s=sum(max(c.seconds for c in alone if c.stage == i) for i in range(len(stages))),
        energy_j=_energy_j(problem, stages, alone),
    )
    return Evaluation(predicted, tuple(busy), bottleneck)


def judged(problem: Problem, plan: Plan) -> Plan:
    """The plan with its prediction recomputed."""
    return replace(plan, predicted=evaluate(problem, plan.stages).predicted)


def busy_factor(problem: Problem, name: str, working: int) -> float:
    """How much slower device `name` is while `working` devices, itself among them, work at the same time."""
    device = problem.platform.device(name)
    others = max(len(group) for group in disjoint_sets(problem.platform.devices) if device in group) - 1
    share = min((working - 1) / others, 1.0) if others else 0.0
    return 1 + (problem.profile.device(name).busy_factor - 1) * share


def check_stages(graph: OperatorGraph, platform: Platform, stages: tuple[Stage, ...]) -> None:
    """Raises PlanError unless the stages hold every operator once, in a legal order, on devices that exist."""
    if not stages:
        raise PlanError("the plan has no stages; it needs at least one")
    known = {operator.name for operator in graph.operators}
    seen: set[str] = set()
    for index, stage in enumerate(stages):
        if not stage.operators or not stage.devices:
            raise PlanError(f"stage {index} has no operators or no devices")
        for name in stage.operators:
            if name not in known:
                raise PlanError(f"stage {index} names operator {name}, which {graph.name} does not have")
            if name in seen:
                raise PlanError(f"operator {name} stands twice in the plan, last in stage {index}")
            seen.add(name)
    missing = [operator.name for operator in graph.operators if operator.name not in seen]
    if missing:
        raise PlanError(f"operator {missing[0]} is in no stage ({len(missing)} missing in all)")
    try:
        crossing_tensors(graph, [stage.operators for stage in stages])
    except GraphError as error:
        raise PlanError(f"the stages form a cycle or stand in the wrong order: {error}") from error
    _check_devices(graph, platform, stages)


def _check_devices(graph: OperatorGraph, platform: Platform, stages: tuple[Stage, ...]) -> None:
    used: dict[str, Device] = {}
    for index, stage in enumerate(stages):
        for name in stage.devices:
            try:
                device = platform.device(name)
            except PlatformError as error:
                raise PlanError(f"stage {index}: {error}") from error
            for other in used.values():
                if device.overlaps(other) and device != other:
                    raise PlanError(f"devices {name} and {other.name} share cores, one plan cannot use both")
            if name in used and (len(stage.devices) > 1 or _replicated(stages, name)):
                raise PlanError(f"device {name} of stage {index} is a replica, and serves another stage as well")
            used[name] = device
    param_bytes = {operator.name: operator.param_bytes for operator in graph.operators}
    for device in used.values():
        held = sum(param_bytes[o] for s in stages if device.name in s.devices for o in s.operators)
        if device.memory_bytes is not None and held > device.memory_bytes:
            raise PlanError(f"device {device.name} would hold {held} bytes of parameters and has {device.memory_bytes}")


def _replicated(stages: tuple[Stage, ...], device: str) -> bool:
    return any(device in stage.devices and len(stage.devices) > 1 for stage in stages)


def _stage_costs(problem: Problem, stages: tuple[Stage, ...], factors: dict[str, float]) -> list[StageCost]:
    """Compute and transfer seconds of each stage on each of its devices, each slowed by its factor."""
    position = {operator.name: index for index, operator in enumerate(problem.graph.operators)}
    boundaries = crossing_tensors(problem.graph, [stage.operators for stage in stages])
    costs: list[StageCost] = []
    for index, stage in enumerate(stages):
        received = sum(tensor.bytes for tensor in boundaries[index])
        upstream = [cost for cost in costs if cost.stage == index - 1]
        for name in stage.devices:
            seconds = problem.profile.device(name).seconds
            compute_s = 0.0
            for operator in stage.operators:
                operator_s = seconds[position[operator]]
                if operator_s is None:
                    raise PlanError(f"device {name} cannot run operator {operator} of stage {index}")
                compute_s += operator_s * factors[name]
            # A frame comes from each upstream replica as often as that replica takes one.
            rates = [1 / max(cost.seconds, 1e-12) for cost in upstream]
            transfer_s = sum(
                problem.link(cost.device, name).seconds(received) * rate / sum(rates)
                for cost, rate in zip(upstream, rates, strict=True)
            )
            costs.append(StageCost(index, name, compute_s, transfer_s * factors[name]))
    return costs


def _energy_j(problem: Problem, stages: tuple[Stage, ...], alone: list[StageCost]) -> float | None:
    """Joules a frame: measured where a sensor was, else active power times seconds; None where neither is."""
    total = 0.0
    for index, stage in enumerate(stages):
        costs = [cost for cost in alone if cost.stage == index]
        rates = [1 / max(cost.seconds, 1e-12) for cost in costs]
        for cost, rate in zip(costs, rates, strict=True):
            joules = _operators_j(problem, stage, cost)
            if joules is None:
                return None
            total += joules * rate / sum(rates)
    return total


def _operators_j(problem: Problem, stage: Stage, cost: StageCost) -> float | None:
    active_w = problem.platform.device(cost.device).active_w
    measured = problem.profile.device(cost.device).joules
    if measured is None:
        return None if active_w is None else active_w * cost.seconds
    names = set(stage.operators)
    position = [index for index, operator in enumerate(problem.graph.operators) if operator.name in names]
    return math.fsum(measured[index] for index in position) + (active_w or 0.0) * cost.transfer_s


def require_energy(problem: Problem) -> None:
    """Raises ProfileError where energy is asked for and nothing says what a device draws."""
    for device in problem.platform.devices:
        if device.active_w is None and problem.profile.device(device.name).joules is None:
            raise ProfileError(
                f"objective energy: nothing is known of the power of device {device.name}; give `active_w` in "
                "the platform file, or profile on a machine with a power sensor"
            )
