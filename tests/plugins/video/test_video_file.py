"""Videos read back by an independent reader, also after a kill and after the disk was full."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import VideoFile, open_source
from tvm_pipeline_video.errors import VideoError

NAMES = ["a.mp4", "a.mkv", "a.avi", "a.mov", "a.ts", "a.m4v", "UPPER.MP4"]


def frames(spec: str = "synthetic:96x64:12") -> list[np.ndarray]:
    return [frame.image for frame in open_source(spec)]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    written = frames()
    with VideoFile(path, 12.5) as video:
        for image in written:
            video.write(image)
    with av.open(str(path)) as container:
        assert container.duration == pytest.approx(12 / 12.5 * av.time_base, abs=av.time_base / 25)
        if path.suffix.lower() in (".mp4", ".m4v", ".mov"):
            assert container.streams.video[0].frames == 12  # an ordinary MP4 with an index, not only fragments
    with open_source(str(path)) as source:
        assert (source.width, source.height, source.fps) == (96, 64, 12.5)
        read = list(source)
    assert len(read) == len(written) == video.frames
    assert read[-1].time_s == pytest.approx(11 / 12.5, abs=0.002)
    for image, frame in zip(written, read, strict=True):
        assert np.abs(image.astype(int) - frame.image).mean() < 12
    assert list(tmp_path.iterdir()) == [path]


def test_colours_survive(tmp_path: Path) -> None:
    color = (200, 40, 90)
    with VideoFile(tmp_path / "a.mp4", 25) as video:
        for _ in range(3):
            video.write(np.full((64, 64, 3), color, np.uint8))
    for frame in open_source(str(tmp_path / "a.mp4")):
        np.testing.assert_allclose(frame.image.reshape(-1, 3).mean(axis=0), color, atol=4)


def test_odd_sizes_are_made_even_and_other_sizes_scaled_to_the_first(tmp_path: Path) -> None:
    with VideoFile(tmp_path / "a.mp4", 29.97) as video:
        for image in frames("synthetic:97x63:3") + frames("synthetic:40x40:2"):
            video.write(image)
    read = list(open_source(str(tmp_path / "a.mp4")))
    assert [frame.image.shape for frame in read] == [(64, 98, 3)] * 5


def test_names_rates_and_devices_that_no_video_can_have(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"a\.webm: a video needs one of the extensions .*\.mp4"):
        VideoFile(tmp_path / "a.webm", 25)
    with pytest.raises(OptionError, match="0 frames a second"):
        VideoFile(tmp_path / "a.mp4", 0)
    (tmp_path / "device.mp4").symlink_to("/dev/null")
    with pytest.raises(VideoError, match="not a regular file"):
        VideoFile(tmp_path / "device.mp4", 25)


def test_a_video_without_frames_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    with pytest.raises(VideoError, match=r"no frame was written to .*a\.mp4"):
        VideoFile(path, 25).close()
    assert list(tmp_path.iterdir()) == []


def test_an_exception_keeps_every_frame_and_is_the_one_that_is_raised(tmp_path: Path) -> None:
    def interrupted(count: int) -> None:
        with VideoFile(tmp_path / f"{count}.mp4", 25) as video:
            for image in frames()[:count]:
                video.write(image)
            raise KeyboardInterrupt

    for count in (0, 3):
        with pytest.raises(KeyboardInterrupt):
            interrupted(count)
    assert [path.name for path in tmp_path.iterdir()] == ["3.mp4"]
    assert len(list(open_source(str(tmp_path / "3.mp4")))) == 3


WRITES = """
import os, resource, sys
import numpy as np
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video import VideoFile
path, count, limit, still = sys.argv[1], *map(int, sys.argv[2:4]), sys.argv[4] == "still"
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
noise = np.random.default_rng(0)
video = VideoFile(path, 12.5)
try:
    for number in range(count):
        # The picture's brightness is its number; or nothing moves, so that hardly a byte comes.
        low, high = (100, 101) if still else (number, number + 3)
        coarse = noise.integers(low, high, (15, 20, 3), dtype=np.uint8)
        video.write(np.repeat(np.repeat(coarse, 16, 0), 16, 1))
    if limit < 0:
        os.kill(os.getpid(), 9)
    video.close()
except VideoError as error:
    print(error)
print(video.frames)
"""


def written(path: Path, count: int, limit: int = -1, kind: str = "moving") -> subprocess.CompletedProcess[str]:
    """Write a video in another process, which is killed at the end where there is no limit to the file's bytes."""
    command = [sys.executable, "-c", WRITES, str(path), str(count), str(limit), kind]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "moving") for name in ("a.mp4", "a.mkv", "a.avi", "a.ts")), ("a.mp4", "still")]
)
def test_a_killed_process_leaves_a_video_that_lacks_a_second_at_most(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / name
    assert written(path, 61, kind=kind).returncode == -signal.SIGKILL
    read = list(open_source(str(path)))
    assert 61 - 14 <= len(read) <= 61
    if kind == "moving":
        assert [round(frame.image.mean() - 1) for frame in read] == pytest.approx(range(len(read)), abs=4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("name", "limit"),
    [("a.mp4", 0), ("a.mkv", 500), ("a.avi", 0), ("a.mp4", 20_000), ("a.mkv", 33_333), ("a.avi", 70_000)],
)
def test_a_full_disk_is_named_and_leaves_what_plays(tmp_path: Path, name: str, limit: int) -> None:
    """The system's limit on file sizes stands in for a full disk, and strikes wherever it does."""
    path = tmp_path / name
    done = written(path, 120, limit)
    said, frames = done.stdout.splitlines()
    assert f"cannot write {path}: File too large; check that" in said
    assert path.stat().st_size <= limit
    try:
        with open_source(str(path)) as source:
            read = sum(1 for _ in source)
            assert source.damaged == 0
    except VideoError:
        assert int(frames) < 15  # not even a second was written
        return
    assert int(frames) - 15 <= read <= int(frames)


@pytest.mark.thorough
def test_a_disk_that_is_full_when_the_video_is_closed(tmp_path: Path) -> None:
    """At several places of the end: the last fragment, and the index after it."""
    path = tmp_path / "a.mp4"
    assert written(path, 30, 10**9).stdout == "30\n"
    whole = path.stat().st_size
    for limit in range(whole - 1, whole - 1500, -500):
        said, frames = written(path, 30, limit).stdout.splitlines()
        assert (f"cannot write {path}: File too large" in said, frames) == (True, "30")
        assert 30 - 15 <= len(list(open_source(str(path)))) <= 30


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a.mp4", "a.mov"])
def test_a_kill_between_the_index_and_the_step_that_makes_it_count(tmp_path: Path, name: str) -> None:
    """The last step turns eight bytes at the beginning; with what stood there before, the fragments count."""
    killed, closed = tmp_path / f"killed{Path(name).suffix}", tmp_path / name
    written(killed, 30)
    written(closed, 30, 10**9)
    before, after = killed.read_bytes(), bytearray(closed.read_bytes())
    changed = [at for at in range(1000) if before[at] != after[at]]
    assert 0 < len(changed) <= 8
    for at in changed:
        after[at] = before[at]
    closed.write_bytes(after)
    assert len(list(open_source(str(closed)))) == 30


def test_after_a_failure_nothing_more_is_written(tmp_path: Path) -> None:
    video = VideoFile(tmp_path / "a.mp4", 25)
    video.write(frames()[0])
    video.close()
    video.close()
    before = (tmp_path / "a.mp4").read_bytes()
    with pytest.raises(VideoError, match=r"a\.mp4: it is closed, or a write failed before; open another file"):
        video.write(frames()[0])
    assert (tmp_path / "a.mp4").read_bytes() == before


def test_the_reader_sees_an_ordinary_h264_file(tmp_path: Path) -> None:
    with VideoFile(tmp_path / "a.mp4", 25) as video:
        for image in frames():
            video.write(image)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == ("h264" if video.codec == "libx264" else "mpeg4")
        assert stream.codec_context.pix_fmt == "yuv420p"
