"""Store images channels first (NCHW), as all fast convolutions here read them; .tflite has channels last.

    conv2d(x: NHWC, w: HWIO)  ->  layout_transform(conv2d(layout_transform(x), w: OIHW))

The changes of layout between two convolutions cancel out, so that those of the inputs and outputs remain.

It is done whatever the target is, so that all libraries of a platform have the same operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tvm
from tvm import relay

from tvm_pipeline_tvm.relay.kernel_walkers import outer_expressions

_CONVOLUTIONS = ("nn.conv2d", "qnn.conv2d")
_DESIRED = {
    **{name: ["NCHW", "default"] for name in (*_CONVOLUTIONS, "nn.conv2d_transpose", "qnn.conv2d_transpose")},
    **{f"nn.{name}_pool2d": ["NCHW"] for name in ("max", "avg", "global_max", "global_avg")},
    **{name: ["NCHW"] for name in ("qnn.avg_pool2d", "image.resize2d")},
}


def channels_first(mod: tvm.IRModule, params: Mapping[str, Any] | None = None) -> tvm.IRModule:
    """Return a module of the same results; where it changes, `params` are constants in it."""
    if not any(map(_is_channels_last, outer_expressions(mod["main"].body))):
        return mod
    main = relay.build_module.bind_params_by_name(mod["main"], dict(params or {}))
    passes = tvm.transform.Sequential(
        [
            relay.transform.InferType(),
            relay.transform.ConvertLayout(_DESIRED),
            relay.transform.InferType(),
        ]
    )
    with tvm.transform.PassContext(opt_level=3):
        return passes(tvm.IRModule.from_expr(main))


def _is_channels_last(expr: relay.Expr) -> bool:
    is_convolution = isinstance(expr, relay.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name in _CONVOLUTIONS
    return is_convolution and str(expr.attrs.data_layout) == "NHWC"
