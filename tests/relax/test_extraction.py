"""ExtractOperatorGraph: parameter bytes, output bytes and multiply-accumulates, against sums done by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from tests.relax.scripts import TARGET, lowered, module, network
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.errors import GraphError, ModelError
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.extraction import ExtractOperatorGraph, operator_graph

LEGALISED = (relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern())


def extract(build: Callable[..., Any], *shapes: tuple[int, ...], fuse: bool = True, **attributes: Any) -> OperatorGraph:
    """Return the graph of a function of float32 tensors x0, x1 .., and its result."""
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
    with builder.function("main", inputs, attrs=attributes):
        with builder.dataflow():
            output = builder.emit_output(build(*inputs))
        builder.emit_func_output(output)
    passes = [*LEGALISED, *([relax.transform.FuseOps()] if fuse else []), ExtractOperatorGraph("net")]
    return operator_graph(tvm.transform.Sequential(passes)(builder.finalize()))


def weight(*shape: int, dtype: str = "float32") -> Any:
    return relax.const(np.ones(shape, dtype))


# name: function, shapes of its inputs, multiply-accumulates, parameter bytes, output bytes
OPERATORS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]], int, int, int]] = {
    "conv2d": (lambda x: op.nn.conv2d(x, weight(16, 3, 3, 3)), [(2, 3, 8, 8)], 2 * 36 * 16 * 3 * 9, 1728, 4608),
    "strided": (lambda x: op.nn.conv2d(x, weight(16, 3, 2, 2), 2), [(1, 3, 8, 8)], 16 * 16 * 3 * 4, 768, 1024),
    "padded": (lambda x: op.nn.conv2d(x, weight(4, 3, 3, 3), 1, 1), [(1, 3, 5, 5)], 25 * 4 * 27, 432, 400),
    "grouped": (lambda x: op.nn.conv2d(x, weight(12, 2, 3, 3), groups=4), [(1, 8, 6, 6)], 16 * 12 * 18, 864, 768),
    "depthwise": (lambda x: op.nn.conv2d(x, weight(8, 1, 3, 3), groups=8), [(1, 8, 6, 6)], 16 * 8 * 9, 288, 512),
    "matmul": (lambda x: op.matmul(x, weight(20, 7)), [(3, 20)], 3 * 7 * 20, 560, 84),
    "batched": (op.matmul, [(4, 3, 20), (4, 20, 7)], 4 * 3 * 7 * 20, 0, 336),
    "relu": (op.nn.relu, [(2, 10)], 0, 0, 80),
    "bias": (lambda x: op.add(x, weight(10)), [(2, 10)], 0, 40, 80),
    "max_pool2d": (lambda x: op.nn.max_pool2d(x, (3, 2), (3, 2)), [(1, 4, 6, 6)], 0, 0, 96),
    "concatenate": (lambda x, y: op.concat([x, y], 1), [(2, 3), (2, 4)], 0, 0, 56),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_sizes_by_hand(name: str) -> None:
    build, shapes, macs, param_bytes, output_bytes = OPERATORS[name]
    (operator,) = extract(build, *shapes).operators
    assert (operator.macs, operator.param_bytes, operator.output_bytes) == (macs, param_bytes, output_bytes)


def test_several_outputs_and_names() -> None:
    def build(x: Any) -> Any:
        parts = op.split(x, 3, axis=1)
        return relax.Tuple([op.tanh(parts[0]), op.exp(op.add(parts[1], parts[2]))])

    graph = extract(build, (2, 12), fuse=False)
    assert graph.operator_names == ["split_0", "tanh_1", "add_2", "exp_3"]
    assert [(t.name, t.shape) for t in graph.operators[0].outputs] == [(f"split_0.{i}", (2, 4)) for i in range(3)]
    assert graph.operators[2].inputs == ("split_0.1", "split_0.2")
    assert graph.outputs == ("tanh_1", "exp_3")


def test_outputs_have_the_names_of_the_file() -> None:
    def build(x: Any) -> Any:
        return relax.Tuple([op.tanh(x), op.nn.softmax(x)])

    assert extract(build, (2, 12), output_names=["near", "far"]).outputs == ("near", "far")


def test_a_fused_operator_is_the_sum_of_its_parts() -> None:
    def build(x: Any) -> Any:
        return op.nn.relu(op.add(op.nn.conv2d(x, weight(16, 3, 3, 3)), weight(1, 16, 1, 1)))

    (operator,) = extract(build, (1, 3, 8, 8)).operators
    assert (operator.kind, operator.name) == ("conv2d+add+relu", "conv2d+add+relu_0")
    parts = extract(build, (1, 3, 8, 8), fuse=False).operators
    assert operator.macs == sum(part.macs for part in parts) == 36 * 16 * 27
    assert operator.param_bytes == sum(part.param_bytes for part in parts) == 1728 + 64
    assert operator.output_bytes == 2304


def test_what_only_moves_elements_is_no_operator() -> None:
    def build(x: Any) -> Any:
        return op.nn.relu(op.reshape(op.reshape(op.nn.relu(x), (1, 16)), (2, 8)))

    assert [operator.name for operator in extract(build, (1, 4, 2, 2), fuse=False).operators] == ["relu_0", "relu_1"]


@pytest.mark.needs("kernels")
@pytest.mark.parametrize(("processor", "columns"), [("x86-64-v4", 10), ("x86-64-v3", 16), ("x86-64-v2", 12)])
def test_the_graph_is_the_same_before_and_behind_fusetir_and_the_schedules(processor: str, columns: int) -> None:
    """Only the names of parts are lost, and layouts: the same calls on as many bytes, with as much work.

    The last layer has 10 outputs, and `columns` with those that fill vectors of 8 or 4.
    """
    target = tvm.target.Target({"kind": "llvm", "mcpu": processor})
    before = kernel_passes.fused(network(), target)
    seen = []
    for mod in (before, lowered(before), kernel_passes.kernels(before, target)):
        graph = operator_graph(ExtractOperatorGraph("net")(mod))
        position = {tensor.name: index for index, tensor in enumerate(graph.inputs)}
        for operator in graph.operators:
            position |= {tensor.name: len(position) + index for index, tensor in enumerate(operator.outputs)}
        seen.append(
            [
                (
                    operator.kind.replace("+", "_").replace("_layout_transform", ""),
                    [position[name] for name in operator.inputs],
                    operator.output_bytes,
                    operator.param_bytes,
                    operator.macs,
                )
                for operator in graph.operators
            ]
        )
    assert seen[0] == seen[1] == seen[2]
    # 64 pixels; the kernel of 3 x 3 is read twice.
    assert sum(row[4] for row in seen[0]) == 64 * 16 * (27 + 144 + 16 + 144) + 32 * columns
    assert sum(row[3] for row in seen[0]) == 4 * (16 * (27 + 144 + 16 + 144) + 4 * 16 + 32 * columns)


def test_it_is_a_pass_among_others() -> None:
    mod = kernel_passes.fused(network(), TARGET)
    after = ExtractOperatorGraph("net")(mod)
    tvm.ir.assert_structural_equal(after["main"], mod["main"])
    assert operator_graph(lowered(after)).name == "net"
    with pytest.raises(GraphError, match="run ExtractOperatorGraph first"):
        operator_graph(mod)


DYNAMIC = """
@R.function
def main(x: R.Tensor(("n", 4), "float32")) -> R.Tensor(("n", 4), "float32"):
    return R.exp(x)
"""
COUNTED = """
@R.function
def main(x: R.Tensor((2, 4), "float32")) -> R.Tensor(dtype="int64", ndim=2):
    return R.nonzero(x)
"""
BRANCHING = """
@R.function
def main(x: R.Tensor((2, 4), "float32"), c: R.Tensor((), "bool")) -> R.Tensor((2, 4), "float32"):
    if c:
        y = R.exp(x)
    else:
        y = R.tanh(x)
    return y
"""
HEADLESS = """
@R.function
def forward(x: R.Tensor((2, 4), "float32")) -> R.Tensor((2, 4), "float32"):
    return R.exp(x)
"""
REFUSED = {
    r"parameter x of main is R.Tensor\(\(n, 4\)": DYNAMIC,
    r"tensor gv of main is R.Tensor\(dtype=.int64., ndim=2\); only tensors of fixed shapes": COUNTED,
    r"main computes y by control flow": BRANCHING,
    "no Relax function main; it has .*forward": HEADLESS,
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_no_graph_of_kernels_is_refused(message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tvm.transform.Sequential([*LEGALISED, ExtractOperatorGraph()])(module(REFUSED[message]))


def test_an_operator_that_is_not_legalised_is_named() -> None:
    with pytest.raises(ModelError, match=r"operator nn\.conv2d has no kernel"):
        ExtractOperatorGraph()(network())
