"""The pipelines of a plan that is exchanged while it runs: one generation for each plan.

New frames go into the newest generation. Results are taken from the oldest until it is empty, so frames stay in order
over an exchange. Frames are numbered over the whole run; each generation knows the number of its first one. Read next:
live_pipeline.py, which decides when plans are exchanged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm_pipeline.core.statistics import StageRecord
from tvm_pipeline.errors import PipelineClosedError, StageError
from tvm_pipeline.runtime.frame_stream import Result
from tvm_pipeline.runtime.freed_memory import FreedMemory
from tvm_pipeline.runtime.pipeline import Pipeline

KEPT_PLANS = 8  # ended generations whose records are kept for a trace


@dataclass(slots=True, eq=False)
class Generation:
    """One plan's pipeline.

    Attributes:
        base: the number, in the whole run, of the pipeline's frame 0.
        taking: locked by the thread that takes results of the pipeline.
        early: results that were taken when the pipeline failed, and not yet delivered.
        over: whether the pipeline failed and another one has taken over its unfinished frames.
    """

    pipeline: Pipeline
    base: int
    taking: threading.Lock = field(default_factory=threading.Lock)
    early: deque[Result] = field(default_factory=deque)
    over: bool = False

    def result(self, timeout_s: float | None) -> Result:
        """Return the next result, numbered within this generation; raise what `Pipeline.result` raises."""
        with self.taking:
            return self.early.popleft() if self.early else self.pipeline.result(timeout_s)

    def finish(self) -> StageError | None:
        """Take every result that a drained or failed pipeline still gives; the caller holds `taking`.

        Returns why it failed, or None.
        """
        while True:
            try:
                self.early.append(self.pipeline.result())
            except StageError as error:
                return error
            except PipelineClosedError:
                return None


class Generations:
    """The generations whose results are still to be taken, the oldest first; there is always one."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._ended, self._freed = 0, FreedMemory()
        self._lock = threading.Lock()  # over what follows
        self._generations = deque([Generation(pipeline, 0)])
        self._retired: deque[tuple[int, list[StageRecord]]] = deque(maxlen=KEPT_PLANS)

    @property
    def oldest(self) -> Generation:
        """Return the generation that gives the next result."""
        return self._generations[0]

    @property
    def newest(self) -> Generation:
        """Return the generation that takes new frames."""
        return self._generations[-1]

    def __iter__(self) -> Iterator[Generation]:
        with self._lock:
            return iter(tuple(self._generations))

    def failed_before(self, generation: Generation) -> tuple[Generation, StageError] | None:
        """Take all results of the generations before this one, unless it is over; return the first that failed."""
        for older in self:
            if older is generation or generation.over:
                return None
            with older.taking:
                failure = None if older.over else older.finish()
            if failure is not None:
                return older, failure
        return None

    def hand_over(self, pipeline: Pipeline) -> int | None:
        """Let new frames go into `pipeline`, which runs, and drain the newest generation.

        Returns the number of the first frame that `pipeline` takes, or None, with nothing changed, if the newest
        generation does not run any more.
        """
        with self._lock:
            old = self.newest
            if old.pipeline.state != "running":
                return None
            old.pipeline.drain()
            base = old.base + old.pipeline.submitted
            pipeline.begin_at(base)
            self._generations.append(Generation(pipeline, base))
            return base

    def replace(self, failed: Generation, pipeline: Pipeline, *, closing: bool) -> int | None:
        """Let `pipeline`, which has the unfinished frames of a failed generation, go on in its place.

        A generation that is not the newest takes no new frames; its successor is drained, as it is if the whole
        pipeline is `closing`. Returns the number of the first frame of `pipeline` if that is the newest now, or None.
        """
        base = failed.base + failed.pipeline.delivered
        with self._lock:
            index = self._generations.index(failed)
            is_newest = index == len(self._generations) - 1
            if closing or not is_newest:
                pipeline.drain()
            self._generations.insert(index + 1, Generation(pipeline, base))
            failed.over = True
        return base if is_newest else None

    def retire(self, generation: Generation) -> bool:
        """Remove a generation that has no results left; return whether others follow it."""
        with self._lock:
            if self.oldest is not generation:  # another thread has removed it
                return True
            if len(self._generations) == 1:
                return False
            self._generations.popleft()
            self._retired.append((generation.base, generation.pipeline.records()))
        generation.pipeline.stop()
        self._ended += 1
        return True

    def give_back_freed(self) -> None:
        """Give back to the system, if it is time, what ended generations have freed; call it again and again."""
        self._freed.look(self._ended)

    def records(self) -> list[tuple[int, list[StageRecord]]]:
        """Return the records of the stages by generation, the newest last: its first frame, and a record each."""
        with self._lock:
            return [*self._retired, *((g.base, g.pipeline.records()) for g in self._generations)]
