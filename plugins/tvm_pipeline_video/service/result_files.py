"""Where a run's results go, lines and a video: which names files have, and when the next segment begins.

Without segments each is one file. With them, `found.jsonl` and `out.mp4` become found-0001.jsonl and out-0001.mp4, then
number 2, and so on; the files of one number hold the same frames. A run takes numbers after all that it finds, so that
it overwrites nothing, also when its process is started again. Read next: log_files.py, mqtt_results.py,
video_file.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import kept_on_disk
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.home_assistant import HomeAssistant, slug
from tvm_pipeline_video.service.log_files import appending, segment_numbers, segment_path
from tvm_pipeline_video.service.mqtt_results import MqttResults, is_broker, parse_broker
from tvm_pipeline_video.service.result_lines import ObjectLine, ResultLine, object_line
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import (
    Analysis,
    Frame,
    JsonLines,
    ObjectEvent,
    Overlay,
    VideoFile,
    draw,
    jpeg,
    json_line,
    naming,
)

ROUNDING_S = 1e-6  # of the times of frames
MOST_OF_NAME = 40  # characters of a source, in the name of a picture
MOST_PATIENCE_S, WATCHDOG_SHARE = 60.0, 0.8  # of a wait for a broker


class ResultFiles:
    """The files, or the broker, that a run writes its results to, for a `with` block.

    Attributes:
        lines: the file of each frame's line; None where no lines are wanted, or they go to a broker.
        video: where the drawn frames go; None where no video is wanted.
        tells_events: whether lines are those of events of objects, in place of frames.

    Args:
        fps: of the video.
        keeps: lines are appended to those of runs before; they are replaced otherwise. Segments are never replaced.

    Raises OptionError or VideoError where a file cannot be written, and what `MqttResults` raises.
    """

    def __init__(self, settings: Settings, fps: float, keeps: bool) -> None:
        self.lines: JsonLines | None = None
        self.video: VideoFile | None = None
        self._broker: MqttResults | None = None
        self._devices: HomeAssistant | None = None
        self._tracking = settings.followed()
        self.tells_events = self._tracking is not None and self._tracking.results == "events"
        self._results, self._output, self._segment_s = settings.results, settings.output, settings.segment
        if self._results and is_broker(self._results):
            # A write that waits must end before the watchdog takes its stage for a failed one.
            patience_s = min(MOST_PATIENCE_S, WATCHDOG_SHARE * settings.watchdog)
            broker = parse_broker(self._results)
            self._broker = MqttResults(broker, patience_s=patience_s)
            self._devices = HomeAssistant(broker) if settings.home_assistant else None
            self._results = None
        self._fps, self._keeps = fps, keeps
        self._overlay = Overlay() if settings.overlay else None
        self._stack = ExitStack()
        self._began_s: dict[tuple[str, str], float] = {}  # the first time of each model and source in this segment
        self._number = 0
        if self._segment_s is not None:
            paths = [Path(path) for path in (self._results, self._output) if path]
            for path in paths:
                if path.exists() and not path.is_file():
                    raise OptionError(
                        f"`segment`: {path} is no file that could be numbered; choose another name", option="segment"
                    )
            self._number = max((number for path in paths for number in segment_numbers(path)), default=0)
            if keeps and self._results and segment_numbers(Path(self._results))[-1:] == [self._number]:
                with appending(segment_path(Path(self._results), self._number)):
                    pass  # what a crash left of a line is cut off

    def __enter__(self) -> ResultFiles:
        with ExitStack() as stack:
            if self._broker:
                stack.enter_context(self._broker)
            if self._devices:
                stack.enter_context(self._devices)
            self._open()
            self._outer = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A frame that began and is not in the video met an error, which is the one to report.
        lacks_frame = self.video is not None and not self.video.frames and bool(self._began_s)
        try:
            with suppress(VideoError) if lacks_frame else nullcontext():
                self._stack.__exit__(kind, error, trace)
        except BaseException as failed:
            self._outer.__exit__(type(failed), failed, failed.__traceback__)
            raise
        self._outer.__exit__(kind, error, trace)

    def write(
        self,
        seen: Analysis[Frame],
        line: ResultLine,
        label: str,
        picture: NDArray[np.uint8] | None,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Write a frame's line, or those of its events, and its picture, which is drawn now unless it is given.

        Args:
            label: of its model, empty where the run has one.
            written: is called when all is written; where lines go to a broker, later and in another thread.
        """
        self.begin_frame(label, line.counted_as, seen.frame.clock_s)
        snapshot = self._snapshot(seen, line.counted_as)
        path, jpg = snapshot or (None, None)
        lines = _lines(seen.events, seen.frame, label, path) if self.tells_events else [line]
        self._to_file(lines)
        if self.video:
            if picture is None:
                figures = self._overlay(line.latency_s) if self._overlay else ""
                picture = draw(seen.frame.image, seen.annotations, figures)
            self.video.write(picture)
        if self._devices:
            self._devices.see(line, label, jpg)
        if self._broker:
            self._broker.write([json_line(one) for one in lines], label, written)
        else:
            written()

    def write_last(self, events: Sequence[ObjectEvent], frame: Frame, label: str) -> None:
        """Write the lines of what becomes of objects when their source ends, after its last frame."""
        lines = _lines(events, frame, label)
        self._to_file(lines)
        if self._broker:
            self._broker.write([json_line(line) for line in lines], label, lambda: None)

    def _to_file(self, lines: Sequence[object]) -> None:
        if self.lines:
            for line in lines:
                self.lines.write(line)

    def _snapshot(self, seen: Analysis[Frame], source: str) -> tuple[Path, bytes] | None:
        """Write the picture of the objects that appear in a frame, where there are any and pictures are wanted."""
        appeared = [event.annotation for event in seen.events if event.kind == "appears"]
        if not appeared or self._tracking is None or self._tracking.snapshots is None:
            return None
        time_of_day = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = "-".join(
            [time_of_day, slug(source)[-MOST_OF_NAME:], *(f"{slug(one.label)}-{one.track}" for one in appeared[:3])]
        )
        path, picture = self._tracking.snapshots / f"{name}.jpg", jpeg(draw(seen.frame.image, appeared))
        with naming(str(path)):
            path.write_bytes(picture)
        return path, picture

    def begin_frame(self, model: str, source: str, time_s: float) -> None:
        """Go on in the next segment if this one is long enough by the times of the source's frames (`clock_s`)."""
        began_s = self._began_s.setdefault((model, source), time_s)
        if self._segment_s is not None and time_s - began_s >= self._segment_s - ROUNDING_S:
            self._stack.close()
            self._began_s = {(model, source): time_s}
            self._open()

    def _open(self) -> None:
        self._number += 1
        with ExitStack() as stack:
            if self._results:
                self.lines = stack.enter_context(JsonLines(self._target(stack, self._results)))
                if self._results != "-":
                    stack.enter_context(kept_on_disk(self._named(Path(self._results))))
            if self._output:
                video = VideoFile(self._named(self._output), self._fps)
                stack.enter_context(kept_on_disk(self._named(self._output)))
                self.video = stack.enter_context(video)  # which writes more when it is closed
            self._stack = stack.pop_all()

    def _target(self, stack: ExitStack, results: str) -> str | Path | IO[bytes]:
        if results == "-":
            return results
        if self._keeps and self._segment_s is None:
            return stack.enter_context(appending(Path(results)))
        return self._named(Path(results))

    def _named(self, path: Path) -> Path:
        return path if self._segment_s is None else segment_path(path, self._number)


def _lines(
    events: Sequence[ObjectEvent], frame: Frame, label: str, snapshot: Path | None = None
) -> Sequence[ObjectLine]:
    return [object_line(one, frame, label, snapshot if one.kind == "appears" else None) for one in events]
