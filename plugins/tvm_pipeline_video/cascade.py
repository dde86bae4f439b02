"""Two models in a row: the first one finds things in a frame, the second one looks at a crop of each.

    crops = measured_crops(first, some_frames, cut)               # of a stretch of the source
    plans = plan_cascade((first_problem, second_problem), crops).plans
    for frame in Cascade(first, second, cut).map(frames):
        frame.first.outputs, [crop.outputs for crop in frame.crops]

Both models are planned as one problem: they share the devices, and the second one has as many frames a second as the
first one finds crops. Crops go through the second pipeline while the first one goes on with later frames. Frames come
out in order, each with the results of all its crops. Read next: planning/deployment.py, which places models at their
rates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Full, Queue

from tvm_pipeline import Problem, Result
from tvm_pipeline.errors import OptionError, PipelineClosedError
from tvm_pipeline.planning.deployment import Demand, Deployment, deploy
from tvm_pipeline.runtime.frame_stream import FrameStream, Inputs, Tagged

MOST_AHEAD = 64  # frames that the first model may be ahead of who takes the results
LOOK_S = 0.1  # between two looks at whether they are still wanted

# Returns the inputs of the second model, one for each thing that the first one has found; a tag comes back with it.
Cut = Callable[[Result], Sequence[Inputs | Tagged]]


@dataclass(frozen=True, slots=True)
class CascadeResult:
    """The result of a frame by the first model, and those of its crops by the second one, in the order of the cut."""

    first: Result
    crops: tuple[Result, ...]


def measured_crops(first: FrameStream, frames: Iterable[Inputs | Tagged], cut: Cut) -> float:
    """Return how many crops a frame of a stretch has in the mean; one in the whole stretch where there is none.

    The pipeline ends with the frames.

    Raises:
        OptionError: there are no frames.
    """
    counts = [len(cut(result)) for result in first.map(frames)]
    if not counts:
        raise OptionError("a cascade is measured on frames of its source, and it gave none; give it another `source`")
    return max(sum(counts), 1) / len(counts)


def plan_cascade(problems: tuple[Problem, Problem], crops_per_frame: float, rate_fps: float = 1.0) -> Deployment:
    """Return plans for both models on the same devices; raise what `deploy` raises.

    Args:
        problems: of the first model and the second one, on one platform.
        crops_per_frame: what `measured_crops` returned.
        rate_fps: frames a second of the source. The plans are the same for any: those by which the devices have the
            least work in a second, which is also the most frames a second (`reachable_fps`, where a rate is too high).
    """
    first, second = problems
    return deploy([Demand(first, rate_fps), Demand(second, rate_fps * crops_per_frame)])


class Cascade:
    """Two pipelines that run, the second one on crops of what the first one was given; they end with the frames.

    Args:
        cut: is called with each result of the first pipeline, in order; its tag is what the frame was submitted with.
    """

    def __init__(self, first: FrameStream, second: FrameStream, cut: Cut) -> None:
        self._first, self._second, self._cut = first, second, cut

    def map(self, frames: Iterable[Inputs | Tagged]) -> Iterator[CascadeResult]:
        """Run every frame and its crops, and yield the results in order; stop both pipelines at the end.

        Raises what `FrameStream.map` raises of either, and what `cut` raises, after the results of the frames before.
        """
        ahead: Queue[tuple[Result, int] | None] = Queue(MOST_AHEAD)
        left = threading.Event()
        failure: list[BaseException] = []

        def put(entry: tuple[Result, int] | None) -> None:
            while not left.is_set():
                with suppress(Full):
                    ahead.put(entry, timeout=LOOK_S)
                    return

        def feed() -> None:
            try:
                for result in self._first.map(frames):
                    crops = self._cut(result)
                    put((result, len(crops)))
                    for crop in crops:
                        inputs, tag = crop if isinstance(crop, Tagged) else (crop, None)
                        self._second.submit(inputs, tag=tag)
            except BaseException as error:
                failure.append(error)
            finally:
                self._second.drain()
                put(None)

        feeder = threading.Thread(target=feed, name="feeder of crops", daemon=True)
        feeder.start()
        try:
            while (entry := ahead.get()) is not None:
                first, count = entry
                yield CascadeResult(first, tuple(self._second.result() for _ in range(count)))
        except PipelineClosedError:
            if not failure:  # else crops of this frame are missing because of it
                raise
        finally:
            left.set()
            self._first.stop()
            self._second.stop()
            feeder.join(1.0)
        if failure:
            raise failure[0]
