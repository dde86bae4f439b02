"""Plans as text: what is printed parses back, and what does not parse says its line."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Plan, Prediction, Stage, cost_key, margin, read_plan
from tvm_pipeline.core.problem import OBJECTIVES, Objective
from tvm_pipeline.errors import PlanError

WORD = st.text(st.characters(categories=("L", "N", "P", "S")), min_size=1, max_size=8)
# As OperatorGraph allows them.
OPERATOR = st.text(
    st.characters(categories=("L", "N", "P", "S"), include_characters=" "), min_size=1, max_size=12
).filter(lambda name: name == name.strip() and not name.startswith("#"))
# As a model's file may be called.
GRAPH = st.text(st.characters(categories=("L", "N", "P", "S"), include_characters=" "), min_size=1, max_size=20)
FIGURE = st.floats(min_value=0, allow_infinity=False)
BYTES = st.integers(0, 10**12)

STAGES = st.lists(
    st.builds(
        Stage,
        st.lists(WORD, min_size=1, max_size=3).map(tuple),
        st.lists(OPERATOR, max_size=4).map(tuple),
    ),
    max_size=4,
).map(tuple)
PREDICTIONS = st.builds(Prediction, *([st.none() | FIGURE] * 4), *([st.none() | BYTES] * 4))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    objective = draw(st.sampled_from(OBJECTIVES))
    parts = len(objective.split(","))
    bound = draw(st.none() | st.tuples(*([BYTES if parts > 1 else FIGURE] * parts)))
    status = draw(st.sampled_from(("optimal", "feasible")))
    return Plan(draw(GRAPH), draw(WORD), objective, draw(STAGES), draw(PREDICTIONS), status, bound)


TEXT = """\
plan squeezenet by chain
objective throughput
status optimal
bound 58.5
predicted throughput_fps 58.5 latency_s 0.25 energy_j 2.0
stage cpu0
  conv2d_0
  relu_1
stage cpu1 cpu2
  dense_2
"""


@given(plans())
def test_what_is_printed_parses_back(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


BYTES_TEXT = """\
plan resnet50 by ideals
objective memory,dram,communication
status feasible
bound 4000000 0 1000.5
predicted memory_bytes 4000000 dram_bytes 0 communication_bytes 2001
stage tpu0
  conv2d_0
stage tpu1
  dense_1
"""


def test_a_lexicographic_plan_has_a_bound_for_each_part() -> None:
    plan = Plan(
        "resnet50",
        "ideals",
        "memory,dram,communication",
        (Stage(("tpu0",), ("conv2d_0",)), Stage(("tpu1",), ("dense_1",))),
        Prediction(memory_bytes=4_000_000, dram_bytes=0, communication_bytes=2001),
        "feasible",
        (4_000_000, 0, 1000.5),
    )
    assert str(plan) == BYTES_TEXT
    assert Plan.parse(BYTES_TEXT) == plan
    assert plan.value == (4_000_000, 0, 2001)
    assert plan.gap == pytest.approx(1.0)
    with pytest.raises(PlanError, match="the bound has 2 figures, objective memory,dram,communication has 3"):
        Plan.parse(BYTES_TEXT.replace(" 1000.5", ""))


def test_the_text_is_what_a_person_would_edit() -> None:
    plan = Plan(
        "squeezenet",
        "chain",
        "throughput",
        (Stage(("cpu0",), ("conv2d_0", "relu_1")), Stage(("cpu1", "cpu2"), ("dense_2",))),
        Prediction(58.5, 0.25, 2.0),
        "optimal",
        (58.5,),
    )
    assert str(plan) == TEXT
    edited = "# tried by hand\n\n" + TEXT.replace("  relu_1\n", "\t# in front of the cut\n\n      relu_1  \n")
    assert Plan.parse(edited) == plan
    assert plan.devices == ("cpu0", "cpu1", "cpu2")


@given(OPERATOR)
def test_a_plan_can_hold_every_operator_that_a_graph_can(name: str) -> None:
    graph = OperatorGraph("net", (Tensor("x", (1,)),), (Operator(name, "k", ("x",), ()),), ("x",))
    assert graph.operators[0].name == name


@pytest.mark.parametrize("name", ["my model (1)", "a by b", " padded ", "by"])
def test_a_model_s_name_may_hold_blanks(name: str) -> None:
    plan = Plan(name, "single", "latency", (Stage(("cpu",), ("a",)),), Prediction(1.0, 1.0))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("plan squeezenet by chain", "plan squeezenet", "line 1: cannot read 'plan squeezenet' as part of a plan"),
        ("plan squeezenet by", "plan squeezenet of", "line 1: cannot read"),
        ("objective throughput", "objective speed", "line 2: cannot read 'objective speed'"),
        ("objective throughput", "objective", "line 2: cannot read 'objective'"),
        ("status optimal", "status perfect", "line 3: cannot read 'status perfect'"),
        ("bound 58.5", "bound high", "line 4: cannot read 'bound high'"),
        ("bound 58.5", "bound", "line 4: cannot read 'bound'"),
        ("bound 58.5", "bound 58.5 59", "the bound has 2 figures, objective throughput has 1"),
        ("latency_s 0.25", "latency_s", "line 5: cannot read"),
        ("latency_s 0.25", "latency 0.25", "line 5: cannot read"),
        ("latency_s 0.25", "latency_s ?", "line 5: cannot read"),
        ("stage cpu0\n", "", "line 6: operator conv2d_0 stands before the first stage"),
        ("stage cpu0", "stage", "line 6: cannot read 'stage'"),
        ("  relu_1", "relu_1", "line 8: cannot read 'relu_1'"),
        ("stage cpu1", "plan squeezenet by single\nstage cpu1", "line 9: a second line begins with 'plan'"),
        ("plan squeezenet by chain\n", "", "a line beginning with 'plan' is missing"),
        ("objective throughput\n", "", "a line beginning with 'objective' is missing"),
        ("status optimal\n", "", "a line beginning with 'status' is missing"),
        ("predicted throughput_fps 58.5 latency_s 0.25 energy_j 2.0\n", "", "beginning with 'predicted' is missing"),
    ],
)
def test_what_cannot_be_read_says_its_file_and_line(tmp_path: Path, before: str, after: str, message: str) -> None:
    assert before in TEXT
    path = tmp_path / "plan.txt"
    path.write_text(TEXT.replace(before, after, 1))
    with pytest.raises(PlanError, match=message) as raised:
        read_plan(path)
    assert str(raised.value).startswith(f"{path}: ")


def test_files_that_hold_no_text(tmp_path: Path) -> None:
    path = tmp_path / "plan.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"plan\.txt: it is no text: byte 0 is not utf-8"):
        read_plan(path)
    path.write_bytes(b"")
    with pytest.raises(PlanError, match=r"plan\.txt: a line beginning with 'plan' is missing"):
        read_plan(path)
    with pytest.raises(PlanError, match=r"cannot read .*absent\.txt: No such file"):
        read_plan(tmp_path / "absent.txt")


@given(st.text(max_size=200) | st.lists(st.sampled_from(TEXT.splitlines()), max_size=12).map("\n".join))
def test_any_text_parses_or_is_refused(text: str) -> None:
    try:
        plan = Plan.parse(text)
    except PlanError:
        return
    assert str(Plan.parse(str(plan))) == str(plan)
    assert plan.gap is None or plan.gap >= 0 or math.isnan(plan.gap)


def test_the_gap_is_relative_to_the_bound() -> None:
    def plan(objective: str, *bound: float) -> Plan:
        predicted = Prediction(80.0, 0.3, memory_bytes=30, dram_bytes=5, communication_bytes=0)
        return Plan("net", "x", objective, (), predicted, "feasible", bound or None)  # type: ignore[arg-type]

    assert plan("throughput", 100.0).gap == pytest.approx(0.2)
    assert plan("latency", 0.2).gap == pytest.approx(0.5)
    assert plan("throughput").gap is None
    assert plan("energy", 1.0).gap is None
    assert plan("throughput", 80.0).gap == 0.0
    assert plan("memory,communication", 20, 0).gap == pytest.approx(0.5)
    assert plan("memory,dram,communication", 30, 4, 0).gap == pytest.approx(0.25)
    assert plan("memory,dram,communication", 30, 5, 0).gap == 0.0
    assert plan("memory,dram,communication", 30, 0, 0).gap == math.inf


def planned(objective: Objective, **figures: float) -> Plan:
    return Plan("net", "x", objective, (), Prediction(**figures))  # type: ignore[arg-type]


def test_of_two_plans_the_first_part_that_differs_decides() -> None:
    objective: Objective = "memory,dram,communication"
    best = planned(objective, memory_bytes=10, dram_bytes=0, communication_bytes=9)
    worse = planned(objective, memory_bytes=10, dram_bytes=4, communication_bytes=1)
    worst = planned(objective, memory_bytes=40, dram_bytes=0, communication_bytes=0)
    assert sorted((worst, best, worse), key=cost_key) == [best, worse, worst]
    assert margin(best, worse) == pytest.approx(1.0)
    assert margin(best, worst) == pytest.approx(0.75)
    assert margin(worse, best) == -math.inf
    assert margin(best, best) == 0.0
    assert sorted((worst, best, worse), key=lambda p: cost_key(replace(p, objective="dram,memory,communication"))) == [
        best,
        worst,
        worse,
    ]
    fast, slow = planned("throughput", throughput_fps=30.0), planned("throughput", throughput_fps=20.0)
    assert cost_key(fast) < cost_key(slow)
    assert margin(fast, slow) == pytest.approx(0.5)
    assert margin(planned("latency", latency_s=0.1), planned("latency", latency_s=0.2)) == pytest.approx(0.5)


def test_communication_by_edges_is_a_figure_of_its_own() -> None:
    """A plan that was printed before there was one parses, and nothing is known of it then."""
    plan = planned("memory,edge_communication", memory_bytes=10, communication_bytes=1, edge_communication_bytes=2)
    assert (plan.value, replace(plan, objective="memory,communication").value) == ((10, 2), (10, 1))
    printed = str(plan)
    assert "predicted memory_bytes 10 communication_bytes 1 edge_communication_bytes 2\n" in printed
    earlier = Plan.parse(printed.replace(" edge_communication_bytes 2", ""))
    assert earlier == replace(plan, predicted=replace(plan.predicted, edge_communication_bytes=None))
    assert earlier.value is None


def test_what_is_not_known_is_not_judged() -> None:
    uncached = planned("dram,memory,communication", memory_bytes=10, communication_bytes=1)
    assert uncached.value is None
    assert margin(uncached, uncached) is None
    with pytest.raises(PlanError, match="nothing is known of the dram,memory,communication of x's plan of net"):
        cost_key(uncached)
