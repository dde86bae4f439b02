"""The joules of a frame from the seconds that a run measured and the watts that its platform states.

That is no measurement of energy, and is never called one; it serves where there is no sensor. Read next:
`runtime/metering.py`, which measures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace

from tvm_pipeline.core.frame_energy import FrameEnergy
from tvm_pipeline.core.plan import Plan, Prediction
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.statistics import RunStatistics
from tvm_pipeline.cost.device_costs import idle_w


def energy_by_watts(problem: Problem, plan: Plan, statistics: RunStatistics) -> FrameEnergy | None:
    """Return `idle_w` x period + the sum of `active_w` x busy seconds a frame, over the devices of the stages.

    Busy seconds are the medians that the run measured, of computing and of transfers. A replica is busy for its share
    of the frames. Where the idle power is not known, it counts as 0.

    Returns:
        The joules of a frame; None where a device of the plan states no `active_w`, or too few frames came out.
    """
    placed = [(index, name) for index, stage in enumerate(plan.stages) for name in stage.devices]
    if not statistics.throughput_fps or len(placed) != len(statistics.stages):
        return None  # between two plans, the stages may be those of the other one
    frames: dict[int, int] = defaultdict(int)
    for found in statistics.stages:
        frames[found.stage] += found.frames
    parts_j = []
    for (index, name), found in zip(placed, statistics.stages, strict=True):
        active_w = problem.platform.device(name).active_w
        if active_w is None or found.stage != index or not frames[index]:
            return None
        parts_j.append(active_w * (found.compute_s + found.transfer_s) * found.frames / frames[index])
    active_j = math.fsum(parts_j)
    return FrameEnergy(active_j + idle_w(problem) / statistics.throughput_fps, active_j)


def at_pace(problem: Problem, predicted: Prediction, pace_fps: float) -> Prediction:
    """Return the prediction of frames that come at a rate: the idle machine counts until the next one comes."""
    full_fps = predicted.throughput_fps
    if full_fps is None or full_fps <= pace_fps:
        return predicted
    waited_j = idle_w(problem) * (1 / pace_fps - 1 / full_fps)
    energy_j = None if predicted.energy_j is None else predicted.energy_j + waited_j
    return replace(predicted, throughput_fps=pace_fps, energy_j=energy_j)
