"""Graphs whose calls compute several frames: searches plan calls, and a plan's figures are of frames.

Next: `planning/planner.py` and `runtime/replanning.py`, which search; `evaluate.py`, which judges.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan, Prediction
from tvm_pipeline.core.problem import Problem


def of_calls(problem: Problem) -> Problem:
    """Return the problem whose frames are the calls of this one; the problem itself where a call computes one frame.

    >>> from tvm_pipeline.testing import example_problem
    >>> problem = example_problem()
    >>> of_calls(replace(problem, graph=replace(problem.graph, batch=2))).graph.inputs
    (Tensor(name='x', shape=(8,), dtype='float32'),)
    """
    graph, batch, floor_fps = problem.graph, problem.graph.batch, problem.min_throughput_fps
    if batch == 1:
        return problem
    wide = _of_a_call(graph)
    return replace(
        problem,
        graph=wide,
        profile=replace(problem.profile, fingerprint=wide.fingerprint),
        min_throughput_fps=None if floor_fps is None else floor_fps / batch,
    )


@lru_cache(maxsize=8)
def _of_a_call(graph: OperatorGraph) -> OperatorGraph:
    batch = graph.batch
    operators = (
        replace(operator, outputs=tuple(t.times(batch) for t in operator.outputs), macs=operator.macs * batch)
        for operator in graph.operators
    )
    return replace(graph, inputs=tuple(t.times(batch) for t in graph.inputs), operators=tuple(operators), batch=1)


def figures_of_frames(predicted: Prediction, batch: int) -> Prediction:
    """Return the prediction of calls as that of their frames: a frame's latency is that of its call."""
    return replace(
        predicted,
        throughput_fps=None if predicted.throughput_fps is None else predicted.throughput_fps * batch,
        energy_j=None if predicted.energy_j is None else predicted.energy_j / batch,
    )


def of_frames(plan: Plan, batch: int) -> Plan:
    """Return a plan of calls with the figures of their frames."""
    scale = {"throughput": batch, "energy": 1 / batch}.get(plan.objective, 1)
    bound = None if plan.bound is None else tuple(scale * figure for figure in plan.bound)
    return replace(plan, predicted=figures_of_frames(plan.predicted, batch), bound=bound, batch=batch)
