"""MediaPipe's custom operator of TFLite files, a transposed convolution with a bias.

Next: `relay/tflite_repairs.py` and `relax/tflite_importer.py`, which convert it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

TRANSPOSE_BIAS = "Convolution2DTransposeBias"
_PADDING_SAME = 1  # of TfLitePadding, which is not numbered as the schema's Padding
_OPTIONS = struct.Struct("<3i")  # padding, stride of the width, stride of the height


def is_transpose_bias(code: Any) -> bool:
    """Return whether a code of a file's operators is this one."""
    return bool(code.CustomCode() == TRANSPOSE_BIAS.encode())


def transpose_bias(
    op: Any, image: Sequence[int], weights: Sequence[int]
) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """Return the strides (height, width) and the padding (top, left, bottom, right) of an operator.

    The padding is that of mediapipe/util/tflite/operations/transpose_conv_bias.cc: where it is SAME, the result is
    smaller by max(0, kernel - (extent - 1) % stride - 1), one half of which, rounded down, goes before.

    Args:
        image: the shape, NHWC.
        weights: the shape, OHWI.
    """
    padding, stride_width, stride_height = _OPTIONS.unpack_from(op.CustomOptionsAsNumpy().tobytes())
    down = right = 0
    if padding == _PADDING_SAME:
        down = max(0, int(weights[1]) - (int(image[1]) - 1) % stride_height - 1)
        right = max(0, int(weights[2]) - (int(image[2]) - 1) % stride_width - 1)
    return (stride_height, stride_width), (down // 2, right // 2, down - down // 2, right - right // 2)
