"""Algorithm 1 as it is printed, against the sums of every prefix in both orders."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.graphs import TIMED, Traits, problems, randoms
from tvm_pipeline import planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import describe
from tvm_pipeline.core.platform import Device, Link, Platform, Transfer
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.errors import InfeasibleError
from tvm_pipeline.planning.search.dynamic_programming import two_stage
from tvm_pipeline_papers.algorithm_1 import algorithm_1


@pytest.mark.parametrize("objective", TIMED)
@given(data=st.data())
def test_it_is_the_prefix_of_the_least_value(objective: str, data: st.DataObject) -> None:
    problem = data.draw(problems(objective, operators=(1, 7), devices=(1, 3), traits=Traits(copies=True)))  # type: ignore[arg-type]
    if problem.stages not in (None, 1, 2):
        problem = replace(problem, stages=None)
    problem = with_every_link(problem, data.draw(randoms()))
    values = {
        (a.name, b.name, n): printed(problem, a, b, n)
        for a, b in itertools.permutations(problem.platform.devices, 2)
        for n in range(1, len(problem.graph) + 1)
        if not a.overlaps(b) and problem.stages in (None, 1 if n == len(problem.graph) else 2)
    }
    if not any(map(math.isfinite, values.values())):
        with pytest.raises(InfeasibleError, match="algorithm-1 needs two devices that share no cores"):
            algorithm_1(problem)
        return
    plan = algorithm_1(problem)
    first, n = plan.stages[0].devices[0], len(plan.stages[0].operators)
    seconds = [d.name for d in problem.platform.devices if not d.overlaps(problem.platform.device(first))]
    others = seconds if len(plan.stages) == 1 else plan.stages[1].devices
    assert min(values[first, other, n] for other in others) == pytest.approx(min(values.values()), rel=1e-9)
    assert plan.predicted == evaluate(problem, plan.stages).predicted
    assert (plan.scheduler, plan.status, plan.bound) == ("algorithm-1", "feasible", None)


def with_every_link(problem: Problem, rng: random.Random) -> Problem:
    """Return the problem with links whose rates decide about cuts: bytes take about as long as operators."""
    names = [device.name for device in problem.platform.devices]
    links = [Link(*ends, 0.001, rng.choice((2e4, 5e4, 2e5))) for ends in itertools.permutations(names, 2)]
    return replace(
        problem,
        platform=replace(problem.platform, links=tuple(links)),
        profile=replace(problem.profile, links=()),
    )


def printed(problem: Problem, first: Device, second: Device, n: int) -> float:
    """Return the value of the cut n, written out for itself."""
    operators, profile = problem.graph.operators, problem.profile.devices
    stages = []
    for device, other, part, at in ((first, second, operators[:n], 0), (second, first, operators[n:], n)):
        measured, value = profile[device.name], 0.0
        if device.memory_bytes is not None and sum(o.param_bytes for o in part) > device.memory_bytes:
            return math.inf
        for operator in part:
            seconds = measured.seconds[operator.name]
            if seconds is None:
                return math.inf
            if problem.objective != "energy":
                value += seconds
            elif measured.joules is not None:
                value += measured.joules[operator.name]
            else:
                value += seconds * (device.active_w or 0.0)
        if part and problem.objective != "energy":
            rates = [problem.link(other.name, device.name).bandwidth_bytes_per_s]
            rates += [measured.receive.bandwidth_bytes_per_s] if measured.receive else []
            value += sum(alive(problem.graph, at) / rate for rate in rates if rate)
        stages.append(value)
    return max(stages) if problem.objective == "throughput" else sum(stages)


def alive(graph: OperatorGraph, n: int) -> int:
    """Return the bytes of what is there before operator n, and which a later operator or the caller reads."""
    known = [*graph.inputs, *(tensor for operator in graph.operators[:n] for tensor in operator.outputs)]
    read = {name for operator in graph.operators[n:] for name in operator.inputs} | set(graph.outputs)
    return sum(tensor.bytes for tensor in known if tensor.name in read)


def chain(seconds: dict[str, tuple[float, ...]], *links: Link) -> Problem:
    count = len(next(iter(seconds.values())))
    operators = tuple(Operator(f"op{i}", "k", (f"t{i}",), (Tensor(f"t{i + 1}", (1000,)),)) for i in range(count))
    graph = OperatorGraph("net", (Tensor("t0", (250,)),), operators, (f"t{count}",))
    devices = {name: DeviceProfile.in_order(graph, row) for name, row in seconds.items()}
    platform = Platform("box", tuple(Device(name) for name in seconds), links)
    return Problem(graph, platform, Profile("net", graph.fingerprint, devices))


def test_one_device_is_the_cut_behind_the_last_operator() -> None:
    problem = chain({"cpu": (0.9, 0.9), "gpu": (0.1, 0.1)})
    assert describe(algorithm_1(problem)) == "algorithm-1 (gpu)"
    assert len(two_stage(problem).stages) == 2
    assert len(planning.plan(replace(problem, stages=2), "algorithm-1").plan.stages) == 2


def test_the_first_stage_pays_for_the_input_of_the_network() -> None:
    """The input takes 0.4 s to the GPU, which our two-stage leaves out: an operator less there makes up for it."""
    links = Link("cpu", "gpu", bandwidth_bytes_per_s=2500), Link("gpu", "cpu")
    problem = chain({"cpu": (0.2, 0.2, 0.2), "gpu": (0.1, 0.1, 0.1)}, *links)
    assert [(stage.devices, len(stage.operators)) for stage in two_stage(problem).stages] == [
        (("gpu",), 2),
        (("cpu",), 1),
    ]
    printed_plan = algorithm_1(problem)
    assert [(stage.devices, len(stage.operators)) for stage in printed_plan.stages] == [(("gpu",), 1), (("cpu",), 2)]
    received = replace(problem.profile.devices["gpu"], receive=Transfer(bandwidth_bytes_per_s=2500))
    devices = {**problem.profile.devices, "gpu": received}
    dear = replace(problem, profile=replace(problem.profile, devices=devices))
    assert describe(algorithm_1(dear)) == "algorithm-1 (cpu)"


def test_the_latency_of_a_link_is_not_in_its_model_but_in_the_prediction() -> None:
    slow = [Link(*ends, latency_s=0.5) for ends in (("cpu", "gpu"), ("gpu", "cpu"))]
    plan = algorithm_1(chain({"cpu": (0.3, 0.1), "gpu": (0.1, 0.3)}, *slow))
    assert describe(plan) == "algorithm-1 (gpu | cpu)"
    assert plan.predicted.throughput_fps == pytest.approx(1 / 0.6)
