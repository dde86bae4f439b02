"""Work in threads that are bound to devices, so that the caller's own thread is bound to none.

Everything that is timed is timed here; next: `operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

from tvm_pipeline.backends.contract import StageRunner

T = TypeVar("T")


def in_bound_thread(runner: StageRunner, action: Callable[[], T]) -> T:
    """Run `action` in a new thread that is bound to the runner's device, and return its result."""
    [result] = in_bound_threads([(runner, action)])
    return result


def in_bound_threads(work: Sequence[tuple[StageRunner, Callable[[], T]]], *barriers: Barrier) -> list[T]:
    """Run actions at the same time, each in a new thread that is bound to its runner's device.

    Args:
        work: the runners and what to do on their devices.
        barriers: barriers at which the actions wait for one another. If one thread raises an error, the barriers
            are broken, so that no other thread waits for ever.

    Returns:
        The results in the order of `work`.

    Raises:
        Exception: the first error of a thread, of `bind` or of the action.
    """

    def bound(runner: StageRunner, action: Callable[[], T]) -> T:
        try:
            runner.bind()
            return action()
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            raise

    with ThreadPoolExecutor(len(work)) as pool:
        futures = [pool.submit(bound, runner, action) for runner, action in work]
    errors = [error for future in futures if (error := future.exception())]
    if errors:  # A broken barrier is only the consequence of another thread's error.
        raise min(errors, key=lambda error: isinstance(error, BrokenBarrierError))
    return [future.result() for future in futures]
