"""The baseline `even-parameters`: all segments have about the same bytes of parameters.

The Edge TPU compiler cuts in this way, as far as its documentation says. Its plans are fast where the seconds of a
segment are in proportion to its parameters.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.planning.baselines.segments import best_pipeline


def even_parameters(problem: Problem) -> Plan:
    """Cut the graph's order into segments of equal parameter bytes, on the devices in the platform's order.

    `edgetpu_compiler --num_segments` makes segments with "roughly the same amount of parameter data"
    (https://coral.ai/docs/edgetpu/pipeline/); its source is not public.

    Raises:
        InfeasibleError: there are too few devices, or they cannot run their segments or have no memory for them.
    """
    return best_pipeline(problem, "even-parameters", lambda devices: even_cuts(problem.graph, len(devices)))


def even_cuts(graph: OperatorGraph, segments: int) -> tuple[int, ...]:
    """Return the cuts: cut b is where the first operators reach b/segments of all bytes. No segment is empty."""
    # Bytes are multiplied by `segments`, so that a share of the total is a whole number.
    reached = [0, *accumulate(operator.param_bytes * segments for operator in graph.operators)]
    cuts = [0]
    for index in range(1, segments):
        position = bisect_left(reached, reached[-1] // segments * index)
        cuts.append(min(max(position, cuts[-1] + 1), len(graph) - (segments - index)))
    return tuple(cuts[1:])
