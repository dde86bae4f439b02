"""The figures of a problem as arrays over a chain: what the chain schedulers add up.

The graph's topological order is taken as a chain of N operators; a cut at position i lies in front of
operator i, and all tensors alive there cross it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tvm_pipeline.evaluate import busy_factor
from tvm_pipeline.graph import crossing_tensors
from tvm_pipeline.plan import Problem

Floats = npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64] | int


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """A problem's costs on a chain of N operators and D devices.

    Attributes:
        prefix: D x (N+1) cumulative cost of the operators on each device.
        receive: D x D x (N+1); `receive[p, d, i]` is what d pays to take over from p at position i.
        blocked: D x (N+1); how many of the first i operators d cannot run.
        param_bytes: N+1 cumulative bytes of parameters.
        capacity: D; bytes of parameters that fit each device.
    """

    prefix: Floats
    receive: Floats
    blocked: Floats
    param_bytes: Floats
    capacity: Floats

    def between(self, device: int, start: Positions, end: Positions) -> Floats:
        """Cost of the operators start..end-1 on `device`; infinite where it cannot run or hold them."""
        cost = self.prefix[device, end] - self.prefix[device, start]
        held = self.param_bytes[end] - self.param_bytes[start]
        impossible = (self.blocked[device, end] > self.blocked[device, start]) | (held > self.capacity[device])
        return np.where(impossible, np.inf, cost)


def chain_costs(problem: Problem, devices: Sequence[str], working: int) -> ChainCosts:
    """What adds up for the problem's objective on `devices`, `working` of which work at the same time.

    Throughput: seconds of a busy machine. Latency: seconds of an idle one. Energy: joules as measured, else
    active power times seconds; a transfer draws the receiver's power.
    """
    match problem.objective:
        case "throughput":
            scale = [busy_factor(problem, name, working) for name in devices]
        case "latency":
            scale = [1.0 for _ in devices]
        case "energy":
            scale = [problem.platform.device(name).active_w or 0.0 for name in devices]
    operators = problem.graph.operators
    boundaries = crossing_tensors(problem.graph, [[operator.name] for operator in operators])
    crossing = [sum(tensor.bytes for tensor in boundary) for boundary in boundaries]
    profiles = [problem.profile.device(name) for name in devices]
    figures = [[(s or 0.0) * factor for s in p.seconds] for p, factor in zip(profiles, scale, strict=True)]
    if problem.objective == "energy":
        figures = [list(p.joules or row) for p, row in zip(profiles, figures, strict=True)]
    limits = [problem.platform.device(name).memory_bytes for name in devices]
    return ChainCosts(
        prefix=_cumulated(figures),
        receive=np.array(
            [
                [
                    [problem.link(source, name).seconds(size) * factor for size in crossing]
                    for name, factor in zip(devices, scale, strict=True)
                ]
                for source in devices
            ]
        ),
        blocked=_cumulated([[s is None for s in p.seconds] for p in profiles]),
        param_bytes=_cumulated([[operator.param_bytes for operator in operators]])[0],
        capacity=np.array([np.inf if limit is None else limit for limit in limits], dtype=float),
    )


def _cumulated(rows: Sequence[Sequence[Any]]) -> Floats:
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1, dtype=float)], axis=1)
