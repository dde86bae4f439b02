"""Lines of results that services have written: each once to the coordinator, whatever ends, starts or is lost."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.examples import examples
from tests.support.power_failure import emulated_disk
from tvm_pipeline_hosts.fleet import host_results
from tvm_pipeline_hosts.fleet.collector import Collector
from tvm_pipeline_hosts.fleet.host_results import HostResults
from tvm_pipeline_video.service.log_files import segment_numbers, segment_path


class Writer:
    """A service that writes lines, as tvm_pipeline_video/service/result_files.py does, in a folder of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name / "results.jsonl"
        self.path.parent.mkdir()
        self.frames: dict[str, int] = {}
        self.lines = 0
        self.begin()

    def begin(self) -> None:
        """Begin another segment; a process that was started again cuts off what a crash left of a line."""
        numbers = segment_numbers(self.path)
        if numbers:
            last = segment_path(self.path, numbers[-1])
            content = last.read_bytes()
            os.truncate(last, content.rfind(b"\n") + 1)
        self.segment = segment_path(self.path, max(numbers, default=0) + 1)
        self.segment.touch()

    def restart(self) -> None:
        self.frames = {}
        self.begin()

    def write(self, tag: str, more: str = "", end: str = "\n") -> None:
        frame = self.frames.get(tag, 0)
        self.add(json.dumps({"frame": frame, "tag": tag, "number": self.lines, "more": more}) + end)
        if end:
            self.frames[tag] = frame + 1
            self.lines += 1

    def add(self, text: str) -> None:
        with self.segment.open("a") as file:
            file.write(text)


def reader(folder: Path, *names: str) -> HostResults:
    results = HostResults(folder)
    results.recall()
    for name in names:
        results.models[name] = "m"
    return results


def taken(results: HostResults, upto: str) -> bool:
    """Have a head take the lines up to there, and its disk have them."""
    return results.acknowledge(upto, upto)


def numbers(lines) -> list[int]:
    return [msgspec.json.decode(line.line)["number"] for line in lines]


def test_whole_lines_go_out_again_and_again_until_they_are_acknowledged(tmp_path):
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for _ in range(3):
        writer.write("gate@7")
    writer.write("gate@7", end="")
    batch = results.batch()
    assert [(line.camera, line.model, line.epoch, line.frame) for line in batch.lines] == [
        ("gate", "m", 7, frame) for frame in range(3)
    ]
    writer.add("\n")
    assert results.batch() is batch
    assert not results.acknowledge("", "")  # it took nothing yet
    assert results.batch() is batch
    assert taken(results, batch.upto)
    assert [line.frame for line in results.batch().lines] == [3]


def test_the_next_agent_goes_on_where_the_last_one_was_acknowledged(tmp_path):
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for _ in range(3):
        writer.write("gate@7")
    taken(results, results.batch().upto)
    writer.restart()
    writer.write("gate@7")
    taken(results, results.batch().upto)
    results.save(at_once=True)
    writer.write("gate@7")
    assert [line.frame for line in results.batch().lines] == [4]
    again = reader(tmp_path, "one").batch()
    assert [(line.frame, msgspec.json.decode(line.line)["frame"]) for line in again.lines] == [(4, 4)]
    for content in (b"half", b'{"\xff": {}}', b'{"one": {"offset": -1}}', b'{"one": {"frames": {"gate@7": [1]}}}'):
        (tmp_path / "cursor.json").write_bytes(content)
        assert [line.frame for line in reader(tmp_path, "one").batch().lines] == [0, 1, 2, 3, 4]


def test_numbers_of_a_process_that_began_anew_grow(tmp_path):
    """They go on behind the last one; those that are greater of themselves, since frames were dropped, stay."""
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for first in (0, 0, 9, 2):
        writer.restart()
        writer.frames["gate@7"] = first
        writer.write("gate@7")
        writer.write("gate@7")
    assert [line.frame for line in results.batch().lines] == [0, 1, 2, 3, 11, 12, 15, 16]


def test_a_batch_is_bounded_and_no_service_waits_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr(host_results, "MOST_LINES", 10)
    writers, results = [Writer(tmp_path, name) for name in ("one", "two")], reader(tmp_path, "one", "two")
    for writer in writers:
        for _ in range(25):
            writer.write(f"{writer.path.parent.name}@1")
    firsts = []
    while (batch := results.batch()).lines:
        assert len(batch.lines) <= 10
        firsts.append(batch.lines[0].camera)
        taken(results, batch.upto)
    assert firsts[:2] in (["one", "two"], ["two", "one"])
    assert results.is_taken("one")
    assert results.is_taken("two")


def test_what_waits_is_about_the_lines_behind_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(host_results, "MOST_LINES", 10)
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for _ in range(2000):
        writer.write("gate@1", "x" * 30)
    while results.batch().lines and writer.lines - results.batch().lines[-1].frame > 500:
        taken(results, results.batch().upto)
    assert results.waiting(results.batch()) == pytest.approx(500, rel=0.1)


def test_long_lines_and_lines_that_are_none(tmp_path, monkeypatch):
    monkeypatch.setattr(host_results, "MOST_BYTES", 1000)
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    writer.write("gate@1")
    writer.write("gate@1", "x" * 5000)
    for text in ("no json\n", "[]\n", '{"frame": 3}\n', '{"frame": 3, "tag": "gate"}\n', "\0\0\0\n"):
        writer.add(text)
    with writer.segment.open("ab") as file:
        file.write(b'{"frame": 3, "tag": "gate@1", "label": "\xff"}\n')
    writer.write("gate@1")
    found = []
    while (batch := results.batch()).lines or not results.is_taken("one"):
        found += numbers(batch.lines)
        taken(results, batch.upto)
    assert found == [0, 1, 2]
    assert results.damaged == 6


def test_a_line_without_an_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(host_results, "LONGEST_LINE", 10_000)
    monkeypatch.setattr(host_results, "MOST_BYTES", 1000)
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    writer.add("x" * 30_000 + "\n")
    writer.write("gate@1")
    found = []
    for _ in range(10):
        batch = results.batch()
        found += numbers(batch.lines)
        taken(results, batch.upto)
    assert found == [0]
    assert results.damaged


def test_segments_that_are_safe_go_and_the_last_one_stays(tmp_path):
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for _ in range(4):
        writer.write("gate@1")
        writer.begin()
    writer.write("gate@1")
    results.clean(0.0, 0)
    assert segment_numbers(writer.path) == [1, 2, 3, 4, 5]
    taken(results, results.batch().upto)
    results.clean(0.0, 0)
    assert segment_numbers(writer.path) == [1, 2, 3, 4, 5]
    results.save(at_once=True)
    long_ago = time.time() - 100
    os.utime(segment_path(writer.path, 1), (long_ago, long_ago))
    results.clean(50.0, 1 << 20)
    assert segment_numbers(writer.path) == [2, 3, 4, 5]
    results.clean(50.0, segment_path(writer.path, 4).stat().st_size)
    assert segment_numbers(writer.path) == [4, 5]
    results.clean(0.0, 0)
    assert segment_numbers(writer.path) == [5]
    writer.begin()
    writer.write("gate@1")
    assert [line.frame for line in results.batch().lines] == [5]


def test_a_head_that_lacks_what_was_taken_gets_all_that_is_not_safe_again(tmp_path):
    """Another coordinator, or a disk that failed: lines that only its memory had are sent again, and no others."""
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    places = [""]
    for _ in range(4):
        writer.write("gate@7")
        assert results.batch().since == places[-1]
        places.append(results.batch().upto)
        assert results.acknowledge(places[-1], "")
    results.acknowledge(results.batch().upto, places[2])
    results.save(at_once=True)
    writer.write("gate@7")
    assert [line.frame for line in results.batch().lines] == [4]
    assert not results.acknowledge("", "")  # a new coordinator has not taken anything
    batch = results.batch()
    assert (batch.since, [line.frame for line in batch.lines]) == ("", [2, 3, 4])
    assert [line.frame for line in reader(tmp_path, "one").batch().lines] == [2, 3, 4]
    assert not results.is_taken("one")
    results.acknowledge(batch.upto, batch.upto)
    assert results.is_taken("one")


def test_a_disk_that_hangs_lets_nothing_grow(tmp_path, monkeypatch):
    """Of ever more batches that are not safe, the ends of the last ones are remembered, and they become safe."""
    monkeypatch.setattr(host_results, "MOST_AHEAD", 3)
    writer, results = Writer(tmp_path, "one"), reader(tmp_path, "one")
    for _ in range(10):
        writer.write("gate@7")
        upto = results.batch().upto
        results.acknowledge(upto, "")
    assert len(results._ahead) == 3
    results.batch()
    results.acknowledge(upto, upto)
    assert results.is_taken("one")


class Lines(RuleBasedStateMachine):
    """Two services that write, die and begin segments; agents that die; beats and replies that are lost; and a head,
    with its collector, that dies or whose power fails, by an emulated disk which keeps only what was synced.
    """

    def __init__(self) -> None:
        super().__init__()
        self.open = ExitStack()
        self.folder = Path(self.open.enter_context(tempfile.TemporaryDirectory()))
        self.disk = self.open.enter_context(emulated_disk())
        self.writers = [Writer(self.folder, name) for name in ("one", "two")]
        self.epochs = [1, 1]
        self.results = reader(self.folder, "one", "two")
        self.head = self.folder / "head"
        self.head.mkdir()
        self.collector = Collector()
        self.collector.into(self.head / "all.jsonl")

    def teardown(self) -> None:
        self.collector.close()
        self.open.close()

    @rule(which=st.integers(0, 1), newer=st.booleans(), count=st.integers(1, 4))
    def write(self, which: int, newer: bool, count: int) -> None:
        """Epochs only grow."""
        writer = self.writers[which]
        self.epochs[which] += newer
        for _ in range(count):
            writer.write(f"{writer.path.parent.name}@{self.epochs[which]}")

    @rule(which=st.integers(0, 1), half=st.booleans())
    def dies(self, which: int, half: bool) -> None:
        writer = self.writers[which]
        if half:
            writer.write(f"{writer.path.parent.name}@{self.epochs[which]}", end="")
        writer.restart()

    @rule(which=st.integers(0, 1))
    def segment(self, which: int) -> None:
        self.writers[which].begin()

    @rule(comes=st.booleans(), returns=st.booleans())
    def beat(self, comes: bool, returns: bool) -> None:
        batch = self.results.batch()
        if not comes:
            return
        self.collector.take("attic", batch.lines, batch.since, batch.upto)
        if returns:
            taken, safe = (places.get("attic", "") for places in (self.collector.taken, self.collector.safe))
            self.results.acknowledge(taken, safe)

    @rule()
    def disk_has_them(self) -> None:
        self.collector.sync()

    @rule(power=st.booleans(), half=st.booleans())
    def head_dies(self, power: bool, half: bool) -> None:
        if half:
            with (self.head / "all.jsonl").open("ab") as file:
                file.write(b'{"camera":"one","model":"m","fra')
        self.collector._open.close()
        if power:
            self.disk.fail(self.head)
        self.collector = Collector()
        self.collector.into(self.head / "all.jsonl")

    @rule(saved=st.booleans())
    def agent_dies(self, saved: bool) -> None:
        if saved:
            self.results.save(at_once=True)
        self.results = reader(self.folder, "one", "two")

    @rule()
    def cleaned(self) -> None:
        self.results.clean(0.0, 0)

    def taken(self) -> dict[str, list[int]]:
        """Return the numbers of the lines in the head's file."""
        found: dict[str, list[int]] = {"one": [], "two": []}
        for text in (self.head / "all.jsonl").read_text().splitlines():
            line = json.loads(text)
            found[line["camera"]].append(line["number"])
        return found

    @invariant()
    def once_and_in_order(self) -> None:
        for found in self.taken().values():
            assert found == list(range(len(found)))

    @rule()
    def all_come(self) -> None:
        while True:
            lines = self.results.batch().lines
            self.beat(comes=True, returns=True)
            if not lines and not self.results.batch().lines:
                break
        found = self.taken()
        for writer in self.writers:
            assert len(found[writer.path.parent.name]) == writer.lines


TestLines = Lines.TestCase
TestLines.settings = examples(25, stateful_step_count=25, deadline=None)
