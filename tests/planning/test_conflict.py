"""A refusal names what is in conflict, and that really is: no less than all of it together forbids every plan."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.support.brute_force import every_plan, serving_once, verdict
from tests.support.examples import seeds
from tests.support.graphs import Traits, random_problem
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Objective, Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.device_costs import counts_period
from tvm_pipeline.errors import InfeasibleError, NoPlanError
from tvm_pipeline.planning.search.dynamic_programming import chain, hybrid, ideals


def limits(problem: Problem) -> dict[str, Callable[[Problem], Problem]]:
    """The limits of a problem as a user would call them, each with what takes it away."""

    def roomy(name: str) -> Callable[[Problem], Problem]:
        def without(p: Problem) -> Problem:
            devices = tuple(replace(d, memory_bytes=None) if d.name == name else d for d in p.platform.devices)
            return replace(p, platform=replace(p.platform, devices=devices))

        return without

    found: dict[str, Callable[[Problem], Problem]] = {
        f"`stages` {problem.stages}": lambda p: replace(p, stages=None),
        "`children_together`": lambda p: replace(p, children_together=False),
        f"`min_throughput_fps` {problem.min_throughput_fps or 0:g}": lambda p: replace(p, min_throughput_fps=None),
        f"`max_latency_s` {problem.max_latency_s or 0:g}": lambda p: replace(p, max_latency_s=None),
    }
    for device in problem.platform.devices:
        if device.memory_bytes is not None:
            found[f"memory_bytes {device.memory_bytes} of device {device.name}"] = roomy(device.name)
    return found


def plans(problem: Problem, *, replicas: bool) -> Iterator[tuple[Stage, ...]]:
    again = not counts_period(problem)
    limited = serving_once(problem)
    for stages in every_plan(problem, problem.stages, again=again, replicas=replicas):
        used = [name for stage in stages for name in stage.devices]
        if not any(used.count(name) > 1 for name in limited):
            yield stages


def feasible(problem: Problem, *, replicas: bool) -> bool:
    return any(verdict(problem, stages) is not None for stages in plans(problem, replicas=replicas))


def random_limits(seed: int) -> Problem:
    rng = random.Random(seed)
    objective: Objective = rng.choice(("throughput", "throughput", "latency", "energy"))
    problem = random_problem(rng, objective, operators=(3, 5), devices=(2, 3), traits=Traits(overlapping=False))
    if seed % 2:
        problem = replace(problem, platform=replace(problem.platform, idle_w=2.0))
    problem = replace(problem, children_together=rng.random() < 0.4)
    if rng.random() < 0.8:
        if objective == "throughput":
            return replace(problem, max_latency_s=rng.randint(15, 60) / 1000)
        return replace(problem, min_throughput_fps=float(rng.randint(20, 80)))
    return problem


@pytest.mark.parametrize(("scheduler", "seeds"), [(ideals, seeds(400)), (hybrid, seeds(200))])
def test_what_is_named_is_in_conflict_and_nothing_of_it_can_be_left_out(
    scheduler: Callable[[Problem], Plan], seeds: range
) -> None:
    replicas, named = scheduler is hybrid, 0
    for seed in seeds:
        problem = random_limits(seed)
        try:
            scheduler(problem)
            continue
        except NoPlanError as error:
            reason = str(error)
        assert not feasible(problem, replicas=replicas), (seed, reason)
        if not reason.startswith("no plan keeps all of: "):
            continue
        parts = reason.removeprefix("no plan keeps all of: ").removesuffix("; loosen any one of these").split("; ")
        takes_away = limits(problem)
        assert set(parts) <= takes_away.keys(), reason
        alone = problem
        for name, take_away in takes_away.items():
            if name not in parts:
                alone = take_away(alone)
        assert not feasible(alone, replicas=replicas), (seed, reason)
        for name in parts:
            assert feasible(takes_away[name](alone), replicas=replicas), (seed, reason, name)
        named += 1
    assert named >= (20 if len(seeds) >= 200 else 1)


def network(
    seconds: dict[str, tuple[float | None, ...]], memory: dict[str, int] | None = None, **figures: object
) -> Problem:
    """A chain of operators with 10 bytes of parameters each, on a device for each row of seconds."""
    count = len(next(iter(seconds.values())))
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1,)),), 10) for i in range(count))
    graph = OperatorGraph("net", (Tensor("t0", (1,)),), operators, (f"t{count}",))
    profile = Profile(
        "net", graph.fingerprint, {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    )
    devices = tuple(Device(name, memory_bytes=(memory or {}).get(name)) for name in seconds)
    return Problem(graph, Platform("box", devices), profile, **figures)  # type: ignore[arg-type]


SLOW = {"a": (0.1, 0.1, 0.1), "b": (0.2, 0.2, 0.2)}


@pytest.mark.parametrize("scheduler", [chain, ideals, hybrid])
@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            network({"a": (0.1, None), "b": (0.1, None)}),
            "no device can run operator op1; platform box has a, b",
        ),
        (
            network(SLOW, {"a": 9, "b": 8}),
            "operator op0 holds 10 bytes of parameters, no device that can run it has more than 9",
        ),
        (
            network({"a": (0.1, 0.1), "b": (None, 0.1)}, {"a": 9}),
            "operator op0 holds 10 bytes of parameters, no device that can run it has more than 9",
        ),
        (
            network(SLOW, {"a": 10, "b": 19}),
            "net holds 30 bytes of parameters, all devices of platform box together hold 29",
        ),
        (
            network(SLOW, stages=3),
            "3 stages need as many devices that share no cores; platform box has 2",
        ),
        (
            network({"a": (0.1, 0.1)}, stages=2, objective="latency"),
            "2 stages need two devices that share no cores; platform box has 1",
        ),
        (
            network(SLOW, objective="latency", min_throughput_fps=20.0),
            "operator op0 takes 0.1 s on its fastest device a, which alone makes no more than 10 frames a second; "
            "`min_throughput_fps` asks for 20",
        ),
        (
            network(SLOW, max_latency_s=0.25),
            "with each operator on its fastest device a frame takes 0.3 s, `max_latency_s` allows 0.25",
        ),
        (
            network({"a": (0.1, None, 0.1, None), "b": (None, 0.1, None, 0.1)}),
            r"device a cannot run operator op1 \(and 1 more\), and no split with b covers the rest",
        ),
    ],
)
def test_what_one_look_tells(scheduler: Callable[[Problem], Plan], problem: Problem, message: str) -> None:
    with pytest.raises(InfeasibleError, match=message):
        scheduler(problem)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        # On a alone a frame takes 0.3 s and three come in 0.9 s; two stages are faster, and slower for a frame.
        (
            network(SLOW, stages=2, max_latency_s=0.35),
            "no plan keeps all of: `stages` 2; `max_latency_s` 0.35; loosen any one of these",
        ),
        # op0 to op2 take a alone 0.3 s; with room for two of them b must take one, at 0.2 s.
        (
            network(SLOW, {"a": 20}, max_latency_s=0.35),
            "no plan keeps all of: `max_latency_s` 0.35; memory_bytes 20 of device a; loosen any one of these",
        ),
        # Whatever the memory of b, five frames a second are beyond two stages of three equal operators.
        (
            network(SLOW, {"b": 100}, objective="latency", min_throughput_fps=6.0),
            "no plan keeps all of: `min_throughput_fps` 6",
        ),
    ],
)
def test_limits_are_taken_away_one_by_one(problem: Problem, message: str) -> None:
    with pytest.raises(InfeasibleError) as refused:
        ideals(problem)
    assert str(refused.value) == message
