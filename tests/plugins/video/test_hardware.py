"""Decoding by hardware, on a machine that may have none: then software decodes, the same pictures, and that is said."""

from __future__ import annotations

import av
import numpy as np
import pytest
from av.codec.hwaccel import HWAccel, hwdevices_available

from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import VideoFile, open_source
from tvm_pipeline_video.decoding import decode, open_container
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.hardware import check_hardware, decoded_by, hardware_decoders, hardware_device
from tvm_pipeline_video.service.settings import Settings

WORKING = [kind for kind, obstacle in hardware_decoders().items() if not obstacle]
ABSENT = [kind for kind, obstacle in hardware_decoders().items() if obstacle]
needs_absent = pytest.mark.skipif(not ABSENT, reason="every kind of hardware that this FFmpeg decodes with opens here")
needs_working = pytest.mark.skipif(not WORKING, reason="no hardware decodes video here")


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    path = tmp_path_factory.mktemp("film") / "film.mp4"
    with open_source("synthetic:256x192@25:12") as source, VideoFile(path, 25) as video:
        for frame in source:
            video.write(frame.image)
    return path


def images(path, hardware: str) -> tuple[list[np.ndarray], str]:
    with open_source(str(path), hardware=hardware) as source:
        return [frame.image for frame in source], source.hardware


def test_what_is_listed_is_what_some_decoder_of_this_ffmpeg_takes():
    assert set(hardware_decoders()) <= set(hwdevices_available())
    for kind in ABSENT:
        with pytest.raises((av.error.FFmpegError, OSError)):
            HWAccel(kind).create(av.Codec("h264", "r"))
        assert hardware_device(kind) is None
    assert (hardware_device("auto") is None) == (not WORKING)
    assert hardware_device("off") is None


@needs_absent
def test_a_device_that_does_not_open_leaves_it_to_software(film):
    expected, _ = images(film, "off")
    found, used = images(film, ABSENT[0])
    assert used == ""
    assert len(found) == 12
    assert all(map(np.array_equal, found, expected))


@needs_absent
def test_a_device_that_opened_before_and_does_not_now_leaves_it_to_software(film, caplog):
    """The container is opened with the device itself, as if it had answered when it was tried."""
    container, stream = open_container(str(film), "the film", "none", hardware=HWAccel(ABSENT[0]))
    found = [picture.image for picture in decode(container, stream, "the film")]
    assert all(map(np.array_equal, found, images(film, "off")[0]))
    assert decoded_by(stream) == ""
    assert "the film is decoded in software: " in caplog.text
    caplog.clear()
    with pytest.raises(VideoError, match="cannot open nothing"):
        open_container("/nothing.mp4", "nothing", "none", hardware=HWAccel(ABSENT[0]))
    assert caplog.text == ""


@needs_working
def test_hardware_decodes_the_same_pictures(film):
    expected, _ = images(film, "off")
    found, used = images(film, "auto")
    assert used
    for picture, same in zip(found, expected, strict=True):  # chroma is brought up in another way
        assert np.abs(picture.astype(int) - same.astype(int)).mean() < 3


def test_a_kind_that_ffmpeg_does_not_know_is_refused():
    with pytest.raises(OptionError, match=r"`hardware_decoding` nonsense: this FFmpeg decodes with .*; give one of"):
        check_hardware("nonsense")
    with pytest.raises(OptionError, match="`hardware_decoding`"):
        Settings(bundle=["n.tar"], source=["a.mp4"], hardware_decoding="nonsense").check()
