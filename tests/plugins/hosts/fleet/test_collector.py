"""The file of results: once each, whole, in order; a full disk, restarts, rotation."""

from __future__ import annotations

import errno
import json
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from tests.support.power_failure import emulated_disk
from tvm_pipeline.errors import OptionError
from tvm_pipeline_hosts.fleet import collector as collecting
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.messages import Line

FOREIGN = b'{"frame": 3}\nnot json\n\xff\xfe\n{"camera": 5}\n{"camera": "\xff"}\n'


def line(frame, epoch=1, camera="gate", model="faces", content=None):
    content = content or b'{"frame":%d,"annotations":[]}' % frame
    return Line(camera, model, epoch, frame, msgspec.Raw(content))


def lines_of(path: Path) -> list[dict]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def killed(collector: Collector) -> Collector:
    """Return a new collector after this one was killed: only what the kernel closes is closed."""
    collector._open.close()
    collector._file = None
    return Collector()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "all.jsonl"


@pytest.fixture
def collector(path):
    made = Collector()
    made.into(path)
    yield made
    made.close()


def test_lines_are_the_hosts_with_four_keys_more(collector, path):
    assert collector.take("attic", [line(0, 7, content=b'{"frame":0,"annotations":[{"label":"cat"}]}')]).late == []
    assert path.read_text() == (
        '{"camera":"gate","model":"faces","host":"attic","epoch":7,"frame":0,"annotations":[{"label":"cat"}]}\n'
    )


@pytest.mark.parametrize(
    ("content", "rest"),
    [
        (b"{}", {}),
        (b'{"model":"other","host":1,"frame":3}', {"frame": 3}),
        (b'{\n "frame": 3\n}', {"frame": 3}),
        (b' {"frame":3}', {"frame": 3}),
        (b"[1, 2]", {"frame": 5, "line": [1, 2]}),
        (b'{"label":"say \\"model\\": x"}', {"label": 'say "model": x'}),
        ('{"label":"Tür 7"}'.encode(), {"label": "Tür 7"}),
    ],
)
def test_whatever_json_it_is_a_line_is_one_object(collector, path, content, rest):
    collector.take("attic", [line(5, content=content), line(6)])
    first, second = lines_of(path)
    assert first == {"camera": "gate", "model": "faces", "host": "attic", "epoch": 1} | rest
    assert second["annotations"] == []


def test_what_is_sent_again_is_written_once(collector, path):
    report = [line(0), line(1), line(0, model="plates"), line(2)]
    assert len(collector.take("attic", report).new) == 4
    again = collector.take("attic", [*report, line(3)])
    assert (len(again.new), again.late) == (1, [])
    assert [(found["model"], found["epoch"]) for found in lines_of(path)].count(("faces", 1)) == 4


def test_no_older_epoch_comes_after_a_newer_one(collector, path):
    collector.take("attic", [line(0, 1), line(0, 1, model="plates")])
    collector.take("barn", [line(0, 2)])
    found = collector.take("attic", [line(1, 1), line(1, 1, model="plates")])  # of a camera that barn has now
    assert (len(found.new), len(found.late)) == (0, 2)
    collector.take("barn", [line(0, 3, model="plates")])
    assert len(collector.take("barn", [line(1, 2)]).new) == 1  # of the same host, for another model
    assert [found["host"] for found in lines_of(path)] == ["attic", "attic", "barn", "barn", "barn"]


@pytest.mark.parametrize("room", [0, 1, 60, 100])
def test_on_a_full_disk_nothing_is_taken_and_no_line_is_cut(collector, path, room):
    collector.take("attic", [line(0)])
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
    try:
        assert collector.take("attic", [line(1), line(2)]) is None
        assert collector.take("attic", [line(1), line(2)]) is None
        assert collector.take("attic", []).new == []
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size
    assert collector.problem.startswith(f"`results` {path}: File too large; hosts keep their lines")
    assert len(collector.take("attic", [line(1), line(2)]).new) == 2
    assert collector.problem == ""
    assert len(lines_of(path)) == 3


def test_after_a_kill_no_line_comes_twice(collector, path):
    collector.take("attic", [line(frame) for frame in range(5)])
    with path.open("ab") as file:
        file.write(b'{"camera":"gate","model":"fa')  # what a crash left
    later = killed(collector)
    later.into(path)
    assert [found.frame for found in later.take("attic", [line(frame) for frame in range(3, 7)]).new] == [5, 6]
    assert len(lines_of(path)) == 7
    later.close()


def test_what_was_taken_is_safe_once_the_disk_has_it(collector, path):
    """By an emulated power failure, after which a disk has only what was synced."""
    with emulated_disk() as disk:
        collector.into(None)
        collector.into(path)
        collector.take("attic", [line(0), line(1)], "", "2")
        assert (collector.taken, collector.safe) == ({"attic": "2"}, {})
        assert disk.left(path.parent)["all.jsonl"] == b""
        collector.sync()
        assert collector.safe == {"attic": "2"}
        assert disk.left(path.parent)["all.jsonl"] == path.read_bytes()
        collector.take("attic", [line(2)], "2", "3")
        later = killed(collector)
        disk.fail(path.parent)
        later.into(path)
        assert later.take("attic", [line(3)], "3", "4") is None  # line 2 is missing
        assert len(later.take("attic", [line(2), line(3)], "", "4").new) == 2
        assert [found["frame"] for found in lines_of(path)] == [0, 1, 2, 3]
        later.close()


def test_lines_may_be_taken_while_the_disk_is_waited_for(collector):
    collector.take("attic", [line(0)], "", "1")

    @contextmanager
    def waiting():
        collector.take("attic", [line(1)], "1", "2")
        yield

    collector.sync(waiting)
    assert (collector.taken, collector.safe) == ({"attic": "2"}, {"attic": "1"})
    collector.sync()
    assert collector.safe == {"attic": "2"}


def test_what_a_disk_did_not_keep_is_taken_back_and_sent_again(collector, path, monkeypatch):
    collector.take("attic", [line(0)], "", "1")
    collector.sync()
    collector.take("attic", [line(1)], "1", "2")
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", raising(OSError(errno.EIO, "Input/output error")))
        collector.sync()
    assert "Input/output error; hosts keep their lines" in collector.problem
    assert (collector.taken, collector.safe) == ({"attic": "1"}, {"attic": "1"})
    assert [found["frame"] for found in lines_of(path)] == [0]
    assert collector.take("attic", [line(1), line(2)], "1", "3") is None
    collector.look()
    assert collector.take("attic", [line(2)], "2", "3") is None
    assert [found.frame for found in collector.take("attic", [line(1), line(2)], "1", "3").new] == [1, 2]
    assert collector.problem == ""
    collector.sync()
    assert collector.safe == {"attic": "3"}


def test_a_disk_that_fails_altogether_is_tried_again(collector, path, monkeypatch):
    """It gives an error for every call, as a file system that was shut down does."""
    collector.take("attic", [line(0)], "", "1")
    collector.sync()
    collector.take("attic", [line(1)], "1", "2")
    with monkeypatch.context() as patch:
        for name in ("os.fsync", "os.ftruncate", "os.truncate", "tvm_pipeline_hosts.fleet.collector._lines"):
            patch.setattr(name, raising(OSError(errno.EIO, "Input/output error")))
        collector.sync()
        collector.look()
        assert "Input/output error" in collector.problem
        assert collector.take("attic", [line(1)], "1", "2") is None
    collector.look()
    assert collector.problem == ""
    collector.take("attic", [line(1)], "1", "2")
    assert [found["frame"] for found in lines_of(path)] == [0, 1]


def raising(error):
    def call(*_):
        raise error

    return call


def test_zeros_of_a_power_failure_and_what_follows_are_cut_off(collector, path):
    """A file system may keep a later block of lines that were not synced, and not an earlier one."""
    collector.take("attic", [line(0)], "", "1")
    whole = path.read_bytes()
    for frame in (1, 2):
        collector.take("attic", [line(frame)])
    later = killed(collector)
    path.write_bytes(path.read_bytes().replace(b'"frame":1', b"\0" * 9))
    later.into(path)
    assert path.read_bytes() == whole
    assert [found.frame for found in later.take("attic", [line(0), line(1), line(2)]).new] == [1, 2]
    later.close()


@pytest.mark.parametrize("left", [b"\0" * 9, b'{"camera":"ga' + b"\0" * 5000])
def test_zeros_in_the_place_of_the_last_lines_are_cut_off(collector, path, left):
    """As ext4 leaves them of lines that were not synced: it had the new length of the file, and not the content."""
    collector.take("attic", [line(0)])
    whole, later = path.read_bytes(), killed(collector)
    path.write_bytes(whole + left)
    later.into(path)
    assert path.read_bytes() == whole
    later.close()


def test_the_index_knows_what_the_end_of_the_file_does_not(monkeypatch, collector, path):
    monkeypatch.setattr(collecting, "INDEX_EVERY", 500)
    monkeypatch.setattr(collecting, "TAIL", 500)
    collector.take("attic", [line(9)])
    for frame in range(20):
        collector.take("barn", [line(frame, camera="yard")])
        collector.sync()
    later = killed(collector)
    later.into(path)
    assert later.take("attic", [line(9)]).new == []
    assert later.take("barn", [line(19, camera="yard")]).new == []
    later.close()


@pytest.mark.parametrize("content", [b"", b"{", b'{"end":"x","last":[]}', b'{"end":99999999,"last":[]}', b'{"\xff":1}'])
def test_without_a_good_index_the_file_is_read(collector, path, content):
    collector.take("attic", [line(0), line(1)])
    later = killed(collector)
    path.with_name(".all.jsonl.index").write_bytes(content)
    later.into(path)
    assert [found.frame for found in later.take("attic", [line(1), line(2)]).new] == [2]
    later.close()


def test_lines_that_are_not_its_own_are_left_alone(path):
    path.write_bytes(FOREIGN)
    collector = Collector()
    collector.into(path)
    collector.take("attic", [line(0)])
    collector.close()
    assert path.read_bytes().startswith(FOREIGN + b'{"camera":"gate"')


def test_a_rotated_file_is_begun_anew_and_nothing_comes_twice(collector, path):
    collector.take("attic", [line(0)])
    path.rename(path.with_name("old.jsonl"))
    collector.look()
    assert [found.frame for found in collector.take("attic", [line(0), line(1)]).new] == [1]
    assert len(lines_of(path)) == 1
    assert len(lines_of(path.with_name("old.jsonl"))) == 1


def test_a_file_has_one_collector(collector, path):
    with pytest.raises(OptionError, match=r"`results` .*all\.jsonl: another process writes it"):
        Collector().into(path)


def test_a_place_that_cannot_be_written(tmp_path, collector, path):
    with pytest.raises(OptionError, match="`results`"):
        collector.into(tmp_path / "missing" / "all.jsonl")
    assert len(collector.take("attic", [line(0)]).new) == 1  # it goes on with the other one
    later = Collector()
    later.resume(tmp_path / "missing" / "all.jsonl")
    assert later.take("attic", [line(0)]) is None
    assert "missing" in later.problem
    (tmp_path / "missing").mkdir()
    later.look()
    assert later.problem == ""
    assert len(later.take("attic", [line(0)]).new) == 1
    later.close()


def test_without_a_file_it_still_tells_what_is_new():
    collector = Collector()
    collector.into(None)
    assert len(collector.take("attic", [line(0)]).new) == 1
    assert collector.take("attic", [line(0)]).new == []
    assert collector.written == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_device_that_is_always_full():
    collector = Collector()
    collector.into(Path("/dev/full"))
    assert collector.take("attic", [line(0)]) is None
    assert "No space left on device" in collector.problem
    collector.close()
