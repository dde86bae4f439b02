"""What it costs a device to read a tensor that another one wrote.

Stages hand over pointers, so nothing is copied; what a hand-over costs is that the reader finds the tensor in another
core's cache. A copy of a buffer that the other device just wrote is timed, and a second copy of the same buffer
subtracted; `latency + bytes / bandwidth` is fitted to the medians over sizes from 4 KB to 4 MB by least squares.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from queue import SimpleQueue

import numpy as np

from tvm_pipeline.backends.contract import Array, StageRunner
from tvm_pipeline.backends.ports import aligned_empty
from tvm_pipeline.core.platform import Device, Link
from tvm_pipeline.profiling.bound import in_bound_thread

SIZES = tuple(4096 * 4**step for step in range(6))
REPEATS = 15


def fit_links(runners: Mapping[Device, StageRunner]) -> tuple[Link, ...]:
    """A link for every ordered pair of devices that can work at the same time."""
    return tuple(
        fit_link(source.name, destination.name, *measure_link(runners[source], runners[destination]))
        for source, destination in permutations(runners, 2)
        if not source.overlaps(destination)
    )


def measure_link(source: StageRunner, destination: StageRunner) -> tuple[list[int], list[float]]:
    """Sizes in bytes, and the seconds more that a copy takes because the source wrote the buffer last."""
    written: SimpleQueue[Array] = SimpleQueue()
    read: SimpleQueue[None] = SimpleQueue()
    buffers = [aligned_empty((size,), "uint8") for size in SIZES]

    def write() -> None:
        for buffer in buffers:
            for value in range(REPEATS):
                buffer.fill(value)
                written.put(buffer)
                read.get()

    def copy() -> list[float]:
        medians = []
        for size in SIZES:
            own = aligned_empty((size,), "uint8")
            extra = []
            for _ in range(REPEATS):
                extra.append(_cold_copy_s(own, written.get()))
                read.put(None)
            medians.append(float(np.median(extra)))
        return medians

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(in_bound_thread, source, write)
        seconds = in_bound_thread(destination, copy)
        writer.result()
    return list(SIZES), seconds


def _cold_copy_s(own: Array, buffer: Array) -> float:
    """Seconds that the first copy of `buffer` takes more than the second."""
    begin = time.perf_counter()
    np.copyto(own, buffer)
    between = time.perf_counter()
    np.copyto(own, buffer)
    return (between - begin) - (time.perf_counter() - between)


def fit_link(source: str, destination: str, sizes: list[int], seconds: list[float]) -> Link:
    """Fits a link to measured seconds; neither part can be negative."""
    x, y = np.array(sizes, float), np.array(seconds)
    slope, intercept = np.polyfit(x, y, 1)
    slope, intercept = max(float(slope), 0.0), max(float(intercept), 0.0)
    rest = float(((y - (intercept + slope * x)) ** 2).sum())
    total = float(((y - y.mean()) ** 2).sum())
    return Link(source, destination, intercept, 1 / slope if slope else None, 1 - rest / total if total else None)
