"""Seconds of every operator on every device, measured on the compiled model itself.

Each kernel is timed where it runs in the whole model, from a thread tied to the device. The whole model is timed
too, and the operators' times are scaled to its median, since a sum of small times misses what lies between
them. Then all devices that can work at the same time do: what they slow one another down is the `busy_factor`.
Devices and phases alternate in rounds, so that a passing load on the machine meets all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Backend, CompiledModel, Progress
from tvm_pipeline.backends.ports import noise
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.platform import Device, Platform, disjoint_sets
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.device_costs import can_time_operators
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.environment import environment
from tvm_pipeline.profiling.links import fit_links

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
    """Measures `compiled` on every device of `platform`, and the links between the devices.

    A device that is here and has a model is left to that: operators cannot be timed one by one on an Edge TPU. What
    such devices take for whole stages is measured by `measured_plan`.

    Args:
        repeats: passes over the model for each device, spread over the rounds.
        progress: told in a few words what is being measured.
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
    """One device, with the whole model on it and all that was timed."""

    def __init__(self, compiled: CompiledModel, operators: Sequence[str], device: Device) -> None:
        self._compiled, self._device = compiled, device
        self.runner = compiled.stage(operators, device)
        self._inputs = [noise(port) for port in self.runner.inputs]
        self._outputs = [port.buffer() for port in self.runner.outputs]
        self.operators: list[Samples] = []
        self.whole: list[float] = []
        self.busy: list[float] = []

    def alone(self, repeats: int) -> None:
        def measure() -> None:
            self.operators.append(self._compiled.time_operators(self._device, repeats))
            self.whole += self._passes(repeats)

        in_bound_thread(self.runner, measure)

    def together(self, repeats: int, started: threading.Barrier, finished: threading.Barrier) -> None:
        def measure() -> None:
            started.wait()
            self.busy += self._passes(repeats)
            # All go on until the slowest has its passes: nobody's last ones may meet an idle machine.
            waiter = threading.Thread(target=finished.wait)
            waiter.start()
            while waiter.is_alive():
                self.runner.run(self._inputs, self._outputs)

        in_bound_thread(self.runner, measure)

    def _passes(self, repeats: int) -> list[float]:
        self.runner.run(self._inputs, self._outputs)
        samples = []
        for _ in range(repeats):
            begin = time.perf_counter()
            self.runner.run(self._inputs, self._outputs)
            samples.append(time.perf_counter() - begin)
        return samples

    def close(self) -> None:
        self.runner.close()

    def profile(self) -> DeviceProfile:
        samples = np.concatenate(self.operators)
        median = np.median(samples, axis=0)
        low, high = np.quantile(samples, [0.25, 0.75], axis=0)
        whole = float(np.median(self.whole))
        return DeviceProfile.in_order(
            self._compiled.graph,
            seconds=(median * whole / median.sum()).tolist(),
            spread=((high - low) / median).tolist(),
            busy_factor=max(float(np.median(self.busy)) / whole, 1.0) if self.busy else 1.0,
        )


def _together(benches: Sequence[_Bench], repeats: int) -> None:
    started, finished = threading.Barrier(len(benches)), threading.Barrier(len(benches))
    with ThreadPoolExecutor(len(benches)) as pool:
        for done in [pool.submit(bench.together, repeats, started, finished) for bench in benches]:
            done.result()


def _warnings(devices: dict[str, DeviceProfile], graph: OperatorGraph) -> list[str]:
    """A machine that was busy with something else shows in the spread of its slower operators."""
    found = []
    for name, device in devices.items():
        spread = device.mean_spread
        if spread > BUSY_SPREAD:
            found.append(
                f"device {name} was busy with something else while {graph.name} was measured (spread {spread:.0%}); "
                "predictions will be as far off: stop other programs and profile again"
            )
    return found
