"""A compiled model whose calls compute several frames: the CompiledModel of any backend, with the graph of one frame.

Next: `frontends/batching.py`, which widens a model; `runtime/pipeline.py`, which fills its calls.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_pipeline.backends.contract import CompiledModel, Delegating
from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.errors import GraphError


class BatchedModel(Delegating):
    """A model that was compiled for calls of `batch` frames; raises what `of_one_frame` raises."""

    def __init__(self, inner: CompiledModel, batch: int) -> None:
        super().__init__(inner)
        self.graph = of_one_frame(inner.graph, batch)


def with_batch(compiled: CompiledModel, batch: int) -> CompiledModel:
    """Return the model with its batch; the model itself for one frame a call."""
    return BatchedModel(compiled, batch) if batch > 1 else compiled


def of_one_frame(graph: OperatorGraph, batch: int) -> OperatorGraph:
    """Return the graph of one frame for the graph of a call.

    Raises:
        GraphError: the first axis of an input or an output is no such number of equal parts.
    """
    ends = {*(tensor.name for tensor in graph.inputs), *graph.outputs}

    def part(tensor: Tensor) -> Tensor:
        first, *others = tensor.shape or (0,)
        if first and first % batch == 0:
            return replace(tensor, shape=(first // batch, *others))
        if tensor.name in ends:
            raise GraphError(
                f"graph {graph.name}: the first axis of tensor {tensor.name} of shape {list(tensor.shape)} is not "
                f"{batch} equal parts, one for each frame of a call"
            )
        return tensor  # such as a shape, or what has the frames in another axis

    operators = (
        replace(operator, outputs=tuple(map(part, operator.outputs)), macs=operator.macs // batch)
        for operator in graph.operators
    )
    return replace(graph, inputs=tuple(map(part, graph.inputs)), operators=tuple(operators), batch=batch)
