"""The seconds of stages by the model of a device alone: of one stage, or of many at once for a fit of its constants.

They are what `evaluate` says of a stage that runs alone on the device, its inputs and outputs included. Next:
`device_costs.py`, which prices the stages of a plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.device_model import DeviceModel, per_unit
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.core.partition import slice_ends
from tvm_pipeline.cost.shapes import OperatorWork, operator_work

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WorkTable:
    """The work of W operators, as a roofline prices it.

    Attributes:
        kinds: the kinds that occur.
        kind: W; the index of each operator's kind in `kinds`.
        macs: W; multiply-accumulates, with those that vectors waste.
        moved_bytes: W; bytes that the operator reads and writes.
    """

    kinds: tuple[str, ...]
    kind: Integers
    macs: Floats
    moved_bytes: Floats

    @classmethod
    def of(cls, works: Sequence[OperatorWork]) -> WorkTable:
        """Return the table of some operators."""
        kinds = tuple(dict.fromkeys(work.key for work in works))
        index = {kind: number for number, kind in enumerate(kinds)}
        return cls(
            kinds,
            np.array([index[work.key] for work in works], np.int64),
            np.array([work.macs + work.lost_macs for work in works], np.float64),
            np.array([work.moved_bytes for work in works], np.float64),
        )

    def seconds(self, model: DeviceModel) -> Floats:
        """Return the W seconds of the operators by a roofline, see DeviceModel."""
        factors = {kind.name: kind.factor for kind in model.kind}
        factor = np.array([factors.get(kind, 1.0) for kind in self.kinds])
        roof_s = np.maximum(self.macs * per_unit(model.macs_per_s), self.moved_bytes * per_unit(model.bytes_per_s))
        return model.operator_s + factor[self.kind] * roof_s


@dataclass(frozen=True, slots=True, eq=False)
class StageTable:
    """What a model needs to know of N stages.

    Attributes:
        operators, macs, param_bytes, input_bytes, output_bytes: N; sums over each stage.
        work: the operators of all stages, one stage after another.
        stage: the stage of each of them.
    """

    operators: Floats
    macs: Floats
    param_bytes: Floats
    input_bytes: Floats
    output_bytes: Floats
    work: WorkTable
    stage: Integers

    def __len__(self) -> int:
        return len(self.operators)

    def only(self, kept: Integers) -> StageTable:
        """Return the table of some of the stages, by their indices."""
        inside = np.concatenate([np.flatnonzero(self.stage == stage) for stage in kept] or [kept[:0]])
        work = replace(
            self.work,
            kind=self.work.kind[inside],
            macs=self.work.macs[inside],
            moved_bytes=self.work.moved_bytes[inside],
        )
        stage = np.repeat(np.arange(len(kept)), self.operators[kept].astype(np.int64))
        return StageTable(
            self.operators[kept],
            self.macs[kept],
            self.param_bytes[kept],
            self.input_bytes[kept],
            self.output_bytes[kept],
            work,
            stage,
        )

    def seconds(self, model: DeviceModel) -> Floats:
        """Return the N seconds of the stages, each alone on the device, with its inputs and outputs."""
        cached = 0 if model.cached_bytes is None else model.cached_bytes
        spill_s = model.spill_s_per_byte * np.maximum(0.0, self.param_bytes - cached)
        if model.is_roofline:
            compute_s = np.bincount(self.stage, self.work.seconds(model), len(self)) + spill_s
        else:
            work_s = np.maximum(self.macs * per_unit(model.macs_per_s), spill_s)
            compute_s = self.operators * model.operator_s + work_s
        received_s = self.input_bytes * per_unit(model.input_bytes_per_s)
        return np.asarray(
            model.call_s + compute_s + received_s + self.output_bytes * per_unit(model.output_bytes_per_s), np.float64
        )


def stage_table(stages: Sequence[tuple[OperatorGraph, Sequence[str]]]) -> StageTable:
    """Return the table of stages, each a graph and the names of the stage's operators.

    A stage receives the tensors that its operators read from outside, and sends those that are read outside.
    """
    rows: list[tuple[int, int, int, int, int]] = []
    works: list[OperatorWork] = []
    for graph, names in stages:
        operators = [graph.operators[graph.edges.index[name]] for name in names]
        taken, given = slice_ends(graph, names)
        rows.append(
            (
                len(operators),
                sum(operator.macs for operator in operators),
                sum(operator.param_bytes for operator in operators),
                sum(tensor.bytes for tensor in taken),
                sum(tensor.bytes for tensor in given),
            )
        )
        known = works_of(graph)
        works += [known[name] for name in names]
    count, macs, param_bytes, input_bytes, output_bytes = np.array(rows, np.float64).reshape(-1, 5).T
    stage = np.repeat(np.arange(len(rows)), count.astype(np.int64))
    return StageTable(count, macs, param_bytes, input_bytes, output_bytes, WorkTable.of(works), stage)


def stage_seconds(model: DeviceModel, graph: OperatorGraph, operators: Sequence[str]) -> float:
    """Return the seconds of a stage by the model, with its inputs and outputs.

    Examples:
        Two operators on vectors of 16 bytes: two calls of kernels, and 16 bytes each way.

        >>> from tvm_pipeline.testing import example_graph
        >>> model = DeviceModel(operator_s=0.5, input_bytes_per_s=16, output_bytes_per_s=8)
        >>> stage_seconds(model, example_graph(), ["double", "increment"])
        4.0
    """
    return float(stage_table([(graph, operators)]).seconds(model)[0])


@lru_cache(maxsize=64)
def works_of(graph: OperatorGraph) -> Mapping[str, OperatorWork]:
    """Return the work of each operator of a graph, by name."""
    return {operator.name: operator_work(operator, graph.tensors) for operator in graph.operators}


@lru_cache(maxsize=64)
def roofline_seconds(graph: OperatorGraph, model: DeviceModel) -> Mapping[str, float | None]:
    """Return the seconds of each operator by a roofline; None for the host's operators."""

    def of(operator: Operator, seconds: float) -> float | None:
        return None if operator.is_host else seconds

    by_operator = WorkTable.of([*works_of(graph).values()]).seconds(model).tolist()
    return {o.name: of(o, seconds) for o, seconds in zip(graph.operators, by_operator, strict=True)}
