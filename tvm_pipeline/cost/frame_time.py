"""Where the time of a frame goes: the seconds of each device between two frames, by what it does in them.

Next: `evaluate.py`, which gives the seconds of the stages; `report/frame_bars.py`, which draws them.
"""

from __future__ import annotations

from collections import defaultdict

from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.cost.evaluate import evaluate

MODEL, TRANSFER, IDLE = "model", "transfer", "idle"


def frame_time(
    problem: Problem, stages: tuple[Stage, ...], throughput_fps: float | None = None
) -> dict[str, dict[str, float]]:
    """Return for each device of a plan the seconds that it spends on each part of a frame.

    The parts are the host operators by name, `model`, `transfer` and, with what is left of the time between two frames,
    `idle`. A replica spends its share of the frames.

    Args:
        throughput_fps: frames a second, such as a run measured; those that are predicted unless given. The devices'
            seconds are as predicted.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> stages = Stage(("d0",), ("double",)), Stage(("d1",), ("increment",))
        >>> frame_time(example_problem(), stages, throughput_fps=40)["d0"]
        {'model': 0.02, 'transfer': 0.0, 'idle': 0.005}
    """
    evaluation = evaluate(problem, stages)
    by_name = {operator.name: operator for operator in problem.graph.operators}
    found: dict[str, dict[str, float]] = {}
    for cost in evaluation.costs:
        parts = found.setdefault(cost.device, defaultdict(float))
        costs = cost_of(problem, cost.device)
        operators = [by_name[name] for name in stages[cost.stage].operators]
        alone_s = [costs.alone_s(operator) for operator in operators]
        scale = cost.share * cost.compute_s / max(sum(alone_s), 1e-12)
        for operator, seconds in zip(operators, alone_s, strict=True):
            parts[operator.name if operator.is_host else MODEL] += seconds * scale
        parts[TRANSFER] += cost.transfer_s * cost.share
    rate = throughput_fps or evaluation.predicted.throughput_fps or 0.0
    for parts in found.values():
        for part in parts:
            parts[part] /= problem.graph.batch
        parts[IDLE] = max(0.0, (1 / rate if rate else 0.0) - sum(parts.values()))
    return {device: dict(parts) for device, parts in found.items()}
