"""ONNX files that are rewritten compute what they computed before, by onnx's own implementation or by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends import load, parse_values
from tvm_pipeline.frontends.onnx_control_flow import MOST_COPIES, MOST_NODES
from tvm_pipeline.frontends.onnx_graph import OnnxGraph
from tvm_pipeline.frontends.onnx_inlining import all_nodes
from tvm_pipeline.frontends.onnx_known import KnownTensors

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def node(kind: str, inputs: str, outputs: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), **attributes)


def graph(nodes: list[Any], inputs: list[Any] = (), outputs: str = "", kind: int = FLOAT, **weights: Any) -> Any:
    """Return a subgraph; `outputs` are names, of tensors whose shapes are left open."""
    made = [helper.make_tensor_value_info(name, kind, None) for name in outputs.split()]
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in weights.items()]
    return helper.make_graph(nodes, "inner", list(inputs), made, constants)


def value(name: str, shape: Any = (), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def read(folder: Path, content: bytes, **given: Any) -> Model:
    path = folder / "net.onnx"
    path.write_bytes(content)
    return load(path, **given)


def kinds(model: Model) -> list[str]:
    return [inner.op_type for inner in all_nodes(onnx.load_from_string(model.content).graph)]


def frame(model: Model, seed: int = 0) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    return {tensor.name: draw.standard_normal(tensor.shape).astype(tensor.dtype) for tensor in model.inputs}


def assert_computes_the_same(content: bytes, model: Model, **bound: Any) -> None:
    before, after = (ReferenceEvaluator(onnx.load_from_string(each)) for each in (content, model.content))
    for seed in range(4):
        given = frame(model, seed)
        expected = before.run(None, {**given, **bound})
        for one, other in zip(after.run(None, given), expected, strict=True):
            np.testing.assert_array_equal(one, other)
            assert np.shape(one) == np.shape(other)


Y = (value("y", (None, None)),)  # where onnx infers no shape

# ---- What stays, and what is no control flow ----


def test_a_file_that_needs_nothing_keeps_its_bytes(tmp_path: Path) -> None:
    content = onnx_bytes([node("Relu", "x", "y")])
    model = read(tmp_path, content)
    assert (model.content, model.notes, model.outputs) == (content, (), ("y",))


def test_weights_that_are_no_inputs_in_ir_version_3(tmp_path: Path) -> None:
    made = onnx.load_from_string(onnx_bytes([node("Mul", "x w", "y")], {"w": np.full(3, 2, "float32")}, opset=8))
    made.ir_version = 3
    with pytest.raises(onnx.checker.ValidationError):
        onnx.checker.check_model(made)
    model = read(tmp_path, made.SerializeToString())
    assert [tensor.name for tensor in model.inputs] == ["x"]
    assert "IR version 4" in model.notes[0]
    assert_computes_the_same(made.SerializeToString(), model)


@pytest.mark.parametrize(
    ("nodes", "left", "noted"),
    [
        ([node("Dropout", "x", "a"), node("Relu", "a", "y")], ["Relu"], 1),
        ([node("Dropout", "x ratio", "a"), node("Relu", "a", "b"), node("Dropout", "b", "y")], ["Relu", "Identity"], 1),
        ([node("Dropout", "x ratio no", "a mask"), node("Neg", "a", "y")], ["Neg"], 1),
        ([node("Dropout", "x ratio yes", "a"), node("Neg", "a", "y")], ["Dropout", "Neg"], 0),
        ([node("Dropout", "x", "a mask"), node("Where", "mask a a", "y")], ["Dropout", "Where"], 0),
    ],
)
def test_dropout(tmp_path: Path, nodes: list[Any], left: list[str], noted: int) -> None:
    weights = {"ratio": np.float32(0.9), "no": np.array(False), "yes": np.array(True)}
    content = onnx_bytes(nodes, weights, shape=(2, 3))
    model = read(tmp_path, content)
    assert (kinds(model), len(model.notes), model.outputs) == (left, noted, ("y",))
    if "yes" not in nodes[0].input:
        assert_computes_the_same(content, model)


# ---- Inputs that become constants ----

TWO_INPUTS = [value("x", (2, 3)), value("sr", (), INT64), value("scale", ("n",))]
BOUND = [node("Cast", "sr", "f", to=FLOAT), node("Mul", "x f", "a"), node("Mul", "a scale", "y")]


def test_inputs_become_constants(tmp_path: Path) -> None:
    content = onnx_bytes(BOUND, inputs=TWO_INPUTS)
    one = read(tmp_path, content, input_values=parse_values("sr=3, scale=[0.5, 2, 1]"))
    assert [tensor.name for tensor in one.inputs] == ["x"]
    assert_computes_the_same(content, one, sr=np.int64(3), scale=np.array([0.5, 2, 1], "float32"))
    other = read(tmp_path, content, input_values={"sr": 4, "scale": np.array([0.5, 2, 1])})
    assert one.digest != other.digest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 3}, r"`input_values`: .*net\.onnx has no input rate; its inputs are x, sr, scale"),
        ({"sr": 1.5}, r"input sr is of int64, not 1\.5"),
        ({"sr": [1, 2]}, r"input sr has the shape \[\], the value \[2\]"),
        ({"scale": 2}, r"input scale has the shape \['\?'\], the value \[\]"),
        ({"x": np.ones((3, 2))}, r"input x has the shape \[2, 3\], the value \[3, 2\]"),
        ({"x": 0, "sr": 0, "scale": [1]}, "has no other input than x, sr, scale; leave one an input"),
    ],
)
def test_what_an_input_cannot_hold(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ModelError), match=message):
        read(tmp_path, onnx_bytes(BOUND, inputs=TWO_INPUTS), input_values=given, input_shapes={})
    with pytest.raises(OptionError, match=r"only the inputs of an \.onnx file"):
        load("resnet-18", input_values={"data": 1})


@pytest.mark.parametrize(
    "text", ["", "sr", "sr=", "sr=x", "sr=[1,[2]]", 'sr="1"', "sr=1,sr=2", "sr={}", "=3", "[" * 9000]
)
def test_values_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="give it as"):
        parse_values(text)


def test_values_as_they_are_written() -> None:
    assert parse_values("a=1 b=[1, 2.5],c:0=-1e3 , d=true") == {"a": 1, "b": [1, 2.5], "c:0": -1000.0, "d": True}


# ---- If ----


def test_what_is_known_of_shapes_and_values() -> None:
    """A target of Reshape is known by a shape, and by it another shape; scalars have no axis."""
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s zero", "rows"),
        node("Unsqueeze", "rows first", "r"),
        node("Concat", "r r", "square", axis=0),
        node("Reshape", "square column", "c"),
        node("Transpose", "c", "t"),
        node("Reshape", "t row", "turned"),
        node("ConstantOfShape", "turned", "ones", value=helper.make_tensor("v", FLOAT, [1], [1])),
        node("ConstantOfShape", "huge", "many"),
        node("MatMul", "ones x", "m"),
        node("Shape", "m", "y"),
    ]
    weights = {"zero": np.array(0), "first": np.array([0]), "huge": np.array([10**6, 10**6])}
    weights |= {"column": np.array([2, 1]), "row": np.array([2])}
    known = KnownTensors(onnx.load_from_string(onnx_bytes(nodes, weights)))
    for each in nodes:
        known.learn(each)
    assert {name: known.values[name].tolist() for name in ("rows", "square", "y")} == {
        "rows": 2,
        "square": [2, 2],
        "y": [2, 3],
    }
    assert known.values["rows"].shape == ()
    assert known.shape("m") == (2, 3)
    assert "many" not in known.values
    assert known.shape("many") == (10**6, 10**6)


def rank_test(inner: Any, name: str) -> list[Any]:
    """Return nodes that squeeze x where its first extent is 1, as PyTorch's squeeze is exported."""
    return [
        node("Shape", inner, f"{name}s"),
        node("Gather", f"{name}s zero", f"{name}e"),
        node("Equal", f"{name}e one", f"{name}c"),
        node(
            "If",
            f"{name}c",
            name,
            then_branch=graph([node("Squeeze", f"{inner} first", "t")], outputs="t", first=np.array([0])),
            else_branch=graph([node("Identity", inner, "t")], outputs="t"),
        ),
    ]


CONSTANTS = {"zero": np.array(0), "one": np.array(1)}


@pytest.mark.parametrize("extent", [1, 2])
def test_an_if_on_a_shape(tmp_path: Path, extent: int) -> None:
    content = onnx_bytes(
        [*rank_test("x", "a"), node("Relu", "a", "y")],
        CONSTANTS,
        shape=("n", 3),
        outputs=(value("y", (None,) * extent),),
    )
    model = read(tmp_path, content, input_shapes={"x": (extent, 3)})
    assert kinds(model) == (["Squeeze", "Relu"] if extent == 1 else ["Identity", "Relu"])
    assert model.notes == ("If with a known condition replaced by its branch",)
    assert_computes_the_same(content, model)


def test_nested_ifs_on_a_bound_input_whose_branches_use_the_same_names(tmp_path: Path) -> None:
    def rate(factor: float) -> Any:
        inner = [*rank_test("x", "a"), node("Mul", "a w", "b")]
        return graph(inner, outputs="b", w=np.float32(factor))

    nodes = [
        node("Equal", "sr known", "c"),
        node("If", "c", "one_way", then_branch=rate(2), else_branch=rate(3)),
        node("If", "c", "another", then_branch=rate(5), else_branch=rate(7)),
        node("Sub", "one_way another", "y"),
    ]
    content = onnx_bytes(
        nodes,
        {**CONSTANTS, "known": np.array(16000)},
        inputs=[value("x", (1, 3)), value("sr", (), INT64)],
        outputs=(value("y", (None,)),),
    )
    for rate_ in (16000, 8000):
        model = read(tmp_path, content, input_values={"sr": rate_})
        assert not {"If", "Shape", "Equal"} & set(kinds(model))
        assert model.notes == ("If with a known condition replaced by its branch (4)",)
        assert_computes_the_same(content, model, sr=np.int64(rate_))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_if_that_depends_on_data_becomes_both_branches(tmp_path: Path, rank: int) -> None:
    """A condition of shape [1] gives a scalar no axis."""
    nodes = [
        node("ReduceSum", "x", "r", keepdims=0),
        node("Reshape", "r shape", "s"),
        node("Greater", "s zero", "c"),
        node(
            "If",
            "c",
            "y z",
            then_branch=graph([node("Relu", "x", "a"), node("Identity", "r", "b")], outputs="a b"),
            else_branch=graph([node("Neg", "x", "a"), node("Sqrt", "r", "b")], outputs="a b"),
        ),
    ]
    weights = {"zero": np.float32(0), "shape": np.ones(rank, "int64")}
    content = onnx_bytes(nodes, weights, outputs=("y", value("z")))
    model = read(tmp_path, content)
    assert "If" not in kinds(model)
    assert model.notes == ("If that depends on data: both branches are computed",)
    with np.errstate(invalid="ignore"):  # the root of a negative number, which is not taken
        assert_computes_the_same(content, model)


def test_an_if_whose_branches_differ_in_shape_stays(tmp_path: Path) -> None:
    nodes = [
        node("ReduceSum", "x", "s", keepdims=0),
        node("Greater", "s zero", "c"),
        node(
            "If",
            "c",
            "y",
            name="which",
            then_branch=graph([node("ReduceMax", "x", "a", keepdims=1)], outputs="a"),
            else_branch=graph([node("Neg", "x", "a")], outputs="a"),
        ),
    ]
    content = onnx_bytes(nodes, {"zero": np.float32(0)})
    model = read(tmp_path, content)
    assert model.notes == ("If which stays, since its branches give [1, 1] and [2, 3]",)
    assert kinds(model).count("If") == 1
    assert model.obstacles[0].startswith("operator If (node which): its condition depends on data; ")


# ---- Loop and Scan ----


def loop(body: list[Any], outputs: str, states: str, results: str, **weights: Any) -> Any:
    """Return a Loop; its body reads `turn`, `go` and the states, called as outside with an `_`."""
    inputs = [value("turn", (), INT64), value("go", (), BOOL), *(value(f"{name}_", None) for name in states.split())]
    inner = graph(body, inputs, outputs, **weights)
    inner.output[0].type.tensor_type.elem_type = BOOL
    return helper.make_node("Loop", ["trips", "yes", *states.split()], results.split(), body=inner)


TURN = [
    node("Identity", "go", "goes"),
    node("Cast", "turn", "n", to=FLOAT),
    node("Mul", "x_ half", "m"),
    node("Add", "m n", "next"),
]


@pytest.mark.parametrize("opset", [11, 13])
def test_a_loop_of_known_turns(tmp_path: Path, opset: int) -> None:
    counted = loop(TURN, "goes next m", "x", "last all", half=np.float32(0.5))
    nodes = [counted, node("ReduceMean", "all", "mean", axes=[0], keepdims=0), node("Sub", "last mean", "y")]
    content = onnx_bytes(nodes, {"yes": np.array(True), "trips": np.array(4)}, opset=opset, outputs=Y)
    model = read(tmp_path, content)
    assert kinds(model).count("Mul") == 4
    assert "Loop" not in kinds(model)
    assert model.notes == ("Loop unrolled into 4 copies",)
    # By hand: onnx's own implementation joins what a Loop collects along its first axis, against the specification.
    x = last = frame(model)["x"]
    collected = []
    for turn in range(4):
        collected.append(last * np.float32(0.5))
        last = collected[-1] + np.float32(turn)
    (y,) = ReferenceEvaluator(onnx.load_from_string(model.content)).run(None, {"x": x})
    np.testing.assert_allclose(y, last - np.mean(collected, axis=0), rtol=1e-6)


def test_a_loop_that_ends_by_its_own_counter(tmp_path: Path) -> None:
    ends = [node("Less", "turn two", "goes"), node("Neg", "x_", "next")]
    content = onnx_bytes(
        [loop(ends, "goes next", "x", "y", two=np.array(2))], {"yes": np.array(True), "trips": np.array(99)}, outputs=Y
    )
    model = read(tmp_path, content)
    assert model.notes == ("Loop unrolled into 3 copies",)
    assert kinds(model).count("Neg") == 3
    assert_computes_the_same(content, model)


def test_a_loop_without_turns_and_an_if_inside_one(tmp_path: Path) -> None:
    nothing = onnx_bytes(
        [loop(TURN, "goes next", "x", "y", half=np.float32(2))],
        {"yes": np.array(True), "trips": np.array(0)},
        outputs=Y,
    )
    assert_computes_the_same(nothing, read(tmp_path, nothing))
    inside = [
        node("Identity", "go", "goes"),
        node("Equal", "turn one", "c"),
        node("If", "c", "next", then_branch=graph([node("Neg", "x_", "t")], outputs="t"),
             else_branch=graph([node("Exp", "x_", "t")], outputs="t")),
    ]  # fmt: skip
    content = onnx_bytes(
        [loop(inside, "goes next", "x", "y", one=np.array(1))], {"yes": np.array(True), "trips": np.array(3)}, outputs=Y
    )
    model = read(tmp_path, content)
    assert [kind for kind in kinds(model) if kind in ("Neg", "Exp", "If")] == ["Exp", "Neg", "Exp"]
    assert_computes_the_same(content, model)


def test_copies_of_named_nodes_have_names_of_their_own(tmp_path: Path) -> None:
    """TVM's importer tells nodes by their names; a weight of the body is not copied."""
    body = [node("Identity", "go", "goes"), node("Mul", "x_ half", "next", name="while/mul")]
    content = onnx_bytes(
        [loop(body, "goes next", "x", "h", half=np.float32(0.5)), node("Mul", "h h", "y", name="while/mul/1")],
        {"yes": np.array(True), "trips": np.array(3)},
        outputs=Y,
    )
    model = read(tmp_path, content)
    made = onnx.load_from_string(model.content).graph
    assert [each.name for each in made.node if each.op_type == "Mul"] == [
        *("while/mul", "while/mul/2", "while/mul/3", "while/mul/1"),
    ]
    assert [numpy_helper.to_array(each).tolist() for each in made.initializer] == [0.5]
    assert_computes_the_same(content, model)


def test_what_an_if_uncovers_settles_the_next_one(tmp_path: Path) -> None:
    """A shape behind an If that depends on data is known when the If after it comes."""
    nodes = [node("ReduceSum", "x", "s", keepdims=0), node("Greater", "s zero", "c")]
    both = {
        "then_branch": graph([node("Relu", "x", "t")], outputs="t"),
        "else_branch": graph([node("Neg", "x", "t")], outputs="t"),
    }
    settled = {
        "then_branch": graph([node("Exp", "a", "t")], outputs="t"),
        "else_branch": graph([node("Abs", "a", "t")], outputs="t"),
    }
    nodes += [node("If", "c", "a", **both), node("Size", "a", "size"), node("Equal", "size six", "six_")]
    content = onnx_bytes([*nodes, node("If", "six_", "y", **settled)], {"zero": np.float32(0), "six": np.array(6)})
    model = read(tmp_path, content)
    assert kinds(model) == ["ReduceSum", "Greater", "Relu", "Neg", "Where", "Exp"]
    assert_computes_the_same(content, model)


LONG = MOST_NODES * 2 // (3 * MOST_COPIES)  # nodes of a body of which one loop may be unrolled, and no second one


@pytest.mark.thorough
def test_loops_whose_copies_are_too_many_together_stay(tmp_path: Path) -> None:
    """Of loops in a row the first ones are unrolled; one with a loop inside that stays has no copies either."""
    chain = [node("Neg", "x_" if index == 0 else f"n{index - 1}", f"n{index}") for index in range(LONG)]

    def long(reads: str, writes: str) -> Any:
        made = loop([node("Identity", "go", "goes"), *chain], f"goes n{LONG - 1}", "x", writes)
        made.input[2] = reads
        return made

    inside = loop([node("Identity", "go", "on"), long("x_", "h")], "on h", "x", "y")
    for read_, name in zip(inside.attribute[0].g.input, ("outer_turn", "outer_go", "x_"), strict=True):
        read_.name = name
    inside.attribute[0].g.node[0].input[0] = "outer_go"
    weights = {"yes": np.array(True), "trips": np.array(256)}
    row = read(tmp_path, onnx_bytes([long("x", "a"), long("a", "y")], weights, outputs=Y))
    assert row.notes[0] == "Loop unrolled into 256 copies"
    assert kinds(row).count("Neg") == 257 * LONG
    nested = read(tmp_path, onnx_bytes([inside], weights, outputs=Y))
    assert kinds(nested).count("Loop") == 2
    assert f"would be over {MOST_NODES} nodes" in nested.obstacles[0]


@pytest.mark.parametrize("counted", [False, True])
def test_what_a_loop_that_stays_gives_has_a_shape(tmp_path: Path, counted: bool) -> None:
    """Its turns are given, or it counts them itself; an engine that cuts the model needs the shapes of all ends."""
    go = node("Less", "count_ most", "goes") if counted else node("Identity", "go", "goes")
    body = [node("Add", "count_ one", "more"), go, *TURN[1:]]
    looped = loop(body, "goes more next m", "count x", "last y all", half=np.float32(0.5), one=np.array(1))
    trips = 10**6 if counted else 300
    weights = {"yes": np.array(True), "trips": np.array(trips), "count": np.array(0), "most": np.array(299)}
    model = read(
        tmp_path, onnx_bytes([looped], weights, outputs=(value("y", ("a", "b")), value("all", ("n", "a", "b"))))
    )
    assert [kind for kind in kinds(model) if kind == "Loop"] == ["Loop"]
    assert model.notes[0].startswith("Loop stays, since up to 256 turns")
    (operator,) = OnnxGraph(model).graph.operators
    assert {tensor.name: tensor.shape for tensor in operator.outputs} == {"y": (2, 3), "all": (300, 2, 3)}


@pytest.mark.parametrize("backwards", [0, 1])
def test_a_scan(tmp_path: Path, backwards: int) -> None:
    """Running sums over axis 1, first to last or last to first, as results along axis 0."""
    body = graph(
        [node("Add", "sum_ part_", "sum"), node("Neg", "sum", "each")],
        [value("sum_", (2,)), value("part_", (2,))],
        "sum each",
    )
    directions = {"scan_input_directions": [backwards], "scan_output_directions": [backwards]}
    scan = helper.make_node(
        "Scan", ["start", "x"], ["y", "z"], body=body, num_scan_inputs=1, scan_input_axes=[1], **directions
    )
    content = onnx_bytes([scan], {"start": np.zeros(2, "float32")}, outputs=(value("y", (2,)), value("z", (3, 2))))
    model = read(tmp_path, content)
    assert model.notes == ("Scan unrolled into 3 copies",)
    x = frame(model)["x"]
    total, each = ReferenceEvaluator(onnx.load_from_string(model.content)).run(None, {"x": x})
    ordered = x[:, ::-1] if backwards else x
    sums = -np.cumsum(ordered, axis=1).T
    np.testing.assert_allclose(total, x.sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(each, sums[::-1] if backwards else sums, rtol=1e-6)


@pytest.mark.parametrize("trips", [MOST_COPIES + 1, 10**15])
def test_a_loop_of_too_many_turns_stays(tmp_path: Path, trips: int) -> None:
    content = onnx_bytes(
        [loop(TURN, "goes next", "x", "y", half=np.float32(0.5))],
        {"yes": np.array(True), "trips": np.array(trips)},
        outputs=Y,
    )
    model = read(tmp_path, content)
    assert model.notes[0].startswith("Loop stays, since up to")
    assert "Loop" in kinds(model)


def test_a_loop_whose_end_depends_on_data_stays(tmp_path: Path) -> None:
    ends = [node("ReduceSum", "x_", "s", keepdims=0), node("Greater", "s zero", "goes"), node("Neg", "x_", "next")]
    content = onnx_bytes(
        [loop(ends, "goes next", "x", "y", zero=np.float32(0))],
        {"yes": np.array(True), "trips": np.array(3)},
        outputs=Y,
    )
    assert "Loop" in kinds(read(tmp_path, content))
