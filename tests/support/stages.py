"""Frames, random cuts, and stages that run one after another: what tests of any compiled model do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from random import Random

import numpy as np

from tvm_pipeline.backends.contract import Array, CompiledModel, Port
from tvm_pipeline.core.graph import OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.tensor_layout import relayout, to_logical

Written = dict[str, tuple[Port, Array]]  # tensors by name, each as its port says


def random_frame(inputs: Iterable[Tensor | Port], seed: int = 1) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {tensor.name: draw.standard_normal(tensor.shape).astype(tensor.dtype) for tensor in inputs}


def random_stages(graph: OperatorGraph, random: Random, stages: int) -> list[list[str]]:
    """Return a legal cut: a random topological order in consecutive parts, so that any downset may come first."""
    known, order = {tensor.name for tensor in graph.inputs}, []
    waiting = list(graph.operators)
    while waiting:
        ready = [operator for operator in waiting if known.issuperset(operator.inputs)]
        chosen = ready[0] if random.random() < 0.3 else random.choice(ready)
        waiting.remove(chosen)
        order.append(chosen.name)
        known.update(tensor.name for tensor in chosen.outputs)
    positions = sorted(random.sample(range(1, len(order)), stages - 1))
    return [order[a:b] for a, b in zip([0, *positions], [*positions, len(order)], strict=True)]


def run_stages(
    model: CompiledModel, stages: Sequence[tuple[Sequence[str], Device]], frame: Mapping[str, Array]
) -> Written:
    """Run one frame through the stages, one after another; return every tensor that crossed, as it was written."""
    return run_from(model, stages, as_written(model.graph.inputs, frame))


def as_written(inputs: Iterable[Tensor], frame: Mapping[str, Array]) -> Written:
    """Return a frame as tensors that stages read."""
    return {tensor.name: (Port.of(tensor), frame[tensor.name]) for tensor in inputs}


def run_from(
    model: CompiledModel, stages: Iterable[tuple[Sequence[str], Device]], tensors: Mapping[str, tuple[Port, Array]]
) -> Written:
    """Run stages one after another; return `tensors` and all that the stages hand on, as they wrote it."""
    known = dict(tensors)
    for operators, device in stages:
        runner = model.stage(operators, device)
        inputs, outputs = ([port.buffer() for port in ports] for ports in (runner.inputs, runner.outputs))
        for port, array in zip(runner.inputs, inputs, strict=True):
            written, source = known[port.name]
            relayout(source, written.layout, array, port.layout)
        runner.run(inputs, outputs)
        runner.close()
        known.update({port.name: (port, array) for port, array in zip(runner.outputs, outputs, strict=True)})
    return known


def model_outputs(model: CompiledModel, tensors: Mapping[str, tuple[Port, Array]]) -> list[Array]:
    return [to_logical(tensors[name][1], tensors[name][0].layout) for name in model.graph.outputs]
