"""Waits until passes over a model take the same time: after a switch of the power mode, clocks take seconds to settle.

A public measurement on a Xavier has first passes after `nvpmodel -m` that take up to eight times as long as later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from statistics import median

from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.platform import Platform
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.computed import computed_runner

LEAST_S = 0.3  # governors look at the load some times a second
LONGEST_S = 5.0
PASSES = 5
STEADY = 0.1  # how far the medians of the last PASSES and of those before them may be apart


def unsettled(compiled: CompiledModel, platform: Platform) -> Iterator[str]:
    """Run a model on each device that a profile measures until its time is steady; yield a line for each where not."""
    for device in filter(can_time_operators, platform.devices):
        with closing(computed_runner(compiled, device)) as runner:
            inputs = [input_for_timing(compiled.graph, port) for port in runner.inputs]
            run = partial(runner.run, inputs, [port.buffer() for port in runner.outputs])
            if not in_bound_thread(runner, partial(settles, run)):
                yield (
                    f"device {device.name}: its clocks had not settled {LONGEST_S:g} s after the mode was set, so "
                    "figures may be off; fix them (on a Jetson by `sudo jetson_clocks`), and profile again"
                )


def settles(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> bool:
    """Repeat a pass until its time is steady; return False if it is not within LONGEST_S."""
    begin_s, seconds = clock(), list[float]()
    while (now_s := clock()) < begin_s + LONGEST_S:
        run()
        seconds.append(clock() - now_s)
        before, last = seconds[-2 * PASSES : -PASSES], seconds[-PASSES:]
        if len(before) == PASSES and now_s >= begin_s + LEAST_S and abs(median(last) / median(before) - 1) < STEADY:
            return True
    return False
