"""A model on a board against the same model here: what was compiled for another processor was never run before.

Both compute one frame of noise, this machine by code for its own processor. How far the outputs may be apart is what
`tvm_pipeline_tvm/agreement.py` allows two targets of one machine. Read next: backends/closeness.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np

from tvm_pipeline import Device, OperatorGraph, Platform
from tvm_pipeline.backends.closeness import Difference, difference, roundings_of
from tvm_pipeline.backends.contract import Array, CompiledModel, Port
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.tensor_layout import relayout, to_logical
from tvm_pipeline.errors import ModelError


def frame_of_noise(graph: OperatorGraph) -> dict[str, Array]:
    """Return noise for each input of a model; two of one shape differ."""
    ports = [Port(tensor.name, tensor.shape, tensor.dtype) for tensor in graph.inputs]
    return {port.name: np.roll(noise(port), index) for index, port in enumerate(ports)}


def whole_devices(compiled: CompiledModel, platform: Platform) -> list[Device]:
    """Return a device of each target of a platform that computes the whole model."""
    found = {device.target: device for device in reversed(platform.devices)}
    return [device for device in found.values() if len(compiled.computes(device)) == len(compiled.graph)]


def outputs_on(compiled: CompiledModel, device: Device, frame: Mapping[str, Array]) -> list[Array]:
    """Return what a model computes of a frame, in one stage on a device, from a thread that is bound to it.

    Args:
        frame: each input, its elements in their logical order; what is not among them, such as a state, is 0.

    Returns:
        The outputs in the order of the graph, each as its elements in their logical order.
    """
    names = compiled.graph.operator_names
    with closing(compiled.stage(names, device)) as runner, ThreadPoolExecutor(1) as thread:
        inputs, outputs = ([port.buffer() for port in ports] for ports in (runner.inputs, runner.outputs))
        for port, array in zip(runner.inputs, inputs, strict=True):
            if port.name in frame:
                relayout(frame[port.name], "", array, port.layout)

        def run() -> None:
            runner.bind()
            runner.run(inputs, outputs)

        thread.submit(run).result()
        made = {p.name: to_logical(array, p.layout) for p, array in zip(runner.outputs, outputs, strict=True)}
    return [np.ascontiguousarray(made[name]) for name in compiled.graph.outputs]


def check_board(
    board: str, graph: OperatorGraph, device: str, here: Sequence[Array], there: Sequence[Array]
) -> Difference:
    """Return how far the output that differs most is off on a board.

    Raises:
        ModelError: it is too far off.
    """
    roundings = roundings_of([operator.kind for operator in graph.operators])
    worst: Difference | None = None
    for name, own, other in zip(graph.outputs, here, there, strict=True):
        port = Port(name, own.shape, own.dtype.name)
        apart = difference((port, own), (port, other.reshape(own.shape)))
        if not apart.is_close_behind_a_cut(roundings):
            raise ModelError(
                f"{graph.name} computes something else on {device} of board {board} than on this machine: output "
                f"{name} is {apart}; give the device another `target` in a platform file, and report this"
            )
        worst = apart if worst is None or apart.error > worst.error else worst
    if worst is None:
        raise ModelError(f"{graph.name} has no outputs to compare")
    return worst
