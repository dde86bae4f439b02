"""The check of stages: which groups of operators are legal, whatever devices run them.

No path may leave a stage and come back. A partition is a sequence of such stages that contains every operator once; a
stage stands behind those that it reads from. `cost/evaluate.py` checks that the devices can take the stages. Next:
`plan.py`, which gives each stage its devices.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tvm_pipeline.core.graph import OperatorGraph, Tensor, crossing_tensors
from tvm_pipeline.errors import GraphError, PlanError


def check_partition(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> list[list[Tensor]]:
    """Return the tensors that cross each boundary between the groups (see `crossing_tensors`), if they are legal.

    Args:
        groups: the names of each stage's operators, the first stage first.

    Raises:
        PlanError: the groups do not contain every operator once, in a legal order; the message names the stage and
            the operator.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator
        >>> a = Operator("a", "input", (), (Tensor("x", (2,)),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> graph = OperatorGraph("net", (), (a, b), ("y",))
        >>> [[tensor.name for tensor in boundary] for boundary in check_partition(graph, [["a"], ["b"]])]
        [[], ['x'], ['y']]
        >>> check_partition(graph, [["a"]])
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.PlanError: operator b is in no stage (1 missing in all)
    """
    if not groups:
        raise PlanError("the plan has no stages; it needs at least one")
    known = graph.edges.index
    seen: set[str] = set()
    for stage, names in enumerate(groups):
        if not names:
            raise PlanError(f"stage {stage} has no operators")
        for name in names:
            if name not in known:
                raise PlanError(f"stage {stage} names operator {name}, which {graph.name} does not have")
            if name in seen:
                raise PlanError(f"operator {name} stands twice in the plan, last in stage {stage}")
            seen.add(name)
    missing = [operator.name for operator in graph.operators if operator.name not in seen]
    if missing:
        raise PlanError(f"operator {missing[0]} is in no stage ({len(missing)} missing in all)")
    try:
        return crossing_tensors(graph, groups)
    except GraphError as error:
        raise PlanError(f"the stages form a cycle or stand in the wrong order: {error}") from error


def check_stage(graph: OperatorGraph, operators: Iterable[str]) -> None:
    """Check that operators can be one stage of some partition of the graph.

    Raises:
        PlanError: there are no operators, the graph does not have one of them, or a path leaves them and comes back.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator
        >>> a = Operator("a", "input", (), (Tensor("x", (2,)),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> c = Operator("c", "relu", ("y",), (Tensor("z", (2,)),))
        >>> graph = OperatorGraph("net", (), (a, b, c), ("z",))
        >>> check_stage(graph, ["b", "c"])
        >>> check_stage(graph, ["a", "c"])
        Traceback (most recent call last):
            ...
        tvm_pipeline.errors.PlanError: no stage of net: a path leaves it and comes back at c
    """
    names = set(operators)
    if not names:
        raise PlanError(f"a stage of {graph.name} holds no operators")
    unknown = names.difference(graph.edges.index)
    if unknown:
        raise PlanError(
            f"the model {graph.name} has no operator {min(unknown)}; the plan is of another model or target"
        )
    _, *others = longest_stages(graph, names)
    if others:
        raise PlanError(f"no stage of {graph.name}: a path leaves it and comes back at {others[0][0]}")


def longest_stages(graph: OperatorGraph, operators: Collection[str]) -> list[list[str]]:
    """Return operators in stages that are legal each, and as long as the graph's order makes them.

    An operator joins the stage before it, unless a path from that stage to it goes through an operator that is not
    among `operators`. All operators of the graph are one stage.

    Examples:
        >>> from tvm_pipeline.core.graph import Operator
        >>> a = Operator("a", "input", (), (Tensor("x", (2,)),))
        >>> b = Operator("b", "relu", ("x",), (Tensor("y", (2,)),))
        >>> c = Operator("c", "tanh", ("x",), (Tensor("z", (2,)),))
        >>> d = Operator("d", "add", ("y", "z"), (Tensor("w", (2,)),))
        >>> graph = OperatorGraph("net", (), (a, b, c, d), ("w",))
        >>> longest_stages(graph, ["a", "c", "d"])
        [['a', 'c'], ['d']]
    """
    stages: list[list[str]] = []
    inside: set[int] = set()
    behind: set[int] = set()  # operators outside the last stage to which a path from it leads
    for index, operator in enumerate(graph.operators):
        sources = graph.edges.before[index]
        if operator.name in operators:
            if not stages or not behind.isdisjoint(sources):
                stages.append([])
                inside, behind = set(), set()
            stages[-1].append(operator.name)
            inside.add(index)
        elif not (behind.isdisjoint(sources) and inside.isdisjoint(sources)):
            behind.add(index)
    return stages


def slice_ends(graph: OperatorGraph, operators: Collection[str]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the tensors that a stage reads, and those that it gives out: the model's outputs first, in their order."""
    edges = graph.edges
    inside = {edges.index[name] for name in operators}
    taken = (
        tensor
        for name, tensor in graph.tensors.items()
        if edges.writer.get(name) not in inside and not inside.isdisjoint(edges.readers[name])
    )
    read_outside = (name for i, operator in enumerate(graph.operators) if i not in inside for name in operator.inputs)
    given = (name for name in dict.fromkeys((*graph.outputs, *read_outside)) if edges.writer.get(name) in inside)
    return tuple(taken), tuple(graph.tensors[name] for name in given)
