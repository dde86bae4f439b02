"""Seconds of every operator on every device, measured on the compiled model itself.

Each kernel is timed where it runs in the whole model, from a thread that is bound to the device. A device with memory
of its own is also timed as it receives and sends tensors. The whole model is timed too. Its median, less the transfers
of its inputs and outputs, is what the operators' times are scaled to, because a sum of small times misses the time
between them. Then all devices that can work at the same time do so; the factor by which that slows a device is its
`busy_factor`. Devices and phases alternate in rounds, so that a passing load on the machine affects all of them.
Next: `links.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Backend, CompiledModel, Progress
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Platform, Transfer, disjoint_sets
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.profiling.bound import in_bound_thread, in_bound_threads
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.links import SIZES, fit_links, fit_transfer

Samples = npt.NDArray[np.float64]

ROUNDS = 4
BUSY_SPREAD = 0.10


def profile_model(
    backend: Backend,
    compiled: CompiledModel,
    platform: Platform,
    repeats: int = 24,
    progress: Progress = lambda _: None,
) -> Profile:
    """Measure `compiled` on every device of `platform`, and the links between the devices.

    A device that is present and has a model is not measured, because operators cannot be timed one by one on it (an
    Edge TPU is such a device). `stage_timer` times whole stages on such devices, for the scheduler `measured`.

    Args:
        repeats: passes over the model for each device, spread over the rounds.
        progress: is told in a few words what is being measured.

    Examples:
        >>> from tvm_pipeline.testing import example_backend, example_model, example_problem
        >>> profile = profile_model(example_backend(), example_model(), example_problem().platform, repeats=4)
        >>> profile.graph, {name: device.runs for name, device in profile.devices.items()}
        ('net', {'d0': 2, 'd1': 2})
    """
    names = [operator.name for operator in compiled.graph.operators]
    measurable = [device for device in platform.devices if can_time_operators(device)]
    with ExitStack() as opened:
        benches = {d.name: opened.enter_context(closing(_Bench(compiled, names, d))) for d in measurable}
        return _profile(backend, compiled, platform, benches, repeats, progress)


def _profile(
    backend: Backend,
    compiled: CompiledModel,
    platform: Platform,
    benches: dict[str, _Bench],
    repeats: int,
    progress: Progress,
) -> Profile:
    measurable = [platform.device(name) for name in benches]
    for round_ in range(ROUNDS):
        for device in measurable:
            progress(f"operators on {device.name}, round {round_ + 1} of {ROUNDS}")
            benches[device.name].alone(max(repeats // ROUNDS, 2))
        for group in disjoint_sets(measurable):
            if len(group) > 1:
                progress(f"{' and '.join(d.name for d in group)} together, round {round_ + 1} of {ROUNDS}")
                _together([benches[device.name] for device in group], max(repeats // ROUNDS, 2))
    progress("links")
    devices = {name: bench.profile() for name, bench in benches.items()}
    return Profile(
        graph=compiled.graph.name,
        fingerprint=compiled.graph.fingerprint,
        devices=devices,
        links=fit_links({device: benches[device.name].runner for device in measurable}),
        environment=environment(backend.versions()),
        warnings=(
            *(
                f"device {name} was not here, measured were {what.partition(' (')[0]}"
                for name, what in platform.stand_ins.items()
            ),
            *_warnings(devices, compiled.graph),
        ),
    )


class _Bench:
    """One device with the whole model on it, and the samples of all that was timed there."""

    def __init__(self, compiled: CompiledModel, operators: Sequence[str], device: Device) -> None:
        self._compiled, self._device = compiled, device
        self.runner = compiled.stage(operators, device)
        self._inputs = [noise(port) for port in self.runner.inputs]
        self._outputs = [port.buffer() for port in self.runner.outputs]
        self.operators: list[Samples] = []
        self.received: list[Samples] = []
        self.sent: list[Samples] = []
        self.whole: list[float] = []
        self.busy: list[float] = []

    def alone(self, repeats: int) -> None:
        """Time operators, transfers and the whole model while no other device works."""

        def measure() -> None:
            self.operators.append(self._compiled.time_operators(self._device, repeats))
            self._time_transfers(repeats)
            self.whole += self._passes(repeats)

        in_bound_thread(self.runner, measure)

    def together(self, repeats: int, started: threading.Barrier, finished: threading.Barrier) -> None:
        """Time the whole model while the other devices of `started` work, from a bound thread."""
        started.wait()
        self.busy += self._passes(repeats)

        def wait() -> None:
            with suppress(threading.BrokenBarrierError):
                finished.wait()

        # A device goes on until the slowest one has its passes, so that no timed pass meets an idle machine.
        waiter = threading.Thread(target=wait)
        waiter.start()
        while waiter.is_alive():
            self.runner.run(self._inputs, self._outputs)

    def close(self) -> None:
        self.runner.close()

    def profile(self) -> DeviceProfile:
        """Return the medians of all samples."""
        samples = np.concatenate(self.operators)
        median = np.median(samples, axis=0)
        low, high = np.quantile(samples, [0.25, 0.75], axis=0)
        whole = float(np.median(self.whole))
        receive, send = _fitted(self.received), _fitted(self.sent)
        compute_s = whole - _moved_s(self._compiled.graph, receive, send)
        if compute_s <= 0:  # The transfers take nearly all the time, and the difference is noise.
            compute_s = float(median.sum())
        found = DeviceProfile.in_order(
            self._compiled.graph,
            seconds=(median * compute_s / median.sum()).tolist(),
            spread=((high - low) / median).tolist(),
            busy_factor=max(float(np.median(self.busy)) / whole, 1.0) if self.busy else 1.0,
        )
        return replace(found, receive=receive, send=send)

    def _time_transfers(self, repeats: int) -> None:
        """Time transfers, after a first one of each size that does not count."""
        self._compiled.time_transfers(self._device, SIZES, 1)
        samples = self._compiled.time_transfers(self._device, SIZES, repeats)
        if samples is not None:
            received, sent = samples
            self.received.append(received)
            self.sent.append(sent)

    def _passes(self, repeats: int) -> list[float]:
        """Return the seconds of passes over the whole model, after a first one that does not count."""
        self.runner.run(self._inputs, self._outputs)
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self.runner.run(self._inputs, self._outputs)
            samples.append(time.perf_counter() - begin)
        return samples


def _fitted(samples: Sequence[Samples]) -> Transfer | None:
    """Return the line through the medians of each size; None where the device has no transfers."""
    return fit_transfer(SIZES, np.median(np.concatenate(samples), axis=0)) if samples else None


def _moved_s(graph: OperatorGraph, receive: Transfer | None, send: Transfer | None) -> float:
    """Return the seconds in which a device receives the model's inputs and sends its outputs, as predicted."""
    seconds = 0.0
    if receive is not None:
        seconds += receive.seconds(sum(tensor.bytes for tensor in graph.inputs))
    if send is not None:
        seconds += send.seconds(sum(graph.tensors[name].bytes for name in graph.outputs))
    return seconds


def _together(benches: Sequence[_Bench], repeats: int) -> None:
    """Time the whole model on several devices that work at the same time."""
    started, finished = threading.Barrier(len(benches)), threading.Barrier(len(benches))
    work = [(bench.runner, partial(bench.together, repeats, started, finished)) for bench in benches]
    in_bound_threads(work, started, finished)


def _warnings(devices: dict[str, DeviceProfile], graph: OperatorGraph) -> list[str]:
    """Return a warning for each device whose slower operators have so much spread that another program used it."""
    found = []
    for name, device in devices.items():
        spread = device.mean_spread
        if spread > BUSY_SPREAD:
            found.append(
                f"device {name} was busy with something else while {graph.name} was measured (spread {spread:.0%}); "
                "predictions will be as far off: stop other programs and profile again"
            )
    return found
