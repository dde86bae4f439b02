"""Each open stage holds an arena of its own, also between its frames: what `deploy` counts for several models."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from tests.support.parts import needs

needs("tvm")

from tvm_pipeline.core.platform import Device
from tvm_pipeline_tvm.relay.compiled import RelayModel


def test_stages_of_a_device_hold_their_activations_side_by_side(
    compiled: Callable[..., RelayModel], cpu: Device
) -> None:
    model = compiled("branching")
    operators = model.graph.operator_names
    first = model.stage(operators, cpu)
    inputs, outputs = ([port.buffer() for port in ports] for ports in (first.inputs, first.outputs))
    held, stages = [], []
    tracemalloc.start()  # numpy tells it of the arrays that it allocates
    try:
        for _ in range(8):
            stages.append(model.stage(operators, cpu))
            stages[-1].run(inputs, outputs)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert stages[0].activation_bytes > 0
    assert held[-1] - held[0] >= 7 * stages[0].activation_bytes
