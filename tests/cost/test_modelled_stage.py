"""The seconds of a stage by a model are those that the judge gives a plan."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given

from tests.support.graphs import graphs, random_chain, random_model, randoms
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import unmeasured
from tvm_pipeline.cost.evaluate import evaluate
from tvm_pipeline.cost.modelled_stage import stage_seconds, stage_table, works_of


def judged_s(model: DeviceModel, graph: OperatorGraph, stages: int) -> float:
    """Return the seconds of a frame in a row of stages on devices of this model, with links that cost nothing."""
    devices = tuple(Device(f"d{index}", model=model) for index in range(stages))
    links = tuple(Link(a.name, b.name, 0.0, 1e30) for a in devices for b in devices if a != b)
    names = graph.operator_names
    ends = [round(len(names) * part / stages) for part in range(stages + 1)]
    parts = tuple(
        Stage((device.name,), tuple(names[start:end]))
        for device, start, end in zip(devices, ends, ends[1:], strict=False)
    )
    return evaluate(Problem(graph, Platform("box", devices, links), unmeasured(graph)), parts).predicted.latency_s


def models(rng: random.Random, graph: OperatorGraph) -> list[DeviceModel]:
    """Return a model with a cache, and a roofline with a factor for the kind of the first operator."""
    spilling = random_model(rng, sum(operator.param_bytes for operator in graph.operators))
    kind = works_of(graph)[graph.operators[0].name].key
    return [spilling, replace(spilling, bytes_per_s=rng.uniform(1e3, 1e6), kind=(KindFactor(kind, 3.0),))]


@given(graph=graphs(), rng=randoms())
def test_a_whole_network_takes_what_the_judge_says(graph: OperatorGraph, rng: random.Random) -> None:
    """Also where parameters spill, and for rooflines; the judge counts inputs that nothing reads as results, too."""
    graph = replace(graph, outputs=tuple(name for name in graph.outputs if name in graph.edges.writer))
    names = graph.operator_names
    for model in models(rng, graph):
        assert stage_seconds(model, graph, names) == pytest.approx(judged_s(model, graph, 1))


def test_stages_of_a_chain_take_what_the_judge_says() -> None:
    """In a chain nothing but a stage's own inputs and outputs crosses its ends."""
    rng = random.Random(3)
    graph = random_chain(rng, 9)
    names = graph.operator_names
    for model in models(rng, graph):
        table = stage_table([(graph, names[start : start + 3]) for start in (0, 3, 6)])
        assert table.seconds(model).sum() == pytest.approx(judged_s(model, graph, 3))
        assert table.only(table.stage[[8, 0]]).seconds(model) == pytest.approx(table.seconds(model)[[2, 0]])
