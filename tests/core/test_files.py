"""Locks of the cache, between real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tvm_pipeline.errors import PipelineError
from tvm_pipeline.files import locked

FORK = get_context("fork")


def make(path: Path, said: Connection) -> None:
    """Make a file under its lock, where it is not there; tell what happens, and wait for a word before it is made."""
    with locked(path, "the file", said.send):
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
