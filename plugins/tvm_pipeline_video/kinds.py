"""The kinds of sources of frames, as one table: a file, a folder of pictures, an address, a camera, a pattern.

    with open_source("bikes.mp4") as source:
        for frame in source:
            ...  # frame.image is uint8, height x width x 3, RGB

Everything that is known of a kind stands in its row of `KINDS`: which specs it takes, how it is opened, whether it
films by itself, whether it can be opened only once. An installed package adds a kind by an entry point of the group
`tvm_pipeline.sources` that names a `Kind`; such kinds are asked after the built-in ones and before FILE, which takes
whatever no other kind does. Read next: sources.py (what an open source gives), decoding.py (how video is decoded).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.stream import VideoStream

from tvm_pipeline.addresses import shown
from tvm_pipeline.errors import OptionError
from tvm_pipeline.files import read_bytes
from tvm_pipeline_video.decoding import Picture, decode, open_container
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.hardware import decoded_by, hardware_device
from tvm_pipeline_video.sources import Source

GROUP = "tvm_pipeline.sources"
PICTURES = (".bmp", ".jpeg", ".jpg", ".png", ".webp")
STREAM_SCHEMES = ("rtmp", "rtsp", "udp")
ADDRESS_SCHEMES = ("http", "https")
_MOST_PIXELS = 1 << 28  # of a synthetic picture
PICTURE_FOLDER_FPS = 25  # FFmpeg's own rate for a sequence of pictures

_log = logging.getLogger(__name__)


class SourceOptions(NamedTuple):
    """The options of `open_source`, which every kind is opened with."""

    limit: int | None = None
    timeout_s: float = 10.0
    thread_count: int = 1
    hardware: str = "off"
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of source.

    Attributes:
        name: what the kind is called.
        matches: tells whether a spec is of this kind; it must not open anything.
        open: opens a spec; raises OptionError for a malformed spec, VideoError for a source that gives no frame.
        live: whether it films by itself, so that a frame that waits grows old. A kind that is not may still turn out
            to have no end when it is opened (`Source.live`).
        exclusive: whether it can be opened only once at a time.
        help: the form of a spec, for messages.
    """

    name: str
    matches: Callable[[str], bool]
    open: Callable[[str, SourceOptions], Source]
    live: bool
    exclusive: bool
    help: str


def source_kind(spec: str) -> Kind:
    """Return the kind of source that a spec names; FILE if no other kind takes it."""
    for kind in all_kinds():
        if kind.matches(spec):
            return kind
    return FILE


def all_kinds() -> Iterator[Kind]:
    """Yield every kind in the order in which they are asked."""
    *first, last = KINDS
    yield from first
    yield from installed_kinds()
    yield last


def installed_kinds() -> Iterator[Kind]:
    """Yield the kinds that installed packages add; one that cannot be loaded is logged and left out."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            kind = entry.load()
        except Exception as error:  # of another package: its fault must not keep the other sources from opening
            _log.warning("the source kind %s cannot be used: %s: %s", entry.name, type(error).__name__, error)
            continue
        if isinstance(kind, Kind):
            yield kind
        else:
            _log.warning("the source kind %s cannot be used: %s is no Kind", entry.name, entry.value)


def open_source(
    spec: str,
    *,
    limit: int | None = None,
    timeout_s: float = 10.0,
    thread_count: int = 1,
    hardware: str = "off",
    start: float = 0.0,
) -> Source:
    """Open a source of frames.

    Args:
        spec: a video file; a picture, or a folder of them in natural order (2.png before 10.png); an http,
            https, rtsp, rtmp or udp address; a camera, `0`, `camera:0`, `/dev/video0` or `/dev/v4l/by-id/...`;
            `synthetic`, in full `synthetic:640x480@30:100` for width x height @ frames a second : frames, endless
            without a count; or what an installed kind takes.
        limit: stop after this many frames.
        timeout_s: for addresses, the longest wait to open, and for data afterwards.
        thread_count: threads of the decoder.
        hardware: the kind of device that decodes video where it opens, such as `cuda` or `vaapi`; `auto` for any, `off`
            for software.
        start: the share of a video file that is left out at its beginning, up to the key frame before; other kinds of
            sources give all their frames.

    Raises:
        OptionError: the spec is not one of these forms, or an option is out of range.
        VideoError: the source cannot be opened or gives no frame.
    """
    for option, value in (("limit", limit), ("timeout_s", timeout_s), ("thread_count", thread_count)):
        if value is not None and value <= 0:
            raise OptionError(f"{option} is {value} for source {shown(spec)}; give a number above 0")
    return source_kind(spec).open(spec, SourceOptions(limit, timeout_s, thread_count, hardware, start))


def _scheme(spec: str) -> str:
    scheme, colon, _ = spec.partition("://")
    return scheme.lower() if colon else ""


def _is_camera(spec: str) -> bool:
    # A camera that is unplugged has no device file and is still a camera. A number is one if no file has this name.
    if re.fullmatch(r"\d{1,3}", spec):
        return not Path(spec).exists()
    return bool(re.fullmatch(r"(?i:camera:\d+)|/dev/video\d+|/dev/v4l/.+", spec)) or Path(spec).is_char_device()


def _open_file(spec: str, opening: SourceOptions) -> Source:
    if scheme := _scheme(spec):
        schemes = ", ".join((*ADDRESS_SCHEMES, *STREAM_SCHEMES))
        raise OptionError(f"cannot read {shown(spec)}: {scheme}:// is not supported; give one of {schemes}")
    _check_file(spec)
    advice = "check that it is a video and was recorded or copied whole"
    # file: keeps FFmpeg from reading a name with a colon as an address.
    device = hardware_device(opening.hardware)
    container, stream = open_container(f"file:{spec}", spec, advice, thread_count=opening.thread_count, hardware=device)
    if opening.start and container.duration:
        with suppress(FFmpegError):  # it cannot be searched
            container.seek((container.start_time or 0) + round(opening.start * container.duration))
    return _stream(spec, container, stream, opening.limit)


def _check_file(spec: str) -> None:
    path = Path(spec)
    if not path.exists():
        forms = "; ".join(kind.help for kind in all_kinds())
        raise VideoError(f"there is no file or folder {spec}; check the path, or give {forms}")
    if path.is_file() and path.stat().st_size == 0:
        raise VideoError(f"{spec} is an empty file; record or copy it again")


def _open_address(spec: str, opening: SourceOptions) -> Source:
    name = shown(spec)
    advice = "check the address, that its server is sending, and the network"
    timeout_s = opening.timeout_s
    container, stream = open_container(
        spec,
        name,
        advice,
        timeout_s=timeout_s,
        thread_count=opening.thread_count,
        hardware=hardware_device(opening.hardware),
    )
    playlist = container.format.name in ("hls", "dash")  # its size is not that of the video
    live = container.duration is None and (playlist or container.size <= 0)
    return _stream(name, container, stream, opening.limit, timeout_s, live)


def _open_camera(spec: str, opening: SourceOptions) -> Source:
    name = spec if spec.startswith("/") else f"/dev/video{spec.rpartition(':')[2]}"
    if not Path(name).exists():
        present = ", ".join(sorted(str(path) for path in Path("/dev").glob("video*"))) or "none"
        raise VideoError(
            f"there is no camera {name}; cameras present: {present}; check that it is plugged in "
            f"(v4l2-ctl --list-devices), and in a container that it is passed on (--device {name})"
        )
    advice = "check that no other program uses it, that you are in group video, and that it is a V4L2 camera"
    container, stream = open_container(
        name,
        name,
        advice,
        format="v4l2",
        thread_count=opening.thread_count,
        hardware=hardware_device(opening.hardware),
    )
    return _stream(name, container, stream, opening.limit, live=True)


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
    codec = stream.codec_context.name
    source = Source(name, pictures, fps=fps, frames=stream.frames or None, limit=limit, live=live, codec=codec)
    source.hardware = decoded_by(stream)  # known now that it has decoded the first frame
    return source


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURES


def _open_folder(spec: str, opening: SourceOptions) -> Source:
    found = [path for path in Path(spec).iterdir() if _is_picture(path) and not path.name.startswith(".")]
    if not found:
        raise VideoError(f"folder {spec} holds no pictures; put {', '.join(PICTURES)} files in it")
    return _pictures(spec, sorted(found, key=_natural), opening.limit)


def _open_picture(spec: str, opening: SourceOptions) -> Source:
    _check_file(spec)
    return _pictures(spec, [Path(spec)], opening.limit)


def _pictures(spec: str, paths: list[Path], limit: int | None) -> Source:
    def pictures() -> Iterator[Picture]:
        broken: list[VideoError] = []  # pictures that no sound one has followed yet
        for number, path in enumerate(paths):
            try:
                picture = _read_picture(path)
            except VideoError as error:
                broken.append(error)
                if len(paths) > 1:
                    _log.warning("%s; it is left out", error)
                continue
            yield Picture(number / PICTURE_FOLDER_FPS, picture.image, picture.damage + len(broken))
            broken.clear()
        if broken:
            raise broken[-1]

    return Source(spec, pictures(), fps=None, frames=len(paths), limit=limit)


def _read_picture(path: Path) -> Picture:
    # From memory: FFmpeg would read "%d" in a file name as a pattern.
    content = BytesIO(read_bytes(path, VideoError))
    container, stream = open_container(content, str(path), "check that it is a picture, or remove it")
    try:
        return next(decode(container, stream, str(path)))
    except (VideoError, StopIteration) as error:
        raise VideoError(f"{path} is a damaged picture; copy it again, or remove it") from error


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", path.name)]


def _open_synthetic(spec: str, opening: SourceOptions) -> Source:
    form = re.fullmatch(r"synthetic(?::(\d{1,9})x(\d{1,9})(?:@(\d{1,9}(?:\.\d+)?))?(?::(\d{1,18}))?)?", spec)
    width, height = (int(form[1] or 640), int(form[2] or 480)) if form else (0, 0)
    fps = float(form[3] or 30) if form else 0.0
    frames = int(form[4]) if form and form[4] else None
    if min(width, height, fps) <= 0 or frames == 0:
        raise OptionError(
            f"cannot read {spec}; the form is synthetic:WIDTHxHEIGHT@FPS:FRAMES, all above 0", option="source"
        )
    if width * height > _MOST_PIXELS:
        raise OptionError(f"cannot make {spec}: a picture has {_MOST_PIXELS} pixels at most", option="source")
    return Source(spec, _pattern(width, height, fps, frames), fps=fps, frames=frames, limit=opening.limit)


def _pattern(width: int, height: int, fps: float, frames: int | None) -> Iterator[Picture]:
    """Yield a colour gradient that drifts left, and a white square that crosses it downwards."""
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


SYNTHETIC = Kind(
    "synthetic",
    lambda spec: spec.partition(":")[0] == "synthetic",
    _open_synthetic,
    live=False,
    exclusive=False,
    help="synthetic or synthetic:WIDTHxHEIGHT@FPS:FRAMES",
)
CAMERA = Kind("camera", _is_camera, _open_camera, live=True, exclusive=True, help="N, camera:N or /dev/videoN")
STREAM = Kind(
    "stream",
    lambda spec: _scheme(spec) in STREAM_SCHEMES,
    _open_address,
    live=True,
    exclusive=False,
    help=", ".join(f"{scheme}://" for scheme in STREAM_SCHEMES),
)
ADDRESS = Kind(
    "address",
    lambda spec: _scheme(spec) in ADDRESS_SCHEMES,
    _open_address,
    live=False,
    exclusive=False,
    help=", ".join(f"{scheme}://" for scheme in ADDRESS_SCHEMES),
)
FOLDER = Kind(
    "folder", lambda spec: Path(spec).is_dir(), _open_folder, live=False, exclusive=False, help="a folder of pictures"
)
PICTURE = Kind(
    "picture",
    lambda spec: _is_picture(Path(spec)) and Path(spec).exists(),
    _open_picture,
    live=False,
    exclusive=False,
    help=f"a picture ({', '.join(PICTURES)})",
)
FILE = Kind("file", lambda spec: True, _open_file, live=False, exclusive=False, help="a video file")

KINDS = (SYNTHETIC, CAMERA, STREAM, ADDRESS, FOLDER, PICTURE, FILE)
