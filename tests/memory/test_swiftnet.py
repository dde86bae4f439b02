"""SERENITY's figures of SwiftNet, from the graphs of the network that its authors published.

Bytes; the paper's Figure 12(b) has 200.7 KB and 188.2 KB for cell A.
"""

from __future__ import annotations

import pytest

from tests.support.memory_networks import PROFILES
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.graph_files import read_graph
from tvm_pipeline.memory import MemoryGraph, memory_graph, minimum_peak
from tvm_pipeline.memory.concatenation import free_concatenations
from tvm_pipeline.memory.rewriting import rewritable, rewrite, rewritten


def swiftnet(part: str = "") -> OperatorGraph:
    return read_graph(PROFILES / "swiftnet" / f"swiftnet{part}.json")


def in_parts(graph: OperatorGraph, *, narrow_sums: bool) -> MemoryGraph:
    """Return the graph with concatenations that take no memory, and with SERENITY's two patterns of rewriting."""
    memory = memory_graph(graph)
    chosen = [name for name, how in rewritable(graph, memory).items() if how == "partitioned"]
    return free_concatenations(graph, rewritten(graph, memory, chosen, narrow_sums=narrow_sums))


def least(graph: MemoryGraph) -> int:
    found = minimum_peak(graph)
    assert found.status == "optimal"
    return found.peak_bytes


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cell", "free", "parts"),
    [("c", 32536, 16856), ("b", 81536, 53312), ("a", 200704, 188160)],
)
def test_least_peaks_where_a_concatenation_is_free(cell: str, free: int, parts: int) -> None:
    graph = swiftnet(f"-cell-{cell}")
    assert least(free_concatenations(graph, memory_graph(graph))) == free
    assert least(in_parts(graph, narrow_sums=True)) == parts


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("cell", "listed", "kahn", "exact"),
    [("c", 53900, 53900, 53900), ("b", 147392, 166208, 122304), ("a", 351232, 388864, 275968)],
)
def test_peaks_with_copies(cell: str, listed: int, kahn: int, exact: int) -> None:
    memory = memory_graph(swiftnet(f"-cell-{cell}"))
    assert [minimum_peak(memory, method).peak_bytes for method in ("program", "kahn")] == [listed, kahn]
    assert least(memory) == exact


@pytest.mark.thorough
def test_exact_sums_of_cell_a_gain_nothing() -> None:
    graph = swiftnet("-cell-a")
    memory = memory_graph(graph)
    assert rewrite(graph, memory).operators == ()
    assert least(in_parts(graph, narrow_sums=False)) == 301056 > least(memory)


def test_nodes_are_those_of_table_2() -> None:
    """62 = {21, 19, 22} nodes without concatenations, where the pooling before a cell is its first node."""
    whole = swiftnet()
    names = whole.operator_names
    counts = []
    for first, last in ((4, 32), (33, 56), (57, 81)):
        counts.append(len(free_concatenations(whole, memory_graph(whole, names[first : last + 1]))))
    assert counts == [21, 19, 22]


def test_cells_are_parts_of_the_whole() -> None:
    whole = swiftnet()
    for cell in "abc":
        graph = swiftnet(f"-cell-{cell}")
        members = graph.operator_names
        assert [operator for operator in whole.operators if operator.name in members] == list(graph.operators)
        assert set(memory_graph(whole, members).buffers) == set(memory_graph(graph).buffers)
    assert (len(whole.operators), whole.inputs[0].shape) == (85, (1, 224, 224, 3))
