"""Damaged videos, pictures and settings: whatever is in a file, reading it ends well or by an error of the package.

Each call damages one valid file as `random.Random` draws it, so that a seed repeats it, and reads the file to its end.
"""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import av
import numpy as np
from PIL import Image

from tests.fuzz.documents import read_changed
from tests.support.mutations import cut, flipped, spliced
from tvm_pipeline.errors import PipelineError
from tvm_pipeline_video import Tracking, open_source
from tvm_pipeline_video.service.file import read_service

WIDTH, HEIGHT, FRAMES = 48, 32, 12
# Suffix, format and codec of each video. A codec that this FFmpeg cannot encode is left out.
VIDEOS = (
    (".mp4", "mp4", "libx264"),
    (".mp4", "mp4", "mpeg4"),
    (".mov", "mov", "mjpeg"),
    (".mkv", "matroska", "libx264"),
    (".mkv", "matroska", "ffv1"),
    (".webm", "webm", "libvpx"),
    (".avi", "avi", "mpeg4"),
    (".avi", "avi", "mjpeg"),
    (".ts", "mpegts", "mpeg2video"),
    (".ts", "mpegts", "libx264"),
    (".flv", "flv", "flv"),
    (".gif", "gif", "gif"),
)
SERVICE = b"""bundle = "model.tar"
source = ["camera:0", "rtsp://gate/1"]
policy = ["latest", "fps=5"]
results = "results.jsonl"
segment = 3600
watch = 9600
watchdog = 10.5
supervise = true
"""
TRACKING = b"""results = "frames"
score = 0.4
appears-after = 0.3
[[zone]]
name = "gate"
polygon = [[0, 0], [0.5, 0], [0.5, 1]]
seconds = 2.5
[[line]]
name = "door"
start = [0.5, 0]
end = [0.5, 1]
"""
PICTURES = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}


def read_damaged_video(rng: random.Random) -> None:
    """Read a video that is damaged."""
    suffix, content = rng.choice(videos())
    with TemporaryDirectory() as folder:
        path = Path(folder, f"damaged{suffix}")
        path.write_bytes(damaged(content, rng))
        read(path)


def read_damaged_pictures(rng: random.Random) -> None:
    """Read a picture that is damaged, alone or before a sound one in a folder."""
    suffix, content = rng.choice(pictures())
    with TemporaryDirectory() as folder:
        path = Path(folder, f"1{suffix}")
        path.write_bytes(damaged(content, rng))
        if rng.random() < 0.5:
            read(path)
        else:
            Path(folder, f"2{suffix}").write_bytes(content)
            assert read(Path(folder)) > 0


def read_changed_settings(rng: random.Random) -> None:
    """Read the settings of a service that are changed."""
    read_changed("service.toml", SERVICE, read_service, rng)


def read_changed_tracking(rng: random.Random) -> None:
    """Read how objects are followed from a file that is changed."""
    read_changed("tracking.toml", TRACKING, Tracking.from_toml, rng)


FUZZERS: dict[str, Callable[[random.Random], None]] = {
    "videos": read_damaged_video,
    "pictures": read_damaged_pictures,
    "settings": read_changed_settings,
    "tracking": read_changed_tracking,
}


def read(path: Path) -> int:
    """Read a source to its end and return how many frames it gave; their times do not fall."""
    times = []
    with suppress(PipelineError), open_source(str(path)) as source:
        for frame in source:
            assert frame.image.dtype == np.uint8
            assert frame.image.ndim == 3
            times.append(frame.time_s)
    assert np.isfinite(times).all()
    assert (np.diff(times) >= 0).all()
    return len(times)


def damaged(content: bytes, rng: random.Random) -> bytes:
    """Return the content changed once or a few times."""
    for _ in range(rng.choice((1, 1, 2, 4))):
        content = rng.choice((flipped, cut, spliced, exchanged, zeroed))(content, rng)
    return content or b"\0"


def exchanged(content: bytes, rng: random.Random) -> bytes:
    """Return the content with two of its pieces in each other's place."""
    a, b, c, d = sorted(rng.randrange(len(content) + 1) for _ in range(4))
    return content[:a] + content[c:d] + content[b:c] + content[a:b] + content[d:]


def zeroed(content: bytes, rng: random.Random) -> bytes:
    """Return the content with zeros in the place of a piece, as a bad disk gives."""
    begin = rng.randrange(len(content) + 1)
    length = min(rng.choice((1, 16, 512, len(content))), len(content) - begin)
    return content[:begin] + bytes(length) + content[begin + length :]


@cache
def videos() -> list[tuple[str, bytes]]:
    """Return suffix and content of a small video of each kind."""
    made = []
    for suffix, form, codec in VIDEOS:
        with suppress(av.codec.codec.UnknownCodecError):
            made.append((suffix, _encoded(form, codec)))
    return made


def _encoded(form: str, codec: str) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        container.metadata["title"] = "a film"
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height = WIDTH, HEIGHT
        stream.pix_fmt = next(form.name for form in stream.codec_context.codec.video_formats or ())
        for number in range(FRAMES):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(_image(number))))
        container.mux(stream.encode(None))
    return file.getvalue()


@cache
def pictures() -> list[tuple[str, bytes]]:
    """Return suffix and content of a picture of each kind."""
    made = []
    for suffix, form in PICTURES.items():
        file = io.BytesIO()
        Image.fromarray(_image(0)).save(file, form)
        made.append((suffix, file.getvalue()))
    return made


def _image(number: int) -> np.ndarray:
    noise = np.random.default_rng(number).integers(0, 60, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    noise[:, :, 0] += np.uint8(number * 8)
    return noise
