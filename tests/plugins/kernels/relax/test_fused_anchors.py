"""What FuseOps makes of the operators that have a rule: one kernel with what follows, which still names its rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_pipeline_kernels.relax.schedules import conv2d_transpose, depthwise, group_conv2d
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE

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
