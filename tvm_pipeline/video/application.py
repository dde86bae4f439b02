"""An application: a source, a model, a decoder and a video to write, as one graph of operators and one pipeline.

The host operators around the model's are

    host/read -> host/prepare -> [the model] -> host/decode (-> host/draw -> host/write)

Each takes all frames in order. What they know of a frame travels with it as a `Passage`. `host_graph` makes the graph
that is planned, and `Application.host` the functions that a Pipeline runs.

Read next: `runtime/host_work.py` (how a pipeline runs host operators) and host_profile.py (how long they take).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.backends.ports import Array
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import OptionError, PipelineError, StageError
from tvm_pipeline.runtime.frame_stream import FrameStream, Tagged
from tvm_pipeline.runtime.host_work import EndOfStream, Entry, HostFunction, HostWork
from tvm_pipeline.video.analysis import Analysed, Decoder, FrameT, decoded
from tvm_pipeline.video.annotations import Annotation, draw
from tvm_pipeline.video.live_source import LiveFrame
from tvm_pipeline.video.preprocessing import Preprocessing, preprocess

READ, PREPARE, DECODE, DRAW, WRITE = "host/read", "host/prepare", "host/decode", "host/draw", "host/write"


class VideoSink(Protocol):
    """Where annotated pictures go; a `VideoFile` is one."""

    def write(self, image: NDArray[np.uint8]) -> None:
        """Write a frame, uint8 HxWx3 RGB."""


@dataclass(slots=True)
class Passage(Generic[FrameT]):
    """What the host operators of one frame hand on to one another.

    Attributes:
        frame: set by `host/read`.
        outputs, annotations: set by `host/decode`.
        picture: set by `host/draw`; None again when it is written.
        written: whether `host/write` is done with it.
    """

    frame: FrameT | None = None
    outputs: dict[str, Array] = field(default_factory=dict)
    annotations: Sequence[Annotation] = ()
    picture: NDArray[np.uint8] | None = None
    written: bool = False


def host_graph(model: OperatorGraph, width: int, height: int, *, writes_video: bool) -> OperatorGraph:
    """Return the model's graph with the host operators around it, for frames of this size.

    Raises:
        OptionError: the model takes something else than one picture.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> graph = host_graph(example_graph(), 640, 360, writes_video=True)
        >>> [operator.name for operator in graph.operators]
        ['host/read', 'host/prepare', 'double', 'increment', 'host/decode', 'host/draw', 'host/write']
    """
    if len(model.inputs) != 1:
        names = ", ".join(tensor.name for tensor in model.inputs)
        raise OptionError(f"{model.name} has several inputs ({names}); a video gives one picture a frame")
    frame, picture = (Tensor(f"host/{name}", (height, width, 3), "uint8") for name in ("frame", "picture"))
    found, done = (Tensor(f"host/{name}", (0,), "uint8") for name in ("annotations", "done"))
    before = (
        Operator(READ, "read and decode a frame", (), (frame,), ordered=True),
        Operator(PREPARE, "resize and normalise", (frame.name,), model.inputs, ordered=True),
    )
    after = [Operator(DECODE, "decode outputs", model.outputs, (found,), ordered=True)]
    if writes_video:
        after += [
            Operator(DRAW, "draw annotations", (found.name,), (picture,), ordered=True),
            Operator(WRITE, "encode and write", (picture.name,), (done,), ordered=True),
        ]
    last = after[-1].outputs[0].name
    return OperatorGraph(model.name, (), (*before, *model.operators, *after), (last,))


class Application(Generic[FrameT]):
    """The host work of one source, decoder and video to write.

    Args:
        model: the operator graph of the model.
        graph: what `host_graph` returned for it.
        frames: the frames of the source; the thread of `host/read` iterates over them.
        preprocessing: how a frame becomes the model's input.
        decode: turns the model's outputs into annotations.
        video: where annotated pictures go; needed where `graph` holds `host/write`.
        place: is called with the device of `host/read`, to move the threads of a source that is read ahead.
    """

    def __init__(
        self,
        model: OperatorGraph,
        graph: OperatorGraph,
        frames: Iterable[FrameT],
        preprocessing: Preprocessing,
        decode: Decoder | None = None,
        video: VideoSink | None = None,
        place: Callable[[Device], None] = lambda _: None,
    ) -> None:
        self._frames = iter(frames)
        self._preprocessing, self._decoder, self._video = preprocessing, decode, video
        self._input, self._outputs = model.inputs[0].name, model.outputs
        functions: dict[str, Callable[[Passage[FrameT], Callable[[str], Array]], Entry | None]] = {
            READ: self._read,
            PREPARE: self._prepare,
            DECODE: self._decode,
        }
        if video is not None:
            functions |= {DRAW: self._draw, WRITE: self._write}
        self.host = HostWork(graph, cast(dict[str, HostFunction], functions), place)

    def run(self, pipeline: FrameStream, stopped: Callable[[], bool] = lambda: False) -> Iterator[Analysed[FrameT]]:
        """Run every frame through a pipeline that has `host`, and yield what was found, in order.

        It ends when the source ends, or with the frames inside once `stopped()` is true. Close live sources as well,
        since they may give no frame for long.

        Raises:
            PipelineError: a host operator failed, such as VideoError where the source broke; the frames before that
                have been yielded.
            StageError: a stage failed.
        """

        def passages() -> Iterator[Tagged]:
            while not stopped():
                yield Tagged({}, Passage[FrameT]())

        try:
            for result in pipeline.map(passages()):
                passage: Passage[FrameT] = result.tag
                frame = cast(FrameT, passage.frame)
                yield Analysed(frame, replace(result, outputs=passage.outputs, tag=frame), passage.annotations)
        except StageError as error:
            if error.operator and isinstance(error.__cause__, PipelineError):
                raise error.__cause__ from error
            raise

    def _read(self, passage: Passage[FrameT], _: Callable[[str], Array]) -> Entry | None:
        if passage.frame is not None:  # it runs again, because a device failed
            return None
        began_s = time.perf_counter()
        try:
            frame = passage.frame = next(self._frames)
        except StopIteration:
            raise EndOfStream from None
        if not isinstance(frame, LiveFrame):
            return Entry(began_s)
        now_s = time.perf_counter()
        return Entry(now_s - frame.age_s, now_s - began_s, frame.read_s)

    def _prepare(self, passage: Passage[FrameT], tensor: Callable[[str], Array]) -> None:
        preprocess(cast(FrameT, passage.frame).image, self._preprocessing, tensor(self._input))

    def _decode(self, passage: Passage[FrameT], tensor: Callable[[str], Array]) -> None:
        passage.outputs = {name: tensor(name).copy() for name in self._outputs}  # the slot is used again
        if self._decoder is not None:
            passage.annotations = decoded(
                self._decoder, passage.outputs, self._preprocessing, cast(FrameT, passage.frame)
            )

    def _draw(self, passage: Passage[FrameT], _: Callable[[str], Array]) -> None:
        if not passage.written:
            passage.picture = draw(cast(FrameT, passage.frame).image, passage.annotations)

    def _write(self, passage: Passage[FrameT], _: Callable[[str], Array]) -> None:
        if passage.picture is not None and self._video is not None:
            self._video.write(passage.picture)
            passage.picture, passage.written = None, True
