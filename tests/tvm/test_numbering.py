"""Operators have the same numbers in every library of a model, however targets fuse and order them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("tvm")

from tvm_pipeline.core.graph import Tensor
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.kernels import Entry, Kernel, Output, Source
from tvm_pipeline_tvm.numbering import WEIGHT, Value, numbered

CONV, ADD = ("conv2d", 64), ("add", 64)
X: Entry = (-1, 0)
WEIGHTS = Source(None, -1)


def read(index: int) -> Source:
    return Source(None, index)


def written(operator: int | None, index: int = 0) -> Output:
    return Output((1, 4, 4, 4), "float32", "", Source(operator, index))


def conv(param_bytes: int, entry: Entry = X) -> Kernel:
    return Kernel((CONV,), ((read(0), WEIGHTS),), (entry,), (written(0),), param_bytes, 0)


def conv_and_add(param_bytes: int, *, is_first: bool) -> Kernel:
    """A convolution of x, and its sum with what kernel 0 writes; `is_first` where it is the first to be added."""
    own, other = Source(0, 0), read(1)
    arguments = (read(0), WEIGHTS), (own, other) if is_first else (other, own)
    return Kernel((CONV, ADD), arguments, (X, (0, 0)), (written(1),), param_bytes, 0)


def test_look_alike_convolutions_are_told_apart_by_who_reads_them() -> None:
    """add(main, shortcut): one target fuses the addition into the shortcut, the other into the main convolution."""
    into_shortcut = [conv(900), conv_and_add(100, is_first=False)]
    into_main = [conv(100), conv_and_add(900, is_first=True)]
    one, other = numbered(into_shortcut, [(1, 0)]), numbered(into_main, [(1, 0)])
    assert one.kinds == other.kinds == (CONV, CONV, ADD)
    assert one.reads == other.reads == (((-1, 0), WEIGHT), ((-1, 0), WEIGHT), ((0, 0), (1, 0)))
    assert one.heads == other.heads == ((2, 0),)
    for kernels, found in ((into_shortcut, one), (into_main, other)):
        assert [kernels[kernel].param_bytes for kernel, _ in found.places[:2]] == [900, 100]


def test_what_only_moves_elements_has_no_number() -> None:
    glue = Kernel((), (), ((0, 0),), (written(None),), 0, 0)
    plain = [conv(1), conv(2, (0, 0))]
    moved = [conv(1), glue, Kernel((CONV,), ((read(0), WEIGHTS),), ((1, 0),), (written(0),), 2, 0)]
    one, other = numbered(plain, [(1, 0)]), numbered(moved, [(2, 0)])
    assert (one.kinds, one.reads, one.heads) == (other.kinds, other.reads, other.heads)
    assert other.places == ((0, 0), (2, 0))
    assert other.values == (((0, 0),), ((0, 0),), ((1, 0),))


def test_what_no_output_needs_is_numbered_last() -> None:
    found = numbered([conv(1), conv(2), conv(3, (0, 0))], [(2, 0)])
    assert found.places == ((0, 0), (2, 0), (1, 0))


@pytest.mark.thorough
def test_a_deep_network_is_numbered_without_recursion() -> None:
    kernels = [conv(0), *(conv(0, (index, 0)) for index in range(20_000))]
    assert numbered(kernels, [(20_000, 0)]).places == tuple((index, 0) for index in range(20_001))


# Random networks, each fused twice at random. All operators look alike: only who reads whom tells them apart.


@dataclass(frozen=True)
class Network:
    """Operators in an order that can run; a value is (operator, field), an input (-1, its index), or WEIGHT."""

    reads: tuple[tuple[Value, ...], ...]
    fields: tuple[int, ...]
    heads: tuple[Value, ...]

    @property
    def edges(self) -> set[tuple[int, int]]:
        return {(v[0], operator) for operator, reads in enumerate(self.reads) for v in reads if v[0] >= 0}


def random_network(draw: Random) -> Network:
    known: list[Value] = [(-1, 0), (-1, 1)]
    reads, fields = [], []
    for operator in range(draw.randint(1, 10)):
        own = draw.choices(known[-6:], k=draw.randint(1, 3))
        reads.append((*own, WEIGHT) if draw.random() < 0.5 else tuple(own))
        fields.append(draw.choice((1, 1, 1, 2)))
        known.extend((operator, field) for field in range(fields[-1]))
    used = {value[0] for own in reads for value in own}
    heads = [(operator, draw.randrange(count)) for operator, count in enumerate(fields) if operator not in used]
    heads += [value for value in known[2:] if value not in heads and draw.random() < 0.1]
    draw.shuffle(heads)
    return Network(tuple(reads), tuple(fields), tuple(heads))


def quotient(network: Network, groups: Iterable[Iterable[int]]) -> nx.DiGraph:
    group_of = {operator: index for index, group in enumerate(groups) for operator in group}
    graph = nx.DiGraph()
    graph.add_nodes_from(group_of.values())
    graph.add_edges_from((group_of[a], group_of[b]) for a, b in network.edges if group_of[a] != group_of[b])
    return graph


def random_order(graph: nx.DiGraph, draw: Random) -> list[int]:
    waiting, order = set(graph), []
    while waiting:
        ready = sorted(node for node in waiting if waiting.isdisjoint(graph.predecessors(node)))
        order.append(draw.choice(ready))
        waiting.remove(order[-1])
    return order


def random_fusion(network: Network, draw: Random) -> list[list[int]]:
    """Return kernels as lists of operators, all in an order that can run."""
    groups = [[operator] for operator in range(len(network.reads))]
    for _ in range(draw.randint(0, 8)):
        if len(groups) < 2:
            break
        one, other = draw.sample(range(len(groups)), 2)
        joined = [group for index, group in enumerate(groups) if index not in (one, other)]
        joined.append(groups[one] + groups[other])
        if nx.is_directed_acyclic_graph(quotient(network, joined)):
            groups = joined
    inside = random_order(nx.DiGraph(network.edges) if network.edges else nx.empty_graph(1, nx.DiGraph), draw)
    alone = [operator for operator in range(len(network.reads)) if operator not in inside]
    position = {operator: index for index, operator in enumerate([*alone, *inside])}
    return [sorted(groups[index], key=position.__getitem__) for index in random_order(quotient(network, groups), draw)]


def library(
    network: Network, fusion: list[list[int]], draw: Random, *, tangled: bool = False
) -> tuple[list[Kernel], list[list[int]], list[Entry]]:
    """Return the kernels of a fusion, with glue here and there; the operators of each kernel; and the heads.

    Where `tangled`, glue may be given more tensors than the one that it shows.
    """
    kernels: list[Kernel] = []
    operators: list[list[int]] = []
    entries: dict[Value, Entry] = {(-1, 0): (-1, 0), (-1, 1): (-1, 1)}
    outside = {value for reads in network.reads for value in reads}

    def shown(value: Value) -> Entry:
        if draw.random() < (0.5 if tangled else 0.8):
            return entries[value]
        given = [entries[value]]
        if tangled and draw.random() < 0.7:
            given = [*draw.choices(list(entries.values()), k=draw.randint(1, 3)), *given]
            draw.shuffle(given)
        kernels.append(Kernel((), (), tuple(given), (written(None, given.index(entries[value])),), 0, 0))
        operators.append([])
        return len(kernels) - 1, 0

    for own in fusion:
        position = {operator: index for index, operator in enumerate(own)}
        reads: list[Entry] = []
        arguments = []
        for operator in own:
            found = []
            for value in network.reads[operator]:
                if value == WEIGHT:
                    found.append(WEIGHTS)
                elif value[0] in position:
                    found.append(Source(position[value[0]], value[1]))
                else:
                    found.append(read(len(reads)))
                    reads.append(shown(value))
            arguments.append(tuple(found))
        made = [(operator, field) for operator in own for field in range(network.fields[operator])]
        seen = [value for value in made if value in outside or value in network.heads]
        entries.update({value: (len(kernels), index) for index, value in enumerate(seen)})
        outputs = tuple(written(position[operator], field) for operator, field in seen)
        kernels.append(Kernel((CONV,) * len(own), tuple(arguments), tuple(reads), outputs, 0, 0))
        operators.append(own)
    heads = [shown(value) for value in network.heads]
    return kernels, operators, heads


@given(st.randoms(use_true_random=False))
def test_any_two_fusions_are_numbered_alike_and_grouped_as_finely_as_can_be(draw: Random) -> None:
    network = random_network(draw)
    made = [library(network, random_fusion(network, draw), draw) for _ in range(2)]
    known = [numbered(kernels, heads) for kernels, _, heads in made]
    assert known[0].kinds == known[1].kinds
    assert known[0].reads == known[1].reads
    assert known[0].heads == known[1].heads
    original = [
        [own[kernel][position] for kernel, position in one.places] for one, (_, own, _) in zip(known, made, strict=True)
    ]
    assert original[0] == original[1]
    assert sorted(original[0]) == list(range(len(network.reads)))

    inputs = tuple(Tensor(f"x{index}", (1, 4, 4, 4)) for index in range(2))
    graph, alignments = align("net", inputs, [kernels for kernels, _, _ in made], [heads for _, _, heads in made])
    together = nx.DiGraph(network.edges)
    together.add_nodes_from(range(len(network.reads)))
    for _, operators, _ in made:
        for own in operators:
            nx.add_cycle(together, own)
    groups = []
    for operator in graph.operators:
        one, other = (
            {o for kernel in alignment.kernels[operator.name] for o in own[kernel]}
            for alignment, (_, own, _) in zip(alignments, made, strict=True)
        )
        assert one == other
        groups.append(one)
    assert set(map(frozenset, groups)) == set(map(frozenset, nx.strongly_connected_components(together)))

    # What each operator reads and writes is what crosses its border, and all stand in an order that can run.
    value_of = {name: (original[0][v[0]], v[1]) if v[0] >= 0 else v for v, name in alignments[0].names.items()}
    known_values = {(-1, 0), (-1, 1)}
    for operator, group in zip(graph.operators, groups, strict=True):
        reads = {v for o in group for v in network.reads[o] if v != WEIGHT and v[0] not in group}
        assert {value_of[name] for name in operator.inputs} == reads <= known_values
        read_elsewhere = {v for o, own in enumerate(network.reads) if o not in group for v in own}
        crossing = {v for v in {*read_elsewhere, *network.heads} if v[0] in group}
        assert {value_of[tensor.name] for tensor in operator.outputs} == crossing
        known_values |= crossing
    assert [value_of[name] for name in graph.outputs] == list(network.heads)
