"""The drawing of the cut: every operator is in it, in the colour of its stage, whatever anything is called."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.test_drawing import graphs, inception, plan_of
from tests.support.examples import examples
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import PlanError
from tvm_pipeline.report.drawing import CUT, PALETTE
from tvm_pipeline_video.application import host_graph
from tvm_pipeline_video.watch.cut import cut_svg

SVG = "{http://www.w3.org/2000/svg}"


def drawn(graph: OperatorGraph, plan: Plan) -> tuple[dict[str, str], list[str], ElementTree.Element]:
    """What stands in the tooltips with the colours of their boxes, all texts, and the whole."""
    svg = ElementTree.fromstring(cut_svg(graph, plan))
    boxes = [box for box in svg.iter(f"{SVG}g") if box.find(f"{SVG}title") is not None]
    colours = {box.find(f"{SVG}title").text: box.find(f"{SVG}rect").get("fill") for box in boxes}
    assert len(colours) == len(boxes) == len(graph)
    return colours, [text.text for text in svg.iter(f"{SVG}text")], svg


@given(graphs(), st.text(), st.text())
@examples(15, deadline=None)
def test_each_operator_has_the_colour_of_its_stage(case, kind, tensor):
    graph, plan = case
    first, *others = graph.operators
    inputs = (dataclasses.replace(graph.inputs[0], name=tensor),)
    rename = {graph.inputs[0].name: tensor}
    operators = tuple(
        dataclasses.replace(o, kind=kind, inputs=tuple(rename.get(name, name) for name in o.inputs))
        for o in (first, *others)
    )
    colours, texts, svg = drawn(dataclasses.replace(graph, inputs=inputs, operators=operators), plan)
    for title, colour in colours.items():
        name = title.partition(":")[0]
        stage = next(index for index, stage in enumerate(plan.stages) if name in stage.operators)
        assert colour == PALETTE[stage]
        assert title.endswith(f"stage {stage} on cpu{stage}")
    assert sum(text.startswith("cut ") and text.endswith("B") for text in texts) <= len(plan.stages) - 1
    red = [group for group in svg.iter(f"{SVG}g") if group.get("stroke") == CUT]
    assert bool(len(red[0])) == (len(plan.stages) > 1)


def test_cuts_say_what_crosses_them():
    graph = inception(2)
    _, texts, _ = drawn(graph, plan_of(graph, 1 + 7 + 2))
    assert "cut 1: 32.8 kB in 4 tensors" in texts
    assert "stage 1 on cpu1: 6 operators, 6.14 kB of parameters" in texts


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(PlanError, match="does not hold the operators of inception"):
        cut_svg(inception(2), plan_of(inception(1)))


def test_host_work_has_its_name():
    graph = host_graph(inception(1), 64, 48, draws=True, writes=True)
    _, texts, _ = drawn(graph, plan_of(graph, len(graph)))
    assert {"read", "prepare", "decode", "draw", "write"} <= {*texts}
