"""Sources that come and go while frames are taken; sources that open when they can; frames by the clock."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.video.cameras import QUICK, explained, film, hanging_after, live, numbers, picture
from tests.plugins.video.test_sources import FRAMES
from tests.support.examples import examples
from tests.support.waiting import until
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import Frame, LiveSet, LiveSource, Source, parse_policy
from tvm_pipeline_video.decoding import Picture


@pytest.mark.parametrize(("fps", "every"), [("5", 5), ("12.5", 2), ("25", 1), ("100", 1)])
def test_a_file_is_thinned_by_its_own_times(clip: Path, fps: str, every: int) -> None:
    with LiveSource(str(clip), parse_policy(f"fps={fps}")) as source:
        assert [frame.index for frame in source] == list(range(0, FRAMES, every))
        assert explained(source) == +Counter(fps=FRAMES - len(range(0, FRAMES, every)))


def test_a_rate_that_divides_no_other_is_kept_in_the_mean() -> None:
    with LiveSource("synthetic:8x8@25:250", parse_policy("fps=10")) as source:
        assert [frame.index for frame in source][:5] == [0, 3, 5, 8, 10]
        assert source.statistics().delivered == 100


@examples(50, deadline=None)
@given(gaps=st.lists(st.floats(0, 0.5), min_size=1, max_size=60), fps=st.sampled_from([2, 5, 10]))
def test_never_more_a_second_than_asked_for_and_all_where_they_are_fewer(gaps: list[float], fps: int) -> None:
    times = list(itertools.accumulate(gaps))

    def pictures() -> Iterator[Picture]:
        yield from (picture(0)._replace(time_s=t) for t in times)

    opened = Source("cam", pictures(), fps=None, frames=None, limit=None)
    with LiveSource("cam", parse_policy(f"fps={fps}"), open=lambda _: opened) as source:
        kept = [frame.time_s for frame in source]
    assert all(sum(begin <= t < begin + 1 for t in kept) <= fps + 1 for begin in kept)
    if all(gap >= 1 / fps for gap in gaps):
        assert len(kept) == len(times)
    # Wherever nothing was taken for two periods, nothing came either.
    for before, after in itertools.pairwise(kept):
        assert not any(before + 2 / fps < t < after - 1e-9 for t in times)


def test_of_a_camera_the_newest_waits_and_both_reasons_are_counted() -> None:
    with live(film(200, 0.001), policy="fps=50", reconnect=None) as source:
        while not source.statistics().dropped.get("latest"):
            time.sleep(0.001)
        assert source.statistics().waiting <= 1
        list(source)
        assert explained(source).keys() >= {"fps", "latest"}


@pytest.mark.parametrize("text", ["fps=0", "fps=-1", "fps", "block,fps=2", "fps=1,fps=2", "fps=inf"])
def test_a_rate_that_cannot_be(text: str) -> None:
    with pytest.raises(OptionError, match=r"`policy`.*(fps=N|choose one|keep one)"):
        parse_policy(text)


def test_another_policy_from_now_on() -> None:
    with live(film(), policy="block") as source:
        frames = iter(source)
        first = [next(frames).index for _ in range(20)]
        assert first == list(range(20))
        source.set_policy(parse_policy("every=10"))
        later = [next(frames).index for _ in range(30)][15:]  # behind those that waited
    assert all(index % 10 == 0 for index in later)


def test_a_file_is_read_by_the_clock_where_that_is_asked_for() -> None:
    with LiveSource("synthetic:8x8@100:12", paced=True) as source:
        frames = list(source)
    assert [frame.index for frame in frames] == list(range(12))
    for frame in frames:
        assert frame.captured_s - frames[0].captured_s >= frame.time_s - 1e-6


# Opened when it can be


class Heard:
    """What a source lets one hear."""

    def __init__(self) -> None:
        self.news: list[tuple[str, str]] = []

    def __call__(self, kind: str, problem: str, seconds: float) -> None:
        self.news.append((kind, problem))


def test_one_that_is_not_there_is_opened_when_it_comes(clip: Path, tmp_path: Path) -> None:
    """A file, too, of which nobody knows before that it has an end."""
    heard, path = Heard(), tmp_path / "late.mp4"
    with LiveSource(str(path), patient=True, reconnect=QUICK, hear=heard, tag="t") as source:
        assert until(lambda: len(heard.news) > 2)
        assert not source.opened
        assert "there is no file or folder" in source.problem
        path.write_bytes(clip.read_bytes())
        frames = list(source)
        assert [(frame.index, frame.tag) for frame in frames] == [(index, "t") for index in range(FRAMES)]
        assert (source.failure, source.problem, source.ended) == (None, "", True)
    assert {kind for kind, _ in heard.news[:-1]} == {"failed"}
    assert heard.news[-1] == ("opened", "")


def test_one_that_hangs_or_cannot_be_holds_up_nobody() -> None:
    over = threading.Event()

    def hangs(spec: str) -> Source:
        over.wait(30)
        raise OSError("too late")

    try:
        began_s = time.monotonic()
        with LiveSource("cam", patient=True, open=hangs, stall_s=0.05, reconnect=QUICK) as source:
            assert until(lambda: "gave no frame for" in source.problem)
            assert until(lambda: "while 3 attempts to read it hang" in source.problem)
            assert time.monotonic() - began_s < 29
            hanging = [thread for thread in threading.enumerate() if thread.name == "reader of cam"]
            assert len(hanging) <= 4
    finally:
        over.set()
    with (
        LiveSource("synthetic:wide", patient=True, reconnect=QUICK) as never,
        pytest.raises(OptionError, match="the form is synthetic:WIDTH"),
    ):
        list(never)


# A set that changes


def _until_seen(frames: Iterator[Frame], sources: set[str]) -> list[Frame]:
    """Return at least 20 frames, the last of them when each source has given one: threads decide which is first."""
    taken: list[Frame] = []
    while len(taken) < 20 or {frame.source for frame in taken} < sources:
        taken.append(next(frames))
    assert {frame.source for frame in taken} == sources
    return taken


def test_those_that_come_and_go_leave_the_others_whole() -> None:
    with live(film(), spec="stays") as stays, live(film(), spec="goes") as goes, live(film(), spec="comes") as comes:
        group = LiveSet([stays, goes])
        frames = iter(group)
        taken = _until_seen(frames, {"stays", "goes"})
        group.remove(goes)
        after = [next(frames) for _ in range(20)]
        group.add(comes)
        last = _until_seen(frames, {"stays", "comes"})
        group.close()
        assert list(frames) == []
    assert {frame.source for frame in after} == {"stays"}
    staid = numbers([frame for frame in (*taken, *after, *last) if frame.source == "stays"])
    assert staid == list(range(len(staid)))
    assert goes.next_index == sum(frame.source == "goes" for frame in taken)


@pytest.mark.thorough
def test_without_a_source_it_waits() -> None:
    over: list[LiveSource] = []
    with live(film(3), spec="late", reconnect=None) as source, hanging_after(2) as silent, live(silent) as other:
        group = LiveSet(over=over.append)
        found: list[str] = []
        taker = threading.Thread(target=lambda: found.extend(frame.source for frame in group))
        taker.start()
        group.add(source)
        assert until(lambda: over == [source])
        assert found == ["late"] * 3
        group.add(other)
        assert until(lambda: found.count("cam") == 2)
        assert taker.is_alive()
        group.close()
        taker.join(30)
        assert not taker.is_alive()
