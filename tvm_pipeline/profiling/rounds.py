"""What is timed when: rounds over all devices, again what was disturbed, and once more where equal devices differ.

Devices and phases alternate in rounds, so that a passing load on the machine meets all of them. What was disturbed is
measured again, after a pause, until enough is undisturbed or the time that may be spent on it is over.
Next: `estimates.py` (the figures) and `disturbance.py` (what counts as disturbed).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.profiling.device_bench import Bench, together
from tvm_pipeline.profiling.disturbance import MOST_SLOWER
from tvm_pipeline.profiling.estimates import BESIDE_OTHERS, DeviceTimings, undisturbed_rows
from tvm_pipeline.profiling.patience import Patience, pause
from tvm_pipeline.profiling.timings import Timing, TrustedTimings, undisturbed
from tvm_pipeline.profiling.twins import equal_devices, slower

_log = logging.getLogger(__name__)

ROUNDS = 4
LEAST_EACH = 2  # passes in a round
LONGEST_S = 8.0  # of all rounds together; slower models get fewer passes, down to LEAST_EACH in each round
RETRIED_ROWS = 2  # few, so that they fit between two loads


class Rounds:
    """All measurements on the devices of one platform.

    Args:
        benches: one for each device.
        repeats: passes over the model for each device; fewer, down to 8, where they would take longer than LONGEST_S.
        look: is called before each measurement.
        strict: whether to try for longer, and to make all passes however long they take.

    Attributes:
        groups: devices whose measurements count as those of one, because they are equal.
        again_s: seconds spent on measuring again.
        differences: what was seen of differences between equal devices, as sentences.
    """

    def __init__(self, benches: Mapping[Device, Bench], repeats: int, look: Callable[[], object], strict: bool) -> None:
        self._benches, self._look, self._strict = benches, look, strict
        self._each = max(math.ceil((repeats - LEAST_EACH) / (ROUNDS - 1)), LEAST_EACH)
        self.groups = equal_devices(benches)
        self._sets = [devices for devices in disjoint_sets(benches) if len(devices) > 1]
        self._paused_s = self.again_s = 0.0
        self.differences: list[str] = []

    @property
    def least(self) -> int:
        """How many undisturbed passes of a device are enough; twice as many are tried for."""
        return (LEAST_EACH + (ROUNDS - 1) * self._each) // 2

    @property
    def spent_s(self) -> float:
        """Seconds that everything took so far."""
        return sum(bench.spent_s for bench in self._benches.values()) + self._paused_s

    def measure(self) -> None:
        """Measure everything."""
        for round_ in range(ROUNDS):
            of, each = f"round {round_ + 1} of {ROUNDS}", self._each if round_ else LEAST_EACH
            for device, bench in self._benches.items():
                self._begin(f"operators on {device.name}, {of}")
                bench.alone(each, each)
            for devices in self._sets:
                self._begin(f"{_names(devices)} together, {of}")
                together([self._benches[device] for device in devices], each)
            if not (round_ or self._strict):
                left_s, pass_s = LONGEST_S - self.spent_s, max(self.spent_s / LEAST_EACH, 1e-12)
                self._each = max(min(self._each, int(left_s / pass_s) // (ROUNDS - 1)), LEAST_EACH)
        once_s = self.spent_s
        patience = Patience(once_s, self._strict)
        while patience.lasts(self.spent_s, sum(map(sum, (lacking := self._lacking()).values()))):
            self._sweep(lacking)
        for group in list(self.groups):
            self._doubt_difference(group, patience.until_s)
        self.again_s = self.spent_s - once_s

    def of(self, devices: Iterable[Device]) -> DeviceTimings:
        """Return what was measured on these devices, as if they were one."""
        return DeviceTimings.of_one(self._benches[device].measured for device in devices)

    def stages(self, device: Device) -> list[list[str]]:
        """Return the operators that a device computes, in the stages of a pass."""
        return self._benches[device].stages

    def best_alone_s(self, device: Device) -> float:
        """Return the seconds of the reference kernel on the device while it is undisturbed and works alone.

        They are those of the equal device where it is fastest, unless the device never comes near them: then its core
        is another one than it seems.
        """
        group = self.of(next(group for group in self.groups if device in group)).best_alone_s
        own = self._benches[device].measured.best_alone_s
        return group if own <= group * (1 + MOST_SLOWER) else own

    def _begin(self, line: str) -> None:
        self._look()
        _log.info(line)

    def _sweep(self, lacking: Mapping[Device, MissingPasses]) -> None:
        """Measure once again on each device that lacks undisturbed passes, then wait for a moment."""
        begin_s = self.spent_s
        for device, (rows, passes, _) in lacking.items():
            if rows or passes:
                self._begin(f"operators on {device.name} again, because another program disturbed them")
                self._benches[device].alone(min(rows, RETRIED_ROWS), min(passes, self._each))
        for devices in self._sets:
            busy = max(lacking[device].busy for device in devices)
            if busy:
                self._begin(f"{_names(devices)} together again, because another program disturbed them")
                together([self._benches[device] for device in devices], min(busy, self._each))
        self._paused_s += pause(self.spent_s - begin_s)

    def _lacking(self) -> dict[Device, MissingPasses]:
        found = {}
        for device, bench in self._benches.items():
            measured, best_s = bench.measured, self.best_alone_s(device)
            wanted_busy = 2 * self.least * sum(device in devices for devices in self._sets)
            found[device] = MissingPasses(
                rows=max(self.least - undisturbed_rows(measured.operators, best_s), 0),
                passes=max(2 * self.least - len(undisturbed(measured.whole, best_s)), 0),
                busy=max(wanted_busy - len(undisturbed(measured.busy, BESIDE_OTHERS)), 0),
            )
        return found

    def _doubt_difference(self, group: list[Device], until_s: float) -> None:
        """Measure equal devices again if one seems slower, and count it as a device of its own if it still does."""
        first = self._slower({device: self._benches[device].measured.whole for device in group})
        if not first:
            return
        second: dict[Device, list[Timing]] = {device: [] for device in group}
        while self.spent_s < until_s and any(
            len(undisturbed(second[device], self.best_alone_s(device))) < self.least for device in group
        ):
            for device in group:
                self._begin(f"{_names(group)} again, because they are equal and differ")
                second[device] += self._benches[device].passes(self._each)
        repeated = self._slower(second)
        for device in group:
            self._benches[device].measured.whole += second[device]
        for device, by in first.items():
            twins = _names([other for other in group if other != device])
            if device in repeated:
                self.groups = [[other for other in known if other != device] for known in self.groups] + [[device]]
                self.differences.append(
                    f"device {device.name} is {repeated[device]:.0%} slower than its equal {twins}, in both of two "
                    "measurements"
                )
            else:
                self.differences.append(
                    f"device {device.name} seemed {by:.0%} slower than its equal {twins}, which did not repeat; they "
                    "have the same figures"
                )

    def _slower(self, timings: Mapping[Device, Sequence[Timing]]) -> dict[Device, float]:
        return slower(
            {device: TrustedTimings(found, self.best_alone_s(device), self.least) for device, found in timings.items()}
        )


class MissingPasses(NamedTuple):
    """How many undisturbed passes a device lacks: over the operators, over the whole model, and beside others."""

    rows: int
    passes: int
    busy: int


def _names(devices: Iterable[Device]) -> str:
    return " and ".join(device.name for device in devices)
