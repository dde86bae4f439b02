"""What is read of a module's kernels: operators, layouts, views, multiply-adds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from onnx import helper

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline import frontends
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.kernels import Source
from tvm_pipeline_tvm.relax import kernel_passes
from tvm_pipeline_tvm.relax.cuda_kernels import cuda_target
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.kernel_walkers import FlatModule, flat_module
from tvm_pipeline_tvm.relax.simplify import simplified

TARGET = tvm.target.Target({"kind": "llvm", "mcpu": "x86-64-v3"})  # vectors of 8


def simple(
    nodes: list, weights: dict[str, tuple[int, ...]], outputs: tuple[str, ...] = ("y",), **inputs: tuple
) -> tvm.IRModule:
    """Return a network of ONNX nodes and random weights as a simplified module."""
    draw = np.random.default_rng(0)
    constants = {name: draw.standard_normal(shape).astype("float32") for name, shape in weights.items()}
    infos = [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()]
    model = frontends.onnx.read("net", "net.onnx", onnx_bytes(nodes, constants, inputs=infos, outputs=outputs), {}, {})
    return simplified(import_model(model))


def flat(*arguments: Any, **inputs: tuple) -> FlatModule:
    return flat_module(kernel_passes.fused(simple(*arguments, **inputs), TARGET))


@pytest.mark.needs("kernels")
def test_a_convolution_and_what_follows_are_one_kernel() -> None:
    found = flat(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", ["c"], ["y"]),
        ],
        {"w": (16, 8, 3, 3), "b": (16,)},
        x=(1, 8, 6, 5),
    )
    into, convolution, back = found.kernels
    assert (into.is_glue, back.is_glue) == (True, True)
    assert [name for name, _ in convolution.operators] == ["conv2d", "add", "relu"]
    assert convolution.arguments[0] == (Source(None, 0), Source(None, -1))
    assert convolution.arguments[1:] == ((Source(0, 0), Source(None, -1)), (Source(1, 0),))
    assert [(output.shape, output.layout) for output in convolution.outputs] == [((1, 2, 6, 5, 8), "NCHW8c")]
    assert back.outputs[0].layout == ""
    assert convolution.macs == 16 * 8 * 9 * 30
    assert convolution.param_bytes == 4 * (16 * 8 * 9 + 16)
    assert found.heads == [(2, 0)]
    assert found.is_view == [False, False, False]


def test_another_shape_of_the_same_bytes_is_a_view() -> None:
    found = flat(
        [
            helper.make_node("Conv", ["x", "w"], ["c"]),
            helper.make_node("GlobalAveragePool", ["c"], ["g"]),
            helper.make_node("Flatten", ["g"], ["f"]),
            helper.make_node("Gemm", ["f", "v"], ["y"]),
        ],
        {"w": (16, 3, 3, 3), "v": (16, 4)},
        x=(1, 3, 6, 5),
    )
    views = [kernel for kernel, is_view in zip(found.kernels, found.is_view, strict=True) if is_view]
    assert views
    assert all(kernel.is_glue for kernel in views)
    assert not any(
        kernel.is_glue for kernel, is_view in zip(found.kernels, found.is_view, strict=True) if not is_view
    ), "an image of one pixel changes its layout without a copy"


def test_the_same_kernel_twice_is_one_function_with_two_weights() -> None:
    found = flat(
        [
            helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["c", "w2"], ["y"], pads=[1, 1, 1, 1]),
        ],
        {"w1": (8, 8, 3, 3), "w2": (8, 8, 3, 3)},
        x=(1, 8, 6, 5),
    )
    first, second = (call for call in found.calls if call.function.startswith("conv2d"))
    assert first.function == second.function
    assert first.arguments[1] != second.arguments[1]
    assert len(found.constants) == 2


def test_two_outputs_are_two_heads() -> None:
    found = flat(
        [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Sigmoid", ["x"], ["z"])],
        {},
        outputs=("y", "z"),
        x=(1, 4),
    )
    assert len(set(found.heads)) == 2


def test_kernels_of_cpus_and_gpus_line_up() -> None:
    """A bias of one channel is a tensor to both, and a number without axes a part of the loops of both."""
    mod = simple(
        [
            helper.make_node("Conv", ["x", "w1"], ["c"], pads=[1, 1, 1, 1]),
            helper.make_node("Mul", ["c", "number"], ["m"]),
            helper.make_node("Conv", ["m", "w2", "b2"], ["d"]),
            helper.make_node("Sigmoid", ["d"], ["y"]),
        ],
        {"w1": (16, 8, 3, 3), "number": (), "w2": (1, 16, 1, 1), "b2": (1,)},
        x=(1, 8, 6, 5),
    )
    found = [flat_module(kernel_passes.fused(mod, TARGET)), flat_module(gpu_fused(mod, cuda_target("sm_87", TARGET)))]
    tensors = tuple(Tensor(str(param.name), (1, 8, 6, 5), "float32") for param in mod["main"].params)
    graph, _ = align("net", tensors, [each.kernels for each in found], [each.heads for each in found])
    assert [operator.kind for operator in graph.operators] == ["conv2d", "conv2d+add+sigmoid"]


@pytest.mark.needs("kernels")
def test_weights_that_several_kernels_read_are_kept_once() -> None:
    """As an LSTM's steps do: each product packs the matrix anew."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["t"]),
        helper.make_node("MatMul", ["t", "w"], ["y"]),
    ]
    found = flat(nodes, {"w": (24, 24)}, x=(1, 24))
    assert [array.numpy().size for array in found.constants] == [24 * 24]
    read = [index for call in found.calls for index in call.arguments if isinstance(index, int)]
    assert read == [0, 0]
