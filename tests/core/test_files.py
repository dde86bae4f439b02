"""The cache and its locks, between real processes; files that are whole, distinct and undamaged."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tvm_pipeline import files
from tvm_pipeline.errors import OptionError, PipelineError
from tvm_pipeline.files import (
    cache_folder,
    check_distinct,
    damaged,
    forget_oldest,
    keep,
    locked,
    read_kept,
    seal,
    temporary_folder,
)

FORK = get_context("fork")


def make(path: Path, said: Connection) -> None:
    """Make a file under its lock, where it is not there; tell what happens, and wait for a word before it is made."""
    handler = logging.Handler()
    handler.emit = lambda record: said.send(record.getMessage())
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)
    with locked(path, "the file"):
        if path.exists():
            said.send("found")
            return
        said.send("makes")
        said.recv()
        path.write_text(str(os.getpid()))


class Maker:
    def __init__(self, path: Path) -> None:
        self.connection, theirs = FORK.Pipe()
        self.process = FORK.Process(target=make, args=(path, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def heard(self) -> str:
        assert self.connection.poll(20), "it says nothing"
        return self.connection.recv()


def test_one_process_makes_it_and_the_others_wait_and_find_it(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "entry"
    first = Maker(path)
    assert first.heard() == "makes"
    others = [Maker(path) for _ in range(3)]
    for other in others:
        assert other.heard() == "another process makes the file; waiting for it"
        assert not other.connection.poll(0.05), "it did not wait"
    first.connection.send("go on")
    assert [other.heard() for other in others] == ["found"] * 3
    for maker in (first, *others):
        maker.process.join(20)
        assert maker.process.exitcode == 0
    assert path.read_text() == str(first.process.pid)
    assert [file.name for file in path.parent.iterdir()] == ["entry"], "a lock was left behind"


def test_the_lock_of_a_killed_process_goes_to_another(tmp_path: Path) -> None:
    path = tmp_path / "entry"
    first = Maker(path)
    assert first.heard() == "makes"
    second = Maker(path)
    assert second.heard().startswith("another process")
    os.kill(first.process.pid or 0, signal.SIGKILL)
    assert second.heard() == "makes"
    second.connection.send("go on")
    second.process.join(20)
    assert path.read_text() == str(second.process.pid)


def test_threads_exclude_one_another_too(tmp_path: Path) -> None:
    inside, most = [], []

    def work() -> None:
        for _ in range(8):
            with locked(tmp_path / "entry", "it"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1] * 48


def below_a_file(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file" / "cache" / "entry"


@pytest.mark.parametrize("place", [below_a_file, lambda _: Path("/proc/cache/entry")])
def test_a_cache_that_cannot_be_written_is_named(place: Callable[[Path], Path], tmp_path: Path) -> None:
    path = place(tmp_path)
    with pytest.raises(PipelineError, match=rf"{path.parent}.*TVM_PIPELINE_CACHE"), locked(path, "it"):
        pass


# Where the cache lies


@pytest.fixture
def places(tmp_path, monkeypatch, caplog):
    """No variable names a place; the home cannot be written, and neither can what lies below a file."""
    for name in ("TVM_PIPELINE_CACHE", "XDG_CACHE_HOME", "CACHE_DIRECTORY", "STATE_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "file").touch()
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("HOME", f"{tmp_path}/file")
    monkeypatch.setattr("tempfile.tempdir", f"{tmp_path}/tmp")
    monkeypatch.setattr(files, "_told", set())
    return tmp_path


def test_without_any_place_it_is_private_and_said_once(places, caplog):
    private = places / "tmp" / f"tvm-pipeline-{os.getuid()}"
    assert cache_folder() == cache_folder() == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count(f"{places}/file/.cache/tvm-pipeline cannot be written, and {private} is used") == 1


def test_the_folders_of_a_service_come_before_it(places, monkeypatch):
    monkeypatch.setenv("STATE_DIRECTORY", f"{places}/state:{places}/more")
    assert cache_folder() == places / "state" / "cache"
    monkeypatch.setenv("CACHE_DIRECTORY", f"{places}/of-service")
    assert cache_folder() == places / "of-service"
    monkeypatch.setenv("XDG_CACHE_HOME", f"{places}/home")
    assert cache_folder() == places / "home" / "tvm-pipeline"
    monkeypatch.setenv("TVM_PIPELINE_CACHE", f"{places}/asked")
    assert cache_folder() == places / "asked"


@pytest.mark.parametrize("make", [lambda path: path.mkdir(mode=0o755), lambda path: path.symlink_to("/usr")])
def test_a_private_folder_that_others_can_use_is_not_taken(make, places):
    make(places / "tmp" / f"tvm-pipeline-{os.getuid()}")
    assert cache_folder() == places / "file" / ".cache" / "tvm-pipeline"  # and who writes it is told that it cannot be


# What is damaged


def test_what_is_kept_comes_back_unless_it_was_changed(tmp_path, caplog):
    path = tmp_path / "cache" / "one.json"
    assert read_kept(path) is None
    keep(path, b"one\ntwo")
    assert read_kept(path) == b"one\ntwo"
    assert not caplog.records
    path.write_bytes(path.read_bytes().replace(b"two", b"too"))
    assert read_kept(path) is None
    assert f"{path} is damaged" in caplog.text
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "one", b"")
    assert "is not kept for the next time" in caplog.text


def test_any_change_of_a_sealed_folder_is_found(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"it is {name}")
    assert damaged(tmp_path) == files.SUMS
    seal(tmp_path)
    assert damaged(tmp_path) == ""
    (tmp_path / "a").write_text("it is b")
    assert damaged(tmp_path) == "a"
    seal(tmp_path)  # again, over its own sums
    assert damaged(tmp_path) == ""
    (tmp_path / "a").unlink()
    assert damaged(tmp_path) == "a"
    (tmp_path / files.SUMS).write_text("[]")
    assert damaged(tmp_path) == files.SUMS


# What goes by itself


def _hold(folder: Path, said: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(folder))
        with temporary_folder() as made:
            (made / "model").touch()
            said.send(made)
            said.recv()


def test_a_temporary_folder_goes_with_its_block_and_that_of_a_killed_process_with_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=_hold, args=(tmp_path, theirs), daemon=True)
    process.start()
    assert ours.poll(20)
    other = ours.recv()
    with temporary_folder() as own:
        assert (other / "model").exists()
        process.kill()
        process.join(20)
        with temporary_folder():
            assert not other.exists()
            assert own.exists()
    assert list(tmp_path.iterdir()) == []


def test_what_was_used_longest_ago_is_forgotten(tmp_path):
    for age, name in enumerate(("new", "old", "oldest")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(1000))
        os.utime(tmp_path / name, (1e9 - age, 1e9 - age))
    size = sum(file.stat().st_size for file in (tmp_path / "new", tmp_path / "new" / "weights"))
    forget_oldest(tmp_path.iterdir(), 2 * size)
    assert {path.name for path in tmp_path.iterdir()} == {"new", "old"}


# Outputs and inputs


def test_an_output_that_is_read_or_written_twice_is_refused(tmp_path):
    video, link, hard = tmp_path / "v.mp4", tmp_path / "link.mp4", tmp_path / "hard.mp4"
    video.write_bytes(b"precious")
    link.symlink_to(video)
    hard.hardlink_to(video)
    for output in (video, link, hard, tmp_path / "x" / ".." / "v.mp4"):
        (tmp_path / "x").mkdir(exist_ok=True)
        with pytest.raises(OptionError, match=r"cannot write .*reads or writes it; choose another file"):
            check_distinct([None, output], [None, "camera:0", str(video)])
    new = tmp_path / "new.mp4"
    with pytest.raises(OptionError, match=rf"cannot write {new}"):
        check_distinct([new, tmp_path / "." / "new.mp4"], [])
    check_distinct([new, tmp_path / "other.mp4", Path("/dev/null"), Path("/dev/null")], [str(video), "/dev/null"])
