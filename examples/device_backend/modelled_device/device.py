"""The device as a driver shows it: buffers in its own memory, copies to and from them, and a queue of work.

The memory is ordinary memory that the host's stages never see. The copies are really made, and `time_copies` measures
them. In a backend for real hardware the driver's calls replace `np.copyto`. Next: `compiled.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from tvm_pipeline.backends.contract import Array, Seconds

T = TypeVar("T")


class ModelledDevice:
    """Computes one piece of work after the other, in the order in which stages submit them."""

    def __init__(self) -> None:
        self._queue: ThreadPoolExecutor | None = None

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Return a buffer in the device's memory."""
        return np.zeros(shape, dtype)

    def upload(self, source: Array, target: Array) -> None:
        """Copy from the host's memory into a buffer."""
        np.copyto(target, source)

    def download(self, source: Array, target: Array) -> None:
        """Copy from a buffer into the host's memory."""
        np.copyto(target, source)

    def run(self, work: Callable[[], T]) -> T:
        """Have the device do some work, and wait until it is done."""
        if self._queue is None:
            self._queue = ThreadPoolExecutor(1, "modelled device")
        return self._queue.submit(work).result()

    def time_copies(self, sizes_bytes: Sequence[int], repeats: int) -> tuple[Seconds, Seconds]:
        """Return seconds of uploads and of downloads (each repeats x sizes)."""
        received, sent = (np.empty((repeats, len(sizes_bytes))) for _ in range(2))
        for column, size in enumerate(sizes_bytes):
            host, buffer = np.ones(size, np.uint8), self.allocate((size,), "uint8")
            self.upload(host, buffer)
            for row in range(repeats):
                began = time.perf_counter()
                self.upload(host, buffer)
                uploaded = time.perf_counter()
                self.download(buffer, host)
                received[row, column] = max(uploaded - began, 1e-9)
                sent[row, column] = max(time.perf_counter() - uploaded, 1e-9)
        return received, sent

    def close(self) -> None:
        """End the queue; the next work begins a new one."""
        if self._queue is not None:
            self._queue.shutdown()
            self._queue = None
