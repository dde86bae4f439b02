"""Joules of every operator on every device, and the power of the idle machine, by a sensor of power.

A sensor resolves no single kernel, so each is repeated for many of the sensor's periods. In turn run

1. nothing, for the power of the idle machine; again after each device, so that a drift shows;
2. on each device, the whole model, or what the device computes of it: its joules above idle are the level;
3. on each device, each operator as a stage of its own: its power above idle, times its seconds in the profile, is what
   it gets of the level.

So the operators' joules add up to what was measured of the whole model, as their seconds do (`estimates.py`). The
joules of transfers are left out of the level: it takes the share of the seconds that is no transfer. Operators that
take the same time share one measurement. Operators of little time, and those that are no stage of their own, have the
power of the whole model. Equal devices share their figures.

Read before: `power/meter.py`. Next: `estimates.py`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, stdev
from typing import NamedTuple

from tvm_pipeline.backends.contract import CompiledModel, StageRunner
from tvm_pipeline.backends.operator_timing import alike_operators
from tvm_pipeline.backends.ports import input_for_timing
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, IdlePower, Profile
from tvm_pipeline.errors import PlanError, PowerError
from tvm_pipeline.power import Meter, Sensor
from tvm_pipeline.profiling.bound import in_bound_thread
from tvm_pipeline.profiling.computed import computed_runner, computed_stages
from tvm_pipeline.profiling.estimates import moved_s

_log = logging.getLogger(__name__)

WINDOWS = 10  # of which a mean is taken, at least
T_95 = 2.262  # Student's t of 95 % for WINDOWS; of more windows it is less
LITTLE = 0.005  # the share of the model's seconds below which an operator is not measured alone
STEADY = 0.01  # the share of the idle machine's power that no difference of power is told from
QUIET = 0.05  # the share of a core that this process may take while the machine is called idle
LATE_S = 5.0  # that a reading may come after its moment


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to measure.

    Attributes:
        window_s: seconds of each of the WINDOWS, at least; never less than the sensor's period.
        idle_window_s: the same for the idle machine.
        settle_s: seconds that threads of this process have to go to sleep before the machine is called idle, at most:
            those of pools spin for some time first.
        longest_s: seconds after which a mean is taken as it is; never less than the first WINDOWS take.
        whole: how narrow the interval of the whole model's power above idle shall be, relative to that power.
        operator: the same of an operator's.
        idle: the same of the idle machine's power.
    """

    window_s: float = 0.1
    idle_window_s: float = 0.3
    settle_s: float = 10.0
    longest_s: float = 10.0
    whole: float = 0.02
    operator: float = 0.05
    idle: float = 0.01


class Power(NamedTuple):
    """A mean power, half the width of its 95 % confidence interval, and the mean seconds of a run."""

    power_w: float
    half_w: float
    run_s: float


class _Window(NamedTuple):
    energy_j: float
    seconds: float
    runs: int


def profile_joules(
    compiled: CompiledModel, platform: Platform, profile: Profile, sensor: Sensor, pace: Pace | None = None
) -> Profile:
    """Return the profile with the joules of each operator above idle, their intervals, and the idle machine's power.

    A device that was not measured, because it has a model, gets no joules.

    Args:
        profile: of `profile_model`, of the same model and platform.
        sensor: covers the devices; it is closed at the end.
        pace: how long to measure.

    Raises:
        PowerError: the sensor cannot be read, or tells nothing of the moments in which the devices worked.
    """
    with Meter(sensor) as meter:
        bench = _Bench(compiled, meter, pace or Pace())
        idles = [bench.idle()]
        found: dict[str, DeviceProfile] = {}
        warnings: list[str] = []
        for device in platform.devices:
            figures = profile.devices.get(device.name)
            if figures is None:
                continue
            equal = next((name for name in found if profile.devices[name].seconds == figures.seconds), None)
            if equal is not None:
                known = found[equal]
                found[device.name] = replace(figures, joules=known.joules, joules_uncertainty=known.joules_uncertainty)
                continue
            whole, operators = bench.device(device, figures, idles[-1])
            idles.append(bench.idle())
            warnings += _drift(device, *idles[-2:])
            found[device.name], said = _shared(compiled, device, figures, whole, operators, _mean(idles[-2:]), sensor)
            warnings += said
    idle = _mean(idles)
    measured_by = f"{sensor.name} ({sensor.covers}), a value every {meter.period_s:g} s"
    return replace(
        profile,
        devices={**profile.devices, **found},
        idle=IdlePower(sensor.name, sensor.covers, max(idle.power_w, 0.0), _relative(idle.half_w, idle.power_w)),
        environment={**profile.environment, "joules measured by": measured_by},
        warnings=(*profile.warnings, *bench.warnings, *warnings),
    )


class _Bench:
    """Repeats work while a meter samples.

    Attributes:
        warnings: what disturbed it.
    """

    def __init__(self, compiled: CompiledModel, meter: Meter, pace: Pace) -> None:
        self._compiled, self._meter, self._pace = compiled, meter, pace
        self.warnings: list[str] = []

    def idle(self) -> Power:
        """Return the power of the idle machine, after the threads of this process have gone to sleep."""
        _log.info("power of the idle machine")
        until_s = time.perf_counter() + self._pace.settle_s
        while (share := _own_share()) > QUIET and time.perf_counter() < until_s:
            pass
        if share > QUIET:
            self.warnings.append(
                f"threads of this process took {share:.0%} of a core while the machine was to be idle, so that the "
                "idle power is too high and joules above it are too low: measure in a process of its own"
            )
        window_s = max(self._pace.idle_window_s, self._meter.period_s)
        return self._mean(partial(time.sleep, window_s / 2), window_s, lambda power: self._pace.idle * power.power_w)

    def device(self, device: Device, figures: DeviceProfile, idle: Power) -> tuple[Power, dict[str, Power]]:
        """Return the power while the device runs all that it computes, and while it runs operators alone."""
        graph = self._compiled.graph
        _log.info(f"joules of {graph.name} on {device.name}")
        groups = [[graph.operators[index].name for index in indices] for indices in alike_operators(graph)]
        long = [names for names in groups if _seconds(figures, names) >= LITTLE * figures.whole_s]
        found: dict[str, Power] = {}

        # All in one thread: a thread that ends leaves a pool of threads behind, which spin for some time.
        def measure() -> Power:
            whole = self._repeated(runner, idle, self._pace.whole)
            for number, names in enumerate(long, 1):
                _log.info(f"joules of {names[0]} on {device.name}, {number} of {len(long)}")
                try:
                    alone = self._compiled.stage(names[:1], device)
                except PlanError:
                    continue  # it is no stage of its own
                with closing(alone):
                    alone.bind()
                    power = self._repeated(alone, idle, self._pace.operator)
                found.update(dict.fromkeys(names, power))
            return whole

        with closing(computed_runner(self._compiled, device)) as runner:
            return in_bound_thread(runner, measure), found

    def _repeated(self, runner: StageRunner, idle: Power, wanted: float) -> Power:
        """Return the power while a stage runs again and again, in the thread that is bound to its device."""
        inputs = [input_for_timing(self._compiled.graph, port) for port in runner.inputs]
        outputs = [port.buffer() for port in runner.outputs]
        window_s = max(self._pace.window_s, self._meter.period_s)
        run = partial(runner.run, inputs, outputs)
        return self._mean(run, window_s, lambda power: wanted * abs(power.power_w - idle.power_w))

    def _mean(self, run: Callable[[], None], window_s: float, wanted_w: Callable[[Power], float]) -> Power:
        """Repeat the work, at first for two windows that do not count, until its power is known well enough."""
        began_s = time.perf_counter()
        while time.perf_counter() - began_s < 2 * window_s:
            run()
        windows: list[_Window] = []
        while True:
            windows += self._windows(run, window_s)
            power = _power(windows)
            spent_s = time.perf_counter() - began_s
            if power.half_w <= wanted_w(power) or spent_s >= self._pace.longest_s:
                return power

    def _windows(self, run: Callable[[], None], window_s: float) -> list[_Window]:
        """Repeat the work for WINDOWS windows of at least so many seconds."""
        marks, runs = [(time.perf_counter(), 0)], 0
        while len(marks) <= WINDOWS:
            run()
            runs += 1
            now_s = time.perf_counter()
            if now_s - marks[-1][0] >= window_s:
                marks.append((now_s, runs))
        found = []
        for (begin_s, before), (end_s, after) in pairwise(marks):
            energy = self._meter.energy(begin_s, end_s, LATE_S + self._meter.period_s)
            if energy is None:
                raise PowerError(
                    f"{self._meter.sensor.name} told nothing for {LATE_S:g} s of what is drawn now; give a sensor that "
                    "goes on, as `power_sensor`"
                )
            found.append(_Window(energy.energy_j, energy.seconds, after - before))
        return found


def _power(windows: Sequence[_Window]) -> Power:
    """Return the mean of windows that follow one another, with its interval."""
    seconds = math.fsum(window.seconds for window in windows)
    watts = [window.energy_j / window.seconds for window in windows]
    return Power(
        math.fsum(window.energy_j for window in windows) / seconds,
        T_95 * stdev(watts) / math.sqrt(len(watts)),
        seconds / sum(window.runs for window in windows),
    )


def _mean(powers: Sequence[Power]) -> Power:
    """Return the mean of several; its interval also holds how far they differ."""
    watts = [power.power_w for power in powers]
    half_w = max(fmean(power.half_w for power in powers), (max(watts) - min(watts)) / 2)
    return Power(fmean(watts), half_w, fmean(power.run_s for power in powers))


def _shared(
    compiled: CompiledModel,
    device: Device,
    figures: DeviceProfile,
    whole: Power,
    operators: Mapping[str, Power],
    idle: Power,
    sensor: Sensor,
) -> tuple[DeviceProfile, list[str]]:
    """Return the figures of a device with joules, whose level is that of the whole model, and what is to be said."""
    active_w, half_w = whole.power_w - idle.power_w, math.hypot(whole.half_w, idle.half_w)
    stages = computed_stages(compiled, device)
    moved = sum(moved_s(compiled.graph, stage, figures.receive, figures.send) for stage in stages)
    level_j = max(active_w, 0.0) * whole.run_s * figures.whole_s / (figures.whole_s + moved)
    power_w = {name: power.power_w - idle.power_w for name, power in operators.items()}
    raw_j = {name: max(power_w.get(name, active_w), 0.0) * (s or 0.0) for name, s in figures.seconds.items()}
    if not any(raw_j.values()):  # the sensor tells none of them from the idle machine
        raw_j = {name: seconds or 0.0 for name, seconds in figures.seconds.items()}
    sum_j = math.fsum(raw_j.values())
    joules = {name: level_j * raw / sum_j for name, raw in raw_j.items()}
    of_whole = _relative(half_w, active_w)
    uncertainty = dict.fromkeys(joules, of_whole)
    for name, power in operators.items():
        of_share = _relative(math.hypot(power.half_w, idle.half_w), power_w[name])
        uncertainty[name] = math.hypot(of_share, of_whole) if joules[name] else 1.0
    said = []
    if active_w <= max(half_w, STEADY * idle.power_w):
        said.append(
            f"device {device.name}: the whole model drew {whole.power_w:.3g} W and the idle machine "
            f"{idle.power_w:.3g} W, with +-{half_w:.2g} W, so that {sensor.name} ({sensor.covers}) tells no joules "
            "above idle; give a sensor that covers the device, as `power_sensor`"
        )
    elif none := [name for name, watts in power_w.items() if watts <= 0]:
        least = min(none, key=lambda name: power_w[name])
        half_w = math.hypot(operators[least].half_w, idle.half_w)
        said.append(
            f"device {device.name}: {len(none)} of {len(power_w)} operators drew no more than the idle machine and "
            f"have 0 J, such as {least} ({power_w[least]:+.2g} W, +-{half_w:.2g})"
        )
    return replace(figures, joules=joules, joules_uncertainty=uncertainty), said


def _drift(device: Device, before: Power, after: Power) -> list[str]:
    """Return a warning where the idle machine drew more or less after a device was measured, beyond both intervals."""
    by_w = after.power_w - before.power_w
    if abs(by_w) <= max(before.half_w + after.half_w, STEADY * before.power_w):
        return []
    return [
        f"the idle machine drew {before.power_w:.3g} W before device {device.name} was measured and "
        f"{after.power_w:.3g} W after ({by_w:+.2g} W): joules may be off by as much; stop other programs, let it cool "
        "down and profile again"
    ]


def _own_share() -> float:
    """Return how much of a core this process takes while it waits for a tenth of a second."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    time.sleep(0.1)
    return (time.process_time() - cpu_s) / (time.perf_counter() - began_s)


def _seconds(figures: DeviceProfile, names: Sequence[str]) -> float:
    return sum(figures.seconds[name] or 0.0 for name in names)


def _relative(half: float, figure: float) -> float:
    """Return half the width of an interval relative to its middle; 1 where that is 0 or less."""
    return min(half / figure, 1.0) if figure > 0 else 1.0
