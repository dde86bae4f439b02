"""Compressed video to pictures, and what happens when the video is damaged.

Cameras drop packets and disks cut files short, so damage is the ordinary case here. The rule:

- a damaged packet or picture *followed by sound ones* does not stop the video: the decoder goes on as well as
  it can, and the damage is counted (`Picture.damage`, summed in `Source.damaged`);
- damage *that nothing sound follows*, and a container or connection that breaks, is where the video breaks
  off: the sound pictures before it are delivered, then VideoError names the frame.

FFmpeg takes some cuts for a clean end, and so they are here: any in Matroska, between two pictures in
MPEG-TS, and some within a picture when the decoder has several threads. An http answer with neither a length
nor chunks is the reverse: it always ends as a broken connection. Read next: sources.py, which picks the
input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.error import ExitError, FFmpegError, InvalidDataError
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from numpy.typing import NDArray

from tvm_pipeline.errors import VideoError

MOST_DAMAGED_IN_A_ROW = 1000  # packets; a stream that is only noise must not keep us for ever


class Picture(NamedTuple):
    """A decoded picture: seconds since the first, uint8 HxWx3 RGB, damage met since the one before."""

    time_s: float
    image: NDArray[np.uint8]
    damage: int = 0


def without_password(spec: str) -> str:
    """`rtsp://user:secret@camera/1?token=secret` -> `rtsp://user:***@camera/1?token=***`, for names and messages."""
    # A password that holds a / is no address, but may be tried; `:8080/` is a port.
    spec = re.sub(r"(://[^/@:]*):(?:[^/]*|(?!\d*/).*?)@", r"\1:***@", spec)
    # Many cameras take it in the query: ?usr=admin&pwd=secret.
    return re.sub(r"(?i)([?&][^=&]*(?:auth|key|pass|pwd|secret|sig|token)[^=&]*=)[^&#]*", r"\1***", spec)


def reason(error: FFmpegError, timeout_s: float | None) -> str:
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
) -> tuple[InputContainer, VideoStream]:
    """Opens anything that FFmpeg reads, and its first video stream.

    Raises VideoError with `advice` where it cannot be opened, or has no video stream.
    """
    timeout = None if timeout_s is None else (timeout_s, timeout_s)
    try:
        container = av.open(file, "r", format=format, timeout=timeout)
    except FFmpegError as error:
        raise VideoError(f"cannot open {name}: {reason(error, timeout_s)}; {advice}") from error
    if not container.streams.video:
        kinds = ", ".join(sorted({stream.type for stream in container.streams})) or "nothing"
        container.close()
        raise VideoError(f"{name} has no video stream, only {kinds}; give a file or address with pictures in it")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    stream.thread_count = thread_count  # the stages of the pipeline own the cores
    return container, stream


def decode(
    container: InputContainer, stream: VideoStream, name: str, *, timeout_s: float | None = None
) -> Iterator[Picture]:
    """The pictures of a stream in order of time; closes the container at the end.

    Raises VideoError after the last sound picture where the video breaks off (the rule at the top of this
    file).
    """
    packets = _Packets(container, stream, timeout_s)
    scaler = VideoReformatter()
    delivered = 0
    damage = 0
    broken = ""  # why the last packet was of no use, until a sound one follows
    held: list[av.VideoFrame] = []  # damaged pictures that no sound one has followed yet
    start_s: float | None = None
    rate = float(stream.average_rate or 25)
    clockless = container.format.name == "avi"  # AVI keeps no times, and FFmpeg's are out of order with B-frames
    with container:
        for packet in packets:
            try:
                frames = stream.decode(packet)
            except InvalidDataError as error:
                damage += 1
                broken = reason(error, timeout_s)
                if damage > MOST_DAMAGED_IN_A_ROW:
                    break
                continue
            if packet is not None and packet.size:
                broken = ""
            for frame in frames:
                held.append(frame)
                if frame.is_corrupt:
                    damage += 1
                    continue
                for ready in held:
                    time_s = delivered / rate if clockless or ready.time is None else float(ready.time)
                    start_s = time_s if start_s is None else start_s
                    yield Picture(time_s - start_s, _upright(scaler, ready), damage)
                    delivered += 1
                    damage = 0
                held.clear()
    broken = packets.failure or broken or ("the data is incomplete" if held else "")
    if broken:
        before = f"the {delivered} frames before it are sound" if delivered else "nothing before it could be decoded"
        raise VideoError(
            f"{name} breaks off at frame {delivered}: {broken}; {before}. "
            "Copy or record it again, check the connection, or stop before it with a frame limit"
        )


class _Packets:
    """The packets of a stream, then None to flush the decoder; `failure` says why they ended early."""

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
