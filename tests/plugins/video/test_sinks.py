"""JSON lines read back, also while they are written, after a kill and after the disk was full."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tvm_pipeline.errors import PipelineError
from tvm_pipeline_video import Annotation, JsonLines, VideoFile
from tvm_pipeline_video.errors import VideoError


def test_one_object_a_line_with_numpy_values(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with JsonLines(path) as lines:
        lines.write({"frame": 0, "scores": np.array([0.5, 0.25], np.float32), "best": np.int64(3)})
        lines.write(Annotation("cat", 0.5, (1, 2, 3, 4)))
        assert path.read_bytes().count(b"\n") == 2  # at once
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == {"frame": 0, "scores": [0.5, 0.25], "best": 3}
    assert second == {
        "label": "cat",
        "score": 0.5,
        "box": [1, 2, 3, 4],
        "points": [],
        "polygon": [],
        "mask": None,
        "track": None,
        "zones": [],
    }


def test_older_results_are_replaced_and_an_exception_keeps_what_came(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("older\n")

    def interrupted() -> None:
        with JsonLines(path) as lines:
            assert path.read_text() == ""
            lines.write({"frame": 0})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_text() == '{"frame":0}\n'
    assert list(tmp_path.iterdir()) == [path]
    lines = JsonLines(path)
    lines.write(1)
    lines.close()
    lines.close()
    assert path.read_text() == "1\n"


def test_a_file_emptied_by_another_goes_on_at_its_beginning(tmp_path: Path) -> None:
    """As logrotate does it with `copytruncate`."""
    path = tmp_path / "results.jsonl"
    with JsonLines(path) as lines:
        lines.write([1])
        os.truncate(path, 0)
        lines.write([2])
    assert path.read_bytes() == b"[2]\n"


def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()))
    reader.start()
    with JsonLines(path) as lines:
        lines.write("x" * 200_000)  # more than a pipe holds
        lines.write([2])
    reader.join()
    assert read == [b'"' + b"x" * 200_000 + b'"\n[2]\n']
    assert path.is_fifo()


def test_a_stream_gets_each_line_at_once_and_stays_open() -> None:
    stream = io.BytesIO()
    with JsonLines(stream) as lines:
        lines.write([1])
        assert stream.getvalue() == b"[1]\n"
    assert not stream.closed


def test_standard_output_and_a_reader_that_leaves() -> None:
    script = (
        "from tvm_pipeline_video import JsonLines\n"
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
    with JsonLines("/dev/full") as lines, pytest.raises(VideoError, match="/dev/full: No space left"):
        lines.write({"frame": 0})
    assert Path("/dev/full").is_char_device()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("opened", ["Path(sys.argv[1])", "open(sys.argv[1], 'ab', buffering=0)"])
def test_a_full_disk_leaves_whole_lines(tmp_path: Path, opened: str) -> None:
    """The system's limit on file sizes stands in for it: of the line that meets the limit a part is written."""
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from tvm_pipeline_video.errors import VideoError\n"
        "from tvm_pipeline_video import JsonLines\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 200))\n"
        f"lines = JsonLines({opened})\n"
        "lines.write('a' * 60)\n"
        "try:\n"
        "    lines.write('b' * 60)\n"
        "except VideoError as error: print(error)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"  # there is space again
        "lines.write('c' * 60)\n"
    )
    path = tmp_path / "results.jsonl"
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    assert f"cannot write {path}: File too large; check that" in done.stdout
    assert list(map(json.loads, path.read_text().splitlines())) == ["a" * 60, "c" * 60]


def test_a_killed_process_leaves_the_lines_it_wrote(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from tvm_pipeline_video import JsonLines\n"
        "lines = JsonLines(sys.argv[1])\n"
        "for number in range(1000): lines.write({'frame': number})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = tmp_path / "results.jsonl"
    assert subprocess.run([sys.executable, "-c", script, str(path)], check=False).returncode == -9
    assert [json.loads(line)["frame"] for line in path.read_text().splitlines()] == list(range(1000))


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
