"""The speed of the machine now, against that at the time of its profile.

The speed of a shared machine moves by itself: two busy virtual cores may share one real core for minutes. So a run that
is compared with its prediction states the machine's speed just before and after it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from threading import Barrier

from tvm_pipeline.backends.contract import Array, CompiledModel, StageRunner
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.platform import Platform, disjoint_sets
from tvm_pipeline.core.profile import Profile
from tvm_pipeline.profiling.bound import in_bound_threads
from tvm_pipeline.profiling.computed import computed_runner


def machine_speed(compiled: CompiledModel, platform: Platform, profile: Profile, passes: int = 10) -> float:
    """Return the speed of the machine now over its speed at the time of `profile`, by the median over passes.

    A pass runs the model, or what a device computes of it, on as many devices as can work together, all at once.

    Args:
        profile: has the model's operators on every device; it may have host operators, too.
    """
    group = max(disjoint_sets(platform.devices), key=len)
    names = compiled.graph.operator_names
    then_s = []
    for device in group:
        found = profile.device(device.name)
        then_s.append(sum(found.seconds[name] or 0.0 for name in names) * found.busy_factor)
    runners = [computed_runner(compiled, device) for device in group]
    together = Barrier(len(group))
    try:
        inputs = [[input_for_timing(compiled.graph, port) for port in runner.inputs] for runner in runners]
        work = [
            (runner, partial(_passes, runner, given, passes, together))
            for runner, given in zip(runners, inputs, strict=True)
        ]
        now_s = [seconds for found in in_bound_threads(work, together) for seconds in found]
    finally:
        for runner in runners:
            runner.close()
    return median(then_s) / median(now_s)


def _passes(runner: StageRunner, inputs: Sequence[Array], passes: int, together: Barrier) -> list[float]:
    """Return the seconds of each pass after a first one, from a bound thread."""
    outputs = [port.buffer() for port in runner.outputs]
    seconds = []
    for _ in range(passes + 1):
        together.wait()
        begin_s = time.perf_counter()
        runner.run(inputs, outputs)
        seconds.append(time.perf_counter() - begin_s)
    return seconds[1:]
