"""The table of the kinds of sources: what each spec is taken for, and kinds that an installed package adds."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.plugins.video.cameras import film
from tests.plugins.video.test_sources import failure
from tvm_pipeline_video import KINDS, Kind, Source, SourceOptions, open_source, source_kind

BY_ID = "/dev/v4l/by-id/usb-046d_HD_Pro_Webcam_C920-video-index0"


def _open_film(spec: str, opening: SourceOptions) -> Source:
    pictures = film(int(spec.partition(":")[2]))()
    return Source(spec, pictures, fps=None, frames=None, limit=opening.limit, live=True)


FILM = Kind("film", lambda spec: spec.startswith("film:"), _open_film, live=True, exclusive=True, help="film:FRAMES")


def install(folder: Path, *entries: str) -> None:
    """Make kinds of sources installed, wherever `folder` is on the path."""
    package = folder / "films-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: films\nVersion: 1\n")
    (package / "entry_points.txt").write_text("\n".join(("[tvm_pipeline.sources]", *entries)))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        "film = tests.plugins.video.test_kinds:FILM",
        "broken = tests.plugins.video.no_such_module:KIND",
        "other = tests.plugins.video.test_kinds:BY_ID",
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("spec", "kind", "live", "exclusive"),
    [
        ("camera:0", "camera", True, True),
        ("CAMERA:0", "camera", True, True),
        ("/dev/video1", "camera", True, True),
        (BY_ID, "camera", True, True),
        ("/dev/v4l/by-path/pci-0000:00:14.0-usb-0:3:1.0-video-index0", "camera", True, True),
        ("rtsp://gate/1", "stream", True, False),
        ("RTMP://gate/1", "stream", True, False),
        ("udp://0.0.0.0:5000", "stream", True, False),
        ("http://host/bikes.mp4", "address", False, False),
        ("synthetic:64x48@30:20", "synthetic", False, False),
        ("bikes.mp4", "file", False, False),
        ("/dev/shm/bikes.mp4", "file", False, False),
        ("camera:front.mp4", "file", False, False),
        ("bikes.png", "file", False, False),  # which is not there
        ("film:3", "file", False, False),  # whose package is not installed
    ],
)
def test_what_a_spec_is_taken_for(spec: str, kind: str, live: bool, exclusive: bool) -> None:
    found = source_kind(spec)
    assert (found.name, found.live, found.exclusive) == (kind, live, exclusive)


def test_files_folders_and_pictures_by_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "one.PNG").touch()
    (tmp_path / "clip.mp4").touch()
    (tmp_path / "camera").symlink_to("/dev/null")  # a character device, as udev names one
    names = {name: source_kind(str(tmp_path / name)).name for name in (".", "one.PNG", "clip.mp4", "camera")}
    assert names == {".": "folder", "one.PNG": "picture", "clip.mp4": "file", "camera": "camera"}
    assert source_kind(str(tmp_path / "camera")).live
    assert "V4L2 camera" in failure(tmp_path / "camera")


@pytest.mark.parametrize(("spec", "name"), [("CAMERA:99", "/dev/video99"), (BY_ID, BY_ID)])
def test_every_camera_is_opened_as_one(spec: str, name: str) -> None:
    """As what it is taken for: neither was a camera to the one and a file to the other."""
    message = failure(spec)
    assert f"there is no camera {name}" in message
    assert "plugged in" in message


def test_what_no_kind_takes_lists_the_forms(tmp_path: Path) -> None:
    message = failure(tmp_path / "missing.mp4")
    assert all(kind.help in message for kind in KINDS)


def test_an_installed_kind(installed: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), open_source("film:3", limit=2) as source:
        assert [frame.index for frame in source] == [0, 1]
        assert source.name == "film:3"
    assert source_kind("film:3") is FILM
    assert "film:FRAMES" in failure("missing.mp4")
    assert "the source kind broken cannot be used: ModuleNotFoundError" in caplog.text
    assert "the source kind other cannot be used: tests.plugins.video.test_kinds:BY_ID is no Kind" in caplog.text


def test_an_installed_kind_takes_nothing_from_those_built_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "greedy = tests.plugins.video.test_kinds:GREEDY")
    monkeypatch.syspath_prepend(tmp_path)
    assert source_kind("camera:0").name == "camera"
    assert source_kind("rtsp://gate/1").name == "stream"
    assert source_kind("ndi:studio") is GREEDY


GREEDY = Kind("greedy", lambda _: True, _open_film, live=False, exclusive=False, help="anything")
