"""Where frames come from: a file, a folder of pictures, an address, a camera, or a synthetic pattern.

    with open_source("bikes.mp4") as source:
        for frame in source:
            ...  # frame.image is uint8, height x width x 3, RGB

A source gives frames as fast as it is asked (a camera: as fast as it films); queueing, dropping and coming
back after a stall are live.py's. Read next: decoding.py (what damage does), preprocessing.py (a frame to a
model's input).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path

import numpy as np
from av.container import InputContainer
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvm_pipeline.errors import OptionError, VideoError
from tvm_pipeline.files import read_bytes
from tvm_pipeline.video.decoding import Picture, decode, open_container, without_password

PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
SCHEMES = ("http", "https", "rtmp", "rtsp", "udp")
PICTURE_FOLDER_FPS = 25  # FFmpeg's own rate for a sequence of pictures


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """One picture: `index` counts from 0 without gaps, `time_s` since the first, `image` uint8 HxWx3 RGB."""

    index: int
    time_s: float
    image: NDArray[np.uint8]


class Source:
    """An open source: iterate over it once, close it or use it in a `with` block.

    The first frame is decoded on opening, so that a source that opens does give frames. Iterating and closing
    may happen in different threads; closing waits for the frame that is being decoded.

    Attributes:
        name: what it was opened as, without passwords.
        width, height: of the first frame; later ones may differ in a stream that changes size.
        fps: frames a second as the container says it, None for pictures and where it does not say.
        frames: how many it will give as the container says it, None for live sources and where it does not
            say.
        live: whether it has no end of its own: a camera, or an address that does not say how long it is.
        damaged: damaged packets and pictures met so far, see decoding.py.
    """

    def __init__(
        self,
        name: str,
        pictures: Iterator[Picture],
        *,
        fps: float | None,
        frames: int | None,
        limit: int | None,
        live: bool = False,
    ) -> None:
        self.name = name
        self.fps = fps
        self.frames = min((n for n in (frames, limit) if n is not None), default=None)
        self.live = live and self.frames is None
        self.damaged = 0
        self._pictures = pictures
        self._limit = limit
        self._given = 0
        self._lock = threading.Lock()
        self._first = next(pictures, None)
        if self._first is None:
            raise VideoError(f"{name} holds no picture; check that it was recorded whole, or choose another source")
        self.height, self.width = self._first.image.shape[:2]

    def __iter__(self) -> Source:
        return self

    def __next__(self) -> Frame:
        with self._lock:
            if self._given == self._limit:
                raise StopIteration
            picture, self._first = self._first or next(self._pictures), None
            self.damaged += picture.damage
            self._given += 1
            return Frame(self._given - 1, picture.time_s, picture.image)

    def close(self) -> None:
        """Releases the file, camera or connection; iterating afterwards ends at once."""
        with self._lock:
            self._limit = self._given
            self._first = None
            if close := getattr(self._pictures, "close", None):
                close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_source(spec: str, *, limit: int | None = None, timeout_s: float = 10.0, thread_count: int = 1) -> Source:
    """Opens a source of frames.

    Args:
        spec: a video file; a picture, or a folder of them in natural order (2.png before 10.png); an http,
            https, rtsp, rtmp or udp address; a camera, `/dev/video0` or `camera:0`; or `synthetic`, in full
            `synthetic:640x480@30:100` for width x height @ frames a second : frames, endless without a count.
        limit: stop after this many frames.
        timeout_s: for addresses, the longest wait to open, and for data afterwards.
        thread_count: threads of the decoder.

    Raises:
        OptionError: the spec is not one of these forms, or an option is out of range.
        VideoError: the source cannot be opened or gives no frame.
    """
    for option, value in (("limit", limit), ("timeout_s", timeout_s), ("thread_count", thread_count)):
        if value is not None and value <= 0:
            raise OptionError(f"{option} is {value} for source {without_password(spec)}; give a number above 0")
    if spec.partition(":")[0] == "synthetic":
        return _synthetic(spec, limit)
    if re.fullmatch(r"camera:\d+|/dev/video\d+", spec) or Path(spec).is_char_device():
        return _camera(spec, limit, thread_count)
    if "://" in spec:
        return _address(spec, limit, timeout_s, thread_count)
    path = Path(spec)
    if not path.exists():
        raise VideoError(
            f"there is no file or folder {spec}; check the path, or give an address "
            f"({', '.join(SCHEMES)}://), camera:N or synthetic"
        )
    if path.is_dir():
        found = [p for p in path.iterdir() if p.suffix.lower() in PICTURES and not p.name.startswith(".")]
        if not found:
            raise VideoError(f"folder {spec} holds no pictures; put {', '.join(PICTURES)} files in it")
        return _pictures(spec, sorted(found, key=_natural), limit)
    if path.is_file() and path.stat().st_size == 0:
        raise VideoError(f"{spec} is an empty file; record or copy it again")
    if path.suffix.lower() in PICTURES:
        return _pictures(spec, [path], limit)
    return _file(spec, limit, thread_count)


def _file(spec: str, limit: int | None, thread_count: int) -> Source:
    advice = "check that it is a video and was recorded or copied whole"
    # file: keeps FFmpeg from reading a name with a colon as an address.
    container, stream = open_container(f"file:{spec}", spec, advice, thread_count=thread_count)
    return _stream(spec, container, stream, limit)


def _address(spec: str, limit: int | None, timeout_s: float, thread_count: int) -> Source:
    name = without_password(spec)
    scheme = spec.partition("://")[0].lower()
    if scheme not in SCHEMES:
        raise OptionError(f"cannot read {name}: {scheme}:// is not supported; give one of {', '.join(SCHEMES)}")
    advice = "check the address, that its server is sending, and the network; a slow one needs a longer timeout"
    container, stream = open_container(spec, name, advice, timeout_s=timeout_s, thread_count=thread_count)
    playlist = container.format.name in ("hls", "dash")  # its size is not that of the video
    live = container.duration is None and (playlist or container.size <= 0)
    return _stream(name, container, stream, limit, timeout_s, live)


def _camera(spec: str, limit: int | None, thread_count: int) -> Source:
    name = spec if spec.startswith("/") else f"/dev/video{spec.partition(':')[2]}"
    if not Path(name).exists():
        present = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        raise VideoError(
            f"there is no camera {name}; cameras present: {present}; check that it is plugged in "
            f"(v4l2-ctl --list-devices), and in a container that it is passed on (--device {name})"
        )
    advice = "check that no other program uses it, that you are in group video, and that it is a V4L2 camera"
    container, stream = open_container(name, name, advice, format="v4l2", thread_count=thread_count)
    return _stream(name, container, stream, limit, live=True)


def _stream(
    name: str,
    container: InputContainer,
    stream: VideoStream,
    limit: int | None,
    timeout_s: float | None = None,
    live: bool = False,
) -> Source:
    fps = float(stream.average_rate) if stream.average_rate else None
    pictures = decode(container, stream, name, timeout_s=timeout_s)
    return Source(name, pictures, fps=fps, frames=stream.frames or None, limit=limit, live=live)


def _pictures(spec: str, paths: list[Path], limit: int | None) -> Source:
    def pictures() -> Iterator[Picture]:
        advice = "check that it is a picture, or remove it"
        for number, path in enumerate(paths):
            # From memory: FFmpeg would read "%d" in a file name as a pattern.
            container, stream = open_container(BytesIO(read_bytes(path, VideoError)), str(path), advice)
            for picture in decode(container, stream, str(path)):
                yield picture._replace(time_s=number / PICTURE_FOLDER_FPS)
                break

    return Source(spec, pictures(), fps=None, frames=len(paths), limit=limit)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


def _synthetic(spec: str, limit: int | None) -> Source:
    form = re.fullmatch(r"synthetic(?::(\d+)x(\d+)(?:@(\d+(?:\.\d+)?))?(?::(\d+))?)?", spec)
    width, height = (int(form[1] or 640), int(form[2] or 480)) if form else (0, 0)
    fps = float(form[3] or 30) if form else 0.0
    frames = int(form[4]) if form and form[4] else None
    if min(width, height, fps) <= 0 or frames == 0:
        raise OptionError(f"cannot read {spec}; the form is synthetic:WIDTHxHEIGHT@FPS:FRAMES, all above 0")

    def pictures() -> Iterator[Picture]:
        """A colour gradient that drifts left, and a white square that crosses it downwards."""
        x = np.arange(2 * width, dtype=np.int64)[None, :]
        y = np.arange(height, dtype=np.int64)[:, None]
        bands = (x * 256 // width + 0 * y, y * 256 // height + 0 * x, (x + y) * 128 // width)
        gradient = np.stack(bands, axis=-1).astype(np.uint8)
        side = max(1, min(width, height) // 8)
        for number in count() if frames is None else range(frames):
            shift = 2 * number % width
            image = gradient[:, shift : shift + width].copy()
            top, left = 3 * number % height, 5 * number % width
            image[top : top + side, left : left + side] = 255
            yield Picture(number / fps, image)

    return Source(spec, pictures(), fps=fps, frames=frames, limit=limit)
