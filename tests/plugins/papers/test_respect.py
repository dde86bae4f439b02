"""The scheduler respect: the repair, the rule of siblings and the cuts of a sequence, each against its definition."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import generators
from tests.support.brute_force import every_chain, figure, least
from tests.support.examples import examples
from tests.support.graphs import Traits, graphs, lexicographic_problems, problems, random_order
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import GraphError, InfeasibleError, LimitMissedError, ModelError, NoPlanError, OptionError
from tvm_pipeline.planning.search.cuts import reordered
from tvm_pipeline_papers.learned.pointer_network import PURPOSE, VERSION, untrained
from tvm_pipeline_papers.learned.respect import MOST_READ, ReadGraph, network_weights
from tvm_pipeline_papers.learned.respect_embedding import COLUMNS
from tvm_pipeline_papers.learned.sequences import repaired, rho, siblings_together, violated_edges
from tvm_pipeline_papers.learned.weights import WeightsNote, write_weights


def ancestors(graph: OperatorGraph) -> list[set[int]]:
    """Return for each operator itself and all that a path leads from."""
    found: list[set[int]] = []
    for operator, parents in enumerate(graph.edges.before):
        found.append({operator}.union(*(found[parent] for parent in parents)))
    return found


@given(graph=graphs(1, 9), data=st.data())
def test_a_repair_emits_each_operator_once_its_ancestors_have_come(graph: OperatorGraph, data: st.DataObject) -> None:
    """After each step of the walk exactly those operators are out whose ancestors have all come by."""
    sequence = data.draw(st.permutations(range(len(graph))))
    order = repaired(graph.edges.before, sequence)
    assert sorted(order) == list(range(len(graph)))
    assert violated_edges(graph.edges.before, order) == 0
    needs = ancestors(graph)
    for step in range(1, len(sequence) + 1):
        come = set(sequence[:step])
        out = {operator for operator in come if needs[operator] <= come}
        assert set(order[: len(out)]) == out


@given(graph=graphs(1, 9), data=st.data())
def test_a_repair_moves_only_what_comes_before_a_parent(graph: OperatorGraph, data: st.DataObject) -> None:
    before = graph.edges.before
    sequence = data.draw(st.permutations(range(len(graph))))
    order = repaired(before, sequence)
    assert repaired(before, order) == order
    place = {operator: at for at, operator in enumerate(sequence)}
    stays = [all(place[need] <= place[o] for need in needs) for o, needs in enumerate(ancestors(graph))]
    assert [o for o in order if stays[o]] == [o for o in sequence if stays[o]]
    assert (order == list(sequence)) == (violated_edges(before, sequence) == 0)


@given(graph=graphs(1, 9), data=st.data())
def test_siblings_come_to_the_earliest_legal_stage_of_any(graph: OperatorGraph, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(graph)), max_size=3)))
    stage_of = [sum(operator >= cut for cut in cuts) for operator in range(len(graph))]
    before, after = graph.edges.before, graph.edges.after
    moved = siblings_together(graph, stage_of)
    assert all(moved[parent] <= moved[o] for o, parents in enumerate(before) for parent in parents)
    families = [{operator} for operator in range(len(graph))]
    for readers in after:
        joined = set().union(*(families[reader] for reader in readers))
        for member in joined:
            families[member] = joined
    for family in families:
        assert len({moved[operator] for operator in family}) == 1
        earliest = min(stage_of[operator] for operator in family)
        latest = max((moved[parent] for operator in family for parent in before[operator]), default=0)
        assert {moved[operator] for operator in family} == {max(earliest, latest)}


def test_siblings_wait_for_their_other_parents() -> None:
    """b and c read x, c also w of stage 2, and d reads b: b and c come together in stage 2, and d follows."""
    reads = {"x": (), "b": ("x",), "d": ("b",), "w": (), "c": ("x", "w")}
    operators = tuple(Operator(name, "kind", found, (Tensor(name, (1,)),)) for name, found in reads.items())
    graph = OperatorGraph("net", (), operators, ("d", "c"))
    assert siblings_together(graph, [0, 1, 1, 2, 3]) == [0, 2, 2, 2, 2]


def along_any_order(problem: Problem, rng: random.Random) -> tuple[list[int], Problem]:
    """Return a topological order, and the problem whose graph has it for its own."""
    order = [problem.graph.edges.index[name] for name in random_order(rng, problem.graph)]
    return order, replace(problem, graph=reordered(problem.graph, order))


@examples(30)
@given(problem=lexicographic_problems(operators=(2, 7)), rng=st.randoms(use_true_random=False))
def test_rho_finds_the_best_of_all_pieces_in_bytes(problem: Problem, rng: random.Random) -> None:
    order, in_order = along_any_order(problem, rng)
    plan = rho(problem, order, "respect")
    assert plan.value == least(in_order, every_chain(in_order, problem.stages, again=False))
    assert (plan.bound, plan.status) == (None, "feasible")
    assert plan.predicted == evaluate(problem, plan.stages).predicted


@given(
    problem=problems("throughput", operators=(1, 5), traits=Traits(modelled=True)),
    seed=st.randoms(use_true_random=False),
)
def test_rho_finds_the_best_of_all_pieces_in_seconds(problem: Problem, seed: random.Random) -> None:
    order, in_order = along_any_order(problem, seed)
    best = least(in_order, every_chain(in_order, problem.stages, again=False))
    if best is None:
        with pytest.raises(NoPlanError):
            rho(problem, order, "respect")
        return
    assert figure(problem, rho(problem, order, "respect").predicted) == pytest.approx(best, rel=1e-9)


def of_bytes(graph: OperatorGraph, count: int, *, together: bool = False, memory: int | None = None) -> Problem:
    devices = tuple(Device(f"d{index}", memory_bytes=memory) for index in range(count))
    return Problem(graph, Platform("box", devices), unmeasured(graph), "memory,communication", count, together)


def made(problem: Problem) -> Plan:
    return planning.plan(problem, "respect").plan


def test_plans_are_legal_and_the_same_each_time() -> None:
    graph = generators.random_dag(random.Random(5), 60, most_reads=9, reach=12)
    assert max(map(len, graph.edges.before)) > 6
    for problem in (of_bytes(graph, 3), of_bytes(generators.transformer(1, 16, 2, 8), 2, together=True)):
        plan = made(problem)
        assert plan == made(problem)
        assert plan.predicted == evaluate(problem, plan.stages).predicted
        assert plan.value is not None
        best = planning.plan(problem).plan.value
        assert best is not None
        assert plan.value >= best


def test_the_ready_mask_needs_no_repair() -> None:
    graph = generators.random_dag(random.Random(5), 60)
    read = ReadGraph.by(graph, untrained(COLUMNS, 8, 4))
    assert violated_edges(graph.edges.before, read.sequence()) > 0
    assert violated_edges(graph.edges.before, read.sequence(ready=True)) == 0


def test_one_operator_is_one_stage() -> None:
    graph = OperatorGraph("one", (), (Operator("only", "kind", (), (Tensor("x", (1,)),)),), ("x",))
    assert [stage.operators for stage in made(of_bytes(graph, 1)).stages] == [("only",)]
    with pytest.raises(InfeasibleError, match="2 stages: one has only 1 operators"):
        of_bytes(graph, 2)


def test_a_cycle_is_no_graph() -> None:
    turn = Operator("turn", "kind", ("y",), (Tensor("x", (1,)),))
    back = Operator("back", "kind", ("x",), (Tensor("y", (1,)),))
    with pytest.raises(GraphError, match="check for a cycle"):
        OperatorGraph("round", (), (turn, back), ("y",))


def fork() -> OperatorGraph:
    x, y, z = (Tensor(name, (1,)) for name in "xyz")
    a = Operator("a", "kind", (), (x,), param_bytes=4)
    b, c = (Operator(out.name * 2, "kind", ("x",), (out,), param_bytes=4) for out in (y, z))
    return OperatorGraph("fork", (), (a, b, c), ("y", "z"))


def test_stages_that_siblings_leave_empty_are_missed() -> None:
    assert len(made(of_bytes(fork(), 3)).stages) == 3
    with pytest.raises(LimitMissedError, match="scheduler respect has 2 stages left of 3, since `children_together`"):
        made(of_bytes(fork(), 3, together=True))
    assert len(made(replace(of_bytes(fork(), 3, together=True), stages=None)).stages) == 2


def test_a_limit_that_no_cut_of_the_order_keeps_is_missed() -> None:
    with pytest.raises(LimitMissedError, match=r"scheduler respect has no plan along its order .* try best"):
        rho(replace(of_bytes(fork(), 2, memory=7), activations=False), [0, 1, 2], "respect")
    # Siblings that come together fill a device.
    with pytest.raises(LimitMissedError, match=r"plan of scheduler respect misses a limit .* try best"):
        rho(replace(of_bytes(fork(), 3, together=True, memory=7), stages=None, activations=False), [0, 1, 2], "respect")


def test_graphs_that_take_too_long_are_refused() -> None:
    graph = generators.chain(random.Random(1), MOST_READ + 1)
    with pytest.raises(
        OptionError, match=r"chain5001 has 5001 operators.*takes up to 5000; use `scheduler` chain or best"
    ):
        made(of_bytes(graph, 2))


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    note = WeightsNote(PURPOSE, VERSION, "python train.py", 1)
    write_weights(path, untrained(COLUMNS, 4, 1), note)
    assert network_weights(path).keys() == untrained(COLUMNS, 4, 1).keys()
    for other in ({"version": VERSION + 1}, {"purpose": "predpar"}):
        path = tmp_path / f"{next(iter(other))}.npz"
        write_weights(path, untrained(COLUMNS, 4, 1), msgspec.structs.replace(note, **other))
        with pytest.raises(ModelError, match=f"{path}: weights of .*train them again"):
            network_weights(path)
    path = tmp_path / "rows.npz"
    write_weights(path, untrained(COLUMNS - 1, 4, 1), note)
    with pytest.raises(ModelError, match=f"{path}: the pointer network has weights"):
        network_weights(path)
