"""Random whole numbers for hot loops, equal on every machine, compiled or not."""

from __future__ import annotations

from typing import Any

import numpy as np

from tvm_pipeline.solvers.hot import hot


@hot
def draw(random: Any, count: Any) -> Any:
    """Return a whole number below `count`. Marsaglia, "Xorshift RNGs", Journal of Statistical Software 8, 2003.

    Args:
        random: 1, uint64; the state, which is not 0.
    """
    x = random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    random[0] = x
    return np.int64((x >> np.uint64(11)) * (1.0 / 9007199254740992.0) * count)
