"""The orders of operators that plans need, so that the activations of their stages fit into memory.

The operators of a stage run in the order in which the plan lists them, and `evaluate` counts activations in that order,
without a search. The search is done here, once, when a plan is made: a stage that does not fit in its order gets the
order that needs the least memory.

Next: `memory/stage_memory.py`, the memory that a stage needs; `search/with_activations.py`, pipelines that are cut so
that they fit.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.evaluate import check_stages, judged, param_bytes_of
from tvm_pipeline.errors import PlanError
from tvm_pipeline.memory import stage_memory


def fitting_plan(problem: Problem, plan: Plan) -> Plan:
    """Return the plan with orders that fit, judged by the problem.

    Raises:
        PlanError: a stage fits in no order that was found, or the plan breaks a limit.
    """
    return judged(problem, replace(plan, stages=fitting_orders(problem, plan.stages)))


def fitting_orders(problem: Problem, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Return the stages, each in its own order where that fits into its devices, else in the order of least memory.

    Raises:
        PlanError: a stage does not fit in the order of least memory either, or the stages are no legal plan.
    """
    if not problem.counts_activations:
        return stages
    check_stages(problem.graph, problem.platform, stages)
    return tuple(_fitting(problem, stages, index) for index in range(len(stages)))


def _fitting(problem: Problem, stages: tuple[Stage, ...], index: int) -> Stage:
    stage, graph = stages[index], problem.graph
    capacities = {}
    for name in stage.devices:
        memory_bytes = problem.platform.device(name).memory_bytes
        if memory_bytes is not None:
            capacities[name] = memory_bytes - param_bytes_of(graph, [s for s in stages if name in s.devices])
    if not capacities:
        return stage
    name = min(capacities, key=capacities.__getitem__)
    if stage_memory.order_peak(graph, stage.operators) <= capacities[name]:
        return stage
    best = stage_memory.least_peak(graph, stage.operators)
    if best.peak_bytes > capacities[name]:
        memory_bytes = problem.platform.device(name).memory_bytes or 0
        raise PlanError(
            f"stage {index} does not fit on device {name}: {memory_bytes - capacities[name]} bytes of parameters and "
            f"{stage_memory.needed(graph, stage.operators)} are more than its {memory_bytes}; make the stage smaller, "
            "or give the device more memory_bytes"
        )
    listed = stage_memory.stage_graph(graph, stage.operators).operators
    return replace(stage, operators=tuple(listed[position] for position in best.order))
