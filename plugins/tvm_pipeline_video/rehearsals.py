"""An application on a stretch of its source that can be run again and again: to measure it, and to compare plans.

Read next: application.py, whose operators it runs; host_profile.py, which measures them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from tvm_pipeline import OperatorGraph, Pipeline, Plan, Platform
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.files import temporary_folder
from tvm_pipeline.runtime.comparison import TURN_FRAMES, Run, Turn, own_times_s, turn
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.runtime.host_work import HostWork
from tvm_pipeline_video.analysis import Decoder
from tvm_pipeline_video.annotations import Overlay
from tvm_pipeline_video.application import Application, Payload, Write, host_errors, host_graph
from tvm_pipeline_video.decoding import USUAL_FPS
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.hardware import hardware_decoders
from tvm_pipeline_video.kinds import open_source
from tvm_pipeline_video.preprocessing import Preprocessing
from tvm_pipeline_video.sources import Frame, Source
from tvm_pipeline_video.tracking import Follow

# What is recorded of a source whose frames cannot be had again.
RECORDED_FRAMES, RECORDED_BYTES, RECORDED_S = 48, 256 << 20, 3.0
# From a place in a file to the next: the golden section spreads any number of places evenly.
NEXT_PLACE = 0.618


@dataclass(frozen=True, slots=True)
class HostSetting:
    """All that the cost of the host operators depends on, apart from the machine.

    Attributes:
        width, height, codec, live: of the source; a codec that hardware decodes has its name, "h264 by cuda".
        decoder: the name of the function that reads the outputs; empty without one.
        video: the extension of the video to write; empty without one.
        lines: whether a line for each frame is written.
        overlay: whether the rate and the latency are drawn into the video.
        tracking: whether objects are followed.
    """

    width: int
    height: int
    codec: str
    live: bool
    decoder: str = ""
    video: str = ""
    lines: bool = False
    overlay: bool = False
    tracking: bool = False

    def decoding(self, requested: str) -> str:
        """Return in words what decodes the video, and why requested hardware does not; empty where it is no video."""
        if not self.codec:
            return ""
        if " by " in self.codec:
            return f"{self.codec.replace(' by ', ' is decoded by ')}"
        obstacles = {kind: why or "it does not take this video" for kind, why in hardware_decoders().items()}
        reasons = [f"{kind}: {why}" for kind, why in obstacles.items() if requested in ("auto", kind)]
        return f"{self.codec} is decoded in software" + (f" ({'; '.join(reasons)})" if reasons else "")

    def differences(self, other: HostSetting) -> str:
        """Return in words what differs, for messages; empty if nothing does."""
        names = {
            "width": "frame width",
            "height": "frame height",
            "live": "live source",
            "video": "video to write",
            "lines": "lines to write",
            "overlay": "figures to draw",
            "tracking": "objects to follow",
        }
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in HostSetting.__slots__)
        return ", ".join(f"{names.get(n, n)} {a or 'none'} instead of {b or 'none'}" for n, a, b in pairs if a != b)


# Opens what a rehearsal writes to in a scratch folder, for a video of this rate.
OpenScratch = Callable[[Path, float], AbstractContextManager[Write[Frame]]]


class Rehearsal:
    """An application on a stretch of its source that can be run again and again, writing to a scratch folder.

    A file is opened anew for each run, at one of several places, since its frames differ: where nothing is found,
    little is drawn. Where it ends, it begins again. A live source or an address is recorded once, when it is first
    needed; its frames then come from memory, and the seconds of reading are those of the recording.

    Args:
        model: the operator graph of the model.
        spec: the source, as `open_source` takes it.
        preprocessing, decode: as for `Application`.
        decoder: the name of `decode`, as the user gave it.
        video: the extension of the video that is written; empty without one.
        lines: whether a line for each frame is written.
        overlay: whether the rate and the latency are drawn into the video.
        trackers: makes what follows objects anew for each run; None where none are followed.
        scratch: opens what is written to; None where nothing is written.
        hardware: what decodes the source, as `open_source` takes it.

    Attributes:
        setting: what the cost of the host operators depends on.
        graph: the operators of the model and of the host.
        fps: of the source, as it says; None where it does not.
    """

    def __init__(
        self,
        model: OperatorGraph,
        spec: str,
        preprocessing: Preprocessing,
        decode: Decoder | None = None,
        *,
        decoder: str = "",
        video: str = "",
        lines: bool = False,
        overlay: bool = False,
        trackers: Callable[[], Follow] | None = None,
        scratch: OpenScratch | None = None,
        hardware: str = "off",
    ) -> None:
        self._open = partial(open_source, spec, hardware=hardware)
        self._model, self._preprocessing, self._decode = model, preprocessing, decode
        self._scratch, self._trackers = scratch, trackers
        with self._open() as source:
            self.fps = source.fps
            codec = f"{source.codec} by {source.hardware}" if source.hardware else source.codec
            follows = trackers is not None
            self.setting = HostSetting(
                source.width, source.height, codec, source.live, decoder, video, lines, overlay, follows
            )
        self._is_recorded = self.setting.live or "://" in spec
        width, height, writes = self.setting.width, self.setting.height, scratch is not None
        self.graph = host_graph(model, width, height, draws=bool(video), writes=writes)

    @contextmanager
    def host(self, rate_fps: float | None = None, start: float = 0.0) -> Iterator[HostWork]:
        """Yield host work for one run; its source does not end while the block lasts, and gives frames at the rate.

        Args:
            start: where a file begins, as `open_source` takes it.
        """
        with ExitStack() as stack:
            write = None
            if self._scratch is not None:
                folder = stack.enter_context(temporary_folder())
                write = stack.enter_context(self._scratch(folder, self.fps or USUAL_FPS))
            frames = stack.enter_context(self._frames(start))
            overlay = Overlay() if self.setting.overlay else None
            yield Application(
                self._model,
                self.graph,
                frames,
                self._preprocessing,
                self._decode,
                write,
                rate_fps,
                overlay=overlay,
                follow=self._trackers() if self._trackers else None,
            ).host

    def runner(self, compiled: CompiledModel, platform: Platform, rate_fps: float | None = None) -> Run:
        """Return the function that runs a plan of the application for a turn, to compare it with others.

        Plans that run one after another begin at the same place of a file. A plan that has run there begins at the
        next place.

        Args:
            rate_fps: the frames a second that come. The latency of a turn is then the median at that rate, where frames
                meet one another, and not that of a frame which is alone; and the times of its stages are those there.
        """
        start, ran = 0.0, set[Plan]()

        def run(plan: Plan, seconds: float) -> Turn:
            nonlocal start
            if plan in ran:
                start = (start + NEXT_PLACE) % 1
                ran.clear()
            ran.add(plan)
            from_there = partial(self.host, start=start)
            with host_errors(), from_there() as host, Pipeline(compiled, plan, platform, host=host) as pipeline:
                full = turn(pipeline, lambda: Tagged({}, Payload[Frame]()), seconds)
            if rate_fps is None:
                return full
            with host_errors(), from_there(rate_fps) as host, Pipeline(compiled, plan, platform, host=host) as pipeline:
                count = max(TURN_FRAMES, round(seconds * rate_fps))
                for _ in pipeline.map(Tagged({}, Payload[Frame]()) for _ in range(count)):
                    pass
                # A core that waited between two frames is slower than one that is kept busy, so these are its times.
                times_s = own_times_s(pipeline.records(), plan.calls_inside)
                latency_s = pipeline.statistics().latency_p50_s or full.latency_s
                return replace(full, latency_s=latency_s, times_s=times_s if all(times_s) else full.times_s)

        return run

    @contextmanager
    def _frames(self, start: float) -> Iterator[Iterator[Frame]]:
        """Yield frames that do not end; where the file breaks off it begins again, and the run itself will say so."""
        with ExitStack() as opened:

            def repeated(place: float) -> Iterator[Frame]:
                while True:
                    given = 0
                    try:
                        for frame in self._recorded[0] if self._is_recorded else self._opened(opened, place):
                            yield frame
                            given += 1
                    except VideoError:
                        if not given and not place:
                            raise
                    place = 0.0

            yield repeated(start)

    def _opened(self, opened: ExitStack, start: float) -> Source:
        opened.close()
        return opened.enter_context(self._open(start=start))

    @property
    def recorded_read_s(self) -> float:
        """Return the mean seconds in which a recorded frame was read; 0 where the source is read anew."""
        return float(np.mean(self._recorded[1])) if self._is_recorded else 0.0

    @cached_property
    def _recorded(self) -> tuple[list[Frame], list[float]]:
        """The next frames of the source, and the seconds that the thread computed for each."""
        with self._open() as source:
            frames, seconds = zip(*_recorded(source), strict=True)
        return list(frames), list(seconds)


def _recorded(source: Source) -> Iterator[tuple[Frame, float]]:
    """Yield the next frames of a live source, and the seconds that the thread computed for each."""
    began_s, size = time.monotonic(), 0
    computed_s = time.thread_time()
    for count, frame in enumerate(source, 1):
        yield frame, time.thread_time() - computed_s
        size += frame.image.nbytes
        if count >= RECORDED_FRAMES or size >= RECORDED_BYTES or time.monotonic() - began_s > RECORDED_S:
            return
        computed_s = time.thread_time()
