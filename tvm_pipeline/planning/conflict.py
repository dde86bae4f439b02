"""The explanation where there is no plan: a small set of operators, devices and limits in conflict.

Some conflicts show in the figures alone: an operator that fits on no device, or a limit that no split can keep. Where
there is no such conflict, limits are taken away one by one (a deletion filter), until every limit that is left is
needed for the conflict. Chinneck, "Feasibility and Infeasibility in Optimization", 2008.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from tvm_pipeline.core.platform import Device, disjoint_sets
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.cost.device_costs import busy_factor, cost_of, counts_period, lock_s


def explain(problem: Problem, feasible: Callable[[Problem], bool]) -> str:
    """Return what is in conflict, in the user's terms.

    Args:
        feasible: a function that says whether an altered problem has a plan.
    """
    reason = next(_plain_reasons(problem), None)
    if reason is not None:
        return reason
    kept = dict(_limits(problem))
    if not kept or not feasible(_without(problem, kept)):
        return _pieces(problem)
    for name in list(kept):
        rest = {other: limit for other, limit in kept.items() if other != name}
        free = _without(problem, {n: limit for n, limit in _limits(problem) if n not in rest})
        if not feasible(free):
            kept = rest
    needed = "; ".join(kept)
    return f"no plan keeps all of: {needed}" + ("" if len(kept) == 1 else "; loosen any one of these")


def _plain_reasons(problem: Problem) -> Iterator[str]:
    """Yield the reasons that need no search, the most specific first."""
    devices, platform = problem.platform.devices, problem.platform.name
    able = [_able(problem, device) for device in devices]
    for index, operator in enumerate(problem.graph.operators):
        runs = [device for device, mask in zip(devices, able, strict=True) if mask[index]]
        if not runs:
            yield f"no device can run operator {operator.name}; platform {platform} has {_names(devices)}"
        capacity = max((device.memory_bytes or float("inf") for device in runs), default=0)
        if operator.param_bytes > capacity:
            yield (
                f"operator {operator.name} holds {operator.param_bytes} bytes of parameters, no device that can run it "
                f"has more than {capacity:.0f}"
            )
    widest = max(map(len, disjoint_sets(devices)))
    comes_again = problem.objective in ("latency", "energy") and not counts_period(problem) and widest > 1
    if problem.stages is not None and problem.stages > widest and not comes_again:
        needed = "two" if problem.objective in ("latency", "energy") else "as many"
        yield f"{problem.stages} stages need {needed} devices that share no cores; platform {platform} has {widest}"
    total = sum(operator.param_bytes for operator in problem.graph.operators)
    capacity = max(sum(d.memory_bytes or float("inf") for d in group) for group in disjoint_sets(devices))
    if total > capacity:
        yield (
            f"{problem.graph.name} holds {total} bytes of parameters, all devices of platform {platform} together hold "
            f"{capacity:.0f}; give them more memory"
        )
    yield from _too_slow(problem)


def _too_slow(problem: Problem) -> Iterator[str]:
    """Yield the limits of speed that even the fastest device of each operator cannot keep."""
    fastest: list[tuple[float, str]] = []
    for index in range(len(problem.graph)):
        seconds = [(_operator_s(problem, device, index), device.name) for device in problem.platform.devices]
        fastest.append(min(seconds))
    floor_fps, most_s = problem.min_throughput_fps, problem.max_latency_s
    if floor_fps is not None:
        held_s = lock_s(problem)
        if held_s * floor_fps > 1 + 1e-9:
            yield (
                f"the operators hold the lock of the Python interpreter for {held_s:.3g} s of each frame, one at a "
                f"time, which makes no more than {1 / held_s:.4g} frames a second; `min_throughput_fps` asks for "
                f"{floor_fps:.4g}"
            )
        slowest = max(range(len(fastest)), key=lambda index: fastest[index][0])
        seconds_s, device_name = fastest[slowest]
        if seconds_s * floor_fps > 1 + 1e-9:
            name = problem.graph.operators[slowest].name
            yield (
                f"operator {name} takes {seconds_s:.3g} s on its fastest device {device_name}, which alone makes no "
                f"more than {1 / seconds_s:.4g} frames a second; `min_throughput_fps` asks for {floor_fps:.4g}"
            )
    least_s = sum(seconds_s for seconds_s, _ in fastest)
    if most_s is not None and least_s > most_s * (1 + 1e-9):
        yield (
            f"with each operator on its fastest device a frame takes {least_s:.3g} s, `max_latency_s` allows "
            f"{most_s:.3g}"
        )


def _operator_s(problem: Problem, device: Device, index: int) -> float:
    """Return the seconds of one operator on an idle device; infinite where the device cannot run it."""
    seconds = cost_of(problem, device).alone_s(problem.graph.operators[index])
    return seconds * min(1.0, busy_factor(problem, device, 1))


def _able(problem: Problem, device: Device) -> list[bool]:
    """Return for each operator whether the device can run it."""
    costs = cost_of(problem, device)
    return [costs.can_run(operator) for operator in problem.graph.operators]


def _names(devices: tuple[Device, ...]) -> str:
    return ", ".join(device.name for device in devices)


_Limit = Callable[[Problem], Problem]


def _limits(problem: Problem) -> Iterator[tuple[str, _Limit]]:
    """Yield the limits that a user set, in words, with functions that take them away."""
    if problem.stages is not None:
        yield f"`stages` {problem.stages}", lambda p: replace(p, stages=None)
    if problem.children_together:
        yield "`children_together`", lambda p: replace(p, children_together=False)
    if problem.min_throughput_fps is not None:
        yield f"`min_throughput_fps` {problem.min_throughput_fps:g}", lambda p: replace(p, min_throughput_fps=None)
    if problem.max_latency_s is not None:
        yield f"`max_latency_s` {problem.max_latency_s:g}", lambda p: replace(p, max_latency_s=None)
    for device in problem.platform.devices:
        for key in ("memory_bytes", "most_stages"):
            if (limit := getattr(device, key)) is not None:
                yield f"{key} {limit} of device {device.name}", partial(_unlimited, name=device.name, key=key)


def _unlimited(problem: Problem, name: str, key: str) -> Problem:
    """Return the problem without a limit of a device."""
    devices = tuple(replace(d, **{key: None}) if d.name == name else d for d in problem.platform.devices)  # type: ignore[arg-type]
    return replace(problem, platform=replace(problem.platform, devices=devices))


def _without(problem: Problem, limits: dict[str, _Limit]) -> Problem:
    for take_away in limits.values():
        problem = take_away(problem)
    return problem


def _pieces(problem: Problem) -> str:
    """Return the reason where no limit causes the conflict, but the operators that devices cannot run."""
    devices = problem.platform.devices
    for device in devices:
        mask = _able(problem, device)
        if not all(mask):
            missing = problem.graph.operators[mask.index(False)].name
            others = ", ".join(d.name for d in devices if d != device) or "no other device"
            return (
                f"device {device.name} cannot run operator {missing} (and {mask.count(False) - 1} more), and no split "
                f"with {others} covers the rest, each device serving one stage"
            )
    return f"no pipeline of the devices {_names(devices)} can run {problem.graph.name}"
