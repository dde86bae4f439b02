"""The one source of costs: what a stage costs on a device, whoever asks.

A device is known by what was measured of it or, where nothing was, by its model (`DeviceModel`). Either way one idle
stage of operators S, which receives and sends so many bytes, takes

    receive_s + compute_s + send_s,   where
    compute_s = call_s + sum of added_s(o) + max(sum of work_s(o), spill_s_per_byte * max(0, parameters - cached_bytes))

with o in S. For a measured device only `added_s`, receiving and sending are not zero. A stage that was measured as a
whole takes what it was measured to take, its transfers included.

The judge, the simulator, the searches, the baselines and the explanation of conflicts all ask `cost_of`. No other
file looks at the model of a device or at the figures of a profile; a test guards that.

Next: `evaluate.py`, which adds the costs of a plan up.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm_pipeline.core.graph import Operator
from tvm_pipeline.core.platform import Device, DeviceModel, Transfer, disjoint_sets, per_unit
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile
from tvm_pipeline.errors import OptionError, ProfileError

_FREE = Transfer()


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """What operators cost on one idle device.

    Attributes:
        device: the device.
        is_known: whether anything says how fast the device is; without, the costs are all zero.
        is_modelled: whether the costs are the word of the device's model, which nothing measured supports.
        busy_factor: how many times slower the device is while every other device works too.
        call_s: seconds of every stage, whatever its operators.
        spill_s_per_byte: seconds for each byte of parameters beyond the cache, which every frame fetches anew.
        cached_bytes: parameters that stay from frame to frame; infinite where all do.
        receive: what the device takes to receive the tensors of a stage.
        send: what it takes to send the tensors of a stage.
        active_w: power drawn while it computes, above idle; None where unknown.
    """

    device: Device
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
    _operator_s: float = 0.0
    _s_per_mac: float = 0.0
    _stages_s: Mapping[frozenset[str], float] | None = None

    @property
    def serves_once(self) -> bool:
        """Whether the device may serve one stage only, because several would have to share what it holds."""
        return self.device.memory_bytes is not None or math.isfinite(self.cached_bytes)

    @property
    def shared_bus(self) -> str:
        """The bus over which the device fetches parameters that its cache does not hold; empty where it has its own."""
        return self.device.bus if self.spill_s_per_byte else ""

    def can_run(self, operator: Operator) -> bool:
        return self._seconds is None or self._seconds[operator.name] is not None

    def added_s(self, operator: Operator) -> float:
        """Seconds that the operator adds to any stage; 0 where the device cannot run it."""
        return self._operator_s if self._seconds is None else self._seconds[operator.name] or 0.0

    def work_s(self, operator: Operator) -> float:
        """Seconds of work, beside which the device fetches parameters."""
        return operator.macs * self._s_per_mac

    def alone_s(self, operator: Operator) -> float:
        """Seconds of the operator without the call and the transfers of a stage; infinite where it cannot run."""
        return self.added_s(operator) + self.work_s(operator) if self.can_run(operator) else math.inf

    def added_j(self, operator: Operator) -> float | None:
        """Measured joules of the operator; None where there was no sensor."""
        return None if self._joules is None else self._joules[operator.name]

    def spill_s(self, param_bytes: int) -> float:
        """Seconds a frame for the parameters of a stage that the cache does not hold."""
        return self.spill_s_per_byte * max(0.0, param_bytes - self.cached_bytes) if self.spill_s_per_byte else 0.0

    def fixed_s(self, operators: Sequence[Operator]) -> float:
        """Seconds of the stage before its work and its parameters."""
        if self._seconds is None:
            return self.call_s + len(operators) * self._operator_s
        return sum(self._seconds[operator.name] or 0.0 for operator in operators)

    def operators_s(self, operators: Sequence[Operator], spill_s: float | None = None) -> float:
        """Seconds of computing a stage, by its operators; `spill_s` where its parameters share the cache.

        Operators that the device cannot run count nothing; ask `can_run`.
        """
        fetch_s = self.spill_s(sum(operator.param_bytes for operator in operators)) if spill_s is None else spill_s
        return self.fixed_s(operators) + max(sum(operator.macs for operator in operators) * self._s_per_mac, fetch_s)

    def whole_s(self, operators: Collection[str]) -> float | None:
        """Seconds of a stage of exactly these operators, transfers included, where just that was measured."""
        return self._stages_s.get(frozenset(operators)) if self._stages_s else None

    def energy_j(self, operators: Sequence[Operator], compute_s: float, transfer_s: float) -> float | None:
        """Joules of a stage that takes these seconds; None where nothing is known of the device's power.

        What was measured counts for the operators; else, and for transfers, active power times seconds.
        """
        if self._joules is not None:
            measured = math.fsum(self._joules[operator.name] for operator in operators)
            return measured + (self.active_w or 0.0) * transfer_s
        return None if self.active_w is None else self.active_w * (compute_s + transfer_s)

    def alike(self, other: DeviceCosts) -> bool:
        """Whether the two devices differ in nothing but their names and cores."""

        def figures(costs: DeviceCosts) -> tuple[object, ...]:
            anonymous = replace(costs, device=_anonymous(costs.device))
            return tuple(getattr(anonymous, name) for name in DeviceCosts.__slots__)

        return figures(self) == figures(other)


def cost_of(problem: Problem, device: Device | str) -> DeviceCosts:
    """Return what operators of the problem cost on a device: as measured, else as its model says."""
    if isinstance(device, str):
        device = problem.platform.device(device)
    measured = problem.profile.devices.get(device.name)
    stages_s = {
        frozenset(stage.operators): stage.seconds
        for stage in reversed(problem.profile.segments)
        if stage.device == device.name
    }
    costs = DeviceCosts(device, active_w=device.active_w, _stages_s=stages_s)
    if measured is not None:
        return replace(
            costs,
            busy_factor=measured.busy_factor,
            receive=measured.receive or _FREE,
            send=measured.send or _FREE,
            _seconds=measured.seconds,
            _joules=measured.joules,
        )
    model = device.model
    if model is None:
        return replace(costs, is_known=False)
    return replace(
        costs,
        is_modelled=True,
        call_s=model.call_s,
        spill_s_per_byte=model.spill_s_per_byte,
        cached_bytes=math.inf if model.cached_bytes is None else model.cached_bytes,
        receive=Transfer(0.0, model.input_bytes_per_s),
        send=Transfer(0.0, model.output_bytes_per_s),
        _operator_s=model.operator_s,
        _s_per_mac=per_unit(model.macs_per_s),
    )


def known_cost_of(problem: Problem, device: Device | str) -> DeviceCosts:
    """Return `cost_of`, where something is known of the device.

    Raises:
        ProfileError: the device has neither measurements nor a model.
    """
    costs = cost_of(problem, device)
    if not costs.is_known:
        problem.profile.device(costs.device.name)  # its error lists what was measured
    return costs


def busy_factor(problem: Problem, device: Device | str, working: int) -> float:
    """Return how much slower a device is while `working` devices, itself among them, work at the same time.

    The measured slow-down by all others is shared out in proportion to how many of them work.
    """
    costs = cost_of(problem, device)
    if costs.busy_factor == 1.0:
        return 1.0
    groups = disjoint_sets(problem.platform.devices)
    others = max(len(group) for group in groups if costs.device in group) - 1
    share = min((working - 1) / others, 1.0) if others else 0.0
    return 1 + (costs.busy_factor - 1) * share


def can_time_operators(device: Device) -> bool:
    """Whether operators can be timed one by one on the device; a device with a model computes whole stages only."""
    return bool(device.stand_in) or device.model is None


def buses_of_parameters(problem: Problem) -> list[str]:
    """For each device that fetches parameters over a bus, the name of the bus."""
    found = [cost_of(problem, device).shared_bus for device in problem.platform.devices]
    return [bus for bus in found if bus]


def slowed(problem: Problem, factors: Mapping[str, float]) -> Problem:
    """Return the problem with each device so many times slower at computing; one that is not named stays as it is."""
    profile, platform = problem.profile, problem.platform

    def factor(name: str) -> float:
        return factors.get(name, 1.0)

    measured = {name: _slower_profile(device, factor(name)) for name, device in profile.devices.items()}
    segments = tuple(replace(s, seconds=s.seconds * factor(s.device)) for s in profile.segments)
    devices = tuple(replace(d, model=_slower_model(d.model, factor(d.name))) for d in platform.devices)
    return replace(
        problem,
        platform=replace(platform, devices=devices),
        profile=replace(profile, devices=measured, segments=segments),
    )


def with_slower_refill(problem: Problem, factor: float) -> Problem:
    """Return the problem with parameters beyond the caches coming `factor` times as slowly, and without their bus."""

    def slower(device: Device) -> Device:
        model = device.model
        if model is None or model.refill_bytes_per_s is None:
            return device
        return replace(device, bus="", model=replace(model, refill_bytes_per_s=model.refill_bytes_per_s / factor))

    devices = tuple(map(slower, problem.platform.devices))
    return replace(problem, platform=replace(problem.platform, devices=devices))


def require_caches(problem: Problem) -> None:
    """Raise OptionError where overflow is asked for and a device does not say how much it keeps."""
    for device in problem.platform.devices:
        if device.cache_bytes is None:
            raise OptionError(
                f"objective {problem.objective}: how many bytes of parameters device {device.name} keeps is "
                "not known; give `cache_bytes` in the platform file",
                option="objective",
            )


def require_energy(problem: Problem) -> None:
    """Raise ProfileError where energy is asked for and nothing says what a device draws."""
    operator = problem.graph.operators[0]
    for device in problem.platform.devices:
        if device.active_w is None and cost_of(problem, device).added_j(operator) is None:
            raise ProfileError(
                f"objective energy: nothing is known of the power of device {device.name}; give `active_w` in "
                "the platform file, or profile on a machine with a power sensor"
            )


def _anonymous(device: Device) -> Device:
    return replace(device, name="any", cores=(), target="", stand_in="")


def _slower_profile(device: DeviceProfile, factor: float) -> DeviceProfile:
    seconds = {name: None if taken is None else taken * factor for name, taken in device.seconds.items()}
    return replace(device, seconds=seconds)


def _slower_model(model: DeviceModel | None, factor: float) -> DeviceModel | None:
    if model is None:
        return None
    rate = None if model.macs_per_s is None else model.macs_per_s / factor
    return replace(model, macs_per_s=rate, call_s=model.call_s * factor, operator_s=model.operator_s * factor)
