"""A TFLite file cut into one sub-model for each stage of a plan.

A stage keeps its operators, the tensors they touch and the constants those hold, byte for byte: the same kernels then
give the same results as in the whole model. It takes in what it reads of other stages or of the model's inputs, and
gives out what others read or the model gives; a tensor that skips stages goes to its reader by its name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import flatbuffers
from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.cost.evaluate import check_stages
from tvm_pipeline_edgetpu.model import TfliteModel, indices

# The schema asks for it (`force_align: 16`), and flatbuffers' Python code does not do it by itself.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Slice:
    """The sub-model of one stage: a whole .tflite file, with what goes in and out of it, in its order."""

    content: bytes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def slice_model(model: TfliteModel, stages: Sequence[Stage]) -> list[Slice]:
    """Cuts the model into the sub-models of `stages`.

    Run one after another, with tensors handed on by name, they give every tensor exactly as the whole model does on
    the same kernels. A model's output that is one of its inputs is in no slice.

    Raises:
        PlanError: the stages do not hold every operator once, in a legal order.
    """
    # The devices may be any: what they can hold is the plan's business.
    names = dict.fromkeys(device for stage in stages for device in stage.devices)
    check_stages(model.graph, Platform("any", tuple(map(Device, names)) or (Device("any"),)), tuple(stages))
    return [slice_operators(model, stage.operators) for stage in stages]


def slice_operators(model: TfliteModel, names: Collection[str]) -> Slice:
    """The sub-model of one stage, or of any other operators; that none stands between them is the caller's business."""
    operators = frozenset(names)
    inputs, outputs = _ends(model.graph, operators)
    subgraph = model.parsed.subgraphs[0]
    chosen = [
        operator
        for operator, described in zip(subgraph.operators, model.graph.operators, strict=True)
        if described.name in operators
    ]
    touched = {i for o in chosen for i in (*indices(o.inputs), *indices(o.outputs), *indices(o.intermediates))}
    tensors = sorted(touched - {-1})
    place = {index: new for new, index in enumerate(tensors)} | {-1: -1}
    # A constant may bear the name of a tensor that is computed.
    computed = {*indices(subgraph.inputs), *(i for o in subgraph.operators for i in indices(o.outputs))}
    by_name = {subgraph.tensors[index].name.decode(): place[index] for index in tensors if index in computed}
    # Buffer 0 is the empty one, by the schema.
    constants = sorted({0, *(subgraph.tensors[index].buffer for index in tensors if index not in computed)})
    codes = sorted({operator.opcodeIndex for operator in chosen})
    part = schema.ModelT(
        version=model.parsed.version,
        description=model.parsed.description,
        operatorCodes=[model.parsed.operatorCodes[code] for code in codes],
        buffers=[model.parsed.buffers[buffer] for buffer in constants],
        subgraphs=[
            schema.SubGraphT(
                name=subgraph.name,
                tensors=[
                    _tensor(subgraph.tensors[i], 0 if i in computed else constants.index(subgraph.tensors[i].buffer))
                    for i in tensors
                ],
                inputs=[by_name[tensor.name] for tensor in inputs],
                outputs=[by_name[tensor.name] for tensor in outputs],
                operators=[_operator(operator, codes, place) for operator in chosen],
            )
        ],
    )
    return Slice(packed(part), inputs, outputs)


def _ends(graph: OperatorGraph, operators: frozenset[str]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """What a stage takes in, and what it gives out: the model's own outputs first, in the model's order."""
    inside = [operator for operator in graph.operators if operator.name in operators]
    outside = [operator for operator in graph.operators if operator.name not in operators]
    written = {tensor.name: tensor for operator in inside for tensor in operator.outputs}
    read = {name for operator in inside for name in operator.inputs}
    wanted = dict.fromkeys((*graph.outputs, *(name for operator in outside for name in operator.inputs)))
    return (
        tuple(tensor for name, tensor in graph.tensors.items() if name in read and name not in written),
        tuple(written[name] for name in wanted if name in written),
    )


def _tensor(tensor: Any, buffer: int) -> Any:
    changed = copy(tensor)
    changed.buffer = buffer
    # Where it says -1, edgetpu_compiler refuses the file for its dynamic tensors.
    changed.shapeSignature = None
    return changed


def _operator(operator: Any, codes: list[int], place: dict[int, int]) -> Any:
    changed = copy(operator)
    changed.opcodeIndex = codes.index(operator.opcodeIndex)
    changed.inputs = [place[index] for index in indices(operator.inputs)]
    changed.outputs = [place[index] for index in indices(operator.outputs)]
    changed.intermediates = [place[index] for index in indices(operator.intermediates)] or None
    # It points into the metadata, which stays behind.
    changed.debugMetadataIndex = -1
    return changed


class _AlignedBuffer:
    """Takes the place of the schema's BufferT, which it packs as that does but for the alignment."""

    def __init__(self, data: Any) -> None:
        self.data = b"" if data is None else bytes(data)

    def Pack(self, builder: Any) -> int:  # noqa: N802, the schema calls it by this name
        if self.data:
            builder.StartVector(1, len(self.data), _ALIGNMENT)
            builder.head -= len(self.data)
            builder.Bytes[builder.head : builder.head + len(self.data)] = self.data
            data = builder.EndVector()
        schema.BufferStart(builder)
        if self.data:
            schema.BufferAddData(builder, data)
        return int(schema.BufferEnd(builder))


def packed(part: Any) -> bytes:
    """The bytes of a schema's `ModelT`, whose buffers are replaced by aligned ones."""
    part.buffers = [_AlignedBuffer(buffer.data) for buffer in part.buffers]
    builder = flatbuffers.Builder(sum(len(buffer.data) for buffer in part.buffers) + 4096)
    builder.Finish(part.Pack(builder), b"TFL3")
    return bytes(builder.Output())
