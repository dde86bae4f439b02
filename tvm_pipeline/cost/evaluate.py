"""What a plan costs, recomputed from the graph, the platform and the profile alone.

This is the one judge of every scheduler: no scheduler's own figure is trusted. The model of the runtime:

- A stage takes what just that stage was measured to take, else the sum of its operators' measured seconds on its
  device, or what the device's model says of the whole set, and before that receives every tensor that crosses the
  boundary in front of it, hop by hop, at the price of the link; the receiver pays.
- Replicas take frames as they become free, so a stage's rate is the sum of its replicas' rates. A device that
  serves several stages gives each frame the sum of their times. Frames are handed on in order: one that a fast
  replica finished waits for those before it, so the slowest replica is the latency and the rest is jitter.
- What several links or devices do over one bus takes turns there: the sum a frame needs of a bus is a pace, too. It is
  a bound, for turns may fall badly (`simulate.py` plays them): up to 22 % on modelled Edge TPUs on one hub.
- While n of the devices that can work at the same time do, each is slower by its measured `busy_factor`,
  in proportion to how many of the others work. A single frame (latency, energy) meets idle devices.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tvm_pipeline.core.graph import OperatorGraph, Tensor, crossing_tensors, handed_on_bytes, readers_of
from tvm_pipeline.core.plan import Plan, Prediction, Problem, Stage
from tvm_pipeline.core.platform import Device, Platform, disjoint_sets
from tvm_pipeline.errors import GraphError, OptionError, PlanError, PlatformError, ProfileError
from tvm_pipeline.memory import stage_memory as memory


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
    """The prediction, and what it is made of.

    Attributes:
        bottleneck: index of the slowest stage.
        bus_s: seconds a frame needs of each bus; one may be slower than every stage, and then sets the pace.
        overtaking: for each stage, how many frames may be done there before one that came earlier is.
    """

    predicted: Prediction
    costs: tuple[StageCost, ...]
    bottleneck: int
    bus_s: dict[str, float] = field(default_factory=dict)
    overtaking: tuple[int, ...] = ()


def evaluate(problem: Problem, stages: tuple[Stage, ...]) -> Evaluation:
    """Judges `stages` as a plan for `problem`.

    Raises:
        PlanError: the stages do not fit the graph, the platform or a limit of the problem; the message names the
            operator, device or limit.
    """
    boundaries = check_stages(problem.graph, problem.platform, stages)
    if problem.children_together:
        _check_children(problem.graph, stages)
    if problem.counts_activations:
        _check_activations(problem, stages)
    predicted = _predicted_bytes(problem, stages)
    used = tuple(dict.fromkeys(name for stage in stages for name in stage.devices))
    if any(problem.measured(name) is None and problem.platform.device(name).model is None for name in used):
        return Evaluation(predicted, (), 0)
    _check_caches(problem, stages, used)
    alone = _stage_costs(problem, stages, boundaries, dict.fromkeys(used, 1.0))
    busy = _stage_costs(problem, stages, boundaries, {name: busy_factor(problem, name, len(used)) for name in used})

    device_load_s: dict[str, float] = defaultdict(float)
    for cost in busy:
        device_load_s[cost.device] += cost.seconds
    rates = [sum(1 / max(device_load_s[name], 1e-12) for name in stage.devices) for stage in stages]
    bottleneck = min(range(len(stages)), key=rates.__getitem__)
    bus_s = _bus_seconds(problem, stages, boundaries, busy)
    slowest = [max(c.seconds for c in alone if c.stage == i) for i in range(len(stages))]
    fastest = [min(c.seconds for c in alone if c.stage == i) for i in range(len(stages))]
    predicted = replace(
        predicted,
        throughput_fps=min(rates[bottleneck], 1 / max(max(bus_s.values(), default=0.0), 1e-12)),
        latency_s=sum(slowest),
        jitter_s=sum(slowest) - sum(fastest),
        energy_j=_energy_j(problem, stages, alone),
    )
    _check_limits(problem, predicted)
    return Evaluation(predicted, tuple(busy), bottleneck, bus_s, _overtaking(stages, busy))


def _check_caches(problem: Problem, stages: tuple[Stage, ...], used: tuple[str, ...]) -> None:
    for name in used:
        model = problem.platform.device(name).model
        cached = problem.measured(name) is None and model is not None and model.cached_bytes is not None
        if cached and sum(name in stage.devices for stage in stages) > 1:
            raise PlanError(f"device {name} serves two stages, and its model does not say how they share its cache")


def _check_limits(problem: Problem, predicted: Prediction) -> None:
    # A millionth of a millionth is the rounding of another order of summation.
    fps, latency_s = predicted.throughput_fps, predicted.latency_s
    floor_fps, most_s = problem.min_throughput_fps, problem.max_latency_s
    if floor_fps is not None and fps is not None and fps < floor_fps * (1 - 1e-9):
        raise PlanError(f"the plan makes {fps:.6g} frames a second, --min-throughput asks for {floor_fps:.6g}")
    if most_s is not None and latency_s is not None and latency_s > most_s * (1 + 1e-9):
        raise PlanError(f"a frame takes {latency_s:.6g} s, --max-latency allows {most_s:.6g}")


def _check_children(graph: OperatorGraph, stages: tuple[Stage, ...]) -> None:
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage.operators}
    for name, readers in readers_of(graph).items():
        if len({stage_of[reader] for reader in readers}) > 1:
            raise PlanError(f"the operators that read {name} stand in several stages, --children-together forbids it")


def _check_activations(problem: Problem, stages: tuple[Stage, ...]) -> None:
    """Parameters stay from stage to stage of a device; activations are those of the stage that runs."""
    graph = problem.graph
    for name in dict.fromkeys(name for stage in stages for name in stage.devices):
        capacity = problem.platform.device(name).memory_bytes
        if capacity is None:
            continue
        held = held_bytes(graph, [stage for stage in stages if name in stage.devices])
        for index, stage in enumerate(stages):
            if name not in stage.devices:
                continue
            if memory.activation_bytes(graph, stage.operators, capacity - held) > capacity - held:
                raise PlanError(
                    f"stage {index} does not fit on device {name}: {held} bytes of parameters and "
                    f"{memory.needed(graph, stage.operators)} are more than its {capacity}; make the stage smaller, or "
                    "give the device more memory_bytes"
                )


def held_bytes(graph: OperatorGraph, stages: Iterable[Stage]) -> int:
    """Bytes of parameters of all these stages."""
    members = {name for stage in stages for name in stage.operators}
    return sum(operator.param_bytes for operator in graph.operators if operator.name in members)


def _predicted_bytes(problem: Problem, stages: tuple[Stage, ...]) -> Prediction:
    param_bytes = {operator.name: operator.param_bytes for operator in problem.graph.operators}
    held = [sum(param_bytes[name] for name in stage.operators) for stage in stages]
    caches = [[problem.platform.device(name).cache_bytes or math.inf for name in stage.devices] for stage in stages]
    beyond = [max(0, size - min(row)) for size, row in zip(held, caches, strict=True)]
    stated = all(problem.platform.device(name).cache_bytes for stage in stages for name in stage.devices)
    return Prediction(
        memory_bytes=max(held),
        dram_bytes=int(sum(beyond)) if stated else None,
        communication_bytes=max(handed_on_bytes(problem.graph, [stage.operators for stage in stages]), default=0),
    )


def judged(problem: Problem, plan: Plan) -> Plan:
    """The plan with its prediction recomputed."""
    return replace(plan, predicted=evaluate(problem, plan.stages).predicted)


def busy_factor(problem: Problem, name: str, working: int) -> float:
    """How much slower device `name` is while `working` devices, itself among them, work at the same time."""
    measured = problem.measured(name)
    if measured is None:
        return 1.0
    device = problem.platform.device(name)
    others = max(len(group) for group in disjoint_sets(problem.platform.devices) if device in group) - 1
    share = min((working - 1) / others, 1.0) if others else 0.0
    return 1 + (measured.busy_factor - 1) * share


def check_stages(graph: OperatorGraph, platform: Platform, stages: tuple[Stage, ...]) -> list[list[Tensor]]:
    """The tensors that cross each boundary, see `crossing_tensors`.

    Raises:
        PlanError: the stages do not hold every operator once, in a legal order, on devices that exist.
    """
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
        boundaries = crossing_tensors(graph, [stage.operators for stage in stages])
    except GraphError as error:
        raise PlanError(f"the stages form a cycle or stand in the wrong order: {error}") from error
    _check_devices(graph, platform, stages)
    return boundaries


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
    for device in used.values():
        held = held_bytes(graph, [stage for stage in stages if device.name in stage.devices])
        if device.memory_bytes is not None and held > device.memory_bytes:
            raise PlanError(f"device {device.name} would hold {held} bytes of parameters and has {device.memory_bytes}")


def _replicated(stages: tuple[Stage, ...], device: str) -> bool:
    return any(device in stage.devices and len(stage.devices) > 1 for stage in stages)


def _stage_costs(
    problem: Problem, stages: tuple[Stage, ...], boundaries: list[list[Tensor]], factors: dict[str, float]
) -> list[StageCost]:
    """Compute and transfer seconds of each stage on each of its devices, each slowed by its factor."""
    position = {operator.name: index for index, operator in enumerate(problem.graph.operators)}
    crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
    costs: list[StageCost] = []
    for index, stage in enumerate(stages):
        upstream = [cost for cost in costs if cost.stage == index - 1]
        places = [position[name] for name in stage.operators]
        for name in stage.devices:
            # A frame comes from each upstream replica as often as that replica takes one.
            transfer_s = sum(
                problem.link(cost.device, name).seconds(crossing[index]) * share
                for cost, share in zip(upstream, _shares(upstream), strict=True)
            )
            model = problem.platform.device(name).model
            compute_s = problem.profile.segment_s(name, stage.operators)
            if compute_s is None:
                compute_s = _compute_s(problem, name, places, index)
                if model and problem.measured(name) is None:
                    transfer_s += model.transfer_s(crossing[index], crossing[index + 1])
            costs.append(StageCost(index, name, compute_s * factors[name], transfer_s * factors[name]))
    return costs


def _compute_s(problem: Problem, name: str, places: list[int], stage: int) -> float:
    """Seconds of the operators at `places` of the graph on an idle device."""
    operators = problem.graph.operators
    measured, model = problem.measured(name), problem.platform.device(name).model
    if measured is None and model is not None:
        chosen = [operators[place] for place in places]
        return model.seconds(len(chosen), sum(o.macs for o in chosen), sum(o.param_bytes for o in chosen))
    seconds = problem.profile.device(name).seconds
    for place in places:
        if seconds[place] is None:
            raise PlanError(f"device {name} cannot run operator {operators[place].name} of stage {stage}")
    return sum(seconds[place] or 0.0 for place in places)


def _shares(costs: list[StageCost]) -> list[float]:
    """The part of the frames that each replica of a stage takes: as it is fast."""
    rates = [1 / max(cost.seconds, 1e-12) for cost in costs]
    return [rate / sum(rates) for rate in rates]


def _bus_seconds(
    problem: Problem, stages: tuple[Stage, ...], boundaries: list[list[Tensor]], busy: list[StageCost]
) -> dict[str, float]:
    """Seconds a frame needs of each bus: the links that name it, and the overflow of the devices that do."""
    needs: dict[str, float] = defaultdict(float)
    param_bytes = {operator.name: operator.param_bytes for operator in problem.graph.operators}
    upstream: list[tuple[str, float]] = []
    for index, stage in enumerate(stages):
        received = sum(tensor.bytes for tensor in boundaries[index])
        held = sum(param_bytes[name] for name in stage.operators)
        costs = [cost for cost in busy if cost.stage == index]
        here = [(cost.device, share) for cost, share in zip(costs, _shares(costs), strict=True)]
        for name, share in here:
            for source, source_share in upstream:
                link = problem.link(source, name)
                if link.bus:
                    needs[link.bus] += link.seconds(received) * share * source_share
            device = problem.platform.device(name)
            if device.bus and device.model and problem.measured(name) is None:
                needs[device.bus] += device.model.spill_s(held) * share
        upstream = here
    return dict(needs)


def _overtaking(stages: tuple[Stage, ...], busy: list[StageCost]) -> tuple[int, ...]:
    """For each stage, the frames its other replicas finish while the slowest is at one."""
    counts = []
    for index in range(len(stages)):
        seconds = sorted(max(cost.seconds, 1e-12) for cost in busy if cost.stage == index)
        counts.append(sum(math.ceil(seconds[-1] / other) - 1 for other in seconds[:-1]))
    return tuple(counts)


def _energy_j(problem: Problem, stages: tuple[Stage, ...], alone: list[StageCost]) -> float | None:
    """Joules a frame: measured where a sensor was, else active power times seconds; None where neither is."""
    total = 0.0
    for index, stage in enumerate(stages):
        costs = [cost for cost in alone if cost.stage == index]
        for cost, share in zip(costs, _shares(costs), strict=True):
            joules = _operators_j(problem, stage, cost)
            if joules is None:
                return None
            total += joules * share
    return total


def _operators_j(problem: Problem, stage: Stage, cost: StageCost) -> float | None:
    active_w = problem.platform.device(cost.device).active_w
    profile = problem.measured(cost.device)
    measured = profile.joules if profile else None
    if measured is None:
        return None if active_w is None else active_w * cost.seconds
    names = set(stage.operators)
    position = [index for index, operator in enumerate(problem.graph.operators) if operator.name in names]
    return math.fsum(measured[index] for index in position) + (active_w or 0.0) * cost.transfer_s


def require_caches(problem: Problem) -> None:
    """Raises OptionError where overflow is asked for and a device does not say how much it keeps."""
    for device in problem.platform.devices:
        if device.cache_bytes is None:
            raise OptionError(
                f"--objective {problem.objective}: how many bytes of parameters device {device.name} keeps is "
                "not known; give `cache_bytes` in the platform file"
            )


def require_energy(problem: Problem) -> None:
    """Raises ProfileError where energy is asked for and nothing says what a device draws."""
    for device in problem.platform.devices:
        profile = problem.measured(device.name)
        if device.active_w is None and (profile is None or profile.joules is None):
            raise ProfileError(
                f"objective energy: nothing is known of the power of device {device.name}; give `active_w` in "
                "the platform file, or profile on a machine with a power sensor"
            )
