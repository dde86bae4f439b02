"""Each open stage holds an arena of its own, also between its frames: what `deploy` counts for several models."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest

pytest.importorskip("tvm")

from tvm_pipeline.core.platform import Device
from tvm_pipeline.tvm.relay.compiled import RelayModel


def test_stages_of_a_device_hold_their_activations_side_by_side(
    compiled: Callable[..., RelayModel], cpu: Device
) -> None:
    model = compiled("branching")
    operators = [operator.name for operator in model.graph.operators]
    held, stages = [], []
    tracemalloc.start()  # numpy tells it of the arrays that it allocates
    try:
        for _ in range(8):
            stage = model.stage(operators, cpu)
            stage.run([port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs])
            stages.append(stage)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    print("XX", [b - a for a, b in zip(held, held[1:])], stages[0].activation_bytes)
    assert stages[0].activation_bytes > 0
    assert held[-1] - held[0] >= 7 * stages[0].activation_bytes
