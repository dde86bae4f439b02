"""Ways to cut a graph, and tensors by name on their way through the ports of stages: what `conformance.py` runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_pipeline.backends.contract import Array, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.tensor_layout import relayout, to_logical

MOST_CUTS = 8  # of a model with many operators, evenly spread


def halves(graph: OperatorGraph) -> list[tuple[list[str], list[str]]]:
    """Return the graph's operators in two groups, cut at up to MOST_CUTS places; the cut in the middle comes first."""
    names = graph.operator_names
    count = min(MOST_CUTS, len(names) - 1)
    places = {round(len(names) * step / (count + 1)) for step in range(1, count + 1)} if count > 0 else set()
    inside = sorted(places & set(range(1, len(names))), key=lambda place: abs(place - len(names) / 2))
    return [(names[:place], names[place:]) for place in inside]


def around(graph: OperatorGraph) -> list[str]:
    """Return an operator and one that reads what others make of it, which are no stage; none where there are none."""
    made: dict[str, frozenset[str]] = {}  # tensor -> operators it depends on
    writer = {tensor.name: operator.name for operator in graph.operators for tensor in operator.outputs}
    for operator in graph.operators:
        before = frozenset[str]().union(*(made.get(name, frozenset()) for name in operator.inputs))
        direct = {writer[name] for name in operator.inputs if name in writer}
        for name in before - direct:
            return [name, operator.name]
        for tensor in operator.outputs:
            made[tensor.name] = before | {operator.name}
    return []


def buffers(runner: StageRunner) -> tuple[list[Array], list[Array]]:
    return [port.buffer() for port in runner.inputs], [port.buffer() for port in runner.outputs]


def fill(runner: StageRunner, inputs: Sequence[Array], tensors: Mapping[str, Array]) -> None:
    """Write tensors in logical order into the buffers of the ports."""
    for port, array in zip(runner.inputs, inputs, strict=True):
        relayout(tensors[port.name], "", array, port.layout)


def logical(graph: OperatorGraph, runner: StageRunner, outputs: Sequence[Array]) -> dict[str, Array]:
    """Return copies of what a stage gives, by name, in logical order and in the shapes of the graph."""
    logical = {
        port.name: to_logical(array, port.layout).copy() for port, array in zip(runner.outputs, outputs, strict=True)
    }
    return reshaped(graph, logical)


def reshaped(graph: OperatorGraph, tensors: Mapping[str, Array]) -> dict[str, Array]:
    shapes = graph.tensors
    return {name: array.reshape(shapes[name].shape) for name, array in tensors.items()}
