"""Decoding compressed video to pictures, also if the video is damaged.

Cameras drop packets and disks cut files short, so damage is the ordinary case here. The rule:

- a damaged packet or picture *with sound ones after it* does not stop the video: the decoder goes on as well as
  it can, and the damage is counted (`Picture.damage`, summed in `Source.damaged`);
- at damage *with nothing sound after it*, and if a container or connection breaks, the video breaks off: the sound
  pictures before it are delivered, then VideoError names the frame.

FFmpeg takes some cuts for a clean end, and so does this module: any cut in Matroska, one between two pictures in
MPEG-TS, and some within a picture when the decoder has several threads. An http answer with neither a length nor
chunks is the opposite: it always ends as a broken connection. Read next: kinds.py, which opens the inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import IO, Any, NamedTuple

import av
import numpy as np
from av.codec.hwaccel import HWAccel
from av.container import InputContainer
from av.error import ExitError, FFmpegError
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvm_pipeline_video.errors import VideoError

_log = logging.getLogger(__name__)

USUAL_FPS = 25.0  # of a video that does not state its rate
MOST_DAMAGED_IN_A_ROW = 1000  # packets; a stream of nothing but noise is given up


class Picture(NamedTuple):
    """A decoded picture: seconds since the first one, uint8 HxWx3 RGB, damage since the previous one."""

    time_s: float
    image: NDArray[np.uint8]
    damage: int = 0


def reason(error: FFmpegError, timeout_s: float | None) -> str:
    """Return why FFmpeg failed, for messages."""
    if isinstance(error, ExitError) and timeout_s is not None:
        return f"no data came for {timeout_s:g} s"
    return str(error.strerror or error)


def open_container(
    file: str | IO[bytes],
    name: str,
    advice: str,
    *,
    format: str | None = None,
    timeout_s: float | None = None,
    thread_count: int = 1,
    hardware: HWAccel | None = None,
) -> tuple[InputContainer, VideoStream]:
    """Open anything that FFmpeg reads, and its first video stream.

    Args:
        hardware: the device to decode with; where it cannot, software does.

    Raises VideoError with `advice` if it cannot be opened, or has no video stream that FFmpeg can decode.
    """
    timeout = None if timeout_s is None else (timeout_s, timeout_s)
    # A title that is not UTF-8 does not matter here.
    opened = partial(av.open, file, "r", format=format, timeout=timeout, metadata_errors="replace")
    try:
        try:
            container = opened(hwaccel=hardware)
        except FFmpegError as error:
            if hardware is None or isinstance(error, ExitError):
                raise
            container = opened()
            _log.warning("%s is decoded in software: %s", name, reason(error, timeout_s))
    except FFmpegError as error:
        raise VideoError(f"cannot open {name}: {reason(error, timeout_s)}; {advice}") from error
    if not container.streams.video:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        container.close()
        raise VideoError(f"{name} has no video stream, only {kinds}; give a file or address with pictures in it")
    stream = container.streams.video[0]
    if getattr(stream, "codec_context", None) is None:  # though PyAV's types do not say so
        container.close()
        raise VideoError(f"{name} has a video stream that this FFmpeg has no decoder for; {advice}")
    stream.thread_type = "AUTO"
    stream.thread_count = thread_count  # the stages of the pipeline own the cores
    return container, stream


def decode(
    container: InputContainer, stream: VideoStream, name: str, *, timeout_s: float | None = None
) -> Iterator[Picture]:
    """Yield the pictures of a stream in order of time; close the container at the end.

    Raises VideoError after the last sound picture if the video breaks off (the rule at the top of this file).
    """
    packets = _Packets(container, stream, timeout_s)
    scaler = VideoReformatter()
    delivered = 0
    damage = 0
    broken = ""  # why the last packet could not be decoded; empty after a sound one
    pending: list[av.VideoFrame] = []  # damaged pictures that no sound one has followed yet
    start_s: float | None = None
    rate = float(stream.average_rate or USUAL_FPS)
    clockless = container.format.name == "avi"  # AVI keeps no times, and FFmpeg's are out of order with B-frames
    with container:
        for packet in packets:
            try:
                frames = stream.decode(packet)
            except FFmpegError as error:
                damage += 1
                broken = reason(error, timeout_s)
                if damage > MOST_DAMAGED_IN_A_ROW:
                    break
                continue
            if packet is not None and packet.size:
                broken = ""
            for frame in frames:
                pending.append(frame)
                if frame.is_corrupt:
                    damage += 1
                    continue
                for ready in pending:
                    # `ready.time` is NaN for the pictures that a broken connection leaves in the decoder.
                    if clockless or ready.pts is None or stream.time_base is None:
                        time_s = delivered / rate
                    else:
                        time_s = float(ready.pts * stream.time_base)
                    start_s = time_s if start_s is None else start_s
                    yield Picture(time_s - start_s, _upright(scaler, ready), damage)
                    delivered += 1
                    damage = 0
                pending.clear()
    broken = packets.failure or broken or ("the data is incomplete" if pending else "")
    if broken:
        before = f"the {delivered} frames before it are sound" if delivered else "nothing before it could be decoded"
        raise VideoError(
            f"{name} breaks off at frame {delivered}: {broken}; {before}. "
            "Copy or record it again, check the connection, or stop before it with a frame limit"
        )


class _Packets:
    """The packets of a stream, then None to flush the decoder; `failure` is the reason if they ended early."""

    def __init__(self, container: InputContainer, stream: VideoStream, timeout_s: float | None) -> None:
        self.failure = ""
        self._demuxed = container.demux(stream)
        self._timeout_s = timeout_s

    def __iter__(self) -> Iterator[av.Packet[VideoStream] | None]:
        try:
            yield from self._demuxed  # ends with an empty packet, which flushes too
        except FFmpegError as error:
            self.failure = reason(error, self._timeout_s)
            yield None


def _upright(scaler: VideoReformatter, frame: av.VideoFrame) -> NDArray[np.uint8]:
    image: NDArray[Any] = scaler.reformat(frame, format="rgb24", threads=1).to_ndarray()
    turns = frame.rotation // 90 % 4  # a telephone held upright stores its video lying down
    return np.ascontiguousarray(np.rot90(image, turns)) if turns else image
