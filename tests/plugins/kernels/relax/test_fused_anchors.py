"""What FuseOps makes of the operators that have a rule: one kernel with what follows, which still names its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.relax.fused import TARGETS, kernels, run
from tvm_pipeline_kernels.relax.schedules import conv2d, conv2d_transpose, depthwise, group_conv2d
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE
from tvm_pipeline_tvm.kernel_sets import relax_kernels

IMAGE = (1, 2, 8, 13, 16)
SAME = (1, 1), (1, 1, 1, 1), (1, 1)


@pytest.mark.parametrize(
    ("rule", "compute", "image", "kernel"),
    [
        (depthwise, lambda x, w: depthwise.compute(x, w, *SAME), IMAGE, (2, 3, 3, 16)),
        (group_conv2d, lambda x, w: group_conv2d.compute(x, w, 8, *SAME, 16), IMAGE, (2, 1, 3, 3, 4, 16)),
        (group_conv2d, lambda x, w: group_conv2d.compute(x, w, 2, *SAME, 16), IMAGE, (2, 1, 3, 3, 16, 16)),
        (group_conv2d, lambda x, w: group_conv2d.compute(x, w, 2, *SAME, 16), (1, 10, 7, 7), (10, 5, 3, 3)),
        (
            conv2d_transpose,
            lambda x, w: conv2d_transpose.compute(x, w, (2, 2), (1, 1, 1, 1), (1, 1)),
            IMAGE,
            (2, 2, 3, 3, 16, 16),
        ),
    ],
    ids=["depthwise", "blocks of groups", "groups of blocks", "pixels", "transposed"],
)
def test_what_follows_is_in_the_same_kernel(
    rule: Any, compute: Callable[..., Any], image: tuple[int, ...], kernel: tuple[int, ...]
) -> None:
    builder, data = relax.BlockBuilder(), relax.Var("data", relax.TensorType(image, "float32"))
    with builder.function("main", [data]):
        with builder.dataflow():
            weights = relax.const(np.ones(kernel, "float32"))
            sums = builder.emit(builder.call_te(compute, data, weights, primfunc_name_hint="anchor"))
            biased = builder.emit(relax.op.add(sums, relax.const(np.ones((1,) * len(image), "float32"))))
            result = builder.emit_output(relax.op.clip(biased, 0, 6))
        builder.emit_func_output(result)
    passes = relax.transform
    module = tvm.transform.Sequential(
        [
            passes.LegalizeOps(),
            passes.AnnotateTIROpPattern(),
            passes.FuseOps(),
            passes.FuseTIR(),
            passes.DeadCodeElimination(),
        ]
    )(builder.get())
    (function,) = (function for function in module.functions.values() if isinstance(function, tvm.tirx.PrimFunc))
    s = tvm.s_tir.Schedule(function)
    blocks = s.get_child_blocks(s.get_sblock("root"))
    assert [s.get(block).annotations[RULE] for block in blocks if RULE in s.get(block).annotations] == [rule.NAME]
    assert len(blocks) > 2


@pytest.mark.parametrize("reads_inside", [False, True])
def test_what_has_another_shape_is_a_pass_in_vectors(reads_inside: bool) -> None:
    """As in a squeeze-and-excitation block: a number for each channel, and the image that it multiplies."""
    draw = np.random.default_rng(0)
    few, image, weights = (
        draw.standard_normal(shape).astype("float32") for shape in ((1, 2, 1, 1, 16), IMAGE, (2, 2, 1, 1, 16, 16))
    )

    def build(builder: Any, x: Any, image: Any) -> Any:
        layer = builder.call_te(conv2d.compute, x, relax.const(weights), (1, 1), (0, 0, 0, 0), (1, 1))
        sums = builder.emit(layer)
        gate = builder.emit(relax.op.clip(builder.emit(relax.op.add(sums, relax.const(1.0))), 0, 6))
        scaled = builder.emit(relax.op.multiply(gate, image))
        return builder.emit(relax.op.add(scaled, sums) if reads_inside else relax.op.nn.relu(scaled))

    found, rules = run(build, [few, image], TARGETS[0])
    assert rules == ["conv2d"]
    [fused] = [
        each
        for each in kernels(build, [few, image], TARGETS[0]).functions.values()
        if isinstance(each, tvm.tirx.PrimFunc)
    ]
    kernel, _ = relax_kernels().scheduled(fused, TARGETS[0])
    assert kernel.script().count("T.vectorized") == 4  # of the sums' beginning, the sums, what stores them, the image
    sums = np.einsum("ic,oixyck->ok", few[0, :, 0, 0], weights).reshape(1, 2, 1, 1, 16)
    scaled = np.clip(sums + 1, 0, 6) * image
    np.testing.assert_allclose(found, scaled + sums if reads_inside else np.maximum(scaled, 0), rtol=2e-5, atol=2e-5)
