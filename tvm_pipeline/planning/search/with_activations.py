"""Stages that fit the memory of their devices with their activations, and not only with their parameters.

The peak of a stage's activations in the best order is no sum over operators, and does not grow with the stage: a larger
stage may end at a cut where fewer bytes are alive. So the searches count parameters alone, which is a relaxation. Its
bound holds in any case, and if its best plan fits with activations, too, this plan is optimal. If it does not fit,
`dynamic_programming.chain` cuts the graph's own order with the bytes of every segment.

A segment first counts with a cheap lower bound of its memory (`least_needs`). Only when the best pipeline contains the
segment, its best order is searched; if the segment is too large, the best pipeline is searched again. The pipeline at
the end is the best one. LazySP (Dellin and Srinivasa, ICAPS 2016) checks only the edges of the best path in the same
way, as does `planning/corrected.py`.

Next: `tvm_pipeline/memory/stage_memory.py`, the memory that a stage needs.
"""

from __future__ import annotations

import math

import numpy as np

from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.memory import stage_memory as memory
from tvm_pipeline.planning.search.cuts import Cuts, Floats


def check_operators(problem: Problem) -> None:
    """Raise InfeasibleError if an operator by itself fits no device."""
    devices = problem.platform.devices
    largest = max(devices, key=lambda device: math.inf if device.memory_bytes is None else device.memory_bytes)
    if largest.memory_bytes is None:
        return
    tensors = problem.graph.tensors
    for operator in problem.graph.operators:
        touched = sum(tensors[read].bytes for read in dict.fromkeys(operator.inputs)) + operator.output_bytes
        if operator.param_bytes + touched > largest.memory_bytes:
            raise InfeasibleError(
                f"operator {operator.name} needs {operator.param_bytes} bytes of parameters and {touched} of tensors "
                f"that it reads and writes; device {largest.name}, which has the most memory, has "
                f"{largest.memory_bytes}; give it more, or choose a smaller input"
            )


def least_needs(graph: OperatorGraph) -> Floats:
    """Return an N+1 x N+1 matrix: a lower bound of the activations, in bytes, that operators i to j-1 need.

    A segment needs all its inputs together with its outputs, and all its inputs together with the tensors of any one of
    its operators. Entries with i >= j are infinite.
    """
    count, tensors = len(graph), graph.tensors
    writer, readers = graph.edges.writer, graph.edges.readers
    own = np.array(
        [sum(tensors[t].bytes for t in dict.fromkeys(o.inputs)) + o.output_bytes for o in graph.operators], float
    )
    kept = set(graph.outputs)
    need = np.full((count + 1, count + 1), np.inf)
    alive: list[str] = [tensor.name for tensor in graph.inputs]
    written = np.zeros(count + 1)  # for each cut: bytes alive there that were written after cut i, `start` below
    for name, index in writer.items():
        last = count if name in kept else max(readers[name], default=index)
        written[index + 1 : last + 1] += tensors[name].bytes
    for start in range(count):
        # `other` has the bytes of each operator's tensors that are no inputs of the segment.
        received, other, leaving = np.zeros(count + 1), own.copy(), written.copy()
        for name in alive:
            size = tensors[name].bytes
            later = [reader for reader in readers[name] if reader >= start]
            if later:
                received[later[0] + 1 :] += size
                other[later] -= size
            if name in writer:
                last = count if name in kept else max(readers[name], default=writer[name])
                leaving[start : last + 1] -= size
        most = np.maximum.accumulate(other[start:])
        need[start, start + 1 :] = received[start + 1 :] + np.maximum(most, leaving[start + 1 :])
        alive = [name for name in alive if name in kept or any(reader > start for reader in readers[name])]
        alive += [
            tensor.name for tensor in graph.operators[start].outputs if tensor.name in kept or readers[tensor.name]
        ]
    return need


class SegmentBytes:
    """The bytes of parameters and activations that segments need.

    Attributes:
        bytes: N+1 x N+1; a lower bound, or the exact bytes of a segment that `fit` found too large.
    """

    def __init__(self, graph: OperatorGraph, cuts: Cuts) -> None:
        self.graph, self.param_bytes = graph, cuts.param_bytes
        self.bytes = least_needs(graph) + (self.param_bytes - self.param_bytes[:, None])

    def fit(self, device: Device, start: int, end: int) -> bool:
        """Return whether the operators start to end-1 fit the device."""
        if device.memory_bytes is None:
            return True
        names = [operator.name for operator in self.graph.operators[start:end]]
        params = int(self.param_bytes[end] - self.param_bytes[start])
        needed = params + memory.activation_bytes(self.graph, names, device.memory_bytes - params)
        if needed > device.memory_bytes:
            self.bytes[start, end] = needed
        return needed <= device.memory_bytes
