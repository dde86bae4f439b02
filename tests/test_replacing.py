"""A file that cannot be written is told with its name; what else fails meanwhile keeps its own error."""

from __future__ import annotations

import errno
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.power_failure import emulated_disk
from tvm_pipeline.errors import PipelineError, RunError
from tvm_pipeline.files import replacing, write_bytes
from tvm_pipeline_tvm.child_process import ChildReport, run_child


@contextmanager
def full() -> Iterator[None]:
    """Let no file become longer than a kilobyte, as on a disk that is full; nor what pytest tells, until it is over."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    for path in (tmp_path / "none" / "file", tmp_path / "folder"):
        with pytest.raises(PipelineError, match=f"cannot write {path}: .*; choose another place"):
            write_bytes(path, b"text")


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    told = r"cannot write .*/file: File too large; choose another place"
    with full(), pytest.raises(PipelineError, match=told):
        write_bytes(tmp_path / "file", bytes(4096))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/bin/no-such-compiler"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        subprocess.SubprocessError("no child"),
    ],
)
def test_what_has_nothing_to_do_with_the_place_keeps_its_error(error: Exception, tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "file") as temporary:
            temporary.touch()
            raise error

    with pytest.raises(type(error)) as caught:
        write()
    assert caught.value is error
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_cannot_be_started_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "gone"))
    with pytest.raises(RunError, match=r"no process can be started for json:loads: No such"), replacing(tmp_path / "x"):
        run_child("json:loads", ChildReport(), ChildReport, lambda _: None)


@pytest.mark.parametrize("is_folder", [False, True])
def test_after_a_power_failure_the_old_or_the_new_is_there_whole(tmp_path: Path, is_folder: bool) -> None:
    """By an emulated disk, which keeps only what was synced: here that is the new, with its name."""
    path = tmp_path / "kept"
    with emulated_disk() as disk:
        with replacing(path) as temporary:
            if is_folder:
                temporary.mkdir()
            (temporary / "inside" if is_folder else temporary).write_bytes(b"content")
        if is_folder:
            assert disk.left(path) == {"inside": b"content"}
        else:
            assert disk.left(tmp_path) == {"kept": b"content"}
