"""The time of one stage, compiled and measured as a whole.

The scheduler `measured` (`planning/measured.py`) asks for such times, where the times of operators do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.platform import Device
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.profiling.calls import time_calls

REPEATS = 30


def stage_timer(compiled: CompiledModel) -> SegmentTimer:
    """Return a function that compiles operators as a stage on a device and times the stage.

    The function raises what the backend raises where the operators cannot be a stage. The spread that it states is the
    interquartile range over the median, or the uncertainty of the median where that is more: if other programs took the
    cores for a share of the time, the median may be off by this share.

    Examples:
        >>> from tvm_pipeline.testing import example_model
        >>> timed = stage_timer(example_model())(["double"], Device("d0", "fake"))
        >>> timed.device, timed.operators, timed.seconds > 0
        ('d0', ('double',), True)
    """

    def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
        with closing(compiled.stage(operators, device)) as runner:
            inputs = [noise(port) for port in runner.inputs]
            outputs = [port.buffer() for port in runner.outputs]
            found = time_calls(runner.bind, lambda: runner.run(inputs, outputs), REPEATS, device.cores)
        low, high = np.quantile(found.seconds, [0.25, 0.75])
        spread = float(high - low) / found.median
        return SegmentProfile(device.name, tuple(operators), found.median, max(spread, found.uncertainty))

    return timed
