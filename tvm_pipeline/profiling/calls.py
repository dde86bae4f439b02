"""Time work of the host on a device's cores, such as decoding, resizing and drawing, and recognise what was disturbed.

`time_calls` leaves the statistics to its caller. Next: `timings.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tvm_pipeline.profiling.disturbance import Watch
from tvm_pipeline.profiling.patience import Patience, pause
from tvm_pipeline.profiling.timings import TrustedTimings, best_reference_s, time_in_windows, undisturbed

BATCHES = 4


def time_calls(
    bind: Callable[[], None], call: Callable[[], object], repeats: int, cores: Sequence[int] = ()
) -> TrustedTimings:
    """Time calls in a thread of their own until enough are undisturbed, or for four times as long as they take once.

    The first call does not count. `timings` of the result has the seconds and the window of every call in order, also
    of those that were disturbed; `seconds` are those to believe. Where calls differ, as frames of several kinds to
    decode do, time a whole cycle as one call: long calls are disturbed more often than short ones.

    Args:
        bind: binds the calling thread, as `StageRunner.bind` does.
        call: the work.
        repeats: how many undisturbed calls are wanted; half of them are enough.
        cores: those of the device, for what is observed of them.
    """

    def timed() -> TrustedTimings:
        bind()
        call()
        with Watch(cores) as watch:
            begin_s = time.perf_counter()

            def spent_s() -> float:
                return time.perf_counter() - begin_s

            timings = time_in_windows(watch, call, repeats)
            patience = Patience(spent_s())
            while True:
                best_s = best_reference_s(timing.window for timing in timings)
                lacking = repeats - len(undisturbed(timings, best_s))
                if not patience.lasts(spent_s(), lacking):
                    return TrustedTimings(timings, best_s, max(repeats // 2, 1))
                pause(spent_s() / BATCHES)
                timings += time_in_windows(watch, call, min(lacking, max(repeats // BATCHES, 1)))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(timed).result()
