"""The best pipeline along an order of the operators other than the graph's own.

Next: `local/local_search.py`, which takes the order of its best plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.planning.search.cuts import prefixes
from tvm_pipeline.planning.search.dynamic_programming import plan_over
from tvm_pipeline.planning.search.space import single_units


def reordered(graph: OperatorGraph, order: Sequence[int]) -> OperatorGraph:
    """Return the graph with its operators in another topological order; a profile of the one is one of the other."""
    return OperatorGraph(
        graph.name, graph.inputs, tuple(graph.operators[operator] for operator in order), graph.outputs
    )


def along(problem: Problem, order: Sequence[int], name: str) -> Plan:
    """Return the best pipeline of single devices whose stages are consecutive pieces of a topological order.

    Args:
        order: indices into `problem.graph.operators`.
        name: of the scheduler that the plan bears.

    Raises:
        NoPlanError: there is none along this order, or none was found in time.
        OptionError: there are more states than the search can hold.
    """
    in_order = replace(problem, graph=reordered(problem.graph, order))
    return plan_over(in_order, prefixes(in_order.graph), single_units, name)
