"""A video file that plays while it is written, after a kill and after the disk was full.

What FFmpeg holds back until the end of an ordinary MP4, it writes here about once a second: MP4 and its like in
fragments, Matroska in clusters, both begun by a key frame. A file that is closed becomes an ordinary MP4. Read next:
sinks.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import cast

import av
import numpy as np
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.reformatter import Colorspace, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.sinks import check_place, naming

# An index of all pictures follows at the end; until it is written, the fragments before it count.
_FRAGMENTS = {"movflags": "+frag_keyframe+empty_moov+default_base_moof+hybrid_fragmented"}
_MUXERS = {
    ".avi": {},
    ".m4v": _FRAGMENTS,
    ".mkv": {"cluster_time_limit": "1000"},  # milliseconds
    ".mov": _FRAGMENTS,
    ".mp4": _FRAGMENTS,
    ".ts": {},
}
VIDEO_EXTENSIONS = tuple(_MUXERS)


class VideoFile:
    """Writes frames as H.264, or as MPEG-4 where FFmpeg was built without x264 (`codec` says which).

    The first frame sets the size, made even by repeating the last row or column, as yuv420p needs; frames of
    another size are scaled to it. Frames stand at 1 / fps seconds from each other.

    The file plays from its first second on. A process that is killed costs at most the last second; an exception
    in the `with` block costs nothing.

    Args:
        path: a file name; its extension, one of `VIDEO_EXTENSIONS`, chooses the container.
        fps: frames a second.

    Raises VideoError when it cannot be written (what was written before plays), or is closed before a frame was
    written (no file is left then); OptionError for the fps.
    """

    def __init__(self, path: str | Path, fps: float) -> None:
        self.name = str(path)
        self._path = Path(path)
        if self._path.suffix.lower() not in VIDEO_EXTENSIONS:
            known = ", ".join(VIDEO_EXTENSIONS)
            raise VideoError(f"cannot write {path}: a video needs one of the extensions {known}")
        if not 0 < fps < 1000:
            raise OptionError(f"cannot write {path} at {fps} frames a second; give a rate between 0 and 1000")
        check_place(self._path)
        if self._path.exists() and not self._path.is_file():
            raise VideoError(f"cannot write {path}: it is not a regular file; choose another name")
        self.codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self.frames = 0
        self._rate = Fraction(fps).limit_denominator(1001)
        self._scaler = VideoReformatter()
        self._encoder: tuple[OutputContainer, VideoStream] | None = None
        self._whole_bytes = 0  # what plays of the file
        self._closed = False
        with naming(self.name):
            self._path.write_bytes(b"")  # to fail now rather than after the first inference

    def __enter__(self) -> VideoFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            with suppress(VideoError):  # the first error is the one to report
                self.close()

    def write(self, image: NDArray[np.uint8]) -> None:
        """Write a frame, uint8 HxWx3 RGB."""
        if self._closed:
            raise VideoError(f"cannot write {self.name}: it is closed, or a write failed before; open another file")
        height, width = image.shape[:2]
        if height % 2 or width % 2:
            image = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        with naming(self.name):
            if self._encoder is None:
                self._encoder = self._open(image.shape[1], image.shape[0])
            container, stream = self._encoder
            frame = self._scaler.reformat(
                av.VideoFrame.from_ndarray(np.ascontiguousarray(image), "rgb24"),
                stream.width,
                stream.height,
                "yuv420p",
                dst_colorspace=Colorspace.ITU601,
                threads=1,
            )
            frame.pts, frame.time_base = self.frames, 1 / self._rate
            with self._whole(container):
                container.mux(stream.encode(frame))
                self._whole_bytes = self._path.stat().st_size
            self.frames += 1

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        with naming(self.name):
            if self._encoder is None:
                self._path.unlink()
                raise VideoError(f"no frame was written to {self.name}, so there is no video; check its source")
            container, stream = self._encoder
            with self._whole(container):
                container.mux(stream.encode(None))
                self._whole_bytes = self._path.stat().st_size
                container.close()

    def _open(self, width: int, height: int) -> tuple[OutputContainer, VideoStream]:
        muxer = {**_MUXERS[self._path.suffix.lower()], "flush_packets": "1"}
        container = av.open(str(self._path), "w", options=muxer)
        options = {"preset": "superfast", "bf": "0"} if self.codec == "libx264" else {"qscale": "3"}
        options["g"] = str(max(1, round(self._rate)))  # a key frame a second, which ends a fragment
        stream = cast(VideoStream, container.add_stream(self.codec, rate=self._rate, options=options))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1  # the stages of the pipeline own the cores
        stream.codec_context.colorspace = 6  # SMPTE 170M, the same matrix as ITU 601
        return container, stream

    @contextmanager
    def _whole(self, container: OutputContainer) -> Iterator[None]:
        """If a write in the block fails, take back what it left of a piece, and write no more.

        After a failed write FFmpeg writes nothing, also not on closing.
        """
        try:
            yield
        except (OSError, FFmpegError):
            self._closed = True
            with suppress(OSError, FFmpegError):
                container.close()
            with suppress(OSError):
                os.truncate(self._path, self._whole_bytes)
            raise
