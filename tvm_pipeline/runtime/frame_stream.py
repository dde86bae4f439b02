"""The interface of a running pipeline: frames in, results out, and `map`, `results` and `with` on top of these.

Read next: pipeline.py, which runs one plan; live_pipeline.py, which exchanges plans.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, TypeVar

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import PipelineClosedError, StageError

Inputs = Mapping[str, Array] | Array
Stream = TypeVar("Stream", bound="FrameStream")


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one frame.

    Attributes:
        frame: its index.
        outputs: the model's outputs by name.
        latency_s: seconds that the frame was inside.
        tag: whatever the frame was submitted with.

    Examples:
        >>> import numpy
        >>> result = Result(7, {"label": numpy.array([2])}, latency_s=0.04, tag="image7.png")
        >>> result.frame, int(result.outputs["label"][0]), result.tag
        (7, 2, 'image7.png')
    """

    frame: int
    outputs: dict[str, Array]
    latency_s: float
    tag: Any = None


class Tagged(NamedTuple):
    """The inputs of a frame for `map`, and a tag that comes back with its result."""

    inputs: Inputs
    tag: Any


class FrameStream(ABC):
    """Frames in, results out, in order and once each. Use it as a context manager; leaving it stops every thread."""

    @abstractmethod
    def start(self) -> None:
        """Start the threads; raise PipelineClosedError if that was done before, StageError if it fails."""

    @abstractmethod
    def submit(self, inputs: Inputs, timeout_s: float | None = None, *, tag: Any = None) -> int:
        """Copy one frame's inputs in and return its index; `tag` comes back with its result."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Result:
        """Return the next frame's result, in the order of submission."""

    @abstractmethod
    def drain(self) -> None:
        """Take no more frames; those inside come out, and then the threads end."""

    @abstractmethod
    def stop(self) -> None:
        """End every thread after its current frame; frames inside are dropped. It may be called twice."""

    @property
    @abstractmethod
    def state(self) -> str:
        """Return the state: new, running, drained, stopped or failed."""

    @abstractmethod
    def refuse(self, what: str) -> NoReturn:
        """Raise why nothing goes in or comes out any more: StageError if a stage failed, else PipelineClosedError."""

    def results(self, timeout_s: float | None = None) -> Iterator[Result]:
        """Yield every result until the pipeline is drained; call `drain` (or submit from another thread) before.

        Raises what `result` raises, except that a drained pipeline ends the iteration.
        """
        while True:
            try:
                yield self.result(timeout_s)
            except PipelineClosedError:
                if self.state == "drained":
                    return
                raise

    def map(self, frames: Iterable[Inputs | Tagged], timeout_s: float | None = None) -> Iterator[Result]:
        """Run every frame and yield the results in order; end when `frames` ends, and stop the pipeline.

        Another thread reads `frames`; an item is a frame's inputs, or these with a tag. An exception of `frames` is
        raised here, after the results of the frames before it. A caller that leaves early waits until `frames` has
        given its current item, at most for a second.

        Raises what `submit` and `result` raise.
        """
        if self.state != "running":
            self.refuse("cannot map")
        failure: list[BaseException] = []

        def feed() -> None:
            try:
                for frame in frames:
                    inputs, tag = frame if isinstance(frame, Tagged) else (frame, None)
                    try:
                        self.submit(inputs, tag=tag)
                    except (PipelineClosedError, StageError):
                        return  # `result` raises the same to the reader
            except BaseException as error:
                failure.append(error)
            finally:
                self.drain()

        feeder = threading.Thread(target=feed, name="feeder", daemon=True)
        feeder.start()
        try:
            yield from self.results(timeout_s)
        finally:
            self.stop()
            feeder.join(1.0)  # a camera that stalls may hold it up; it ends later, because the pipeline is closed
        if failure:
            raise failure[0]

    def __enter__(self: Stream) -> Stream:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
