"""The seconds of a plan's stages on their devices, and the share of the frames that each replica takes.

Next: `shares.py`, the rule by which replicas share frames; `evaluate.py`, the figures of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tvm_pipeline.core.graph import Operator, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import DeviceCosts
from tvm_pipeline.cost.shares import shared_frames
from tvm_pipeline.errors import PlanError

# The rounds in which the shares of replicas settle; they take two where transfers do not depend on the sender.
MOST_ROUNDS = 100

Loads = tuple[float, float]  # seconds of a device, and of the bus of its copies
NONE: Loads = 0.0, 0.0


@dataclass(frozen=True, slots=True)
class StageCost:
    """The seconds of a frame in one stage on one of its devices, while the whole pipeline is busy.

    Attributes:
        share: the part of the frames that this device takes: 1 unless the stage has replicas.
        copies_s: the seconds for which a frame occupies the bus of the device's copies, where the device computes
            beside them; None where transfers occupy the device.
    """

    stage: int
    device: str
    compute_s: float
    transfer_s: float
    share: float = 1.0
    copies_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.compute_s + self.transfer_s

    @property
    def loads_s(self) -> Loads:
        """The seconds for which a frame occupies the device, and those for which it occupies the bus of its copies."""
        return (self.seconds, 0.0) if self.copies_s is None else (self.compute_s, self.copies_s)


@dataclass(frozen=True, slots=True)
class Part:
    """A stage with its operators and with the bytes that it receives and sends."""

    stage: Stage
    operators: tuple[Operator, ...]
    received_bytes: int
    sent_bytes: int


def parts_of(problem: Problem, stages: tuple[Stage, ...], boundaries: list[list[Tensor]]) -> list[Part]:
    by_name = {operator.name: operator for operator in problem.graph.operators}
    crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
    return [
        Part(stage, tuple(by_name[name] for name in stage.operators), received, sent)
        for stage, (received, sent) in zip(stages, pairwise(crossing), strict=True)
    ]


def stage_costs(
    problem: Problem, parts: list[Part], costs: Mapping[str, DeviceCosts], factors: Mapping[str, float]
) -> list[StageCost]:
    """Return compute and transfer seconds of each stage on each of its devices, each slowed by its factor.

    The frames that a replica takes depend on its other stages, whose transfers depend on who sends the frames to them.
    So both are computed in turns, at first as if the replica served no other stage.
    """
    stages = tuple(part.stage for part in parts)
    replicas = {name for stage in stages if len(stage.devices) > 1 for name in stage.devices}
    fixed_s: dict[str, Loads] = {}
    for _ in range(MOST_ROUNDS):
        found = _costs_beside(problem, parts, costs, factors, fixed_s)
        others_s = {name: loads for name, loads in loads_alone(stages, found).items() if name in replicas}
        pairs = ((loads, fixed_s.get(name, NONE)) for name, loads in others_s.items())
        if all(math.isclose(s, before_s, rel_tol=1e-12) for pair in pairs for s, before_s in zip(*pair, strict=True)):
            break
        fixed_s = others_s
    return found


def _costs_beside(
    problem: Problem,
    parts: list[Part],
    costs: Mapping[str, DeviceCosts],
    factors: Mapping[str, float],
    fixed_s: Mapping[str, Loads],
) -> list[StageCost]:
    """Return the costs, with shares of frames as if the replicas spent `fixed_s` a frame on other stages."""
    found: list[StageCost] = []
    upstream: list[StageCost] = []
    for index, part in enumerate(parts):
        here = []
        for name in part.stage.devices:
            device, factor = costs[name], factors[name]
            compute_s, own_s = device.whole_s(part.stage.operators), 0.0
            if compute_s is None:
                compute_s = _compute_s(device, part, index)
                own_s = device.receive.seconds(part.received_bytes) + device.send.seconds(part.sent_bytes)
            # Each upstream replica sends the share of the frames that it computes.
            links = [(problem.link(cost.device, name), cost.share) for cost in upstream]
            of_links = [(link.seconds(part.received_bytes) * share, link.bus) for link, share in links]
            transfer_s = own_s + sum(seconds for seconds, _ in of_links)
            copies_s = own_s + sum(seconds for seconds, bus in of_links if not bus) if device.copies_bus else None
            here.append(StageCost(index, name, compute_s * factor, transfer_s * factor, copies_s=copies_s))
        if len(here) > 1:
            _, shares = shares_beside(here, fixed_s)
            here = [replace(cost, share=share) for cost, share in zip(here, shares, strict=True)]
        found += here
        upstream = here
    return found


def shares_beside(costs: Sequence[StageCost], fixed_s: Mapping[str, Loads]) -> tuple[float, list[float]]:
    """Return `shared_frames` of a stage's replicas, which spend `fixed_s` a frame on stages that they serve alone."""
    return shared_frames([list(zip(cost.loads_s, fixed_s.get(cost.device, NONE), strict=True)) for cost in costs])


def loads_alone(stages: Sequence[Stage], costs: Iterable[StageCost]) -> dict[str, Loads]:
    """Return the loads of each device in the stages that it serves alone, added up."""
    loads: dict[str, Loads] = {}
    for cost in costs:
        if len(stages[cost.stage].devices) == 1:
            device_s, copies_s = loads.get(cost.device, NONE)
            loads[cost.device] = device_s + cost.loads_s[0], copies_s + cost.loads_s[1]
    return loads


def _compute_s(costs: DeviceCosts, part: Part, stage: int) -> float:
    for operator in part.operators:
        if not costs.can_run(operator):
            raise PlanError(f"device {costs.device.name} cannot run operator {operator.name} of stage {stage}")
    return costs.operators_s(part.operators)
