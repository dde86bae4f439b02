"""How long copies to and from a device with memory of its own take."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tvm_pipeline.backends.contract import Seconds
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline_tvm.devices.mirrors import mirrors_of
from tvm_pipeline_tvm.devices.targets import has_own_memory


def time_transfers(target: str, sizes_bytes: Sequence[int], repeats: int) -> tuple[Seconds, Seconds] | None:
    """Return seconds of receiving and of sending (each repeats x sizes); None for CPU cores, which copy nothing."""
    if not has_own_memory(target):
        return None
    mirrors = mirrors_of(target)
    seconds = np.zeros((2, repeats, len(sizes_bytes)))
    for column, size in enumerate(sizes_bytes):
        array = aligned_empty((size,), "uint8")
        mirror = mirrors.shared(array, kept=False) or mirrors.copied(array, mirrors.empty(size))
        for row in range(repeats):
            for direction, move in enumerate((mirror.begin, mirror.end)):
                begin = time.perf_counter()
                move(copied=True)
                mirrors.device.sync()
                seconds[direction, row, column] = time.perf_counter() - begin
    return seconds[0], seconds[1]
