"""Count the work of one operator of a TFLite file. Next: `model.py`, which puts it into the operator graph."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, ...]

_OVER_INPUTS = ("mean", "sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_any", "reduce_all")
_NOTHING = ("reshape", "squeeze", "expand_dims", "shape")


def macs(kind: str, inputs: Sequence[Shape], outputs: Sequence[Shape], window: int = 1) -> int:
    """Return the multiply-accumulates; operators without multiplications count one operation for each element.

    A convolution costs output elements x the weights of one output channel, a transposed one input elements x the
    weights of one input channel, a matrix product output elements x inner extent, a pooling output elements x
    window, and softmax three passes over its input. Operators that only rename a shape are free.

    Args:
        kind: the builtin operator's name in lower case.
        inputs: shapes of all that the operator reads, constants among them, in the file's order.
        window: elements of a pooling's window.
    """
    result = sum(math.prod(shape) for shape in outputs)
    match kind:
        case "conv_2d":  # weights [out, height, width, in / groups]
            return result * math.prod(inputs[1][1:])
        case "depthwise_conv_2d":  # weights [1, height, width, out]
            return result * math.prod(inputs[1][:-1])
        case "conv_3d":  # weights [depth, height, width, in, out]
            return result * math.prod(inputs[1][:-1])
        case "transpose_conv":  # reads a shape, weights [out, height, width, in], the tensor
            return math.prod(inputs[2]) * math.prod(inputs[1][:-1])
        case "fully_connected":  # weights [out, in]
            return result * inputs[1][-1]
        case "batch_matmul":  # the inner extent is what one row of the result takes of the left side
            return result * math.prod(inputs[0]) // max(math.prod(outputs[0][:-1]), 1)
        case "average_pool_2d" | "max_pool_2d":
            return result * window
        case "softmax" | "log_softmax":
            return 3 * result
    if kind in _NOTHING:
        return 0
    return math.prod(inputs[0]) if kind in _OVER_INPUTS else result
