"""Which convolutions get more output channels, so that these fill vectors. Free of TVM."""

from __future__ import annotations

from typing import Any

import numpy as np

PADDED_BLOCK = 16  # whatever the target is, so that all libraries of a platform have the same operators
LEAST_CHANNELS = 64  # fewer are cheap, and often feed another convolution, for which the slice would be in the way
MOST_VECTORS = 0.8  # of those without padding


def padded_channels(channels: int) -> int:
    """Return to how many output channels a convolution is padded; `channels` where it is left alone.

    Examples:
        >>> padded_channels(1000), padded_channels(96)
        (1008, 96)
    """
    padded = channels + -channels % PADDED_BLOCK
    vectors = channels // max(block for block in range(1, PADDED_BLOCK + 1) if channels % block == 0)
    worthwhile = channels >= LEAST_CHANNELS and padded // PADDED_BLOCK <= MOST_VECTORS * vectors
    return padded if worthwhile else channels


def with_zeros(array: Any, length: int) -> Any:
    """Return an array whose first axis is that long."""
    return np.concatenate([array, np.zeros((length - len(array), *array.shape[1:]), array.dtype)])
