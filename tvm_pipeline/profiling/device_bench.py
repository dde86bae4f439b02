"""One device with all that it computes of a model: it times operators, transfers and passes, alone and beside others.

Next: `rounds.py`, which decides what is timed when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from tvm_pipeline.backends.contract import CompiledModel, Seconds
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.device_model import DeviceModel
from tvm_pipeline.core.platform import Device
from tvm_pipeline.cost.modelled_stage import roofline_seconds
from tvm_pipeline.profiling.bound import in_bound_thread, in_bound_threads
from tvm_pipeline.profiling.computed import computed_runner, computed_stages
from tvm_pipeline.profiling.disturbance import Watch
from tvm_pipeline.profiling.estimates import DeviceTimings
from tvm_pipeline.profiling.links import SIZES
from tvm_pipeline.profiling.timings import Rows, Timing, time_in_windows

# By which the time of a model is shared out among operators until stages are measured (`calibration/stage_profile.py`).
SHARED_OUT_BY = DeviceModel(macs_per_s=1e11, bytes_per_s=1e10, operator_s=1e-6)


class Bench:
    """Times a model on one device: what it computes of it, which is the whole model unless `computes` leaves some out.

    Attributes:
        stages: the operators that it computes, in the stages of a pass.
        measured: all that was timed, but the passes of `passes`.
        spent_s: seconds of the device's time that this took.
    """

    def __init__(self, compiled: CompiledModel, device: Device) -> None:
        self._compiled, self.device = compiled, device
        self.stages = computed_stages(compiled, device)
        self.runner = computed_runner(compiled, device)
        self._inputs = [input_for_timing(compiled.graph, port) for port in self.runner.inputs]
        self._outputs = [port.buffer() for port in self.runner.outputs]
        self.measured = DeviceTimings()
        self.spent_s = 0.0

    def close(self) -> None:
        self.runner.close()

    def alone(self, rows: int, passes: int) -> None:
        """Time operators, transfers and the whole model while no other device works.

        Args:
            rows: passes in which operators and transfers are timed; none for 0.
            passes: passes over the whole model; none for 0.
        """

        def measure() -> None:
            with self._spending():
                if rows:
                    self._time_operators(rows)
                if passes:
                    self.measured.whole += self._passes(passes)

        in_bound_thread(self.runner, measure)

    def passes(self, repeats: int) -> list[Timing]:
        """Return passes over the whole model while no other device works."""

        def measure() -> list[Timing]:
            with self._spending():
                return self._passes(repeats)

        return in_bound_thread(self.runner, measure)

    def beside(self, repeats: int, started: threading.Barrier, finished: threading.Barrier) -> None:
        """Time the whole model while the other devices of `started` work, from a bound thread."""
        started.wait()
        with self._spending():
            self.measured.busy += self._passes(repeats)

        def wait() -> None:
            with suppress(threading.BrokenBarrierError):
                finished.wait()

        # A device goes on until the slowest one has its passes, so that no timed pass meets an idle machine.
        waiter = threading.Thread(target=wait)
        waiter.start()
        while waiter.is_alive():
            self.runner.run(self._inputs, self._outputs)

    @contextmanager
    def _spending(self) -> Iterator[None]:
        """Add the seconds of the block to `spent_s`."""
        begin = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - begin

    def _time_operators(self, repeats: int) -> None:
        """Time operators, then transfers, after a first pass and a first transfer of each size that do not count."""
        with Watch(self.device.cores) as watch:
            watch.begin()
            seconds = self._operator_seconds(repeats + 1)
            self.measured.operators.append(Rows(seconds[1:], watch.end()))
            self._compiled.time_transfers(self.device, SIZES, 1)
            watch.begin()
            samples = self._compiled.time_transfers(self.device, SIZES, repeats)
            window = watch.end()
        if samples is not None:
            received, sent = samples
            self.measured.received.append(Rows(received, window))
            self.measured.sent.append(Rows(sent, window))

    def _operator_seconds(self, repeats: int) -> Seconds:
        """Return the seconds of each operator, by their work where the device does not tell them."""
        if self._compiled.has_operator_times(self.device):
            return self._compiled.time_operators(self.device, repeats)
        by_name = roofline_seconds(self._compiled.graph, SHARED_OUT_BY)
        computed = {name for stage in self.stages for name in stage}
        row = [seconds if name in computed else None for name, seconds in by_name.items()]
        return np.tile(np.array(row, np.float64), (repeats, 1))

    def _passes(self, repeats: int) -> list[Timing]:
        """Return passes over the whole model, after a first one that does not count."""
        run = partial(self.runner.run, self._inputs, self._outputs)
        run()
        with Watch(self.device.cores) as watch:
            return time_in_windows(watch, run, repeats)


def together(benches: Sequence[Bench], repeats: int) -> None:
    """Time the whole model on several devices that work at the same time."""
    started, finished = threading.Barrier(len(benches)), threading.Barrier(len(benches))
    work = [(bench.runner, partial(bench.beside, repeats, started, finished)) for bench in benches]
    in_bound_threads(work, started, finished)
