"""The picture of a graph: everything is on it, nothing covers anything, and it is a real picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.parts import needs
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.errors import OptionError, PlanError
from tvm_pipeline.report import draw_graph, drawing, layered


def plan_of(graph: OperatorGraph, *cuts: int) -> Plan:
    names = graph.operator_names
    edges = [0, *cuts, len(names)]
    stages = [Stage((f"cpu{index}",), tuple(names[begin:end])) for index, (begin, end) in enumerate(pairwise(edges))]
    return Plan(graph.name, "chain", "throughput", tuple(stages), Prediction(1.0, 1.0))


def inception(blocks: int) -> OperatorGraph:
    """Blocks of three branches of different lengths, joined; and a tensor that passes all of them."""
    operators = [Operator("stem", "conv2d", ("data",), (Tensor("stem", (1, 8, 16, 16)),), param_bytes=4096)]

    def add(name: str, *inputs: str) -> str:
        operators.append(Operator(name, "conv2d", inputs, (Tensor(name, (1, 8, 16, 16)),), param_bytes=1024))
        return name

    last = "stem"
    for block in range(blocks):
        left = add(f"left{block}", last)
        middle = add(f"middle_b{block}", add(f"middle_a{block}", last))
        right = add(f"right_c{block}", add(f"right_b{block}", add(f"right_a{block}", last)))
        last = add(f"concatenate{block}", left, middle, right)
    add("head", last, "stem")
    return OperatorGraph("inception", (Tensor("data", (1, 3, 32, 32)),), tuple(operators), ("head",))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_pictures_are_real(tmp_path: Path, suffix: str) -> None:
    needs("matplotlib")
    graph = inception(12)
    path = tmp_path / f"graph{suffix}"
    draw_graph(graph, plan_of(graph, 30, 60), path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    if suffix == ".svg":
        text = path.read_text()
        assert ElementTree.fromstring(text).tag.endswith("svg")
        for operator in graph.operators:
            assert f"<!-- {operator.name} -->" in text
        assert "<!-- stage 1 on cpu1: 30 operators, 30.7 kB of parameters -->" in text
    else:
        needs("PIL")
        from PIL import Image

        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert 0.7 < picture.width / picture.height < 3
            colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 22)}
        for stage in range(3):
            hexadecimal = drawing.PALETTE[stage].lstrip("#")
            assert colours.get(tuple(bytes.fromhex(hexadecimal)), 0) > 10_000


def test_cuts_are_marked_with_what_crosses(tmp_path: Path) -> None:
    """Cut 1 is crossed by the outputs of the two branches behind it, by one block's input, and by the stem's."""
    needs("matplotlib")
    graph = inception(2)
    # The first stage ends after left1 and middle_a1: they cross, and so do concatenate0 and stem.
    plan = plan_of(graph, 1 + 7 + 2)
    draw_graph(graph, plan, tmp_path / "graph.svg")
    assert "<!-- cut 1: 32.8 kB in 4 tensors -->" in (tmp_path / "graph.svg").read_text()


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    needs("matplotlib")
    with pytest.raises(PlanError, match="does not hold the operators of inception"):
        draw_graph(inception(2), plan_of(inception(1)), tmp_path / "graph.svg")
    with pytest.raises(OptionError, match=r"\.png or \.svg"):
        draw_graph(inception(1), plan_of(inception(1)), tmp_path / "graph.pdf")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[OperatorGraph, Plan]:
    count = draw(st.integers(1, 24))
    operators = []
    names = ["data"]
    for index in range(count):
        reads = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        name = "o" * draw(st.integers(1, 30)) + str(index)
        operators.append(Operator(name, "op", tuple(reads), (Tensor(name, (4,)),)))
        names.append(name)
    graph = OperatorGraph("random", (Tensor("data", (4,)),), tuple(operators), (names[-1],))
    cuts = draw(st.lists(st.integers(1, count - 1), max_size=3, unique=True)) if count > 1 else []
    return graph, plan_of(graph, *sorted(cuts))


@given(graphs())
@examples(50, deadline=None)
def test_layout_shows_all_and_covers_nothing(case: tuple[OperatorGraph, Plan]) -> None:
    graph, plan = case
    rows = layered.layered(graph, plan)
    sheet = layered.folded_sheet(rows)
    vertices = list(sheet.at)
    assert sum(vertex.kind == "operator" for vertex in vertices) == len(graph)
    assert sum(vertex.kind == "cut" for vertex in vertices) == len(plan.stages) - 1
    boxes = [(*sheet.at[v], v.width / 2, 0.0 if v.kind == "thread" else layered.BOX / 2) for v in vertices]
    for index, (x, y, half_width, half_height) in enumerate(boxes):
        assert x - half_width >= -1e-6
        assert x + half_width <= sheet.width + 1e-6
        for other_x, other_y, other_width, other_height in boxes[:index]:
            apart_x = abs(x - other_x) >= half_width + other_width - 1e-6
            assert apart_x or abs(y - other_y) > half_height + other_height
    # A link leads one row on, and a stage owns its rows: the cut before it lies above all of them.
    assert all(lower.row == upper.row + 1 for upper in vertices for lower in upper.below)
    cuts = [vertex.row for vertex in vertices if vertex.kind == "cut"]
    for vertex in vertices:
        if vertex.kind == "operator":
            assert vertex.stage == sum(cut < vertex.row for cut in cuts)
            assert vertex.row not in cuts
