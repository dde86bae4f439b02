"""The seconds of a plan's stages on their devices, and the share of the frames that each replica takes.

Next: `shares.py`, the rule by which replicas share frames; `evaluate.py`, the figures of a plan.
"""

from __future__ import annotations

import math
from collections import defaultdict
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


@dataclass(frozen=True, slots=True)
class StageCost:
    """The seconds of a frame in one stage on one of its devices, while the whole pipeline is busy.

    Attributes:
        share: the part of the frames that this device takes: 1 unless the stage has replicas.
        concurrent: whether a bus carries the transfers, so that they do not occupy the device.
    """

    stage: int
    device: str
    compute_s: float
    transfer_s: float
    share: float = 1.0
    concurrent: bool = False

    @property
    def seconds(self) -> float:
        return self.compute_s + self.transfer_s

    @property
    def occupied_s(self) -> float:
        """The seconds for which a frame occupies the device."""
        return self.compute_s if self.concurrent else self.seconds


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
    fixed_s: dict[str, float] = {}
    for _ in range(MOST_ROUNDS):
        found = _costs_beside(problem, parts, costs, factors, fixed_s)
        others_s = {name: s for name, s in seconds_alone(stages, found).items() if name in replicas}
        if all(math.isclose(s, fixed_s.get(name, 0.0), rel_tol=1e-12) for name, s in others_s.items()):
            break
        fixed_s = others_s
    return found


def _costs_beside(
    problem: Problem,
    parts: list[Part],
    costs: Mapping[str, DeviceCosts],
    factors: Mapping[str, float],
    fixed_s: Mapping[str, float],
) -> list[StageCost]:
    """Return the costs, with shares of frames as if the replicas spent `fixed_s` a frame on other stages."""
    found: list[StageCost] = []
    upstream: list[StageCost] = []
    for index, part in enumerate(parts):
        here = []
        for name in part.stage.devices:
            # Each upstream replica sends the share of the frames that it computes.
            transfer_s = sum(
                problem.link(cost.device, name).seconds(part.received_bytes) * cost.share for cost in upstream
            )
            device = costs[name]
            compute_s = device.whole_s(part.stage.operators)
            if compute_s is None:
                compute_s = _compute_s(device, part, index)
                transfer_s += device.receive.seconds(part.received_bytes) + device.send.seconds(part.sent_bytes)
            concurrent = bool(device.copies_bus)
            here.append(
                StageCost(index, name, compute_s * factors[name], transfer_s * factors[name], concurrent=concurrent)
            )
        if len(here) > 1:
            _, shares = shared_frames([(cost.occupied_s, fixed_s.get(cost.device, 0.0)) for cost in here])
            here = [replace(cost, share=share) for cost, share in zip(here, shares, strict=True)]
        found += here
        upstream = here
    return found


def seconds_alone(stages: Sequence[Stage], costs: Iterable[StageCost]) -> dict[str, float]:
    """Return the seconds for which a frame occupies each device in the stages that it serves alone."""
    seconds: dict[str, float] = defaultdict(float)
    for cost in costs:
        if len(stages[cost.stage].devices) == 1:
            seconds[cost.device] += cost.occupied_s
    return seconds


def _compute_s(costs: DeviceCosts, part: Part, stage: int) -> float:
    for operator in part.operators:
        if not costs.can_run(operator):
            raise PlanError(f"device {costs.device.name} cannot run operator {operator.name} of stage {stage}")
    return costs.operators_s(part.operators)
