"""The judge of plans: `evaluate` computes what a plan costs from the graph, the platform and the profile alone.

The plans of every scheduler are judged here; no scheduler's own figure is trusted. This is the model of the runtime:

- A stage computes for as long as it was measured to take as a whole. Where it was not, it computes for the sum of its
  operators' measured seconds on its device, or for as long as the device's model says. Before that it receives every
  tensor that crosses the boundary in front of it, hop by hop; the receiver spends the seconds of the link.
- Replicas take frames as they become free, so a stage's rate is the sum of its replicas' rates. A device that
  serves several stages spends the sum of their seconds on each frame. Frames leave a stage in order: a frame that a
  fast replica finished waits for the frames before it. The slowest replica gives the latency, the others the jitter.
- A replica that serves other stages alone does these first, and takes as many frames of the replicated stage as its
  time allows (`shares.py`). It replicates one stage at most. A stage with an ordered operator has no replicas.
- The lock of the Python interpreter is a bus, too: for each frame operators hold it for `lock_s`, one at a time.
- A call of a graph with a batch computes several frames together: they have its latency, and share its energy.
- Links and devices that share a bus take turns on it, so the seconds that a frame needs of a bus bound the throughput,
  too. It is only a bound, because turns may fall badly: modelled Edge TPUs on one hub were up to 22 % slower when the
  turns were simulated (`simulate.py`).
- Of the devices that can work at the same time, each one that works is slower by its measured `busy_factor`, in
  proportion to how many of the others work. A single frame (latency, active energy) meets idle devices.
- Energy is the idle power of the machine times the seconds between frames, and the active energy of the stages and
  their transfers. The seconds between frames are those of a full pipeline: a slower source of frames, for which the
  machine waits, costs more idle energy than that.

Next: `stage_costs.py`, the seconds of stages; `uncertainty.py`, how far a prediction may be off.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tvm_pipeline.core.graph import (
    OperatorGraph,
    Tensor,
    edge_communication_bytes,
    handed_on_bytes,
    readers_of,
)
from tvm_pipeline.core.partition import check_partition
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem, may_exceed
from tvm_pipeline.cost.batches import figures_of_frames, of_calls
from tvm_pipeline.cost.device_costs import INTERPRETER, DeviceCosts, busy_factor, cost_of, idle_w, lock_s
from tvm_pipeline.cost.stage_costs import Loads, Part, StageCost, loads_alone, parts_of, shares_beside, stage_costs
from tvm_pipeline.cost.uncertainty import uncertainty
from tvm_pipeline.errors import GraphError, PlanError, PlatformError
from tvm_pipeline.memory import stage_memory


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The prediction, which is of frames, and what it is made of, which is of calls (`OperatorGraph.batch`).

    Attributes:
        bottleneck: index of the slowest stage.
        bus_s: seconds that a frame needs of each bus; the slowest bus bounds the throughput as the slowest stage does.
            The bus `interpreter` is the lock of the Python interpreter, where the profile has figures of it.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> stages = Stage(("d0",), ("double",)), Stage(("d1",), ("increment",))
        >>> judged = evaluate(example_problem(), stages)
        >>> judged.bottleneck, [(cost.device, cost.seconds) for cost in judged.costs]
        (0, [('d0', 0.02), ('d1', 0.02)])
    """

    predicted: Prediction
    costs: tuple[StageCost, ...]
    bottleneck: int
    bus_s: dict[str, float] = field(default_factory=dict)


def evaluate(problem: Problem, stages: tuple[Stage, ...]) -> Evaluation:
    """Return what `stages` cost as a plan for `problem`.

    Raises:
        PlanError: the stages do not fit the graph, the platform or a limit of the problem; the message names the
            operator, device or limit.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> evaluate(example_problem(), (Stage(("d0",), ("double", "increment")),)).predicted.latency_s
        0.06
        >>> evaluate(example_problem(), (Stage(("d0",), ("double",)),))
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.PlanError: operator increment is in no stage (1 missing in all)
    """
    if (batch := problem.graph.batch) > 1:
        found = evaluate(of_calls(problem), stages)
        return replace(found, predicted=figures_of_frames(found.predicted, batch))
    boundaries = check_stages(problem.graph, problem.platform, stages)
    if problem.children_together:
        _check_children(problem.graph, stages)
    if problem.counts_activations:
        _check_activations(problem, stages)
    predicted = _predicted_bytes(problem, stages)
    costs = {name: cost_of(problem, name) for stage in stages for name in stage.devices}
    if not all(cost.is_known for cost in costs.values()):
        return Evaluation(predicted, (), 0)
    _check_shared_caches(stages, costs)
    parts = parts_of(problem, stages, boundaries)
    alone = stage_costs(problem, parts, costs, dict.fromkeys(costs, 1.0))
    busy = stage_costs(problem, parts, costs, {name: busy_factor(problem, name, len(costs)) for name in costs})

    fixed_s = loads_alone(stages, busy)
    rates = [_rate([cost for cost in busy if cost.stage == i], fixed_s) for i in range(len(stages))]
    bottleneck = min(range(len(stages)), key=rates.__getitem__)
    bus_s = _bus_seconds(problem, parts, costs, busy)
    slowest = [max(c.seconds for c in alone if c.stage == i) for i in range(len(stages))]
    fastest = [min(c.seconds for c in alone if c.stage == i) for i in range(len(stages))]
    throughput_fps = min(rates[bottleneck], 1 / max(max(bus_s.values(), default=0.0), 1e-12))
    predicted = replace(
        predicted,
        throughput_fps=throughput_fps,
        latency_s=sum(slowest),
        jitter_s=sum(slowest) - sum(fastest),
        energy_j=_energy_j(parts, costs, alone, idle_w(problem) / throughput_fps),
        uncertainty=uncertainty(
            [(costs[c.device], parts[c.stage].operators, c.share) for c in busy],
            {c.device: 1 / max(c.loads_s[0], 1e-12) for c in busy if c.stage == bottleneck and c.share},
        ),
    )
    _check_limits(problem, predicted)
    return Evaluation(predicted, tuple(busy), bottleneck, bus_s)


def _check_shared_caches(stages: tuple[Stage, ...], costs: Mapping[str, DeviceCosts]) -> None:
    for name, cost in costs.items():
        if math.isfinite(cost.cached_bytes) and sum(name in stage.devices for stage in stages) > 1:
            raise PlanError(f"device {name} serves two stages, and its model does not say how they share its cache")


def _check_limits(problem: Problem, predicted: Prediction) -> None:
    # A sum in another order of its terms differs by less than a billionth (1e-9) of it. Searches sum in other orders.
    fps, latency_s = predicted.throughput_fps, predicted.latency_s
    floor_fps, most_s = problem.min_throughput_fps, problem.max_latency_s
    if floor_fps is not None and fps is not None and fps < floor_fps * (1 - 1e-9):
        raise PlanError(f"the plan makes {fps:.6g} frames a second, `min_throughput_fps` asks for {floor_fps:.6g}")
    if most_s is not None and latency_s is not None and latency_s > most_s * (1 + 1e-9):
        raise PlanError(f"a frame takes {latency_s:.6g} s, `max_latency_s` allows {most_s:.6g}")


def _check_children(graph: OperatorGraph, stages: tuple[Stage, ...]) -> None:
    stage_of = {name: index for index, stage in enumerate(stages) for name in stage.operators}
    for name, readers in readers_of(graph).items():
        if len({stage_of[reader] for reader in readers}) > 1:
            raise PlanError(f"the operators that read {name} stand in several stages, `children_together` forbids it")


def _check_activations(problem: Problem, stages: tuple[Stage, ...]) -> None:
    """Raise PlanError where a stage needs more memory than a device has.

    A device holds the parameters of all its stages at any time, and the activations of the stage that runs.
    """
    graph = problem.graph
    for name in dict.fromkeys(name for stage in stages for name in stage.devices):
        capacity = problem.platform.device(name).memory_bytes
        if capacity is None:
            continue
        param_bytes = param_bytes_of(graph, [stage for stage in stages if name in stage.devices])
        for index, stage in enumerate(stages):
            if name not in stage.devices:
                continue
            try:
                peak = stage_memory.order_peak(graph, stage.operators)
            except GraphError as error:
                raise PlanError(f"stage {index} cannot run in its order: {error}") from error
            peak *= 2 if problem.platform.device(name).concurrent_copies else 1  # each of two workers has its own
            if param_bytes + peak > capacity:
                raise PlanError(
                    f"stage {index} does not fit on device {name}: {param_bytes} bytes of parameters and {peak} of "
                    f"activations, in the order of the plan, are more than its {capacity}; plan again, for an order "
                    "that needs less, make the stage smaller, or give the device more memory_bytes"
                )


def param_bytes_of(graph: OperatorGraph, stages: Iterable[Stage]) -> int:
    """Return the bytes of the parameters of all these stages."""
    members = {name for stage in stages for name in stage.operators}
    return sum(operator.param_bytes for operator in graph.operators if operator.name in members)


def _predicted_bytes(problem: Problem, stages: tuple[Stage, ...]) -> Prediction:
    by_name = {operator.name: operator.param_bytes for operator in problem.graph.operators}
    sizes = [sum(by_name[name] for name in stage.operators) for stage in stages]
    caches = [[problem.platform.device(name).cache_bytes or math.inf for name in stage.devices] for stage in stages]
    beyond = [max(0, size - min(row)) for size, row in zip(sizes, caches, strict=True)]
    stated = all(problem.platform.device(name).cache_bytes for stage in stages for name in stage.devices)
    groups = [stage.operators for stage in stages]
    return Prediction(
        memory_bytes=max(sizes),
        dram_bytes=int(sum(beyond)) if stated else None,
        communication_bytes=max(handed_on_bytes(problem.graph, groups), default=0),
        edge_communication_bytes=max(edge_communication_bytes(problem.graph, groups), default=0),
    )


def idle_share(problem: Problem, predicted: Prediction) -> float:
    """Return the part of the predicted energy that the idle machine draws; 0 where one of the two is not known."""
    if not predicted.energy_j or not predicted.throughput_fps:
        return 0.0
    return idle_w(problem) / predicted.throughput_fps / predicted.energy_j


def judged(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with its prediction recomputed."""
    return replace(plan, predicted=evaluate(problem, plan.stages).predicted, batch=problem.graph.batch)


def check_stages(graph: OperatorGraph, platform: Platform, stages: tuple[Stage, ...]) -> list[list[Tensor]]:
    """Return the tensors that cross each boundary of the stages, see `crossing_tensors`.

    Raises:
        PlanError: the stages do not hold every operator once, in a legal order, on devices that exist.
    """
    for index, stage in enumerate(stages):
        if not stage.devices:
            raise PlanError(f"stage {index} has no operators or no devices")
    boundaries = check_partition(graph, [stage.operators for stage in stages])
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
            used[name] = device
    _check_replicas(graph, stages, used)
    for device in used.values():
        served = [stage for stage in stages if device.name in stage.devices]
        check_stages_of(device, len(served))
        param_bytes = param_bytes_of(graph, served)
        if device.memory_bytes is not None and param_bytes > device.memory_bytes:
            raise PlanError(
                f"device {device.name} would hold {param_bytes} bytes of parameters and has {device.memory_bytes}"
            )


def check_stages_of(device: Device, count: int) -> None:
    """Raise PlanError where the device would serve more stages than it may."""
    if device.most_stages is not None and count > device.most_stages:
        raise PlanError(f"device {device.name} would serve {count} stages, and its most_stages is {device.most_stages}")


def _check_replicas(graph: OperatorGraph, stages: tuple[Stage, ...], used: Mapping[str, Device]) -> None:
    """Raise PlanError where a stage cannot have several workers, or a device cannot be one of its replicas."""
    ordered = {operator.name for operator in graph.operators if operator.ordered}
    of_one = ordered | {operator.name for operator in graph.operators if operator.is_host}
    replica_of: dict[str, int] = {}
    for index, stage in enumerate(stages):
        for name in stage.devices:
            held = next((o for o in stage.operators if o in of_one), "") if used[name].concurrent_copies else ""
            if held:
                raise PlanError(
                    f"stage {index} holds operator {held}, of which one instance takes all frames in order, and device "
                    f"{name} has `concurrent_copies`, by which two workers take frames in turns; put the operator on "
                    "another device, or leave `concurrent_copies` out"
                )
        if len(stage.devices) == 1:
            continue
        first = next((name for name in stage.operators if name in ordered), None)
        if first is not None:
            raise PlanError(
                f"stage {index} holds the ordered operator {first} and runs on {len(stage.devices)} devices "
                f"({', '.join(stage.devices)}); one instance of it takes all frames, so give the stage one device"
            )
        for name in stage.devices:
            if name in replica_of:
                raise PlanError(
                    f"device {name} of stage {index} is a replica of stage {replica_of[name]} already; a device takes "
                    "part in one replicated stage, once"
                )
            replica_of[name] = index
    for name, index in replica_of.items():
        if may_exceed(graph, used[name]) and sum(name in stage.devices for stage in stages) > 1:
            raise PlanError(
                f"device {name} is a replica of stage {index} and serves another stage; plans of {graph.name} can need "
                "more than its memory_bytes, so it serves one"
            )


def _rate(costs: Sequence[StageCost], fixed_s: Mapping[str, Loads]) -> float:
    """Return the frames a second of one stage; `fixed_s` are the loads of stages that a device serves alone."""
    if len(costs) == 1:
        return 1 / max(fixed_s[costs[0].device][0], 1e-12)
    return shares_beside(costs, fixed_s)[0]


def _bus_seconds(
    problem: Problem, parts: list[Part], costs: Mapping[str, DeviceCosts], busy: list[StageCost]
) -> dict[str, float]:
    """Return the seconds that a frame needs of each bus: for links, concurrent copies, and parameters beyond caches."""
    needs: dict[str, float] = defaultdict(float)
    held_s = lock_s(problem)
    if held_s:
        needs[INTERPRETER] = held_s
    upstream: list[StageCost] = []
    for index, part in enumerate(parts):
        param_bytes = sum(operator.param_bytes for operator in part.operators)
        here = [cost for cost in busy if cost.stage == index]
        for cost in here:
            device = costs[cost.device]
            if cost.copies_s is not None:
                needs[device.copies_bus] += cost.copies_s * cost.share
            for source in upstream:
                link = problem.link(source.device, cost.device)
                if link.bus:
                    needs[link.bus] += link.seconds(part.received_bytes) * cost.share * source.share
            if device.shared_bus:
                needs[device.shared_bus] += device.spill_s(param_bytes) * cost.share
        upstream = here
    return dict(needs)


def _energy_j(
    parts: list[Part], costs: Mapping[str, DeviceCosts], alone: list[StageCost], idle_j: float
) -> float | None:
    """Return the joules of a frame, with those of the idle machine; None where nothing is known of a device's power."""
    total = idle_j
    for cost in alone:
        joules = costs[cost.device].energy_j(parts[cost.stage].operators, cost.compute_s, cost.transfer_s)
        if joules is None:
            return None
        total += joules * cost.share
    return total
