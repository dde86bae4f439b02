"""What OpenVINO computes otherwise than ONNX says is mended, or refused by name; numpy says what is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("openvino")
needs("onnx")

from onnx import TensorProto, helper

from tests.support.onnx_models import onnx_bytes
from tests.support.stages import model_outputs, run_stages
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlanError, RunError
from tvm_pipeline.frontends.onnx_graph import OnnxGraph
from tvm_pipeline_openvino import OpenvinoBackend

DEVICE = Device("cpu0", "openvino", (), "CPU")
node = helper.make_node


@pytest.fixture(scope="module")
def engine() -> Iterator[OpenvinoBackend]:
    with closing(OpenvinoBackend()) as found:
        yield found


def model_of(
    nodes: list[Any],
    frame: Mapping[str, Array],
    outputs: Mapping[str, tuple[int, tuple[int, ...]]],
    constants: Mapping[str, Any] | None = None,
    opset: int = 18,
) -> Model:
    """Return a model with the inputs of a frame; outputs have ONNX's number of a type, and a shape."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in frame.items()}
    inputs = [helper.make_tensor_value_info(name, kind, frame[name].shape) for name, kind in kinds.items()]
    given = [helper.make_tensor_value_info(name, *kind) for name, kind in outputs.items()]
    content = onnx_bytes(nodes, constants or {}, inputs=inputs, outputs=given, opset=opset)
    tensors = tuple(Tensor(name, array.shape, array.dtype.name) for name, array in frame.items())
    return Model("net", "onnx", content, tensors)


def computed(engine: OpenvinoBackend, model: Model, frame: Mapping[str, Array]) -> list[Array]:
    with closing(engine.compile(model, [DEVICE])) as compiled:
        names = compiled.graph.operator_names
        return list(model_outputs(compiled, run_stages(compiled, [(names, DEVICE)], dict(frame))))


def test_an_output_that_is_an_input_is_written(engine: OpenvinoBackend) -> None:
    """OpenVINO drops the operator, and leaves a buffer for the output as it is."""
    frame = {"unused": np.ones(2, np.float32), "x": np.arange(3, dtype=np.float32)}
    nodes = [node("Max", ["x"], ["y"]), node("Neg", ["unused"], ["z"])]
    outputs = {"y": (TensorProto.FLOAT, (3,)), "z": (TensorProto.FLOAT, (2,))}
    y, z = computed(engine, model_of(nodes, frame, outputs), frame)
    np.testing.assert_array_equal(y, frame["x"])
    np.testing.assert_array_equal(z, [-1, -1])


@pytest.mark.parametrize("is_sorted", [0, 1])
def test_the_first_of_equal_numbers_comes_first(engine: OpenvinoBackend, is_sorted: int) -> None:
    x = np.random.default_rng(0).integers(0, 3, 40).astype(np.float32)
    nodes = [node("TopK", ["x", "k"], ["values", "places"], sorted=is_sorted)]
    outputs = {"values": (TensorProto.FLOAT, (5,)), "places": (TensorProto.INT64, (5,))}
    values, places = computed(engine, model_of(nodes, {"x": x}, outputs, {"k": np.array([5])}), {"x": x})
    np.testing.assert_array_equal(places, np.argsort(-x, kind="stable")[:5])
    np.testing.assert_array_equal(values, x[places])


def test_an_input_without_elements_that_it_drops(engine: OpenvinoBackend) -> None:
    frame = {"x": np.ones((2, 3), np.float32), "axes": np.empty(0, np.int64)}
    model = model_of([node("ReduceSum", ["x", "axes"], ["y"])], frame, {"y": (TensorProto.FLOAT, (1, 1))})
    np.testing.assert_array_equal(computed(engine, model, frame)[0], [[6]])


def test_an_input_that_it_ignores(engine: OpenvinoBackend) -> None:
    frame = {"x": np.ones((2, 3), np.float32), "ratio": np.array(0.5, np.float32)}
    nodes = [node("Relu", ["x"], ["r"]), node("Dropout", ["r", "ratio"], ["y"])]
    model = model_of(nodes, frame, {"y": (TensorProto.FLOAT, (2, 3))})
    with pytest.raises(ModelError, match="net: OpenVINO ignores an input, one of ratio; make it a constant"):
        engine.compile(model, [DEVICE])


def test_a_tensor_to_which_it_gives_another_shape(engine: OpenvinoBackend) -> None:
    """Its last pool would begin behind the picture, which ONNX leaves out."""
    frame = {"x": np.ones((1, 1, 2, 2), np.float32)}
    pool = node("MaxPool", ["x"], ["pooled"], kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1)
    nodes = [pool, node("GlobalAveragePool", ["pooled"], ["y"])]
    model = model_of(nodes, frame, {"y": (TensorProto.FLOAT, (1, 1, 1, 1))}, opset=22)
    with pytest.raises(ModelError, match=r"gives tensor pooled the shape \[1,1,2,2\], and ONNX \[1, 1, 1, 1\]"):
        engine.compile(model, [DEVICE])


def test_numbers_beyond_32_bits(engine: OpenvinoBackend) -> None:
    frame = {"x": np.array([7, -(2**31)])}
    model = model_of([node("Identity", ["x"], ["y"])], frame, {"y": (TensorProto.INT64, (2,))})
    np.testing.assert_array_equal(computed(engine, model, frame)[0], frame["x"])
    with pytest.raises(RunError, match="net: input x has numbers beyond 32 bits, and OpenVINO computes int64 in int32"):
        computed(engine, model, {"x": np.array([7, 2**31])})


def test_an_output_whose_extents_are_otherwise_than_the_file_says(engine: OpenvinoBackend) -> None:
    frame = {"shape": np.array([4])}
    nodes = [node("ConstantOfShape", ["shape"], ["y"], value=helper.make_tensor("", TensorProto.FLOAT, [1], [3.0]))]
    model = model_of(nodes, frame, {"y": (TensorProto.FLOAT, (4,))})
    np.testing.assert_array_equal(computed(engine, model, frame)[0], np.full(4, 3, np.float32))
    with pytest.raises(RunError, match=r"gives tensor y the shape \[5\], and ONNX \[4\]"):
        computed(engine, model, {"shape": np.array([5])})


def _resize(**settings: object) -> tuple[Any, ...]:
    resize = node("Resize", ["x", "", "scales"], ["y"], mode="linear", **settings)
    frame = {"x": np.ones((1, 1, 2, 4), np.float32)}
    return [resize], frame, {"y": (TensorProto.FLOAT, (1, 1, 1, 2))}, {"scales": np.array([1, 1, 0.6, 0.6], "float32")}


def _of_two(kind: str, dtype: str, **settings: object) -> tuple[Any, ...]:
    frame = {name: np.ones(3, dtype) for name in "xy"}
    kind_ = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return [node(kind, ["x", "y"], ["z"], **settings)], frame, {"z": (kind_, (3,))}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (
            _of_two("Add", "float64"),
            r"operator Add \(output z\): OpenVINO computes float64 in float32; run the model on an",
        ),
        ((*_of_two("Greater", "uint32")[:2], {"z": (TensorProto.BOOL, (3,))}), "computes uint32 in int32"),
        (_of_two("Mul", "uint8"), "gives the largest uint8 where ONNX's numbers wrap around"),
        (_of_two("Div", "int64"), r"computes int64 in float32, and these may be larger than 2\*\*23"),
        (_of_two("BitShift", "uint8", direction="LEFT"), "shifts by a product in float32"),
        (
            (
                [node("MatMulInteger", ["x", "w"], ["y"])],
                {"x": np.ones((1, 300), np.uint8)},
                {"y": (TensorProto.INT32, (1, 2))},
                {"w": np.ones((300, 2), np.uint8)},
            ),
            "adds up 300 products in float32",
        ),
        (_resize(antialias=1), "computes antialias otherwise"),
        (_resize(coordinate_transformation_mode="align_corners"), "where a scale gives no whole extent"),
    ],
)
def test_operators_that_are_refused(engine: OpenvinoBackend, parts: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        engine.compile(model_of(*parts), [DEVICE])


def test_the_others_of_a_model_stay_on_openvino(engine: OpenvinoBackend, caplog: pytest.LogCaptureFixture) -> None:
    frame = {"x": np.arange(6)}
    nodes = [node("Neg", ["x"], ["n"]), node("Reshape", ["n", "column"], ["c"]), node("Div", ["c", "four"], ["y"])]
    constants = {"column": np.array([6, 1]), "four": np.array([4])}
    model = model_of(nodes, frame, {"y": (TensorProto.INT64, (6, 1))}, constants)
    with closing(engine.compile(model, [DEVICE])) as compiled:
        assert "OpenVINO runs 2 of 3 operators, and leaves others to other engines: operator Div" in caplog.text
        names = compiled.computes(DEVICE)
        assert names == ["neg_0", "reshape_1"]
        compiled.stage(names, DEVICE).close()
        with pytest.raises(PlanError, match=r"cannot compute operator div_2 of net: operator Div \(output y\)"):
            compiled.stage(["div_2"], DEVICE)
        assert np.isnan(compiled.time_operators(DEVICE, 1)[0]).tolist() == [False, False, True]
        assert engine.refuses(model).startswith("operator Div")


MOST = 2**23
BY = 1, 2, 3, 80, 8400, MOST - 1, MOST, -1, -3, -8400, -MOST


def _integers(x: Array, factor: int = 128) -> tuple[list[Any], dict[str, Array], dict[str, Array]]:
    """Return nodes that make x of a byte and 16 bits, with their frame and their constants.

    What is known of x is that it is within 128 + factor * (2**16 - 1).
    """
    high = np.minimum(abs(x) // factor, 2**16 - 1)
    sign = np.array(-1 if x.min() < 0 else 1, x.dtype)
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    nodes = [
        *(node("Cast", [name], [f"{name} wide"], to=kind) for name in ("high", "low")),
        node("Mul", ["high wide", "factor"], ["much"]),
        node("Add", ["low wide", "much"], ["x"]),
    ]
    frame = {"high": high.astype(np.uint16), "low": (x - sign * high * factor).astype(np.int8)}
    return nodes, frame, {"factor": sign * np.array(factor, x.dtype)}


@pytest.mark.parametrize("dtype", ["int64", "int32"])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_that_it_computes_rightly(engine: OpenvinoBackend, sign: int, dtype: str) -> None:
    draw = np.random.default_rng(0)
    multiples = np.concatenate([draw.integers(0, MOST // abs(by), 500, endpoint=True) * abs(by) for by in BY])
    ends = np.arange(MOST - 500, MOST + 1)
    x = np.unique(np.clip([*multiples, *(multiples - 1), *(multiples + 1), *ends, *range(500)], 0, MOST - (sign > 0)))
    x = (sign * x).astype(dtype)
    nodes, frame, constants = _integers(x)
    constants |= {str(by): np.array(by, dtype) for by in (*BY, -7)}
    wanted = {"Relu": np.maximum(x, 0), "Clip": np.clip(x, -7, 8400), "ReduceMax": x.max(), "ReduceMin": x.min()}
    nodes += [node("Relu", ["x"], ["Relu"]), node("Clip", ["x", "-7", "8400"], ["Clip"])]
    nodes += [node(kind, ["x"], [kind], keepdims=0) for kind in ("ReduceMax", "ReduceMin")]
    for by in BY:
        wanted |= {f"x / {by}": np.trunc(x / by), f"x mod {by}": np.mod(x, by), f"x fmod {by}": np.fmod(x, by)}
        nodes.append(node("Div", ["x", str(by)], [f"x / {by}"]))
        nodes += [node("Mod", ["x", str(by)], [f"x {'f' * fmod}mod {by}"], fmod=fmod) for fmod in (0, 1)]
    outputs = {name: (helper.np_dtype_to_tensor_dtype(x.dtype), array.shape) for name, array in wanted.items()}
    for name, found in zip(wanted, computed(engine, model_of(nodes, frame, outputs, constants), frame), strict=True):
        np.testing.assert_array_equal(found, wanted[name], err_msg=name)


@pytest.mark.parametrize(("factor", "reason"), [(128, ""), (129, "operator Div (output y): OpenVINO computes int64")])
def test_integers_are_given_to_it_up_to_a_bound(engine: OpenvinoBackend, factor: int, reason: str) -> None:
    """The bound is 128 * (2**16 - 1) + 128, which is 2**23, and then more."""
    nodes, frame, constants = _integers(np.arange(6), factor)
    nodes.append(node("Div", ["x", "7"], ["y"]))
    model = model_of(nodes, frame, {"y": (TensorProto.INT64, (6,))}, {**constants, "7": np.array(7)})
    assert engine.refuses(model)[: len(reason)] == reason
    assert bool(engine.refuses(model)) == bool(reason)


def test_a_part_that_begins_behind_the_indices(engine: OpenvinoBackend) -> None:
    """It has their bound from the whole model; a file of the same operator alone, as a user may have one, has none."""
    frame = {"x": np.random.default_rng(0).standard_normal(900).astype(np.float32)}
    nodes = [node("TopK", ["x", "k"], ["values", "places"]), node("Mod", ["places", "3"], ["y"])]
    constants = {"k": np.array([300]), "3": np.array(3)}
    part = OnnxGraph(model_of(nodes, frame, {"y": (TensorProto.INT64, (300,))}, constants)).cut(["mod_1"]).model
    assert engine.refuses_slice(part) == ""
    places = np.arange(600, 900)
    np.testing.assert_array_equal(computed(engine, part, {"places": places})[0], places % 3)
    alone = model_of(nodes[1:], {"places": places}, {"y": (TensorProto.INT64, (300,))}, constants)
    assert engine.refuses_slice(alone).startswith("operator Mod")


def test_an_operator_inside_a_function_is_refused(engine: OpenvinoBackend) -> None:
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    ratio = helper.make_function("own", "Ratio", ["a", "b"], ["c"], [node("Div", ["a", "b"], ["c"])], opsets[:1])
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in "xyz"]
    graph = helper.make_graph([node("Ratio", ["x", "y"], ["z"], domain="own")], "net", values[:2], values[2:])
    content = helper.make_model(graph, opset_imports=opsets, functions=[ratio], ir_version=8).SerializeToString()
    inputs = tuple(Tensor(name, (2,), "int64") for name in "xy")
    with pytest.raises(ModelError, match=r"operator Div .*computes int64 in float32"):
        engine.compile(Model("net", "onnx", content, inputs), [DEVICE])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("attention_causal_boolmask_nan_robustness_expanded", "engine"),
        *((name, "right") for name in ("max_one_input", "dropout_default_mask", "tile", "sequence_model2")),
        *((name, "refused") for name in ("lstm_with_peepholes", "roialign_mode_max", "gru_batchwise", "dft_axis")),
    ],
)
def test_tests_of_onnx(name: str, outcome: str) -> None:
    from tests.support.onnx_suite import cases, verdict

    if f"test_{name}" not in cases():
        pytest.skip("the installed onnx has no such test")
    assert verdict(cases()[f"test_{name}"], "openvino").outcome == outcome
