"""The objectives of bytes (Yin et al., SEC 2022) as `evaluate` counts them, against a count by their definitions.

M: parameters of the largest stage. D: parameters beyond the cache, summed over the stages. C: bytes across the widest
boundary, each tensor once; by edges, the most bytes on edges that end in one stage and begin in an earlier one, which
is how the paper's equations 9 and 10 count. The children rule: all that read from one operator stand in one stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.brute_force import every_plan, figure, verdict
from tests.support.graphs import BY_EDGES, LEXICOGRAPHIC, lexicographic_problems
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import PlanError


def counted(problem: Problem, groups: Sequence[Sequence[str]]) -> dict[str, int]:
    """M, D and C of a schedule on equal devices."""
    operators = problem.graph.operators
    stage = {name: index for index, group in enumerate(groups) for name in group}
    param_bytes = [sum(o.param_bytes for o in operators if stage[o.name] == k) for k in range(len(groups))]
    widths = [0]
    for boundary in range(len(groups) - 1):
        widths.append(0)
        for writer in operators:
            for tensor in writer.outputs:
                readers = [o for o in operators if tensor.name in o.inputs]
                if stage[writer.name] <= boundary and any(stage[o.name] > boundary for o in readers):
                    widths[-1] += tensor.shape[0]  # int8, of one axis
    cache = problem.platform.devices[0].cache_bytes
    assert cache is not None
    return {
        "memory": max(param_bytes),
        "dram": sum(max(0, h - cache) for h in param_bytes),
        "communication": max(widths),
        "edge_communication": max(com(problem.graph, stage, k) for k in range(-1, len(groups) - 1)),
    }


def com(graph: OperatorGraph, stage: dict[str, int], k: int) -> int:
    """Equation 9, the bytes t_e of each edge for which alpha_e holds: s_i != s_j and s_j = k + 1."""
    total = 0
    for i, j in itertools.product(graph.operators, repeat=2):
        t_e = sum(tensor.shape[0] for tensor in i.outputs if tensor.name in j.inputs)  # int8, of one axis
        if stage[i.name] != stage[j.name] and stage[j.name] == k + 1:
            total += t_e
    return total


def has_children_together(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> bool:
    stage = {name: index for index, group in enumerate(groups) for name in group}
    for writer in graph.operators:
        written = {tensor.name for tensor in writer.outputs}
        if len({stage[o.name] for o in graph.operators if written.intersection(o.inputs)}) > 1:
            return False
    return True


@given(lexicographic_problems(LEXICOGRAPHIC + BY_EDGES, operators=(2, 6), devices=(1, 3)))
def test_every_schedule_is_counted_as_it_is_defined(problem: Problem) -> None:
    parts = problem.objective.split(",")
    together = replace(problem, children_together=True)
    for stages in list(every_plan(problem))[:300]:
        groups = [stage.operators for stage in stages]
        predicted = verdict(problem, stages)
        assert predicted is not None
        expected = counted(problem, groups)
        assert figure(problem, predicted) == tuple(expected[part] for part in parts)
        assert verdict(together, stages) == (predicted if has_children_together(problem.graph, groups) else None)


def diamond(**figures: object) -> Problem:
    """a (3 bytes out, read by b and c), b (5), c (7, and 11 that nobody reads), d; 10, 20, 30 and 40 parameters."""

    def tensor(name: str, size: int) -> Tensor:
        return Tensor(name, (size,), "int8")

    graph = OperatorGraph(
        "diamond",
        (tensor("x", 100),),
        (
            Operator("a", "k", ("x",), (tensor("ta", 3),), 10),
            Operator("b", "k", ("ta",), (tensor("tb", 5),), 20),
            Operator("c", "k", ("ta", "x"), (tensor("tc", 7), tensor("unread", 11)), 30),
            Operator("d", "k", ("tb", "tc"), (tensor("td", 1000),), 40),
        ),
        ("td", "unread"),
    )
    devices = (Device("p", cache_bytes=25), Device("q", cache_bytes=35), Device("r"))
    return Problem(graph, Platform("box", devices), unmeasured(graph), "memory,communication", **figures)  # type: ignore[arg-type]


def test_bytes_by_hand() -> None:
    """30 | 70: beyond 25 and 35 lie 5 and 35. b's 5 bytes cross, and a's 3, once; inputs and outputs do not count."""
    found = evaluate(diamond(), (Stage(("p",), ("a", "b")), Stage(("q",), ("c", "d")))).predicted
    assert (found.memory_bytes, found.dram_bytes, found.communication_bytes) == (70, 40, 8)
    alone = evaluate(diamond(), (Stage(("p",), ("a", "b", "c", "d")),)).predicted
    assert (alone.memory_bytes, alone.dram_bytes, alone.communication_bytes) == (100, 75, 0)


def test_a_tensor_counts_at_every_boundary_that_it_crosses() -> None:
    """a | b | c, d: 3 bytes for both readers, then 5, and the 3 again on their way to c."""
    found = evaluate(diamond(), (Stage(("p",), ("a",)), Stage(("q",), ("b",)), Stage(("r",), ("c", "d")))).predicted
    assert found.communication_bytes == 8
    found = evaluate(diamond(), (Stage(("p",), ("a",)), Stage(("q",), ("b", "c", "d")))).predicted
    assert found.communication_bytes == 3


def test_an_edge_counts_once_in_front_of_its_reader() -> None:
    """a | b | c, d: 3 bytes for b, then b's 5 and a's 3. a | b, c, d: b and c read the same 3 bytes by two edges."""
    found = evaluate(diamond(), (Stage(("p",), ("a",)), Stage(("q",), ("b",)), Stage(("r",), ("c", "d")))).predicted
    assert found.edge_communication_bytes == 8
    found = evaluate(diamond(), (Stage(("p",), ("a",)), Stage(("q",), ("b", "c", "d")))).predicted
    assert (found.edge_communication_bytes, found.communication_bytes) == (6, 3)


def test_an_edge_that_skips_a_stage_does_not_count_there() -> None:
    """a, b | c | d: both counts have b's 6 bytes at the first boundary; only tensors have the 4 of a there as well."""
    names = {"a": 4, "b": 6, "c": 1, "d": 1}
    reads = {"a": (), "b": (), "c": ("b",), "d": ("a", "c")}
    operators = tuple(Operator(n, "k", reads[n], (Tensor(n, (size,), "int8"),), 1) for n, size in names.items())
    graph = OperatorGraph("skip", (), operators, ("d",))
    platform = Platform("box", tuple(Device(name) for name in "pqr"))
    stages = (Stage(("p",), ("a", "b")), Stage(("q",), ("c",)), Stage(("r",), ("d",)))
    found = evaluate(Problem(graph, platform, unmeasured(graph), "memory,edge_communication"), stages).predicted
    assert (found.communication_bytes, found.edge_communication_bytes) == (10, 6)


def test_without_a_cache_nothing_is_known_of_an_overflow_and_replicas_have_the_smallest() -> None:
    names = ("a", "b", "c", "d")
    assert evaluate(diamond(), (Stage(("r",), names),)).predicted.dram_bytes is None
    assert evaluate(diamond(), (Stage(("q", "r"), names),)).predicted.dram_bytes is None
    assert evaluate(diamond(), (Stage(("q", "p"), names),)).predicted.dram_bytes == 75


def test_children_that_part_are_named_by_what_they_read() -> None:
    problem = diamond(children_together=True)
    with pytest.raises(PlanError, match="that read a stand in several stages, `children_together` forbids it"):
        evaluate(problem, (Stage(("p",), ("a", "b")), Stage(("q",), ("c", "d"))))
    evaluate(problem, (Stage(("p",), ("a",)), Stage(("q",), ("b", "c")), Stage(("r",), ("d",))))
