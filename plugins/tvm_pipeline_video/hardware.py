"""Decoding video by hardware: which devices FFmpeg can use on this machine, and which one decoded a stream.

What FFmpeg was built with says little: a device counts where it opens here. Decoded pictures come back into the memory
of the host, so everything after decoding is the same. Read next: decoding.py, which opens containers with
such a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType

import av
import av.logging
from av.codec.hwaccel import HWAccel, hwdevices_available
from av.error import FFmpegError
from av.video.stream import VideoStream

from tvm_pipeline.errors import OptionError

CODECS = ("h264", "hevc", "av1", "vp9", "vp8", "mjpeg", "mpeg4", "mpeg2video")  # what cameras and files have


@lru_cache(maxsize=1)
def hardware_decoders() -> Mapping[str, str]:
    """Return the kinds of devices that this FFmpeg can decode with; each with why it does not open here, or "".

    A kind with which no usual codec can be decoded is left out. Devices are tried once in a process.
    """
    found: dict[str, str] = {}
    level = av.logging.get_level()
    av.logging.set_level(av.logging.ERROR)
    try:
        for kind in hwdevices_available():
            for name in CODECS:
                with av.logging.Capture() as logged, suppress(NotImplementedError, ValueError):  # not with this codec
                    found[kind] = _obstacle(kind, av.Codec(name, "r"), logged)
                    break
    finally:
        av.logging.set_level(level)
    return MappingProxyType(found)


def _obstacle(kind: str, codec: av.Codec, logged: Sequence[tuple[int, str, str]]) -> str:
    """Return why a device does not open, empty where it does; what FFmpeg logs first says more than its error."""
    try:
        HWAccel(kind).create(codec)
    except FFmpegError as error:
        return logged[0][2].strip() if logged else str(error.strerror or error)
    return ""


def check_hardware(requested: str) -> None:
    """Raise OptionError unless it is `auto`, `off` or a kind of device that this FFmpeg can decode with."""
    if requested not in ("auto", "off", *hardware_decoders()):
        known = ", ".join(hardware_decoders()) or "no device"
        raise OptionError(
            f"`hardware_decoding` {requested}: this FFmpeg decodes with {known}; give one of these, auto or off",
            option="hardware_decoding",
            value=requested,
        )


def hardware_device(requested: str) -> HWAccel | None:
    """Return the device to decode with: the first that opens, or that of the requested kind; None for software.

    Args:
        requested: `auto`, `off` or a kind of device; see `check_hardware` for what is raised.
    """
    check_hardware(requested)
    for kind, obstacle in hardware_decoders().items():
        if not obstacle and requested in ("auto", kind):
            return HWAccel(kind)  # which decodes a codec that it does not know in software
    return None


def decoded_by(stream: VideoStream) -> str:
    """Return the kind of device that decodes a stream, empty for software; ask after the first picture.

    A device may refuse a stream, such as one of a profile that it does not know, and FFmpeg then decodes in software.
    """
    form = stream.codec_context.format
    if not stream.codec_context.is_hwaccel or form is None or form.components:  # pictures on a device have none
        return ""
    return form.name
