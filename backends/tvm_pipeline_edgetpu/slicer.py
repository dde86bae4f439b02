"""Cut a TFLite file into one sub-model for each stage of a plan.

A stage keeps its operators, the tensors that they touch and the constants in those, byte for byte. The same kernels
then give the same results as in the whole model. The inputs of a stage are the tensors that it reads from other stages
or from the model's inputs; its outputs are those that other stages read or that the model gives. A tensor that skips
stages goes to its reader by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from ai_edge_litert import schema_py_generated as schema

from tvm_pipeline.backends.contract import ModelSlice
from tvm_pipeline.backends.ports import Array, Port, noise
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.partition import check_partition, check_stage, slice_ends
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.frontends.tflite_resizing import packed
from tvm_pipeline_edgetpu.interpreter import every_tensor
from tvm_pipeline_edgetpu.model import TfliteModel, indices


@dataclass(frozen=True, slots=True)
class Slice:
    """The sub-model of one stage: a whole .tflite file, with its inputs and outputs in the file's order."""

    content: bytes
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def slice_model(model: TfliteModel, stages: Sequence[Stage]) -> list[Slice]:
    """Cut the model into the sub-models of `stages`.

    If they run one after another and hand tensors on by name, they compute every tensor exactly as the whole model
    does on the same kernels. A model's output that is one of its inputs is in no slice.

    Raises:
        PlanError: the stages do not hold every operator once, in a legal order.
    """
    # Whether the devices can hold the stages was checked with the plan.
    check_partition(model.graph, [stage.operators for stage in stages])
    return [slice_operators(model, stage.operators) for stage in stages]


def slice_operators(model: TfliteModel, names: Collection[str]) -> Slice:
    """Return the sub-model of one stage, or of any other operators; the caller checks that none stands between them."""
    operators = frozenset(names)
    inputs, outputs = slice_ends(model.graph, operators)
    subgraph = model.parsed.subgraphs[0]
    inside = {index for index, o in zip(model.stored, model.graph.operators, strict=True) if o.name in operators}
    read = {tensor for index in inside for tensor in indices(subgraph.operators[index].inputs)}
    for index in reversed(model.unpacking):
        if not read.isdisjoint(indices(subgraph.operators[index].outputs)):
            inside.add(index)
            read.update(indices(subgraph.operators[index].inputs))
    chosen = [subgraph.operators[index] for index in sorted(inside)]
    touched = {i for o in chosen for i in (*indices(o.inputs), *indices(o.outputs), *indices(o.intermediates))}
    tensors = sorted(touched - {-1})
    position = {index: new for new, index in enumerate(tensors)} | {-1: -1}
    # A constant may have the name of a tensor that is computed.
    computed = {*indices(subgraph.inputs), *(i for o in subgraph.operators for i in indices(o.outputs))}
    by_name = {subgraph.tensors[index].name.decode(): position[index] for index in tensors if index in computed}
    # The schema demands that buffer 0 is empty.
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
                operators=[_operator(operator, codes, position) for operator in chosen],
            )
        ],
    )
    return Slice(packed(part), inputs, outputs)


class TfliteSlicer:
    """Cuts one file for stages on Edge TPUs (`slice`) and for other backends (`cut`); it is a Slicer of `sliced.py`."""

    def __init__(self, model: Model, parsed: TfliteModel) -> None:
        self._model, self._parsed = model, parsed

    def slice(self, operators: Collection[str]) -> Slice:
        """Return the sub-model of these operators; raise PlanError where they are no legal stage."""
        check_stage(self._parsed.graph, operators)
        if self._parsed.uncut:
            return Slice(self._model.content, *slice_ends(self._parsed.graph, operators))
        return slice_operators(self._parsed, operators)

    def cut(self, operators: Collection[str]) -> ModelSlice:
        part = self.slice(operators)
        digest = hashlib.sha256(part.content).hexdigest()[:8]
        return ModelSlice(Model(f"{self._model.name}_{digest}", "tflite", part.content, part.inputs), part.outputs)

    def values(self) -> dict[str, Array]:
        """Return every tensor of one frame of noise, as TFLite's CPU kernels compute it."""
        inputs = self._parsed.graph.inputs
        frame = {tensor.name: noise(Port.of(tensor)) for tensor in inputs}
        return every_tensor(self._model.content, frame)


def _tensor(tensor: Any, buffer: int) -> Any:
    changed = copy(tensor)
    changed.buffer = buffer
    # edgetpu_compiler takes a -1 in it for a dynamic tensor and refuses the file.
    changed.shapeSignature = None
    return changed


def _operator(operator: Any, codes: list[int], position: dict[int, int]) -> Any:
    changed = copy(operator)
    changed.opcodeIndex = codes.index(operator.opcodeIndex)
    changed.inputs = [position[index] for index in indices(operator.inputs)]
    changed.outputs = [position[index] for index in indices(operator.outputs)]
    changed.intermediates = [position[index] for index in indices(operator.intermediates)] or None
    # It points into the metadata, which the slice does not have.
    changed.debugMetadataIndex = -1
    return changed
