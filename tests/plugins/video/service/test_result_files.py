"""Results that can be followed: while a run goes on, in segments, and on a disk that becomes full."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.video.service.test_service import count, decoder, meanwhile, rows, service
from tests.plugins.video.service.test_supervisor import workers
from tests.support.log_lines import log_lines
from tests.support.power_failure import emulated_disk
from tests.support.waiting import until
from tvm_pipeline_video import open_source
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.log_files import segment_numbers, segment_path
from tvm_pipeline_video.service.progress import FrameCounts
from tvm_pipeline_video.service.result_files import ResultFiles
from tvm_pipeline_video.service.settings import Settings


def lines_of(base: Path) -> list[list[dict]]:
    """Return the lines of each segment; the numbers are without gaps."""
    numbers = segment_numbers(base)
    assert numbers == list(range(1, len(numbers) + 1))
    return [rows(segment_path(base, number)) for number in numbers]


def pictures(path: Path) -> int:
    with open_source(str(path)) as source:
        return sum(1 for _ in source)


def slow_decoder(folder: Path) -> str:
    decoder(folder / "found.py", "thing")
    return f"{folder / 'found.py'}:decode"


@pytest.mark.thorough
def test_results_and_video_are_read_while_they_are_written(cli, bundle, tmp_path):
    lines, video = tmp_path / "lines.jsonl", tmp_path / "out.mp4"
    lines.write_text("of an earlier run\n")
    seen = []

    def look() -> None:
        seen.extend([rows(lines), pictures(video)])
        os.kill(os.getpid(), signal.SIGTERM)

    with meanwhile(look, lines, 100):
        outcome = cli(
            "run", bundle, "--source", "synthetic:64x48@30", "--results", lines, "--output", video,
            "--decoder", slow_decoder(tmp_path),
        )  # fmt: skip
    assert outcome.code == 0, outcome.err
    assert [row["frame"] for row in seen[0]] == list(range(len(seen[0])))
    assert len(seen[0]) >= 100
    assert seen[1] >= 60
    assert len(rows(lines)) == pictures(video) > len(seen[0]) - 1


@pytest.mark.thorough
def test_segments_hold_the_same_frames_and_another_run_goes_on_after_them(cli, bundle, tmp_path):
    lines, video = tmp_path / "lines.jsonl", tmp_path / "out.mkv"
    options = ("--source", "synthetic:64x48@30:20", "--results", lines, "--output", video, "--segment", 0.2)
    for _ in range(2):
        outcome = cli("run", bundle, *options)
        assert outcome.code == 0
        assert f"written: {tmp_path}/out-*.mkv, {tmp_path}/lines-*.jsonl" in outcome.err
    assert [row["frame"] for segment in lines_of(lines) for row in segment] == 2 * list(range(20))
    assert list(map(len, lines_of(lines))) == [6, 6, 6, 2] * 2
    assert [pictures(segment_path(video, number)) for number in segment_numbers(video)] == [6, 6, 6, 2] * 2
    assert sorted(path.name for path in tmp_path.iterdir())[:1] == ["lines-0001.jsonl"]
    assert len(list(tmp_path.iterdir())) == 16


def test_numbers_are_free_for_both(tmp_path):
    """A video without results, or the other way round, was left by an earlier run; so were files of other names."""
    for name in (
        "out-0007.mp4",
        "lines-0003.jsonl",
        "out-12.mp4",
        "out-0009.mkv",
        "other-0011.mp4",
        "out-0010.mp4.bak",
    ):
        (tmp_path / name).touch()
    (tmp_path / "out-12345.mp4").touch()
    settings = Settings(results=str(tmp_path / "lines.jsonl"), output=tmp_path / "out.mp4", segment=5.0)
    with pytest.raises(VideoError, match="no frame was written"), ResultFiles(settings, 25.0, keeps=False):
        assert (tmp_path / "lines-12346.jsonl").exists()


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), min_size=1, max_size=60),
    segment=st.integers(1, 30),
)
def test_a_segment_ends_before_the_first_frame_that_is_too_late_for_its_source(steps, segment):
    """Against a search from the beginning for every frame; times of a source begin anywhere."""
    clock_s = {0: 0.0, 1: 1000.0, 2: 5.5}
    frames: list[list[tuple[int, float]]] = [[]]
    with TemporaryDirectory() as folder:
        lines = Path(folder) / "lines.jsonl"
        with ResultFiles(Settings(results=str(lines), segment=float(segment)), 25.0, keeps=False) as files:
            for source, step in steps:
                clock_s[source] += step / 4
                if any(s == source and clock_s[source] - time_s >= segment for s, time_s in frames[-1]):
                    frames.append([])
                frames[-1].append((source, clock_s[source]))
                files.begin_frame("", str(source), clock_s[source])
                files.lines.write([source, clock_s[source]])
        assert [[tuple(row) for row in segment] for segment in lines_of(lines)] == frames


@pytest.mark.thorough
def test_a_worker_that_is_killed_goes_on_in_the_next_segment(cli, bundle, tmp_path):
    """Each line once; the video lacks the last second before each kill at most, 60 frames and those in the encoder."""
    lines, video, name = tmp_path / "lines.jsonl", tmp_path / "out.mp4", slow_decoder(tmp_path)
    segment_path(lines, 1).write_text('{"frame": 500, "source": "synthetic:64x48@30:5000", "of": "an earlier run"}\n')
    kills = []

    def total() -> int:
        return sum(count(segment_path(lines, number)) for number in segment_numbers(lines))

    def kill() -> None:
        try:
            assert until(lambda: total() > 100)
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)
            assert until(lambda: worker not in workers())
            kills.append(segment_numbers(lines)[-1])
            with segment_path(lines, kills[-1]).open("ab") as file:  # as a power failure may leave it
                file.write(b'{"frame": ')
            assert until(lambda: total() > 200)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = cli(
        "run", bundle, "--source", "synthetic:64x48@60:5000", "--decoder", name, "--results", lines,
        "--output", video, "--segment", 2, "--supervise",
    )  # fmt: skip
    thread.join()
    assert outcome.code == 0, outcome.err
    segments = lines_of(lines)
    assert segments[0][0]["frame"] == 500
    frames = [row["frame"] for segment in segments[1:] for row in segment]
    assert frames == list(range(len(frames)))
    assert len(kills) == 1
    for number, segment in enumerate(segments[1:], 2):
        at_least = len(segment) - 64 if number in kills else len(segment)
        if at_least > 0:
            assert at_least <= pictures(segment_path(video, number)) <= len(segment)


def test_a_power_failure_costs_no_more_than_what_was_written_since_the_disk_was_waited_for(tmp_path, monkeypatch):
    """By an emulated disk, which keeps only what was synced: nobody writes or closes anything for a line to get there,
    and a segment that is closed is there with its video.
    """
    monkeypatch.setattr("tvm_pipeline.files.SYNC_S", 0.01)
    lines, video = tmp_path / "lines.jsonl", tmp_path / "out.mkv"
    settings = Settings(results=str(lines), output=video, segment=1.0)
    with emulated_disk() as disk, ResultFiles(settings, 25.0, keeps=False) as files:
        for time_s in (0.0, 0.5, 1.0):
            files.begin_frame("", "film", time_s)
            files.lines.write({"time_s": time_s})
            files.video.write(np.zeros((16, 16, 3), np.uint8))
        for path in (segment_path(lines, 1), segment_path(video, 1)):
            assert disk.left(tmp_path)[path.name] == path.read_bytes()
        assert until(lambda: disk.left(tmp_path).get("lines-0002.jsonl") == b'{"time_s":1.0}\n')
        for _ in range(60):  # the encoder holds some
            files.video.write(np.zeros((16, 16, 3), np.uint8))
        assert until(lambda: disk.left(tmp_path).get("out-0002.mkv"))
    for path in (segment_path(lines, 2), segment_path(video, 2)):
        assert disk.left(tmp_path)[path.name] == path.read_bytes()


def test_a_disk_that_does_not_keep_the_lines_is_told_once(tmp_path, monkeypatch):
    said, failures = log_lines("WARNING"), []

    def fail(descriptor: int) -> None:
        failures.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fail)
    monkeypatch.setattr("tvm_pipeline.files.SYNC_S", 0.01)
    settings = Settings(results=str(tmp_path / "lines.jsonl"))
    with ResultFiles(settings, 25.0, keeps=True) as files:
        files.lines.write({"frame": 0})
        assert until(lambda: len(failures) > 2)
    assert said == [
        f"{tmp_path}/lines.jsonl may not be on the disk (Input/output error): a power failure may take back its last "
        "lines"
    ]


@pytest.mark.thorough
def test_settings_read_anew_go_on_with_the_same_output_in_the_next_segment(cli, bundle, tmp_path):
    name = slow_decoder(tmp_path)
    text = (
        f'bundle = "{bundle}"\nsource = "synthetic:64x48@30:200"\nresults = "lines.jsonl"\noutput = "out.mp4"\n'
        f'decoder = "{name}"\nsegment = 60\n'
    )
    config = service(tmp_path, text)
    with meanwhile(lambda: os.kill(os.getpid(), signal.SIGHUP), tmp_path / "lines-0001.jsonl", 20):
        outcome = cli("run", "--config", config)
    assert outcome.code == 0, outcome.err
    segments = lines_of(tmp_path / "lines.jsonl")
    assert len(segments) == 2
    assert [row["frame"] for segment in segments for row in segment] == list(range(200))
    assert [pictures(tmp_path / f"out-000{number}.mp4") for number in (1, 2)] == list(map(len, segments))


@pytest.fixture
def limited(tmp_path) -> Iterator[Callable[..., str]]:
    """Give decoders that let no file grow beyond so many bytes, which stands in for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited_to(size_bytes: int, label: str = "thing") -> str:
        (tmp_path / "found.py").write_text(
            "import resource\n"
            "from tvm_pipeline_video import Annotation\n"
            "def decode(outputs, transform):\n"
            f"    resource.setrlimit(resource.RLIMIT_FSIZE, ({size_bytes}, {before[1]}))\n"
            f"    return [Annotation({label!r})]\n"
        )
        return f"{tmp_path / 'found.py'}:decode"

    yield limited_to
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("full", ["results", "the first line"])
def test_a_disk_that_becomes_full_ends_the_run_and_keeps_what_came(cli, bundle, tmp_path, limited, full):
    lines, video = tmp_path / "lines.jsonl", tmp_path / "out.mp4"
    options = ["--results", lines, "--source", "synthetic:64x48@30"]
    if full != "results":
        options += ["--output", video]
    size = 20_000 if full == "results" else 500_000  # of a file; the video that is measured before must fit
    label = "x" * size if full == "the first line" else "x" * 100
    outcome = cli("run", bundle, *options, "--decoder", limited(size, label))
    assert outcome.code == 1
    assert f"error: cannot write {lines}: File too large; check that its folder may be written to" in outcome.err
    assert "Traceback" not in outcome.err
    frames = [row["frame"] for row in rows(lines)]
    assert frames == list(range(len(frames)))
    assert (len(frames) > 0) == (full != "the first line")


@pytest.mark.parametrize(("written", "goes_on_at"), [(0, 0), (7, 7), (8, 8)])
@pytest.mark.parametrize("empty", [False, True])
def test_a_crash_between_writing_a_line_and_counting_it(tmp_path, written, goes_on_at, empty):
    """Seven frames were counted, in segments of four; the second process may have died before it wrote a line."""
    folder, results = tmp_path / "counts", tmp_path / "lines.jsonl"
    folder.mkdir()
    segment_path(results, 1).write_text('{"frame": 500, "source": "film"}\n')
    before = FrameCounts(folder)
    before.recall(results, segmented=True)
    counts = before.of("", "film")
    for index in range(written):
        with segment_path(results, 2 + index // 4).open("a") as file:
            file.write(json.dumps({"frame": index, "source": "film"}) + "\n")
        if index < 7:
            counts[:] = index + 1, index + 1
    if empty:
        segment_path(results, 5).touch()
    after = FrameCounts(folder)
    after.recall(results, segmented=True)
    assert after.of("", "film").tolist() == [goes_on_at, goes_on_at]
