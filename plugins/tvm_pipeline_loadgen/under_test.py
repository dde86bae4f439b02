"""A running pipeline as LoadGen's system under test: LoadGen asks for samples, and each result goes back to it.

LoadGen calls `issue` in a thread of its own. A pipeline that is full holds that thread up, which LoadGen counts as
latency. Another thread takes the results. Each frame carries the function that its outputs are given to.

Source: https://github.com/mlcommons/inference/tree/master/loadgen
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from tvm_pipeline import OperatorGraph, PipelineError
from tvm_pipeline.backends import Array
from tvm_pipeline.backends.ports import frames_of_noise

MOST_BYTES = 1 << 16  # of an answer that LoadGen logs as it is; a larger one is logged as its SHA-256
SAMPLES, SAMPLE_BYTES = 64, 64 << 20  # at most, of the library of samples; at least four
ALONE, FULL = 24, 64  # frames that are sent one after another, and at once, to learn the pace of a system


class TaggedResult(Protocol):
    """A result: the outputs of a frame by name, and the tag that the frame was submitted with."""

    @property
    def outputs(self) -> dict[str, Array]: ...
    @property
    def tag(self) -> Any: ...


class System(Protocol):
    """What can be tested: `Pipeline` is one, and `benchmarks/loadgen.py` has others."""

    def submit(self, inputs: Mapping[str, Array], *, tag: Any = None) -> object: ...
    def results(self) -> Iterator[TaggedResult]: ...
    def drain(self) -> None: ...


class Pace(NamedTuple):
    """How fast a system is: seconds of a frame alone, and frames a second where it is kept full."""

    alone_s: float
    full_fps: float


class UnderTest:
    """A system whose results are taken by a thread; use it as a context manager.

    Args:
        system: a started system, which this object drains in the end.
        frames: the samples, arrays by input name.
    """

    def __init__(self, system: System, frames: Sequence[Mapping[str, Array]]) -> None:
        self.frames = frames
        self.failure: BaseException | None = None
        self._system = system
        self._open: set[int] = set()  # samples of LoadGen that are inside
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="loadgen-results", daemon=True)

    def issue(self, samples: Iterable[Any]) -> None:
        """Take samples of LoadGen. After a failure they are answered with nothing, so that LoadGen ends soon."""
        for sample in samples:
            with self._lock:
                self._open.add(sample.id)
            if not self.failure:
                try:
                    self._system.submit(self.frames[sample.index], tag=partial(self._answer, sample.id))
                except PipelineError as error:
                    self.fail(error)
        if self.failure:
            self.fail(self.failure)

    def fail(self, error: BaseException) -> None:
        """End the test: every sample that LoadGen waits for is answered with nothing, and every later one, too."""
        with self._lock:
            self.failure = self.failure or error
            still_open, self._open = self._open, set()
        for sample in still_open:
            _complete(sample, 0, 0)

    def pace(self) -> Pace:
        """Return how fast the system is, by frames alone after some that warm it up, and by frames at once.

        Raises what the system raised.
        """
        alone = [self._seconds_of(1) for _ in range(ALONE)][ALONE // 3 :]
        return Pace(median(alone), FULL / self._seconds_of(FULL))

    def _seconds_of(self, count: int) -> float:
        """Return the seconds from the first frame of `count` to the last result."""
        left, done = [count], threading.Event()

        def came(outputs: Mapping[str, Array]) -> None:
            left[0] -= 1
            if not left[0]:
                done.set()

        begin_s = time.perf_counter()
        for number in range(count):
            self._system.submit(self.frames[number % len(self.frames)], tag=came)
        while not done.wait(0.5):
            if self.failure:
                raise self.failure
        return time.perf_counter() - begin_s

    def _answer(self, sample: int, outputs: Mapping[str, Array]) -> None:
        with self._lock:
            if sample not in self._open:
                return
            self._open.remove(sample)
        answer = answer_of(outputs)
        _complete(sample, answer.ctypes.data, answer.nbytes)

    def _read(self) -> None:
        try:
            for result in self._system.results():
                result.tag(result.outputs)
        except BaseException as error:  # the thread of the test raises it
            self.fail(error)

    def __enter__(self) -> UnderTest:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(PipelineError):  # it has failed, and its results end by that
            self._system.drain()
        self._reader.join()


def answer_of(outputs: Mapping[str, Array]) -> Array:
    """Return what LoadGen may log: the bytes of the outputs in the order of their names, or the SHA-256 of many.

    >>> answer_of({"b": np.ones(1, "uint8"), "a": np.zeros(2, "uint8")}).tolist()
    [0, 0, 1]
    >>> answer_of({"a": np.zeros(1 << 20, "uint8")}).nbytes
    32
    """
    arrays = [np.ascontiguousarray(outputs[name]).reshape(-1).view(np.uint8) for name in sorted(outputs)]
    if sum(array.nbytes for array in arrays) <= MOST_BYTES:
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.data)
    return np.frombuffer(digest.digest(), np.uint8)


def samples(graph: OperatorGraph) -> list[dict[str, Array]]:
    """Return frames of noise that differ."""
    frame_bytes = sum(tensor.bytes for tensor in graph.inputs)
    return frames_of_noise(graph, max(4, min(SAMPLES, SAMPLE_BYTES // frame_bytes)))


def _complete(sample: int, address: int, size: int) -> None:
    import mlperf_loadgen

    mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(sample, address, size)])
