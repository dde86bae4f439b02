"""What every running pipeline offers on top of submitting a frame and taking a result: `map`, `results`, `with`."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, TypeVar

from tvm_pipeline.backends.contract import Array
from tvm_pipeline.errors import PipelineClosedError, StageError

Inputs = Mapping[str, Array] | Array
Stream = TypeVar("Stream", bound="FrameStream")


@dataclass(frozen=True, slots=True)
class Result:
    """What came out for one frame: its index, the model's outputs by name, and the seconds it was inside."""

    frame: int
    outputs: dict[str, Array]
    latency_s: float


class FrameStream(ABC):
    """Frames in, results out, in order and once each. Use it as a context manager; leaving it stops every thread."""

    @abstractmethod
    def start(self) -> None:
        """Starts the threads; raises PipelineClosedError where that was done before, StageError where it fails."""

    @abstractmethod
    def submit(self, inputs: Inputs, timeout_s: float | None = None) -> int:
        """Copies one frame's inputs in and returns its index."""

    @abstractmethod
    def result(self, timeout_s: float | None = None) -> Result:
        """The next frame's result, in the order of submission."""

    @abstractmethod
    def drain(self) -> None:
        """Takes no more frames; those inside come out, and then the threads end."""

    @abstractmethod
    def stop(self) -> None:
        """Ends every thread after the frame it is at; frames inside are dropped. Safe to call twice."""

    @property
    @abstractmethod
    def state(self) -> str:
        """new, running, drained, stopped or failed."""

    @abstractmethod
    def refuse(self, what: str) -> NoReturn:
        """Says why nothing goes in or comes out any more: StageError where one failed, else PipelineClosedError."""

    def results(self, timeout_s: float | None = None) -> Iterator[Result]:
        """Every result until the pipeline is drained; call `drain` (or submit from another thread) before.

        Raises what `result` does; being drained ends it.
        """
        while True:
            try:
                yield self.result(timeout_s)
            except PipelineClosedError:
                if self.state == "drained":
                    return
                raise

    def map(self, frames: Iterable[Inputs], timeout_s: float | None = None) -> Iterator[Result]:
        """Runs every frame and yields the results in order; ends when `frames` does, and stops the pipeline.

        `frames` is read from another thread. What it raises is raised here, after the results of the frames before.
        Who leaves early waits until `frames` gave the item it is at, a second at most.

        Raises what `submit` and `result` do.
        """
        if self.state != "running":
            self.refuse("cannot map")
        failure: list[BaseException] = []

        def feed() -> None:
            try:
                for inputs in frames:
                    try:
                        self.submit(inputs)
                    except (PipelineClosedError, StageError):
                        return  # the reader of the results hears of it
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
            feeder.join(1.0)  # a camera that stalls may keep it; it then meets a pipeline that is closed
        if failure:
            raise failure[0]

    def __enter__(self: Stream) -> Stream:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
