"""Running something on a device without tying the caller's own thread to it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tvm_pipeline.backends.contract import StageRunner

T = TypeVar("T")


def in_bound_thread(runner: StageRunner, action: Callable[[], T]) -> T:
    """The result of `action`, run in a new thread tied to the runner's device."""

    def bound() -> T:
        runner.bind()
        return action()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(bound).result()
