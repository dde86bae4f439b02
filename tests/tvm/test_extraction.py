"""ExtractOperatorGraph: parameter bytes, output bytes and multiply-accumulates, against sums done by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.support.networks import relay_module
from tvm_pipeline.core.graph import Operator, OperatorGraph
from tvm_pipeline.errors import ModelError
from tvm_pipeline_tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relay.fold import fast_context
from tvm_pipeline_tvm.relay.importer import import_model

import tvm  # isort: skip
from tvm import relay  # isort: skip

from tvm_pipeline.core.model import Model


def var(*shape: int, name: str = "x", dtype: str = "float32") -> relay.Var:
    return relay.var(name, shape=shape, dtype=dtype)


def weight(*shape: int, dtype: str = "float32") -> relay.Constant:
    return relay.const(np.ones(shape, dtype))


def extract(body: relay.Expr, *passes: tvm.transform.Pass) -> OperatorGraph:
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    return operator_graph(
        tvm.transform.Sequential([relay.transform.InferType(), *passes, ExtractOperatorGraph("net")])(mod)
    )


def conv(x: relay.Expr, w: relay.Expr, channels: int, kernel: int, **options: Any) -> relay.Expr:
    return relay.nn.conv2d(x, w, channels=channels, kernel_size=(kernel, kernel), **options)


# name: expression, multiply-accumulates, parameter bytes, output bytes
OPERATORS = {
    "conv2d": (conv(var(1, 3, 8, 8), weight(16, 3, 3, 3), 16, 3), 6 * 6 * 16 * 3 * 9, 1728, 2304),
    "strided": (conv(var(1, 3, 8, 8), weight(16, 3, 2, 2), 16, 2, strides=(2, 2)), 4 * 4 * 16 * 3 * 4, 768, 1024),
    "dilated": (conv(var(1, 4, 9, 9), weight(2, 4, 3, 3), 2, 3, dilation=(2, 2)), 5 * 5 * 2 * 4 * 9, 288, 200),
    "batch of conv2d": (conv(var(5, 3, 8, 8), weight(16, 3, 3, 3), 16, 3), 5 * 6 * 6 * 16 * 3 * 9, 1728, 11520),
    "grouped": (conv(var(1, 8, 6, 6), weight(12, 2, 3, 3), 12, 3, groups=4), 4 * 4 * 12 * 2 * 9, 864, 768),
    "depthwise": (conv(var(1, 8, 6, 6), weight(8, 1, 3, 3), 8, 3, groups=8), 4 * 4 * 8 * 9, 288, 512),
    "multiplied depthwise": (conv(var(1, 4, 6, 6), weight(8, 1, 3, 3), 8, 3, groups=4), 4 * 4 * 8 * 9, 288, 512),
    "NHWC": (
        conv(var(1, 8, 8, 3), weight(3, 3, 3, 16), 16, 3, data_layout="NHWC", kernel_layout="HWIO"),
        6 * 6 * 16 * 3 * 9, 1728, 2304,
    ),
    "NHWC depthwise": (
        conv(var(1, 6, 6, 8), weight(3, 3, 8, 1), 8, 3, groups=8, data_layout="NHWC", kernel_layout="HWOI"),
        4 * 4 * 8 * 9, 288, 512,
    ),
    "int8": (
        conv(var(1, 3, 8, 8, dtype="uint8"), weight(16, 3, 3, 3, dtype="int8"), 16, 3, out_dtype="int32"),
        6 * 6 * 16 * 3 * 9, 432, 2304,
    ),
    "conv1d": (relay.nn.conv1d(var(1, 3, 10), weight(4, 3, 3), channels=4, kernel_size=3), 8 * 4 * 3 * 3, 144, 128),
    "conv3d": (
        relay.nn.conv3d(var(1, 2, 4, 4, 4), weight(3, 2, 3, 3, 3), channels=3, kernel_size=(3, 3, 3)),
        8 * 3 * 2 * 27, 648, 96,
    ),
    # Each of the 5 x 5 pixels meets every weight of its channel.
    "transposed": (
        relay.nn.conv2d_transpose(var(1, 6, 5, 5), weight(6, 4, 2, 2), channels=4, kernel_size=(2, 2), strides=(2, 2)),
        25 * 6 * 4 * 4, 384, 1600,
    ),
    "dense": (relay.nn.dense(var(3, 20), weight(7, 20)), 3 * 7 * 20, 560, 84),
    "matmul": (relay.nn.matmul(var(3, 20), weight(20, 7)), 3 * 7 * 20, 560, 84),
    "batch_matmul": (relay.nn.batch_matmul(var(4, 3, 20), var(4, 7, 20, name="y")), 4 * 3 * 7 * 20, 0, 336),
    "max_pool2d": (relay.nn.max_pool2d(var(1, 4, 6, 6), (3, 2), (3, 2)), 2 * 3 * 4 * 6, 0, 96),
    "avg_pool2d": (relay.nn.avg_pool2d(var(1, 4, 6, 6), (2, 2), (2, 2)), 9 * 4 * 4, 0, 144),
    "global_avg_pool2d": (relay.nn.global_avg_pool2d(var(1, 4, 6, 6)), 4 * 36, 0, 16),
    "mean": (relay.mean(var(1, 4, 6, 6), axis=(2, 3)), 4 * 36, 0, 16),
    "softmax": (relay.nn.softmax(var(2, 10)), 3 * 20, 0, 80),
    "relu": (relay.nn.relu(var(2, 10)), 20, 0, 80),
    "add": (relay.add(var(2, 10), weight(10)), 20, 40, 80),
    "concatenate": (relay.concatenate([var(2, 3), var(2, 4, name="y")], axis=1), 14, 0, 56),
    "half": (relay.nn.relu(var(2, 10, dtype="float16")), 20, 0, 40),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_by_hand(name: str) -> None:
    expr, macs, param_bytes, output_bytes = OPERATORS[name]
    (operator,) = extract(expr).operators
    assert (operator.macs, operator.param_bytes, operator.output_bytes) == (macs, param_bytes, output_bytes)


def test_several_outputs_and_names() -> None:
    parts = relay.split(relay.nn.relu(var(2, 12)), 3, axis=1)
    graph = extract(relay.Tuple([relay.tanh(parts[0]), relay.exp(relay.add(parts[1], parts[2]))]))
    assert graph.operator_names == ["relu_0", "split_1", "tanh_2", "add_3", "exp_4"]
    assert [(t.name, t.shape) for t in graph.operators[1].outputs] == [(f"split_1.{i}", (2, 4)) for i in range(3)]
    assert graph.operators[3].inputs == ("split_1.1", "split_1.2")
    assert graph.outputs == ("tanh_2", "exp_4")


def test_a_fused_operator_is_the_sum_of_its_parts() -> None:
    body = relay.nn.relu(relay.nn.bias_add(conv(var(1, 3, 8, 8), weight(16, 3, 3, 3), 16, 3), weight(16)))
    with tvm.transform.PassContext(opt_level=3):
        (operator,) = extract(body, relay.transform.FuseOps(2)).operators
    assert operator.kind == "conv2d+bias_add+relu"
    assert operator.macs == sum(part.macs for part in extract(body).operators) == 6 * 6 * 16 * (27 + 1 + 1)
    assert operator.param_bytes == 1728 + 64
    assert operator.output_bytes == 2304


def test_what_only_moves_elements_is_no_operator() -> None:
    body = relay.nn.relu(relay.reshape(relay.nn.batch_flatten(relay.nn.relu(var(1, 4, 2, 2))), (2, 8)))
    assert extract(body).operator_names == ["relu_0", "relu_1"]


def test_weights_that_are_not_folded_are_operators_without_inputs() -> None:
    body = relay.add(var(1, 4, 3, 3), relay.expand_dims(relay.sqrt(weight(4)), 1, 2))
    graph = extract(body)
    assert [(o.name, o.inputs) for o in graph.operators] == [("sqrt_0", ()), ("add_1", ("x", "sqrt_0"))]
    graph = extract(relay.add(var(1, 4, 3, 3), relay.expand_dims(weight(4), 1, 2)))
    assert [(o.name, o.inputs) for o in graph.operators] == [("expand_dims_0", ()), ("add_1", ("x", "expand_dims_0"))]


def test_a_scale_for_each_channel() -> None:
    scales = relay.const(np.full(16, 0.02, "float32"))
    zero, one = relay.const(0), relay.const(1.0)
    body = relay.qnn.requantize(
        conv(var(1, 3, 8, 8, dtype="int8"), weight(16, 3, 3, 3, dtype="int8"), 16, 3, out_dtype="int32"),
        *(scales, zero, one, zero),
        axis=1,
        out_dtype="int8",
    )
    (operator,) = extract(body, relay.qnn.transform.CanonicalizeOps(), relay.transform.FuseOps(2)).operators
    assert "fixed_point_multiply_per_axis" in operator.kind
    assert operator.outputs[0].shape == (1, 16, 6, 6)


def convolutions(graph: OperatorGraph) -> int:
    return sum(operator.macs for operator in graph.operators if "conv2d" in operator.kind)


@pytest.mark.thorough
def test_blocked_layouts_change_no_figure() -> None:
    mod, params = relay_module("mobile")  # plain, depthwise, grouped and transposed convolutions
    plain = operator_graph(ExtractOperatorGraph("net", params)(mod))
    kinds = ("conv2d", "conv2d_transpose")
    expected = sum(operator.macs for operator in plain.operators if operator.kind in kinds)
    assert expected > 0
    with fast_context():
        optimized, rest = relay.optimize(mod, tvm.target.Target("llvm -mcpu=x86-64-v3"), params)
    graph = operator_graph(ExtractOperatorGraph("net", rest)(relay.transform.InferType()(optimized)))
    # Fused after a convolution stand elementwise operators, one a convolution's output element at least.
    fused = [operator for operator in graph.operators if operator.kind.startswith(kinds)]
    extra = sum(_elementwise(operator) for operator in fused)
    assert sum(operator.macs for operator in fused) - extra == expected


def _elementwise(operator: Operator) -> int:
    return (operator.kind.count("+")) * operator.output_bytes // 4


# Published multiply-accumulates: He et al. 2016 (resnet-50, 3.8e9 for v1 with the stride in the first convolution;
# 4.1e9 where it is in the second), and Howard et al. 2017 (mobilenet, 569 million).
PUBLISHED = {
    "resnet-50": (3.8e9, 4.2e9),
    "mobilenet": (565e6, 573e6),
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    mod, params = import_model(Model(name, "relay.testing", b""))
    graph = operator_graph(ExtractOperatorGraph(name, params)(mod))
    products = [operator.macs for operator in graph.operators if operator.kind in ("conv2d", "dense")]
    low, high = PUBLISHED[name]
    assert low < sum(products) < high
    held = sum(array.numpy().nbytes for array in params.values())
    assert sum(operator.param_bytes for operator in graph.operators) == held


CALLS_A_FUNCTION = """
#[version = "0.0.5"]
def @helper(%y: Tensor[(2, 2), float32]) -> Tensor[(2, 2), float32] { exp(%y) }
def @main(%x: Tensor[(2, 2), float32]) -> Tensor[(2, 2), float32] { %0 = @helper(%x); tanh(%0) }
"""


def test_what_is_no_dataflow_graph_is_refused() -> None:
    x = var(2, 2)
    branch = relay.If(relay.const(True), relay.exp(x), relay.tanh(x))
    with pytest.raises(ModelError, match="main holds a If; only a pure dataflow graph can be cut"):
        extract(relay.exp(branch))
    mod = relay.fromtext(CALLS_A_FUNCTION)
    with pytest.raises(ModelError, match="inline global functions first"):
        ExtractOperatorGraph()(relay.transform.InferType()(mod))


def test_it_is_a_pass_among_others() -> None:
    mod, params = relay_module("branching")
    after = ExtractOperatorGraph("net", params)(mod)
    tvm.ir.assert_structural_equal(after["main"], mod["main"])
    assert operator_graph(relay.transform.ToANormalForm()(after)).name == "net"
