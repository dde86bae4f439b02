"""What TVM cannot take of an ONNX file is named with its node, the reason, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnx")

from onnx import TensorProto, helper

from tests.frontends.test_onnx_rewriting import TURN, graph, loop, node, value
from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.frontends import load

Y = (value("y", (None, None)),)


def branches(nodes: int = 1) -> dict[str, Any]:
    chain = [node("Neg", "x" if index == 0 else f"a{index - 1}", f"a{index}") for index in range(nodes)]
    return {
        "then_branch": graph(chain, outputs=f"a{nodes - 1}"),
        "else_branch": graph([node("Identity", "x", "e")], outputs="e"),
    }


SUM = [node("ReduceSum", "x", "s", keepdims=0), node("Greater", "s zero", "c")]
ZERO = {"zero": np.float32(0)}
RATE = [value("x", (2, 3)), value("sr", (), TensorProto.INT64)]


@pytest.mark.parametrize(
    ("nodes", "given", "lines"),
    [
        ([node("Relu", "x", "y")], {}, []),
        (
            [node("Det", "x", "a", name="d"), node("Det", "x", "b"), node("Add", "a b", "y")],
            {"shape": (3, 3)},
            [r"operator Det \(node d and 1 more\): TVM's importer has none; run it on another engine"],
        ),
        (
            [
                node("FusedMatMul", "x x", "a", domain="com.microsoft"),
                node("BiasGelu", "a x", "y", domain="com.microsoft"),
            ],
            {"shape": (3, 3), "outputs": Y},
            [r"operator FusedMatMul \(output a\): TVM has none of the domain com\.microsoft; onnxruntime has put it"],
        ),
        (
            [*SUM, node("If", "c", "y", name="which", **branches(300))],
            {"constants": ZERO, "outputs": Y},
            [r"operator If \(node which\): its condition depends on data, and its branches have 301 nodes; export"],
        ),
        (
            [node("Equal", "sr rate", "c"), node("If", "c", "y", **branches(300))],
            {"constants": {"rate": np.array(16000)}, "inputs": RATE, "outputs": Y},
            [r'operator If .*, or make input sr a constant: `input_values` "sr=\.\.\."$'],
        ),
        (
            [loop(TURN, "goes next", "x", "y", half=np.float32(1))],
            {"constants": {"yes": np.array(True), "trips": np.array(300)}, "outputs": Y},
            [r"operator Loop \(output y\): its number of turns depends on data or is over 256, .* export the model"],
        ),
        (
            [node("Dropout", "x ratio yes", "y")],
            {"constants": {"ratio": np.float32(0.5), "yes": np.array(True)}},
            [r"operator Dropout \(output y\): it is in training mode, or its mask is used; .*model\.eval"],
        ),
        (
            [node("Cast", "w", "v", to=TensorProto.FLOAT), node("Mul", "x v", "y")],
            {"weights": [helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, (3,), [1.0, 2.0, 3.0])], "opset": 19},
            [r"weight w: TVM has no FLOAT8E4M3FN; export the model in FLOAT"],
        ),
    ],
)
def test_what_tvm_cannot_take(tmp_path: Path, nodes: list[Any], given: dict[str, Any], lines: list[str]) -> None:
    path = tmp_path / "net.onnx"
    path.write_bytes(onnx_bytes(nodes, given.pop("constants", None), **given))
    found = load(path).obstacles
    assert len(found) == len(lines)
    for line, pattern in zip(found, lines, strict=True):
        assert re.match(pattern, line), line
