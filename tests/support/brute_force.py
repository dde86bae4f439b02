"""Every plan there is, for problems small enough to write them all down; `evaluate` judges each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tvm_pipeline.errors import PlanError
from tvm_pipeline.evaluate import evaluate
from tvm_pipeline.plan import Prediction, Problem, Stage


def every_chain(problem: Problem, stages: int | None, *, again: bool) -> Iterator[tuple[Stage, ...]]:
    """Every way to cut the operators, in the graph's order, into consecutive stages, on every choice of devices.

    Args:
        stages: how many; None for any number.
        again: whether a device may come again (not in consecutive stages); else each serves one stage.
    """
    names = [operator.name for operator in problem.graph.operators]
    devices = [device.name for device in problem.platform.devices]
    for count in range(1, len(names) + 1) if stages is None else [stages]:
        for cuts in itertools.combinations(range(1, len(names)), count - 1):
            ends = [0, *cuts, len(names)]
            for chosen in itertools.product(devices, repeat=count):
                if again and any(a == b for a, b in itertools.pairwise(chosen)):
                    continue
                if not again and len(set(chosen)) < count:
                    continue
                yield tuple(
                    Stage((device,), tuple(names[start:end]))
                    for device, (start, end) in zip(chosen, itertools.pairwise(ends), strict=True)
                )


def every_replication(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """The whole model on every set of two or more devices that may work together."""
    names = tuple(operator.name for operator in problem.graph.operators)
    devices = [device.name for device in problem.platform.devices]
    for size in range(2, len(devices) + 1):
        for group in itertools.combinations(devices, size):
            if verdict(problem, (Stage(group, names),)) is not None:
                yield (Stage(group, names),)


def verdict(problem: Problem, stages: tuple[Stage, ...]) -> Prediction | None:
    """What `evaluate` says of a plan; None where it refuses it."""
    try:
        return evaluate(problem, stages).predicted
    except PlanError:
        return None


def figure(problem: Problem, predicted: Prediction) -> float:
    """The objective's figure, signed so that less is better."""
    match problem.objective:
        case "throughput":
            return -predicted.throughput_fps
        case "latency":
            return predicted.latency_s
        case "energy":
            assert predicted.energy_j is not None
            return predicted.energy_j


def least(problem: Problem, plans: Iterator[tuple[Stage, ...]]) -> float | None:
    """The best figure of all plans that `evaluate` allows; None where it allows none."""
    allowed = (verdict(problem, stages) for stages in plans)
    return min((figure(problem, predicted) for predicted in allowed if predicted is not None), default=None)
