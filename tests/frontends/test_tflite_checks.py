"""TFLite files that would end the process in TFLite's kernels are refused when they are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.parts import needs

needs("tflite")
needs("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema

from tests.edgetpu.networks import MOBILENET, packed
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import load

Op = schema.BuiltinOperator


@pytest.fixture(scope="module")
def content() -> bytes:
    return MOBILENET.read_bytes()


def first(parsed: Any, number: int) -> Any:
    """Return the first operator with this number, with lists that can be changed."""
    codes = parsed.operatorCodes
    found = next(op for op in parsed.subgraphs[0].operators if codes[op.opcodeIndex].builtinCode == number)
    found.inputs, found.outputs = list(found.inputs), list(found.outputs)
    return found


def no_weights(parsed: Any) -> None:
    first(parsed, Op.CONV_2D).inputs[1] = -1


def no_input(parsed: Any) -> None:
    first(parsed, Op.ADD).inputs = []


def one_input(parsed: Any) -> None:
    first(parsed, Op.ADD).inputs = first(parsed, Op.ADD).inputs[:1]


def tensor_beyond(parsed: Any) -> None:
    first(parsed, Op.CONV_2D).inputs[0] = 100_000


def output_below(parsed: Any) -> None:
    first(parsed, Op.CONV_2D).outputs[0] = -7


def code_beyond(parsed: Any) -> None:
    first(parsed, Op.CONV_2D).opcodeIndex = 1000


def unknown_number(parsed: Any) -> None:
    parsed.operatorCodes[0].builtinCode = 20_000


def another_operator(parsed: Any) -> None:
    """What the file code49.tflite of the attack was: a convolution that is called a split."""
    code = parsed.operatorCodes[first(parsed, Op.DEPTHWISE_CONV_2D).opcodeIndex]
    code.builtinCode = code.deprecatedBuiltinCode = Op.SPLIT


def unknown_type(parsed: Any) -> None:
    parsed.subgraphs[0].tensors[3].type = 99


def buffer_beyond(parsed: Any) -> None:
    parsed.subgraphs[0].tensors[3].buffer = 100_000


def enormous(parsed: Any) -> None:
    parsed.subgraphs[0].tensors[3].shape = [2**30, 2**30]


def output_that_is_not_there(parsed: Any) -> None:
    parsed.subgraphs[0].outputs = [100_000]


FAULTS: dict[Callable[[Any], None], str] = {
    no_weights: r"operator \d+ \(conv_2d\) lacks one of the 2 inputs",
    no_input: r"operator \d+ \(add\) lacks one of the 2 inputs",
    one_input: r"operator \d+ \(add\) lacks one of the 2 inputs",
    tensor_beyond: r"operator \d+ \(conv_2d\) names a tensor that is not there",
    output_below: r"operator \d+ \(conv_2d\) names a tensor that is not there",
    code_beyond: r"operator \d+ has the operator code 1000",
    unknown_number: "it has an operator of number 20000",
    another_operator: r"operator \d+ \(split\) has the options of another operator \(DepthwiseConv2DOptions\)",
    unknown_type: "tensor 3 has the type 99",
    buffer_beyond: "tensor 3 lies in buffer 100000",
    enormous: "tensor 3 has the shape",
    output_that_is_not_there: "an input or output of it is a tensor that is not there",
}


@pytest.mark.parametrize("spoil", FAULTS, ids=lambda spoil: spoil.__name__)
def test_what_kernels_die_of_is_refused_before(spoil: Callable[[Any], None], content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(content)
    load(path)
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    spoil(parsed)
    path.write_bytes(packed(parsed))
    with pytest.raises(ModelError, match=rf"^{re.escape(str(path))}: {FAULTS[spoil]}.*; "):
        load(path)


def test_a_bias_may_be_left_out(content: bytes, tmp_path: Path) -> None:
    parsed = schema.ModelT.InitFromPackedBuf(content, 0)
    first(parsed, Op.CONV_2D).inputs[2] = -1
    path = tmp_path / "net.tflite"
    path.write_bytes(packed(parsed))
    load(path)
