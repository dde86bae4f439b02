"""The seconds of a stage, and the spread that says how far they may be off."""

from __future__ import annotations

import pytest

from tests.profiling.machine import Clock, Kernel, chain_machine
from tvm_pipeline import Device
from tvm_pipeline.profiling import stage_timer

DEVICE = Device("d0", "fake", cores=(0,))


def test_a_steady_stage(clock: Clock, kernel: Kernel) -> None:
    timed = stage_timer(chain_machine(clock, {"d0": [0.01, 0.03]}))(["op0", "op1"], DEVICE)
    assert (timed.device, timed.operators) == ("d0", ("op0", "op1"))
    assert timed.seconds == pytest.approx(0.04)
    assert timed.spread == pytest.approx(0.0)


def test_the_spread_is_that_of_the_middle_half(clock: Clock, kernel: Kernel) -> None:
    """Half of the calls take 2 ms and half 4 ms: the middle half goes from one to the other."""
    timed = stage_timer(chain_machine(clock, {"d0": [(0.002, 0.004)]}))(["op0"], DEVICE)
    assert timed.seconds == pytest.approx(0.003)
    assert timed.spread == pytest.approx(2 / 3)


def test_a_stage_that_others_disturb_is_as_uncertain_as_what_they_took(clock: Clock, kernel: Kernel) -> None:
    """Each call takes 10 ms, 8 of which the thread waits for its core: all samples agree, and none is believed."""
    machine = chain_machine(clock, {"d0": [0.01]})
    take = machine.hooks["op0", "d0"]

    def disturbed(call: int) -> None:
        take(call)
        kernel.wait(0.008)

    machine.hooks = {("op0", "d0"): disturbed}
    timed = stage_timer(machine)(["op0"], DEVICE)
    assert timed.spread >= 0.75
