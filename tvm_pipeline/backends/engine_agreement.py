"""Whether engines compute the same: each operator on each of them, from the same tensors, before they are timed.

Engines round differently, and one may have a fault. What differs by more than `closeness.py` allows for the type is
named, and stays on other devices. Its callers are `sliced.py`, and children that try an engine first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tvm_pipeline.backends.closeness import difference, roundings_of
from tvm_pipeline.backends.contract import Array, Port, StageRunner
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import ModelError, PipelineError


def disagreement(
    graph: OperatorGraph, operators: Sequence[str], runner: StageRunner, values: Mapping[str, Array], precision: str
) -> str:
    """Return how the results of a stage differ from `values`; empty where they are as close as they must be.

    Args:
        operators: those of the stage.
        values: every tensor of one frame, of which the stage reads its inputs.
        precision: the type in which the device computes floats, see `Backend.precision`.
    """
    inputs, outputs = [port.buffer() for port in runner.inputs], [port.buffer() for port in runner.outputs]
    for port, array in zip(runner.inputs, inputs, strict=True):
        np.copyto(array, values[port.name].reshape(port.shape))
    try:
        runner.bind()
        runner.run(inputs, outputs)
    except PipelineError as error:
        return f"it fails: {error}"
    kinds = [graph.operators[graph.edges.index[name]].kind for name in operators]
    for port, array in zip(runner.outputs, outputs, strict=True):
        apart = difference((port, values[port.name].reshape(port.shape)), (port, array), precision)
        is_close = apart.is_close if len(operators) == 1 else apart.is_close_behind_a_cut
        if not is_close(roundings_of(kinds)):
            return f"its result {port.name} is {apart}"
    return ""


def check_results(
    who: str, names: Sequence[str], expected: Sequence[Array], found: Sequence[Array], precision: str
) -> None:
    """Raise ModelError where `who` computes outputs otherwise than the CPU, which computed those expected."""
    for name, one, other in zip(names, expected, found, strict=True):
        port = Port(name, one.shape, str(one.dtype))
        apart = difference((port, one), (port, other), precision)
        if not apart.is_close_behind_a_cut(0):
            raise ModelError(f"{who} computes something else than the CPU: {name} is {apart}")
