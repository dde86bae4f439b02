"""The seconds that a device needs to read a tensor that another device wrote, and the line through such seconds.

Stages hand over pointers, so the runtime copies nothing between them. A hand-over still takes time, because the tensor
is in the cache of another core. This file times a first and a second copy of a buffer that the other device wrote last;
the difference is the time of the hand-over. A least-squares fit over sizes from 4 KB to 4 MB then gives
`latency + bytes / bandwidth`. `operators.py` uses the same sizes and the same fit for devices with memory of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import permutations
from threading import Barrier

import numpy as np
import numpy.typing as npt

from tvm_pipeline.backends.contract import Array, StageRunner
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline.core.platform import Device, Link, Transfer
from tvm_pipeline.profiling.bound import in_bound_threads

SIZES = tuple(4096 * 4**step for step in range(6))
REPEATS = 15


def fit_links(runners: Mapping[Device, StageRunner]) -> tuple[Link, ...]:
    """Measure and return a link for every ordered pair of devices that can work at the same time."""
    return tuple(
        fit_link(source.name, destination.name, *measure_link(runners[source], runners[destination]))
        for source, destination in permutations(runners, 2)
        if not source.overlaps(destination)
    )


def measure_link(source: StageRunner, destination: StageRunner) -> tuple[list[int], list[float]]:
    """Return sizes in bytes, and the additional seconds of a copy if the source wrote the buffer last.

    An error of either device is raised.
    """
    turn = Barrier(2)
    buffers = [aligned_empty((size,), "uint8") for size in SIZES]

    def write() -> list[float]:
        for buffer in buffers:
            for value in range(REPEATS):
                buffer.fill(value)
                turn.wait()  # The reader copies between these two lines.
                turn.wait()
        return []

    def copy() -> list[float]:
        medians = []
        for buffer in buffers:
            own = aligned_empty(buffer.shape, "uint8")
            extra = []
            for _ in range(REPEATS):
                turn.wait()
                extra.append(_cold_copy_s(own, buffer))
                turn.wait()
            medians.append(float(np.median(extra)))
        return medians

    _, seconds = in_bound_threads([(source, write), (destination, copy)], turn)
    return list(SIZES), seconds


def _cold_copy_s(own: Array, buffer: Array) -> float:
    """Return the seconds by which the first copy of `buffer` is slower than the second."""
    begin = time.perf_counter()
    np.copyto(own, buffer)
    between = time.perf_counter()
    np.copyto(own, buffer)
    return (between - begin) - (time.perf_counter() - between)


def fit_link(source: str, destination: str, sizes: list[int], seconds: list[float]) -> Link:
    """Fit a link to measured seconds; `r2` is the quality of the fit."""
    transfer = fit_transfer(sizes, seconds)
    y = np.array(seconds)
    rest = float(((y - np.array([transfer.seconds(size) for size in sizes])) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    quality = 1 - rest / total if total else None
    return Link(source, destination, transfer.latency_s, transfer.bandwidth_bytes_per_s, quality)


def fit_transfer(sizes: Sequence[int], seconds: Sequence[float] | npt.NDArray[np.float64]) -> Transfer:
    """Fit `latency + bytes / bandwidth` to measured seconds by least squares; neither part is negative."""
    slope, intercept = np.polyfit(np.array(sizes, float), np.array(seconds), 1)
    return Transfer(max(float(intercept), 0.0), 1 / float(slope) if slope > 0 else None)
