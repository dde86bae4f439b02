"""From a sequence of operators to a plan: RESPECT's processing after its network, and its map rho.

The paper (DAC 2023) asks for a repair that pushes operators later, and for all readers of an operator in one stage; it
never says what rho is. Here rho is exact: of all cuts of the sequence it takes the best. Next: `respect.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_pipeline import OperatorGraph, Plan, Problem, Stage, evaluate
from tvm_pipeline.errors import InfeasibleError, LimitMissedError, PlanError
from tvm_pipeline.planning import along


def violated_edges(before: Sequence[Sequence[int]], sequence: Sequence[int]) -> int:
    """Return how many edges of a graph lead backwards in a sequence of its operators.

    Examples:
        >>> violated_edges([[], [0], [0, 1]], [2, 0, 1])
        2
    """
    place = {operator: at for at, operator in enumerate(sequence)}
    return sum(place[parent] > place[operator] for operator, parents in enumerate(before) for parent in parents)


def repaired(before: Sequence[Sequence[int]], sequence: Sequence[int]) -> list[int]:
    """Return the sequence with every operator that stands before its parents pushed behind the last of them.

    No other operator moves. Operators that wait for the same one follow it in the graph's own order.

    Args:
        before: the parents of each operator; operators are numbered in a topological order.

    Examples:
        >>> repaired([[], [], [0], [2]], [3, 2, 1, 0])  # 2 waits for 0, and 3 for 2
        [1, 0, 2, 3]
    """
    # An operator is due at its place, or where the last operator is that a path leads from.
    due = [0] * len(before)
    for place, operator in enumerate(sequence):
        due[operator] = place
    for operator, parents in enumerate(before):
        due[operator] = max([due[operator], *(due[parent] for parent in parents)])
    return sorted(range(len(before)), key=lambda operator: (due[operator], operator))


def siblings_together(graph: OperatorGraph, stage_of: Sequence[int]) -> list[int]:
    """Return the stage of each operator after all readers of an operator have moved to one stage.

    That is the earliest stage of any of them, as the paper has it. Where another parent of one of them stands in a
    later stage, it is that one. Operators behind them move later where they must.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator, Tensor
        >>> a = Operator("a", "input", (), (Tensor("x", (2,)),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> c = Operator("c", "relu", ("x",), (Tensor("z", (2,)),))
        >>> siblings_together(OperatorGraph("net", (), (a, b, c), ("y", "z")), [0, 1, 2])
        [0, 1, 1]
    """
    family = list(range(len(graph)))  # one number for all operators that must stay together

    def head(operator: int) -> int:
        while family[operator] != operator:
            family[operator] = family[family[operator]]
            operator = family[operator]
        return operator

    for readers in graph.edges.after:
        for reader in readers[1:]:
            family[head(reader)] = head(readers[0])
    heads = [head(operator) for operator in range(len(graph))]
    stage = dict.fromkeys(heads, max(stage_of, default=0))
    for operator, each in enumerate(heads):
        stage[each] = min(stage[each], stage_of[operator])
    # A stage only rises, and never beyond the last one.
    moved = True
    while moved:
        moved = False
        for operator, parents in enumerate(graph.edges.before):
            latest = max((stage[heads[parent]] for parent in parents), default=0)
            if latest > stage[heads[operator]]:
                stage[heads[operator]], moved = latest, True
    return [stage[each] for each in heads]


def rho(problem: Problem, order: Sequence[int], scheduler: str) -> Plan:
    """Return the best plan whose stages are consecutive pieces of a topological order, by dynamic programming.

    For `memory,communication` the largest piece has the least parameter bytes, and of such cuts the widest boundary is
    the narrowest. All other objectives by figures of single cuts are minimised likewise. Under `children_together` the
    readers of an operator move to one stage afterwards, see `siblings_together`; stages that they leave empty are
    dropped. Nothing is proven of such a plan, so it has no bound.

    Args:
        order: indices into `problem.graph.operators`.
        scheduler: the name that the plan bears.

    Raises:
        LimitMissedError: no plan of this order keeps the limits of the problem.
    """
    graph = problem.graph
    try:
        found = along(replace(problem, children_together=False), order, scheduler)
    except InfeasibleError as error:
        raise LimitMissedError(f"scheduler {scheduler} has no plan along its order ({error}); try best") from error
    index = graph.edges.index
    stage_of = [0] * len(graph)
    for number, stage in enumerate(found.stages):
        for name in stage.operators:
            stage_of[index[name]] = number
    if problem.children_together:
        stage_of = siblings_together(graph, stage_of)
    groups: list[list[str]] = [[] for _ in found.stages]
    for operator, number in zip(graph.operators, stage_of, strict=True):
        groups[number].append(operator.name)
    stages = tuple(
        Stage(stage.devices, tuple(group)) for stage, group in zip(found.stages, groups, strict=True) if group
    )
    if problem.stages not in (None, len(stages)):
        raise LimitMissedError(
            f"scheduler {scheduler} has {len(stages)} stages left of {problem.stages}, since `children_together` moved "
            "all operators out of the others; try best, or fewer `stages`"
        )
    try:
        predicted = evaluate(problem, stages).predicted
    except PlanError as error:
        raise LimitMissedError(f"the plan of scheduler {scheduler} misses a limit ({error}); try best") from error
    return Plan(graph.name, scheduler, problem.objective, stages, predicted)
