"""Where results go: JSON lines for programs, and a video with the results drawn on it for people.

A file appears under its name only when it is complete: it is written under another name and renamed by `close`. An
exception in the `with` block, or a write that fails, discards it; call `close` before to keep the results up to there.
Read next: `tvm_pipeline/files.py`, which does the renaming.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

import av
import msgspec
import numpy as np
from av.container import OutputContainer
from av.error import FFmpegError
from av.video.reformatter import Colorspace, VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from tvm_pipeline.errors import OptionError, VideoError
from tvm_pipeline.files import replacing

VIDEO_EXTENSIONS = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".ts")


class _Sink:
    """The base of a sink: a stack of the steps of closing, which know whether an exception ended it."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> None:
        """Finish the file and give it its name; a second call does nothing."""
        self._stack.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def _discarding(self) -> Iterator[None]:
        """Discard the sink if the block fails."""
        try:
            yield
        except BaseException:
            self._stack.__exit__(*sys.exc_info())
            raise

    def _temporary_path(self, path: Path) -> Path:
        """Return the name to write to until the sink is closed."""
        if path.is_dir():
            raise VideoError(f"cannot write {path}: it is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise VideoError(f"cannot write {path}: there is no folder {path.parent}; make it first")
        if path.exists() and not path.is_file():
            return path  # a device or a pipe is written to, never replaced
        return self._stack.enter_context(replacing(path))


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Turn the system's error of a failed write into a VideoError that names the file."""
    try:
        yield
    except (OSError, FFmpegError) as error:
        if isinstance(error, BrokenPipeError):
            advice = "its reader has gone; keep it running or write to a file"
        else:
            advice = "check that its folder may be written to and has space left, or choose another place"
        raise VideoError(f"cannot write {name}: {error.strerror or error}; {advice}") from error


class JsonLines(_Sink):
    """Writes one JSON object a line.

    Args:
        target: a path; '-' for standard output; or a binary stream, which stays open. A stream is flushed
            after every line, so that it can be read meanwhile; a path appears when the sink is closed.

    Raises VideoError when it cannot be written.
    """

    def __init__(self, target: str | Path | IO[bytes]) -> None:
        super().__init__()
        is_path = isinstance(target, (str, Path)) and target != "-"
        self.name = str(target if is_path else getattr(target, "name", "standard output"))
        self._live = not is_path
        with self._discarding():
            self._file = self._open(target)
        self._encode = msgspec.json.Encoder(enc_hook=_plain).encode

    def __enter__(self) -> JsonLines:
        return self

    def _open(self, target: str | Path | IO[bytes]) -> IO[bytes]:
        if target == "-":
            target = sys.stdout.buffer
        if not isinstance(target, (str, Path)):
            self._stack.enter_context(_naming(self.name))
            return target
        path = self._temporary_path(Path(target))
        self._stack.enter_context(_naming(self.name))
        return self._stack.enter_context(path.open("wb"))

    def write(self, value: Any) -> None:
        """Write a line: plain values, dataclasses, NumPy scalars and arrays."""
        line = self._encode(value) + b"\n"
        with self._discarding():
            self._file.write(line)
            if self._live:
                self._file.flush()


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; convert it to plain values first")


class VideoFile(_Sink):
    """Writes frames as H.264, or as MPEG-4 where FFmpeg was built without x264 (`codec` says which).

    The first frame sets the size, made even by repeating the last row or column, as yuv420p needs; frames of
    another size are scaled to it. Frames stand at 1 / fps seconds from each other.

    Args:
        path: a file name; its extension, one of `VIDEO_EXTENSIONS`, chooses the container.
        fps: frames a second.

    Raises VideoError when it cannot be written, or is closed before a frame was written; OptionError for the
    fps.
    """

    def __init__(self, path: str | Path, fps: float) -> None:
        super().__init__()
        self.name = str(path)
        path = Path(path)
        if path.suffix.lower() not in VIDEO_EXTENSIONS:
            known = ", ".join(VIDEO_EXTENSIONS)
            raise VideoError(f"cannot write {path}: a video needs one of the extensions {known}")
        if not 0 < fps < 1000:
            raise OptionError(f"cannot write {path} at {fps} frames a second; give a rate between 0 and 1000")
        if path.exists() and not path.is_file():
            raise VideoError(f"cannot write {path}: it is not a regular file; choose another name")
        self.codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self.frames = 0
        self._rate = Fraction(fps).limit_denominator(1001)
        self._scaler = VideoReformatter()
        self._encoder: tuple[OutputContainer, VideoStream] | None = None
        with self._discarding():
            self._temporary = self._temporary_path(path)
            self._stack.enter_context(_naming(self.name))
            self._temporary.touch()  # to fail now rather than after the first inference
            self._stack.push(self._finish)

    def __enter__(self) -> VideoFile:
        return self

    def write(self, image: NDArray[np.uint8]) -> None:
        """Write a frame, uint8 HxWx3 RGB."""
        height, width = image.shape[:2]
        if height % 2 or width % 2:
            image = np.pad(image, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        with self._discarding():
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
            container.mux(stream.encode(frame))
            self.frames += 1

    def _open(self, width: int, height: int) -> tuple[OutputContainer, VideoStream]:
        container = av.open(str(self._temporary), "w")
        options = {"preset": "superfast", "bf": "0"} if self.codec == "libx264" else {"qscale": "3"}
        stream = cast(VideoStream, container.add_stream(self.codec, rate=self._rate, options=options))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.thread_count = 1  # the stages of the pipeline own the cores
        stream.codec_context.colorspace = 6  # SMPTE 170M, the same matrix as ITU 601
        return container, stream

    def _finish(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._encoder is None:
            raise VideoError(f"no frame was written to {self.name}, so there is no video; check its source")
        if self._encoder is None:
            return
        container, stream = self._encoder
        if error is None:
            container.mux(stream.encode(None))
            container.close()
        else:
            with suppress(FFmpegError):  # the first error is the one to report
                container.close()


@dataclass(frozen=True, slots=True)
class Annotation:
    """One thing that was found in a frame, in pixels of that frame.

    Attributes:
        label: what it is.
        score: how sure the model is, usually 0 to 1.
        box: left, top, right, bottom; None if it concerns the whole frame.
        points: key points, (x, y) each.
    """

    label: str
    score: float | None = None
    box: tuple[float, float, float, float] | None = None
    points: tuple[tuple[float, float], ...] = ()


def draw(image: NDArray[np.uint8], annotations: Sequence[Annotation]) -> NDArray[np.uint8]:
    """Return a copy of a frame (uint8 HxWx3 RGB) with the annotations; those without a box are lines at top left."""
    picture = Image.fromarray(image)
    pen = ImageDraw.Draw(picture)
    size = max(10, image.shape[0] // 30)
    font = ImageFont.load_default(size)
    line_y = 0
    for annotation in annotations:
        color = _color(annotation.label)
        text = annotation.label if annotation.score is None else f"{annotation.label} {annotation.score:.2f}"
        at = (0.0, float(line_y))
        if annotation.box is None:
            line_y += size + 4
        else:
            left, right = sorted(annotation.box[0::2])
            top, bottom = sorted(annotation.box[1::2])
            pen.rectangle((left, top, right, bottom), outline=color, width=max(1, size // 8))
            at = (max(0.0, left), max(0.0, top - size - 4))
        if text:
            pen.rectangle((*at, at[0] + pen.textlength(text, font=font) + 4, at[1] + size + 3), fill=color)
            pen.text((at[0] + 2, at[1] + 1), text, fill="black", font=font)
        radius = max(1, size // 6)
        for x, y in annotation.points:
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=color)
    return np.asarray(picture)


def _color(label: str) -> str:
    """Return a light colour, always the same for the same label."""
    return f"hsl({zlib.crc32(label.encode()) % 360}, 90%, 65%)"
