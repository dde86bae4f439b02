"""Sinks read back by independent readers, and the promise that a file is whole or absent."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest

from tvm_pipeline.errors import OptionError, PipelineError, VideoError
from tvm_pipeline.video import Annotation, JsonLines, VideoFile, draw, open_source


def frames(spec: str = "synthetic:96x64:12") -> list[np.ndarray]:
    return [frame.image for frame in open_source(spec)]


# JSON lines


def test_one_object_a_line_with_numpy_values(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with JsonLines(path) as lines:
        lines.write({"frame": 0, "scores": np.array([0.5, 0.25], np.float32), "best": np.int64(3)})
        lines.write(Annotation("cat", 0.5, (1, 2, 3, 4)))
        assert not path.exists()
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"frame": 0, "scores": [0.5, 0.25], "best": 3}
    assert second == {"label": "cat", "score": 0.5, "box": [1, 2, 3, 4], "points": []}


def test_the_results_replace_older_ones_only_when_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("older\n")

    def interrupted() -> None:
        with JsonLines(path) as lines:
            lines.write({"frame": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == "older\n"
    assert list(tmp_path.iterdir()) == [path]
    lines = JsonLines(path)
    lines.write(1)
    lines.close()
    lines.close()
    assert path.read_text() == "1\n"


def test_a_stream_gets_each_line_at_once_and_stays_open() -> None:
    stream = io.BytesIO()
    with JsonLines(stream) as lines:
        lines.write([1])
        assert stream.getvalue() == b"[1]\n"
    assert not stream.closed


def test_standard_output_and_a_reader_that_leaves() -> None:
    script = (
        "from tvm_pipeline.video import JsonLines\n"
        "lines = JsonLines('-')\n"
        "for n in range(int(__import__('sys').argv[1])): lines.write({'n': n})\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run([*command, "2"], capture_output=True, check=True)
    assert done.stdout == b'{"n":0}\n{"n":1}\n'
    with subprocess.Popen([*command, "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        assert left.stdout is not None
        assert left.stderr is not None
        left.stdout.readline()
        left.stdout.close()
        assert b"VideoError: cannot write standard output: Broken pipe" in left.stderr.read()


def test_a_full_disk_is_named() -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as full,
        pytest.raises(VideoError, match="/dev/full: No space left"),
    ):
        JsonLines(full).write({"frame": 0})  # type: ignore[arg-type]
    lines = JsonLines("/dev/full")
    lines.write({"frame": 0})
    with pytest.raises(VideoError, match="/dev/full: No space left"):
        lines.close()
    assert Path("/dev/full").is_char_device()


@pytest.mark.parametrize("sink", [JsonLines, lambda path: VideoFile(path, 25)])
def test_places_that_cannot_be_written_are_refused_at_once(tmp_path: Path, sink) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    (tmp_path / "folder.mp4").mkdir()
    for place in (tmp_path / "none" / "a.mp4", tmp_path / "file" / "a.mp4", Path("/proc/a.mp4")):
        with pytest.raises(PipelineError, match=f"cannot write {place}"):
            sink(place)
    with pytest.raises(VideoError, match=r"folder\.mp4"):
        sink(tmp_path / "folder.mp4")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.mp4"]


# Videos


@pytest.mark.parametrize("name", ["a.mp4", "a.mkv", "a.avi", "a.mov", "a.ts", "a.m4v", "UPPER.MP4"])
def test_what_is_written_is_read_again(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    written = frames()
    with VideoFile(path, 12.5) as video:
        for image in written:
            video.write(image)
        assert not path.exists()
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


def test_a_video_without_frames_or_with_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match=r"no frame was written to .*a\.mp4"):
        VideoFile(tmp_path / "a.mp4", 25).close()

    def interrupted() -> None:
        with VideoFile(tmp_path / "a.mp4", 25) as video:
            video.write(frames()[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("count", [1, 100])
def test_no_space_left_names_the_file_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    """The system's limit on file sizes stands in for a full disk; with one frame it strikes on closing."""
    script = (
        "import resource, sys, numpy as np\n"
        "from tvm_pipeline.video import VideoFile\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n"
        "noise = np.random.default_rng(0)\n"
        "with VideoFile(sys.argv[1], 25) as video:\n"
        "    for _ in range(int(sys.argv[2])):\n"
        "        video.write(noise.integers(0, 255, (240, 320, 3), dtype=np.uint8))\n"
    )
    path = str(tmp_path / "a.mp4")
    done = subprocess.run([sys.executable, "-c", script, path, str(count)], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"VideoError: cannot write {path}: File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_reader_sees_an_ordinary_h264_file(tmp_path: Path) -> None:
    with VideoFile(tmp_path / "a.mp4", 25) as video:
        for image in frames():
            video.write(image)
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == ("h264" if video.codec == "libx264" else "mpeg4")
        assert stream.codec_context.pix_fmt == "yuv420p"


# Drawing


def test_boxes_labels_and_points_appear_where_they_belong_and_the_frame_stays() -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    drawn = draw(image, [Annotation("cat", 0.9, (100, 80, 200, 180), ((150, 130),))])
    assert not image.any()
    lit = drawn.any(axis=2)
    assert lit[80, 100:201].all()
    assert lit[180, 100:201].all()
    assert lit[80:181, 100].all()
    assert lit[80:181, 200].all()
    assert lit[130, 150]
    assert lit[62:80, 100:150].any()  # the label above the box
    assert not lit[84:120, 105:195].any()
    assert not lit[190:].any()


def test_annotations_without_a_box_are_lines_at_the_top_left() -> None:
    image = np.zeros((240, 320, 3), np.uint8)
    one = draw(image, [Annotation("cat", 0.9)]).any(axis=2)
    two = draw(image, [Annotation("cat", 0.9), Annotation("dog")]).any(axis=2)
    assert one.any()
    assert not one[24:].any()
    assert two[14:28, :20].any()
    assert not two[40:].any()


def test_the_same_label_has_the_same_colour_and_no_annotation_changes_nothing() -> None:
    image = frames()[0]
    assert np.array_equal(draw(image, []), image)
    cat = Annotation("cat", None, (10, 30, 40, 50))
    assert np.array_equal(draw(image, [cat]), draw(image, [cat]))


def test_boxes_outside_the_frame_or_turned_round_do_not_fail() -> None:
    image = np.zeros((64, 96, 3), np.uint8)
    draw(image, [Annotation("a", 1, (-50, -50, 500, 500)), Annotation("b", 1, (90, 60, 10, 10))])
    draw(image, [Annotation("", None, (200, 200, 300, 300)), Annotation("été 猫", 0.1)])
