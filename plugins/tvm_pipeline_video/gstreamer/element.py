"""The element: its frames travel through a pipeline, and events keep their places between them.

The streaming thread hands pictures in and waits while the pipeline is full; another thread pushes them on. Source of
the rules: GStreamer's Plugin Writer's Guide, and the chapters on events, latency and quality of service of its design
documents (https://gstreamer.freedesktop.org/documentation/additional/design/).
"""

# ruff: noqa: E402 -- versions are required first
from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gi
import numpy as np

gi.require_version("Gst", "1.0")
gi.require_version("GstVideo", "1.0")
from gi.repository import GLib, GObject, Gst, GstVideo

from tvm_pipeline import PipelineError
from tvm_pipeline.cost.under_load import with_latencies
from tvm_pipeline_video.analysis import Analysis, stream
from tvm_pipeline_video.annotations import draw
from tvm_pipeline_video.decoders import Request
from tvm_pipeline_video.interpret import interpret
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.model_bundle import settings_beside
from tvm_pipeline_video.service.running_model import opened_pipeline
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.sources import Frame

CAPS = "video/x-raw, format=(string)RGB, width=(int)[1, MAX], height=(int)[1, MAX], framerate=(fraction)[0, MAX]"
LOOK_S = 0.1  # between two looks at whether the element stops


@dataclass(frozen=True, slots=True, eq=False)
class Picture(Frame):
    """A frame with its buffer; what is flushed before it comes out is dropped."""

    buffer: Any = None
    flush: int = 0


class TvmPipeline(Gst.Element):  # type: ignore[misc]
    """Runs a model on each picture.

    Properties:
        model: a bundle of `compile`, or a model file, which is compiled into the cache first.
        decoder: what reads the outputs, where it is not recognised.
        labels: a file with the names of the classes.
        draw: whether boxes are drawn into the picture. Each box is a region of interest of the buffer in any case.
        dropped: how many pictures were dropped because they came too late for what is downstream.
    """

    __gtype_name__ = "TvmPipeline"
    __gstmetadata__ = (
        "Pipeline of tvm-pipeline",
        "Filter/Analyzer/Video",
        "Runs a model on each picture, in stages on several devices",
        "tvm-pipeline",
    )
    __gsttemplates__ = tuple(
        Gst.PadTemplate.new(name, direction, Gst.PadPresence.ALWAYS, Gst.Caps.from_string(CAPS))
        for name, direction in (("sink", Gst.PadDirection.SINK), ("src", Gst.PadDirection.SRC))
    )
    model = GObject.Property(type=str, default="", nick="a bundle or a model file")
    decoder = GObject.Property(type=str, default="", nick="what reads the outputs")
    labels = GObject.Property(type=str, default="", nick="a file with the names of classes")
    draw = GObject.Property(type=bool, default=True, nick="whether boxes are drawn")

    def __init__(self) -> None:
        super().__init__()
        self._sink = Gst.Pad.new_from_template(self.get_pad_template("sink"), "sink")
        self._src = Gst.Pad.new_from_template(self.get_pad_template("src"), "src")
        self._sink.set_chain_function_full(self._take)
        self._sink.set_event_function_full(self._on_event)
        self._src.set_event_function_full(self._on_upstream_event)
        self._sink.set_query_function_full(self._on_query)
        self._src.set_query_function_full(self._on_query)
        self.add_pad(self._sink)
        self.add_pad(self._src)
        self._given: queue.Queue[Picture] = queue.Queue(1)
        self._lock = threading.Condition()
        self._entered = self._left = self._flush = 0  # pictures; and how often it was flushed
        self._waiting: list[tuple[int, Any]] = []  # events, each with the pictures before it
        self._stops = threading.Event()
        self._flow = Gst.FlowReturn.OK  # of the last push
        self._earliest = self._late = 0  # ns of running time before which a picture is too late; how many were
        self._latency_ns = 0
        self._info: Any = None
        self._segment: Any = None
        self._open = ExitStack()
        self._thread: threading.Thread | None = None

    @GObject.Property(type=int, nick="how many pictures came too late")  # type: ignore[untyped-decorator,unused-ignore]
    def dropped(self) -> int:
        return self._late

    # The states

    def do_change_state(self, change: Any) -> Any:
        try:
            if change == Gst.StateChange.READY_TO_PAUSED:
                self._begin()
            if change == Gst.StateChange.PAUSED_TO_READY:
                self._stops.set()
        except Exception as error:  # whatever it is, the application hears of it
            self._end()
            return self._fail(error)
        done = Gst.Element.do_change_state(self, change)  # which frees the threads that push
        if change == Gst.StateChange.PAUSED_TO_READY:
            self._end()
        return done

    def _begin(self) -> None:
        """Open the model and start its pipeline; raise PipelineError where that cannot be."""
        given = self.get_property("model")
        path = Path(given)
        if not given or not path.is_file():
            raise PipelineError(f"`model` {given!r}: there is no such file; give a bundle of `compile` or a model")
        settings = Settings(
            [path], decoder=[self.decoder] if self.decoder else [], labels=[self.labels] if self.labels else []
        )
        request: Request = settings.request(0)
        pipeline, bundle = self._open.enter_context(opened_pipeline(path, settings, Listener()))
        reading = interpret(bundle.graph, bundle.metadata, request, bundle.preprocessing or settings_beside(path))
        predicted = with_latencies(pipeline.given, pipeline.plan, ()).predicted
        self._latency_ns = round((predicted.latency_p99_s or predicted.latency_s or 0.0) * Gst.SECOND)
        self._stops.clear()
        self._flow, self._entered, self._left, self._waiting = Gst.FlowReturn.OK, 0, 0, []
        results = stream(pipeline, self._pictures(), reading.preprocessing, reading.decode)
        self._thread = threading.Thread(target=self._push_on, args=(results,), name="tvmpipeline", daemon=True)
        self._thread.start()

    def _end(self) -> None:
        self._stops.set()
        if self._thread:
            self._thread.join()
        self._thread = None
        with suppress(queue.Empty):
            self._given.get_nowait()
        self._open.close()

    def _fail(self, error: Exception) -> Any:
        said = GLib.Error.new_literal(Gst.ResourceError.quark(), str(error), Gst.ResourceError.FAILED)
        self.post_message(Gst.Message.new_error(self, said, type(error).__name__))
        return Gst.StateChangeReturn.FAILURE

    # Pictures in, in the streaming thread

    def _take(self, _: Any, __: Any, buffer: Any) -> Any:
        if self._stops.is_set() or self._flow != Gst.FlowReturn.OK:
            return Gst.FlowReturn.FLUSHING if self._stops.is_set() else self._flow
        if self._info is None:
            return Gst.FlowReturn.NOT_NEGOTIATED
        if self._is_late(buffer):
            return Gst.FlowReturn.OK
        time_s = buffer.pts / Gst.SECOND if buffer.pts != Gst.CLOCK_TIME_NONE else 0.0
        try:
            image = self._image(buffer)
        except (PipelineError, ValueError) as error:  # it has fewer bytes than its caps say
            self._fail(error)
            return Gst.FlowReturn.ERROR
        with self._lock:
            picture = Picture(self._entered, time_s, image, self.get_name(), buffer, self._flush)
            self._entered += 1
        while not self._stops.is_set():
            with suppress(queue.Full):
                self._given.put(picture, timeout=LOOK_S)
                return Gst.FlowReturn.OK
        return Gst.FlowReturn.FLUSHING

    def _is_late(self, buffer: Any) -> bool:
        """Drop a picture that is too late for what is downstream, before any work is done on it, and tell so."""
        if not self._earliest or self._segment is None or buffer.pts == Gst.CLOCK_TIME_NONE:
            return False
        at = self._segment.to_running_time(Gst.Format.TIME, buffer.pts)
        if at == Gst.CLOCK_TIME_NONE or at + self._latency_ns >= self._earliest:
            return False
        self._late += 1
        told = Gst.Message.new_qos(
            self, False, at, self._segment.to_stream_time(Gst.Format.TIME, buffer.pts), buffer.pts, buffer.duration
        )
        told.set_qos_values(self._earliest - at, 1.0, 1_000_000)
        told.set_qos_stats(Gst.Format.BUFFERS, self._left, self._late)
        self.post_message(told)
        return True

    def _image(self, buffer: Any) -> Any:
        """Return a copy of the pixels (height, width, 3); rows of a buffer are padded."""
        width, height, stride = self._info.width, self._info.height, self._info.stride[0]
        found, mapped = buffer.map(Gst.MapFlags.READ)
        if not found:
            raise PipelineError("a picture cannot be read")
        try:
            rows = np.frombuffer(mapped.data, np.uint8, height * stride).reshape(height, stride)
            return rows[:, : width * 3].reshape(height, width, 3).copy()
        finally:
            buffer.unmap(mapped)

    def _pictures(self) -> Iterator[Picture]:
        while not self._stops.is_set():
            with suppress(queue.Empty):
                yield self._given.get(timeout=LOOK_S)

    # Pictures out, in a thread of the element

    def _push_on(self, results: Iterator[Analysis[Picture]]) -> None:
        try:
            for seen in results:
                picture = seen.frame
                is_wanted = picture.flush == self._flush and self._flow == Gst.FlowReturn.OK
                flow = self._src.push(self._made(seen)) if is_wanted else self._flow
                with self._lock:
                    if picture.flush == self._flush:  # else a flush ended while the picture was pushed
                        self._flow = flow
                    self._left += 1
                self._push_events()
        except Exception as error:
            if not self._stops.is_set():
                self._flow = Gst.FlowReturn.ERROR
                self._fail(error)

    def _made(self, seen: Analysis[Picture]) -> Any:
        """Return the buffer that goes out: the one that came in, or one with boxes drawn, and with its regions."""
        came, info = seen.frame.buffer, self._info
        if self.draw and seen.annotations:
            image = draw(seen.frame.image, seen.annotations)
            rows = np.zeros((info.height, info.stride[0]), np.uint8)
            rows[:, : info.width * 3] = image.reshape(info.height, -1)
            made = Gst.Buffer.new_wrapped(rows.tobytes())
            made.pts, made.dts, made.duration = came.pts, came.dts, came.duration
            made.offset, made.offset_end = came.offset, came.offset_end
        else:
            made = came.copy_deep()  # `copy` gives another reference, to which nothing can be added
        for found in seen.annotations:
            if found.box is not None:
                left, top, right, bottom = (max(0, round(edge)) for edge in found.box)
                meta = GstVideo.buffer_add_video_region_of_interest_meta(
                    made, found.label, left, top, max(0, right - left), max(0, bottom - top)
                )
                score = Gst.Structure.new_empty("detection")
                score.set_value("confidence", 1.0 if found.score is None else float(found.score))
                meta.add_param(score)
        return made

    def _push_events(self) -> None:
        """Push the events whose turn it is."""
        with self._lock:
            due = [event for before, event in self._waiting if before <= self._left]
            self._waiting = self._waiting[len(due) :]
            for event in due:
                self._src.push_event(event)

    # Events and queries

    def _on_event(self, _: Any, __: Any, event: Any) -> bool:
        if event.type == Gst.EventType.CAPS:
            caps = event.parse_caps()
            found = GstVideo.VideoInfo.new_from_caps(caps)
            if found is None:
                return False
            self._drain()  # pictures of another size are inside
            self._info = found
        elif event.type == Gst.EventType.SEGMENT:
            self._segment, self._earliest = event.parse_segment(), 0
        elif event.type in (Gst.EventType.FLUSH_START, Gst.EventType.FLUSH_STOP):
            with self._lock:
                self._flush += 1
                self._waiting, self._earliest = [], 0
                if event.type == Gst.EventType.FLUSH_STOP:
                    self._flow = Gst.FlowReturn.OK
            return bool(self._src.push_event(event))
        if not event.type & Gst.EventTypeFlags.SERIALIZED:
            return bool(self._src.push_event(event))
        with self._lock:
            self._waiting.append((self._entered, event))
        self._push_events()
        return True

    def _drain(self) -> None:
        while not self._stops.is_set() and self._left < self._entered:
            self._stops.wait(LOOK_S / 10)

    def _on_upstream_event(self, pad: Any, parent: Any, event: Any) -> bool:
        if event.type == Gst.EventType.QOS:
            _, _, jitter, timestamp = event.parse_qos()
            self._earliest = max(0, timestamp + jitter)
        return bool(self._sink.push_event(event))

    def _on_query(self, pad: Any, parent: Any, query: Any) -> bool:
        if query.type == Gst.QueryType.CAPS:  # what goes out has the size and the rate of what comes in
            return bool(pad.proxy_query_caps(query))
        if query.type != Gst.QueryType.LATENCY or pad == self._sink:
            return bool(pad.query_default(parent, query))
        if not self._sink.peer_query(query):
            return False
        live, least, most = query.parse_latency()
        none = Gst.CLOCK_TIME_NONE
        query.set_latency(live, least + self._latency_ns, none if most == none else most + self._latency_ns)
        return True
