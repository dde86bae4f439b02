"""Bounds on the integers of an ONNX graph hold for every frame, and a part of the graph has those of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")

from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.frontends.onnx_graph import OnnxGraph

node = helper.make_node
INPUTS = tuple(Tensor(name, (4, 2), dtype) for name, dtype in (("f", "float32"), ("i", "int64"), ("u", "uint8")))
CONSTANTS = {"0 1": np.array([0, 1]), "1": np.array([1]), "-7": np.array(-7), "5": np.array(5), "900": np.array(900)}
SMALL = node("Cast", ["u"], ["small"], to=TensorProto.INT64)
FIRST = node("ArgMax", ["f"], ["first"])


def model_of(*nodes: Any) -> Model:
    """Return a model whose nodes write t, of any shape."""
    kinds = [helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype)) for tensor in INPUTS]
    inputs = [helper.make_tensor_value_info(one.name, kind, one.shape) for one, kind in zip(INPUTS, kinds, strict=True)]
    least = node("ReduceMin", ["t"], ["y"], keepdims=0)
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, [])]
    return Model(
        "net", "onnx", onnx_bytes([*nodes, least], CONSTANTS, inputs=inputs, outputs=outputs, opset=18), INPUTS
    )


@pytest.mark.parametrize(
    ("bound", "nodes"),
    [
        (255, [SMALL, node("Identity", ["small"], ["t"])]),
        (4, [node("ArgMin", ["f"], ["t"])]),
        (4, [node("TopK", ["f", "1"], ["values", "t"])]),
        (4, [node("NonZero", ["f"], ["t"])]),
        (3607, [FIRST, node("Mul", ["first", "900"], ["m"]), node("Sub", ["m", "-7"], ["t"])]),
        (7, [node("Mod", ["i", "-7"], ["t"])]),
        (255, [SMALL, node("Div", ["small", "-7"], ["t"])]),
        (255 * 8, [SMALL, node("ReduceSum", ["small"], ["t"])]),
        (255, [SMALL, node("ReduceMax", ["small", "1"], ["t"])]),
        (900, [SMALL, node("Clip", ["small", "5", "900"], ["t"])]),
        (255, [SMALL, node("Gather", ["small", "0 1"], ["t"])]),
        (255, [SMALL, node("Split", ["small"], ["s", "t"], axis=0, num_outputs=2)]),
        (255, [SMALL, node("Concat", ["small", "small"], ["t"], axis=0)]),
    ],
    ids=lambda value: value[-1].op_type if isinstance(value, list) else str(value),
)
def test_no_number_is_larger(bound: float, nodes: list[Any]) -> None:
    model = model_of(*nodes)
    assert OnnxGraph(model).magnitudes["t"] == bound
    run, draw = ReferenceEvaluator(model.content).run, np.random.default_rng(0)
    for least in (0, 255):
        frame = {
            "f": draw.standard_normal((4, 2)).astype(np.float32),
            "i": draw.integers(-(2**63), 2**63 - 1, (4, 2)),
            "u": draw.integers(least, 255, (4, 2), np.uint8, endpoint=True),
        }
        [found] = run(["t"], frame)
        assert np.abs(found).max() <= bound


@pytest.mark.parametrize(
    "nodes",
    [
        [node("Cast", ["f"], ["t"], to=TensorProto.INT64)],
        [SMALL, node("TopK", ["small", "1"], ["t", "places"])],
        [SMALL, node("Add", ["small", "i"], ["t"])],
        [SMALL, node("Div", ["small", "0 1"], ["t"])],
        [SMALL, node("Div", ["small", "i"], ["t"])],
        [node("NonZero", ["f"], ["places"]), node("ReduceMax", ["places", "1"], ["t"])],
        [SMALL, node("Concat", ["small", "i"], ["t"], axis=0)],
    ],
    ids=lambda nodes: nodes[-1].op_type,
)
def test_nobody_knows_how_large(nodes: list[Any]) -> None:
    """A float or a frame may be anything, as may a quotient by 0, and the least of no numbers."""
    assert "t" not in OnnxGraph(model_of(*nodes)).magnitudes


def test_a_part_has_the_bounds_of_the_whole() -> None:
    file = OnnxGraph(model_of(FIRST, node("Mul", ["first", "i"], ["m"]), node("Mod", ["m", "5"], ["t"])))
    part = OnnxGraph(file.cut(["mul_1"]).model)
    assert {name: part.magnitudes.get(name) for name in ("first", "i", "m")} == {"first": 4, "i": None, "m": None}
    assert OnnxGraph(part.cut(["mul_0"]).model).magnitudes == part.magnitudes
