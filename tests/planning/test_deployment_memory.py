"""The memory of several models on a device: deployments against every pair of plans, and every order of each stage."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import cache

import pytest

from tests.planning.test_deployment import row, two_demands
from tests.support.brute_force import every_plan, verdict
from tests.support.graphs import Traits
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import InfeasibleError, PlanError, SearchTimeError
from tvm_pipeline.planning.deployment import Demand, deploy, judge_deployment


def least_peak(graph: OperatorGraph, members: tuple[str, ...]) -> int:
    """Return the fewest bytes of activations of a stage, by trying every order."""
    return min(peak(graph, order) for order in itertools.permutations(members) if runs(graph, order))


def runs(graph: OperatorGraph, order: tuple[str, ...]) -> bool:
    """Return whether no operator stands in front of one that it reads."""
    by_name = {operator.name: operator for operator in graph.operators}
    written = {tensor.name: name for name in order for tensor in by_name[name].outputs}
    done: set[str] = set()
    for name in order:
        if any(written.get(read, name) not in done and read in written for read in by_name[name].inputs):
            return False
        done.add(name)
    return True


def peak(graph: OperatorGraph, order: tuple[str, ...]) -> int:
    """Return the most bytes alive at an operator: what comes in and what goes out stays to the end of the stage."""
    by_name = {operator.name: operator for operator in graph.operators}
    sizes = {name: tensor.bytes for name, tensor in graph.tensors.items()}
    inside = [by_name[name] for name in order]
    own = {tensor.name for operator in inside for tensor in operator.outputs}
    read_here = {name for operator in inside for name in operator.inputs}
    read_outside = {name for o in graph.operators if o.name not in order for name in o.inputs}
    pinned = (read_here - own) | (own & (read_outside | set(graph.outputs)))
    written: set[str] = set()
    most = 0
    for index, operator in enumerate(inside):
        written |= {tensor.name for tensor in operator.outputs}
        later = {name for other in inside[index:] for name in other.inputs}
        now = {tensor.name for tensor in operator.outputs}
        alive = {name for name in written if name in later or name in pinned or name in now} | (read_here - own)
        most = max(most, sum(sizes[name] for name in alive))
    return most


def with_memory(rng: random.Random, demands: list[Demand]) -> list[Demand]:
    """Give the devices so little memory that it often forbids what would be the best, and sometimes everything."""
    platform = demands[0].problem.platform
    graphs = [demand.problem.graph for demand in demands]
    whole = [
        sum(o.param_bytes for o in graph.operators) + least_peak(graph, tuple(o.name for o in graph.operators))
        for graph in graphs
    ]
    devices = tuple(replace(d, memory_bytes=rng.randint(max(whole) // 2, sum(whole))) for d in platform.devices)
    return [
        replace(d, problem=replace(d.problem, platform=replace(platform, devices=devices), activations=True))
        for d in demands
    ]


def every_deployment(demands: list[Demand]) -> tuple[float, float]:
    """Return the least utilisation that fits into memory with activations, and with parameters alone."""
    alone = [replace(d, problem=replace(d.problem, activations=False)) for d in demands]
    plans = [[p for p in every_plan(d.problem, d.problem.stages) if verdict(d.problem, p)] for d in alone]
    platform = demands[0].problem.platform

    @cache
    def held(model: int, members: tuple[str, ...]) -> int:
        graph = demands[model].problem.graph
        return least_peak(graph, members) + sum(o.param_bytes for o in graph.operators if o.name in members)

    with_activations = by_parameters = math.inf
    for pair in itertools.product(*plans):
        try:
            most = max(judge_deployment(alone, pair).values())
        except PlanError:
            continue
        by_parameters = min(by_parameters, most)
        needed = dict.fromkeys((device.name for device in platform.devices), 0)
        for model, stages in enumerate(pair):
            for stage in stages:
                needed[stage.devices[0]] += held(model, stage.operators)
        if all(needed[d.name] <= (d.memory_bytes or 0) for d in platform.devices):
            with_activations = min(with_activations, most)
    return with_activations, by_parameters


@pytest.mark.thorough
def test_activations_of_all_models_fit_and_no_deployment_that_fits_is_better() -> None:
    bound_by_activations = impossible = 0
    for seed in (1, 2, 5, 9):
        rng = random.Random(seed)
        traits = Traits(memory=False, overlapping=False, unsupported=False)
        demands = with_memory(rng, two_demands(rng, traits))
        best, by_parameters = every_deployment(demands)
        try:
            found = deploy(demands)
        except InfeasibleError:
            assert best == math.inf, seed
            impossible += 1
            continue
        plans = [plan.stages for plan in found.plans]
        assert found.status == "optimal", seed
        assert max(judge_deployment(demands, plans).values()) == pytest.approx(best, rel=1e-6), seed
        bound_by_activations += best > by_parameters * (1 + 1e-6)
    assert bound_by_activations >= 3
    assert impossible >= 1


def test_the_judge_adds_up_the_activations_of_all_stages_on_a_device() -> None:
    """Each operator reads and writes a byte and has 2 of parameters: alone it holds 4 bytes, and two of them 8."""
    for memory_bytes, fits in ((8, True), (7, False)):
        platform = Platform("box", (Device("a", memory_bytes=memory_bytes), Device("b")))
        demands = [Demand(row(name, 1, platform, 0.01, param_bytes=2), 1.0) for name in ("one", "two")]
        plans = [(Stage(("a",), ("op0",)),)] * 2
        if fits:
            assert judge_deployment(demands, plans) == {"a": pytest.approx(0.02)}
        else:
            with pytest.raises(PlanError, match=r"a would hold 8 bytes, 1 more than its memory_bytes 7 \(one: 2 of"):
                judge_deployment(demands, plans)
        assert judge_deployment(demands[:1], plans[:1]) == {"a": pytest.approx(0.01)}


def wide(name: str, platform: Platform) -> Problem:
    """Two branches of 8 bytes, each made 1 byte by a second operator: one branch after the other needs 11, else 18."""
    source, left, right = Tensor("source", (1,), "int8"), Tensor("left", (8,), "int8"), Tensor("right", (8,), "int8")
    small, other, out = (Tensor(n, (1,), "int8") for n in ("small", "other", "out"))
    operators = (
        Operator("begin_left", "conv2d", ("source",), (left,)),
        Operator("begin_right", "conv2d", ("source",), (right,)),
        Operator("end_left", "conv2d", ("left",), (small,)),
        Operator("end_right", "conv2d", ("right",), (other,)),
        Operator("join", "add", ("small", "other"), (out,)),
    )
    graph = OperatorGraph(name, (source,), operators, ("out",))
    devices = {d.name: DeviceProfile.in_order(graph, (0.01,) * 5) for d in platform.devices}
    return Problem(graph, platform, Profile(name, graph.fingerprint, devices))


def test_stages_run_in_another_order_where_the_listed_ones_do_not_fit_together() -> None:
    platform = Platform("box", (Device("a", memory_bytes=30),))
    demands = [Demand(wide(name, platform), 1.0) for name in ("one", "two")]
    listed = [(Stage(("a",), tuple(o.name for o in d.problem.graph.operators)),) for d in demands]
    with pytest.raises(PlanError, match="a would hold 36 bytes, 6 more than its memory_bytes 30"):
        judge_deployment(demands, listed)
    found = deploy(demands)
    assert found.memory_bytes == {"a": 11 + 18}
    judge_deployment(demands, [plan.stages for plan in found.plans])
    assert sum(plan.stages != stages for plan, stages in zip(found.plans, listed, strict=True)) == 1


def test_what_does_not_fit_is_named() -> None:
    platform = Platform("box", (Device("a", memory_bytes=21),))
    demands = [Demand(wide(name, platform), 1.0) for name in ("one", "two")]
    with pytest.raises(
        InfeasibleError, match=r"deployment exists of one, two .*: device a would hold 22 bytes, 1 more than"
    ):
        deploy(demands)
    with pytest.raises(
        SearchTimeError, match="in the time allowed of one, two on platform box: device a would hold 22"
    ):
        deploy(demands, time_limit_s=0.0)
