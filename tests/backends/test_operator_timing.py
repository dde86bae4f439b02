"""OperatorTimer on a machine whose seconds are known: operators as stages of their own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.profiling.machine import Clock, Machine, clock
from tests.support.fake_backend import random_model
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.core.platform import Device, Transfer

__all__ = ["clock"]

DEVICE = Device("d0", "fake")


@pytest.mark.parametrize("transfers", [{}, {"d0": (Transfer(2e-3, 1e5), Transfer(1e-3, 5e4))}])
def test_seconds_contain_no_transfers(clock: Clock, transfers: dict[str, tuple[Transfer, Transfer]]) -> None:
    """Transfers take as long as the operators here, and each operator has other tensors."""
    plain = random_model(np.random.default_rng(0), 5)
    operators = plain.graph.operators
    hooks = {(operator.name, "d0"): clock.taking(1e-3 * (index + 1)) for index, operator in enumerate(operators)}
    machine = Machine(clock, plain.graph, plain.functions, hooks=hooks, transfers=transfers)
    timer = OperatorTimer(machine.graph, machine.stage, machine.values, machine.time_transfers)
    seconds = np.median(timer.seconds(DEVICE, 9), axis=0)
    timer.close()
    assert seconds == pytest.approx([1e-3 * (index + 1) for index in range(5)])
