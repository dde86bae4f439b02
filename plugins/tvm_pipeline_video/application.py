"""An application: a source, a model, a decoder and what is written, as one graph of operators and one pipeline.

The host operators around the model's are

    host/read -> host/prepare -> [the model] -> host/decode (-> host/draw) (-> host/write)

Each takes all frames in order. What they know of a frame travels with it as a `Payload`. `host_graph` makes the graph
that is planned, and `Application.host` the functions that a Pipeline runs.

Read next: `runtime/host_work.py` (how a pipeline runs host operators) and host_profile.py (how long they take).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, cast

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline import Device, Operator, OperatorGraph, PipelineError, Result, Tensor
from tvm_pipeline.backends.ports import Array
from tvm_pipeline.errors import OptionError, PipelineTimeoutError, StageError
from tvm_pipeline.runtime.frame_stream import FrameStream, Tagged
from tvm_pipeline.runtime.host_work import EndOfStream, Entry, HostFunction, HostWork
from tvm_pipeline_video.analysis import Analysis, Decoder, FrameT, decoded, decoder_name
from tvm_pipeline_video.annotations import Annotation, draw
from tvm_pipeline_video.preprocessing import Preprocessing, preprocess
from tvm_pipeline_video.sources import LiveFrame
from tvm_pipeline_video.tracking import Follow, ObjectEvent

READ, PREPARE, DECODE, DRAW, WRITE = "host/read", "host/prepare", "host/decode", "host/draw", "host/write"


@dataclass(slots=True)
class Payload(Generic[FrameT]):
    """What the host operators of one frame hand on to one another.

    Attributes:
        frame, entered_s: set by `host/read`; the clock time from which the latency of the frame counts.
        outputs, annotations, events: set by `host/decode`.
        followed: whether the objects of the frame were followed.
        picture: set by `host/draw`; None again when it is written.
        written: whether `host/write` is done with it.
    """

    frame: FrameT | None = None
    entered_s: float = 0.0
    outputs: dict[str, Array] = field(default_factory=dict)
    annotations: Sequence[Annotation] = ()
    events: Sequence[ObjectEvent] = ()
    followed: bool = False
    picture: NDArray[np.uint8] | None = None
    written: bool = False


# Writes what was found on a frame; the picture has it drawn, and is None where the graph holds no `host/draw`.
Write = Callable[[Analysis[FrameT], "NDArray[np.uint8] | None"], None]


def host_graph(model: OperatorGraph, width: int, height: int, *, draws: bool, writes: bool) -> OperatorGraph:
    """Return the model's graph with the host operators around it, for frames of this size.

    Args:
        draws: whether pictures are drawn, for a video.
        writes: whether anything is written.

    Raises:
        OptionError: the model takes something else than one picture.

    Examples:
        >>> from tvm_pipeline.testing import example_graph
        >>> graph = host_graph(example_graph(), 640, 360, draws=True, writes=True)
        >>> graph.operator_names
        ['host/read', 'host/prepare', 'double', 'increment', 'host/decode', 'host/draw', 'host/write']
    """
    if len(model.inputs) != 1:
        names = ", ".join(tensor.name for tensor in model.inputs)
        raise OptionError(
            f"{model.name} has several inputs ({names}); a video gives one picture a frame. Compile it with `carry` "
            "where one is a state, and with `input_values` where one is a constant"
        )
    frame, picture = (Tensor(f"host/{name}", (height, width, 3), "uint8") for name in ("frame", "picture"))
    found, done = (Tensor(f"host/{name}", (0,), "uint8") for name in ("annotations", "done"))
    operators = [
        Operator(READ, "read and decode a frame", (), (frame,), ordered=True),
        Operator(PREPARE, "resize and normalise", (frame.name,), model.inputs, ordered=True),
        *model.operators,
        Operator(DECODE, "decode outputs", model.outputs, (found,), ordered=True),
    ]
    if draws:
        operators.append(Operator(DRAW, "draw annotations", (found.name,), (picture,), ordered=True))
    if writes:
        read = (picture if draws else found).name
        operators.append(Operator(WRITE, "encode and write", (read,), (done,), ordered=True))
    return OperatorGraph(model.name, (), tuple(operators), (operators[-1].outputs[0].name,), model.batch)


@contextmanager
def host_errors() -> Iterator[None]:
    """Raise what a host operator reported on purpose, such as VideoError, instead of the StageError about it.

    One that hangs has reported nothing.
    """
    try:
        yield
    except StageError as error:
        cause = error.__cause__
        if error.operator and isinstance(cause, PipelineError) and not isinstance(cause, PipelineTimeoutError):
            raise cause from error
        raise


class Application(Generic[FrameT]):
    """The host work of one source, one decoder and what is written.

    Args:
        model: the operator graph of the model.
        graph: what `host_graph` returned for it.
        frames: the frames of the source; the thread of `host/read` iterates over them.
        preprocessing: how a frame becomes the model's input.
        decode: turns the model's outputs into annotations.
        write: is called with each frame in order, where `graph` holds `host/write`.
        rate_fps: `host/read` gives no frame of a source that is not live earlier than this rate has it; None for as
            fast as frames are taken.
        place: is called with the device of `host/read`, to move the threads of a source that is read ahead.
        overlay: gives the line of figures of each picture from its latency so far; None for none.
        follow: follows objects, such as `Trackers`; None where none are followed.
    """

    def __init__(
        self,
        model: OperatorGraph,
        graph: OperatorGraph,
        frames: Iterable[FrameT],
        preprocessing: Preprocessing,
        decode: Decoder | None = None,
        write: Write[FrameT] | None = None,
        rate_fps: float | None = None,
        place: Callable[[Device], None] = lambda _: None,
        overlay: Callable[[float], str] | None = None,
        follow: Follow | None = None,
    ) -> None:
        self._overlay, self._follow = overlay, follow
        self._frames = iter(frames)
        self._period_s = 1 / rate_fps if rate_fps else 0.0
        self._next_s: float | None = None  # when the next frame is due
        self._preprocessing, self._decoder, self._writer = preprocessing, decode, write
        self._input, self._outputs = model.inputs[0].name, model.outputs
        functions: dict[str, Callable[[Payload[FrameT], Callable[[str], Array]], Entry | None]] = {
            READ: self._read,
            PREPARE: self._prepare,
            DECODE: self._decode,
            DRAW: self._draw,
            WRITE: self._write,
        }
        known = {name: functions[name] for name in functions if name in graph.edges.index}
        known_as = {DECODE: decoder_name(decode)} if decode else {}
        self.host = HostWork(graph, cast(dict[str, HostFunction], known), place, known_as)

    def run(self, pipeline: FrameStream, stopped: Callable[[], bool] = lambda: False) -> Iterator[Analysis[FrameT]]:
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
                yield Tagged({}, Payload[FrameT]())

        with host_errors():
            for result in pipeline.map(passages()):
                passage: Payload[FrameT] = result.tag
                frame = cast(FrameT, passage.frame)
                came = replace(result, outputs=passage.outputs, tag=frame)
                yield Analysis(frame, came, passage.annotations, passage.events)

    def _read(self, passage: Payload[FrameT], _: Callable[[str], Array]) -> Entry | None:
        if passage.frame is not None:  # it runs again, because a device failed
            return None
        began_s = time.perf_counter()
        try:
            frame = passage.frame = next(self._frames)
        except StopIteration:
            raise EndOfStream from None
        if isinstance(frame, LiveFrame):
            now_s = time.perf_counter()
            entry = Entry(now_s - frame.age_s, now_s - began_s, frame.read_s)
        else:
            due_s = began_s if self._next_s is None or not self._period_s else self._next_s
            self._next_s = due_s + self._period_s
            waited_s = max(0.0, due_s - time.perf_counter())
            if waited_s:
                time.sleep(waited_s)
            entry = Entry(began_s + waited_s, waited_s)
        passage.entered_s = entry.entered_s
        return entry

    def _prepare(self, passage: Payload[FrameT], tensor: Callable[[str], Array]) -> None:
        preprocess(cast(FrameT, passage.frame).image, self._preprocessing, tensor(self._input))

    def _decode(self, passage: Payload[FrameT], tensor: Callable[[str], Array]) -> None:
        if passage.followed:  # it runs again, because a device failed
            return
        passage.outputs = {name: tensor(name).copy() for name in self._outputs}  # the slot is used again
        frame = cast(FrameT, passage.frame)
        if self._decoder is not None:
            passage.annotations = decoded(self._decoder, passage.outputs, self._preprocessing, frame)
        if self._follow is not None:
            passage.annotations, passage.events = self._follow(frame, passage.annotations)
            passage.followed = True

    def _draw(self, passage: Payload[FrameT], _: Callable[[str], Array]) -> None:
        if not passage.written:
            figures = self._overlay(time.perf_counter() - passage.entered_s) if self._overlay else ""
            passage.picture = draw(cast(FrameT, passage.frame).image, passage.annotations, figures)

    def _write(self, passage: Payload[FrameT], _: Callable[[str], Array]) -> None:
        if self._writer is not None and not passage.written:
            frame = cast(FrameT, passage.frame)
            result = Result(frame.index, passage.outputs, time.perf_counter() - passage.entered_s, frame)
            self._writer(Analysis(frame, result, passage.annotations, passage.events), passage.picture)
        passage.picture, passage.written = None, True
