"""The one source of costs: the seconds and joules of a stage on a device.

The costs of a device are those that were measured or, where nothing was measured, those of its model (`DeviceModel`).
In both cases a stage of operators S that runs alone takes

    receive_s + compute_s + send_s,   where
    compute_s = call_s + sum of added_s(o) + max(sum of work_s(o), spill_s_per_byte * max(0, parameters - cached_bytes))

where o runs over S. For a measured device all but `added_s`, `receive_s` and `send_s` are zero. For the model of a
roofline `work_s` is zero. A stage that was
measured as a whole takes its measured seconds, which include its transfers.

`evaluate`, the simulator, the searches, the baselines and the explanation of conflicts all call `cost_of`. No other
file reads the model of a device or the figures of a profile; a test guards that.

Next: `evaluate.py`, which adds up the costs of a plan.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tvm_pipeline.core.device_model import per_unit
from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.platform import Device, Transfer, disjoint_sets
from tvm_pipeline.core.problem import Problem, may_exceed
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.cost.modelled_stage import roofline_seconds
from tvm_pipeline.errors import OptionError, ProfileError

Floats = npt.NDArray[np.float64]

# The lock of the Python interpreter, as a bus that all devices share.
INTERPRETER = "interpreter"

WIDTH_OF_ERROR = 1.96 * math.sqrt(math.pi / 2)  # half of a 95 % interval, over the mean absolute error

_FREE = Transfer()


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """The costs of operators on one idle device.

    Attributes:
        device: the device.
        may_exceed: whether stages of the graph can need more than the device's `memory_bytes`.
        is_known: whether the device has measurements or a model; if it has neither, all costs are zero.
        is_modelled: whether the costs are those of the device's model, without any measurement.
        busy_factor: how many times slower the device is while every other device works too.
        call_s: seconds of calling a stage, the same for all operators.
        spill_s_per_byte: seconds for each byte of parameters beyond the cache, which every frame fetches again.
        cached_bytes: capacity for parameters that stay from frame to frame; infinite where all parameters stay.
        receive: the transfer by which the device receives the tensors of a stage.
        send: the transfer by which it sends the tensors of a stage.
        active_w: power drawn while it computes and moves tensors, above idle: as the platform states it, else the mean
            over the operators whose joules were measured; None where unknown.
    """

    device: Device
    may_exceed: bool = False
    is_known: bool = True
    is_modelled: bool = False
    busy_factor: float = 1.0
    call_s: float = 0.0
    spill_s_per_byte: float = 0.0
    cached_bytes: float = math.inf
    receive: Transfer = _FREE
    send: Transfer = _FREE
    active_w: float | None = None
    _seconds: Mapping[str, float | None] | None = None
    _joules: Mapping[str, float] | None = None
    _uncertainty: Mapping[str, float] | None = None
    _operator_s: float = 0.0
    _s_per_mac: float = 0.0
    _stages_s: Mapping[frozenset[str], float] | None = None
    _error: float | None = None

    @property
    def serves_once(self) -> bool:
        """Whether the device may serve one stage only: it says so, or several would have to share its memory."""
        return self.may_exceed or math.isfinite(self.cached_bytes) or self.device.most_stages == 1

    @property
    def shared_bus(self) -> str:
        """The bus over which the device fetches parameters beyond its cache; empty where it shares no bus."""
        return self.device.bus if self.spill_s_per_byte else ""

    @property
    def copies_bus(self) -> str:
        """The bus of the device's copies where they run beside its computing (`concurrent_copies`); else empty."""
        return f"copies of {self.device.name}" if self.device.concurrent_copies else ""

    def can_run(self, operator: Operator) -> bool:
        """Return whether the device can run the operator.

        A device without measurements is taken to run all, but for the host's, which the models of devices do not
        describe. Two workers, of which each takes some frames, run no operator that takes all frames in order.
        """
        if self.device.concurrent_copies and (operator.ordered or operator.is_host):
            return False
        if self._seconds is None:
            return not (self.is_modelled and operator.is_host)
        return self._seconds[operator.name] is not None

    def added_s(self, operator: Operator) -> float:
        """Return the seconds that the operator adds to any stage; 0 where the device cannot run it."""
        return self._operator_s if self._seconds is None else self._seconds[operator.name] or 0.0

    def work_s(self, operator: Operator) -> float:
        """Return the seconds of the operator's work, during which the device can fetch parameters."""
        return operator.macs * self._s_per_mac

    def alone_s(self, operator: Operator) -> float:
        """Return the seconds of the operator without the call and the transfers; infinite where it cannot run."""
        return self.added_s(operator) + self.work_s(operator) if self.can_run(operator) else math.inf

    def every_added_s(self, operators: Sequence[Operator]) -> Floats:
        """Return `added_s` of each operator; NaN where the device cannot run it."""
        if self._seconds is None or self.device.concurrent_copies:
            return np.array([self.added_s(operator) if self.can_run(operator) else np.nan for operator in operators])
        return np.array([self._seconds[operator.name] for operator in operators], np.float64)  # None becomes NaN

    def every_work_s(self, macs: Floats) -> Floats:
        """Return `work_s` of operators with so many multiply-accumulates each."""
        return macs * self._s_per_mac

    def added_j(self, operator: Operator) -> float | None:
        """Return the measured joules of the operator; None where there was no sensor."""
        return None if self._joules is None else self._joules[operator.name]

    def uncertain_s(self, operator: Operator) -> float | None:
        """Return the half-width of the 95 % confidence interval of the operator's seconds; None where not known.

        That of a calibrated model follows from its mean absolute error, as if errors were normal.
        """
        if self._error is not None:
            return WIDTH_OF_ERROR * self._error * (self.added_s(operator) + self.work_s(operator))
        return None if self._uncertainty is None else self._uncertainty[operator.name] * self.added_s(operator)

    def spill_s(self, param_bytes: int) -> float:
        """Return the seconds in which a stage fetches the parameters that the cache does not hold, every frame."""
        return self.spill_s_per_byte * max(0.0, param_bytes - self.cached_bytes) if self.spill_s_per_byte else 0.0

    def fixed_s(self, operators: Sequence[Operator]) -> float:
        """Return the seconds of the stage apart from its work and its parameters."""
        if self._seconds is None:
            return self.call_s + len(operators) * self._operator_s
        return self.call_s + sum(self._seconds[operator.name] or 0.0 for operator in operators)

    def operators_s(self, operators: Sequence[Operator], spill_s: float | None = None) -> float:
        """Return the seconds of computing a stage, from those of its operators.

        Operators that the device cannot run count nothing; `can_run` tells them.

        Args:
            spill_s: seconds of fetching parameters, where other stages share the cache; None if no other stage does.
        """
        fetch_s = self.spill_s(sum(operator.param_bytes for operator in operators)) if spill_s is None else spill_s
        return self.fixed_s(operators) + max(sum(operator.macs for operator in operators) * self._s_per_mac, fetch_s)

    def whole_s(self, operators: Collection[str]) -> float | None:
        """Return the measured seconds of the stage of exactly these operators, with its transfers; None without."""
        return self._stages_s.get(frozenset(operators)) if self._stages_s else None

    def energy_j(self, operators: Sequence[Operator], compute_s: float, transfer_s: float) -> float | None:
        """Return the joules, above idle, of a stage that takes these seconds; None where no power is known.

        Measured joules of operators count where there are any. If the stage was measured as a whole, it draws the mean
        power of its operators for its own seconds. Transfers, and operators without measured joules, take the active
        power times their seconds.
        """
        if self._joules is not None:
            measured_j = math.fsum(self._joules[operator.name] for operator in operators)
            if self.whole_s([operator.name for operator in operators]) is not None:
                measured_j *= compute_s / max(self.operators_s(operators), 1e-12)
            return measured_j + (self.active_w or 0.0) * transfer_s
        return None if self.active_w is None else self.active_w * (compute_s + transfer_s)

    def alike(self, other: DeviceCosts) -> bool:
        """Return whether the two devices differ in nothing but their names and cores."""

        def figures(costs: DeviceCosts) -> tuple[object, ...]:
            anonymous = replace(costs, device=_anonymous(costs.device))
            return tuple(getattr(anonymous, name) for name in DeviceCosts.__slots__)

        return figures(self) == figures(other)


def cost_of(problem: Problem, device: Device | str) -> DeviceCosts:
    """Return the costs of the problem's operators on a device: as measured, else as its model says."""
    if isinstance(device, str):
        device = problem.platform.device(device)
    measured = problem.profile.devices.get(device.name)
    stages_s = {
        frozenset(stage.operators): stage.seconds
        for stage in reversed(problem.profile.segments)
        if stage.device == device.name
    }
    exceeds = may_exceed(problem.graph, device)
    active_w = device.active_w if measured is None or device.active_w is not None else _mean_power_w(measured)
    costs = DeviceCosts(device, exceeds, active_w=active_w, _stages_s=stages_s)
    if measured is not None:
        return replace(
            costs,
            busy_factor=measured.busy_factor,
            receive=measured.receive or _FREE,
            send=measured.send or _FREE,
            _seconds=measured.seconds,
            _joules=measured.joules,
            _uncertainty=measured.uncertainty or None,
        )
    model = device.model
    if model is None:
        return replace(costs, is_known=False)
    by_operator = roofline_seconds(problem.graph, model) if model.is_roofline else None
    return replace(
        costs,
        is_modelled=True,
        _seconds=by_operator,
        call_s=model.call_s,
        spill_s_per_byte=model.spill_s_per_byte,
        cached_bytes=math.inf if model.cached_bytes is None else model.cached_bytes,
        receive=Transfer(0.0, model.input_bytes_per_s),
        send=Transfer(0.0, model.output_bytes_per_s),
        _operator_s=model.operator_s,
        _error=model.error,
        _s_per_mac=0.0 if model.is_roofline else per_unit(model.macs_per_s),
    )


def known_cost_of(problem: Problem, device: Device | str) -> DeviceCosts:
    """Return `cost_of`, or raise where nothing is known of the device.

    Raises:
        ProfileError: the device has neither measurements nor a model.
    """
    costs = cost_of(problem, device)
    if not costs.is_known:
        problem.profile.device(costs.device.name)  # its error lists what was measured
    return costs


def known_idle_w(problem: Problem, covers: str | None = None) -> float | None:
    """Return the power of the idle machine: as measured, else as the platform states it; None where neither tells.

    Args:
        covers: what a sensor covers that this is to be subtracted from. What the profile measured of something else
            then tells nothing.
    """
    measured = problem.profile.idle
    if measured is None:
        return problem.platform.idle_w
    return measured.power_w if covers in (None, measured.covers) else None


def idle_w(problem: Problem) -> float:
    """Return `known_idle_w`, or 0 where it is not known.

    Examples:
        >>> from tvm_pipeline.testing import example_problem
        >>> problem = example_problem()
        >>> idle_w(problem), idle_w(replace(problem, platform=replace(problem.platform, idle_w=1.5)))
        (0.0, 1.5)
    """
    return known_idle_w(problem) or 0.0


def counts_period(problem: Problem) -> bool:
    """Return whether the seconds between frames matter: to the objective, or to a limit.

    They are part of the energy where the idle power is known. Then most searches give each device one stage, because
    they do not add up the seconds of several stages of a device.
    """
    counted = problem.objective == "throughput" or (problem.objective == "energy" and idle_w(problem) > 0)
    return counted or problem.min_throughput_fps is not None


def lock_s(problem: Problem, operators: Iterable[str] | None = None) -> float:
    """Return the seconds of a frame for which operators hold the lock of the Python interpreter.

    Args:
        operators: the names of operators; all of the graph where they are left out.
    """
    held = problem.profile.lock_s
    if not held:
        return 0.0
    names = problem.graph.operator_names if operators is None else operators
    return math.fsum(held.get(name, 0.0) for name in names)


def busy_factor(problem: Problem, device: Device | str, working: int) -> float:
    """Return how many times slower a device is while `working` devices, itself among them, work at the same time.

    The measured factor holds while all other devices work. With fewer of them, the slow-down is in proportion.
    """
    costs = cost_of(problem, device)
    if costs.busy_factor == 1.0:
        return 1.0
    groups = disjoint_sets(problem.platform.devices)
    others = max(len(group) for group in groups if costs.device in group) - 1
    share = min((working - 1) / others, 1.0) if others else 0.0
    return 1 + (costs.busy_factor - 1) * share


def can_time_operators(device: Device) -> bool:
    """Return whether operators can be timed one by one.

    A device with a model computes whole stages only, unless the model is a roofline.
    """
    return bool(device.stand_in) or device.model is None or device.model.is_roofline


def calibrated_error(device: Device) -> float | None:
    """Return the error that the device's model states of itself; None where it has no calibrated model."""
    return None if device.model is None else device.model.error


def buses_of_parameters(problem: Problem) -> list[str]:
    """Return the name of the bus of each device that fetches parameters over one."""
    found = [cost_of(problem, device).shared_bus for device in problem.platform.devices]
    return [bus for bus in found if bus]


def require_caches(problem: Problem) -> None:
    """Raise OptionError where the cache of a device is not known, which an objective with `dram` needs."""
    for device in problem.platform.devices:
        if device.cache_bytes is None:
            raise OptionError(
                f"`objective` {problem.objective}: device {device.name} of platform {problem.platform.name} states no "
                "parameter cache; give `cache_bytes` in the platform file",
                option="objective",
            )


def equal_cache_bytes(problem: Problem, devices: Sequence[Device]) -> int:
    """Return the parameter cache, in bytes, that the devices have in common; 0 if the objective counts no overflow.

    The exact searches define overflow for equal devices only, as the published problem does.

    Raises:
        OptionError: the objective counts overflow, and a device states no cache or another one than the first.
    """
    if "dram" not in problem.objective:
        return 0
    first, *others = (device.cache_bytes for device in devices)
    if first is None or any(size != first for size in others):
        stated = ", ".join(f"{device.name}: {device.cache_bytes or 'unknown'}" for device in devices)
        raise OptionError(
            f"`objective` {problem.objective}: the devices of platform {problem.platform.name} need equal parameter "
            f"caches ({stated}); give each the same `cache_bytes` in the platform file",
            option="objective",
        )
    return first


def require_energy(problem: Problem) -> None:
    """Raise ProfileError where the power of a device is not known, which objective energy needs."""
    operator = problem.graph.operators[0]
    for device in problem.platform.devices:
        if device.active_w is None and cost_of(problem, device).added_j(operator) is None:
            raise ProfileError(
                f"objective energy: nothing is known of the power of device {device.name}; give `active_w` in "
                "the platform file, or measure joules with `tvm-pipeline profile --power`, where a sensor of power is"
            )


def _mean_power_w(measured: DeviceProfile) -> float | None:
    """Return the mean power above idle over all operators that the device runs; None where it was not measured."""
    if measured.joules is None or not measured.whole_s:
        return None
    runs = [name for name, seconds in measured.seconds.items() if seconds is not None]
    return math.fsum(measured.joules[name] for name in runs) / measured.whole_s


def _anonymous(device: Device) -> Device:
    return replace(device, name="any", cores=(), target="", stand_in="")
