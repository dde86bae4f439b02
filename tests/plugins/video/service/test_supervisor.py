"""`run --supervise`: real processes that are killed, and come back where they were."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.plugins.video.service.test_service import count, decoder, rows
from tests.support.waiting import until
from tvm_pipeline.errors import BundleError, OptionError, StageError
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.service.progress import FrameCounts
from tvm_pipeline_video.service.supervisor import is_worth_a_restart, supervise


def workers() -> list[int]:
    """Child processes of this one that are a run."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [pid for pid in map(int, children) if b"tvm_pipeline_command" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_worker_that_is_killed_goes_on_where_it_was(cli, bundle, tmp_path, monkeypatch):
    """And SIGTERM to the supervisor drains the worker: what is written is whole."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    lines, events = tmp_path / "lines.jsonl", tmp_path / "events.jsonl"
    lines.write_text('{"frame": 500, "of": "an earlier run"}\n')
    decoder(tmp_path / "found.py", "thing")

    def kill() -> None:
        try:
            assert until(lambda: count(lines) > 20)
            (worker,) = workers()
            os.kill(worker, signal.SIGKILL)
            with lines.open("ab") as file:  # as if the crash had come in the middle of a line
                file.write(b'{"frame": ')
            assert until(lambda: count(lines) > 40)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    outcome = cli(
        "run", bundle, "--source", "synthetic:64x48@60:5000", "--decoder", f"{tmp_path / 'found.py'}:decode",
        "--results", lines, "--events", events, "--supervise",
    )  # fmt: skip
    thread.join()
    assert outcome.code == 0, outcome.err
    assert "draining" in outcome.err
    frames = [row["frame"] for row in rows(lines)]
    assert frames[0] == 500
    assert frames[1:] == list(range(len(frames) - 1))
    assert len(frames) > 40
    kinds = [row["kind"] for row in rows(events)]
    assert kinds == ["start", "restart", "start"]
    assert "was killed by SIGKILL; it is started again in 0.5 s" in rows(events)[1]["reason"]
    assert workers() == []
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.thorough
def test_one_that_dies_at_once_is_started_ever_less_often(cli, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os\nif 'TVM_PIPELINE_WORKER' in os.environ: os.abort()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events = tmp_path / "events.jsonl"

    def end() -> None:
        assert until(lambda: count(events) == 3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    outcome = cli("run", "net.tar", "--source", "camera:0", "--events", events, "--supervise")
    thread.join()
    assert outcome.code == 0
    reasons = [row["reason"] for row in rows(events)]
    assert reasons == [f"the worker was killed by SIGABRT; it is started again in {wait} s" for wait in ("0.5", 1, 2)]
    assert workers() == []


def test_a_signal_that_comes_just_before_the_wait_for_the_worker_is_passed_on():
    """Here another thread takes the signal while the main thread waits, so that it does not interrupt the wait."""
    threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM)).start()
    assert supervise(["sleep", "600"], None, reloads=False) == 0


@pytest.mark.parametrize("status", [0, 1, 2, 130])
def test_what_ends_on_purpose_is_not_started_again(cli, tmp_path, monkeypatch, status):
    (tmp_path / "sitecustomize.py").write_text(
        f"import os\nif 'TVM_PIPELINE_WORKER' in os.environ: os._exit({status})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    outcome = cli("run", "net.tar", "--source", "camera:0", "--supervise", "--events", tmp_path / "events.jsonl")
    assert (outcome.code, rows(tmp_path / "events.jsonl")) == (status, [])


@pytest.mark.parametrize(
    ("error", "begun", "live", "again"),
    [
        (OptionError("a port in use"), True, True, False),
        (VideoError("no camera"), False, True, False),
        (VideoError("no camera"), True, True, True),
        (VideoError("a damaged file"), True, False, False),
        (BundleError("no such file"), False, True, False),
        (BundleError("the device is not here"), True, False, True),
        (StageError(0, "tpu0", 7, OSError("unplugged")), False, False, True),
        (ValueError("a bug"), False, False, True),
    ],
)
def test_which_errors_another_process_may_not_meet(error, begun, live, again, tmp_path):
    FrameCounts(tmp_path).of("", "camera:0")[:] = (1, 1) if begun else (0, 0)
    assert is_worth_a_restart(error, FrameCounts(tmp_path), live) == again


@pytest.mark.parametrize("earlier", ["", '{"frame": 500, "source": "film"}\n'])
@pytest.mark.parametrize(("written", "goes_on_at"), [(0, [0, 0]), (7, [21, 7]), (8, [24, 8])])
def test_a_crash_between_writing_a_line_and_counting_it(tmp_path, earlier, written, goes_on_at):
    """Of every third frame seven were counted; what stands in the file decides, but not what stood there before."""
    folder, results = tmp_path / "counts", tmp_path / "lines.jsonl"
    folder.mkdir()
    if earlier:
        results.write_text(earlier)
    before = FrameCounts(folder)
    before.recall(results)
    counts = before.of("", "film", 3)
    with results.open("a") as file:
        for index in range(written):
            file.write(json.dumps({"frame": 3 * index, "source": "film"}) + "\n")
            if index < 7:
                counts[:] = 3 * index + 3, index + 1
        file.write('{"frame": ')
    after = FrameCounts(folder)
    after.recall(results)
    assert after.of("", "film", 3).tolist() == goes_on_at
    assert after.of("", "another film").tolist() == [0, 0]
