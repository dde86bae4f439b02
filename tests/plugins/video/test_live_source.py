"""Live sources: what is let go is counted, and what breaks or stalls comes back."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.video.cameras import explained, film, hanging_after, live, numbers, picture
from tests.plugins.video.test_sources import FRAMES, middle_of_packet
from tests.support.examples import examples
from tvm_pipeline.errors import OptionError, RunError
from tvm_pipeline_video import LiveSource, Policy, Reconnect, open_source, parse_policy
from tvm_pipeline_video.decoding import Picture
from tvm_pipeline_video.errors import VideoError
from tvm_pipeline_video.live_source import MOST_WAITING

# Policies


def test_policies_are_read_from_text() -> None:
    assert parse_policy("block") == Policy()
    assert parse_policy("latest") == Policy(latest=True)
    assert parse_policy("every=3") == Policy(every=3)
    assert parse_policy("max-age=0.2") == Policy(max_age_s=0.2)
    assert parse_policy(" every=2, latest,max-age=.5") == Policy(2, True, 0.5)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "it takes block, latest, every=N, max-age=SECONDS"),
        ("newest", "cannot use 'newest'"),
        ("every", "cannot use 'every'"),
        ("every=0", "cannot use 'every=0'"),
        ("every=1.5", "cannot use"),
        ("every=-2", "cannot use"),
        ("max-age=0", "cannot use"),
        ("max-age=0.0", "cannot use"),
        ("max-age=inf", "cannot use"),
        ("latest=2", "cannot use"),
        ("latest,", "cannot use 'nothing'"),
        ("every=2,every=3", "every is given twice"),
        ("block,latest", "choose one"),
        ("max-age=1,block", "choose one"),
    ],
)
def test_a_policy_that_cannot_be_names_its_option(text: str, says: str) -> None:
    with pytest.raises(OptionError, match="`policy`") as caught:
        parse_policy(text)
    assert says in str(caught.value)


def test_block_keeps_every_frame_of_a_file_however_slow_the_consumer(clip: Path) -> None:
    with LiveSource(str(clip)) as source, open_source(str(clip)) as same:
        assert (source.name, source.fps) == (str(clip), 25)
        for frame, other in zip(source, same, strict=True):
            time.sleep(0.002)
            assert (frame.index, frame.time_s, frame.source) == (other.index, other.time_s, str(clip))
            assert np.array_equal(frame.image, other.image)
        assert source.failure is None
        assert explained(source) == {}
        assert source.statistics().delivered == FRAMES


def test_every_third_frame_is_that(clip: Path) -> None:
    with LiveSource(str(clip), parse_policy("every=3")) as source:
        assert [frame.index for frame in source] == list(range(0, FRAMES, 3))
        assert explained(source) == {"every": FRAMES - len(range(0, FRAMES, 3))}


def test_latest_gives_a_slow_consumer_the_newest() -> None:
    with live(film(period_s=0.002), policy="latest") as source:
        frames = []
        for frame in itertools.islice(source, 10):
            frames.append(frame)
            assert frame.age_s < 1
            time.sleep(0.03)
        counts = source.statistics()
    indices = [frame.index for frame in frames]
    assert indices == sorted(set(indices))
    assert counts.waiting <= 1
    assert set(counts.dropped) == {"latest"}
    assert counts.dropped["latest"] > 10
    assert counts.age_p99_s is not None
    assert counts.age_p99_s < 1
    assert set(explained(source)) <= {"latest", "closed"}


@pytest.mark.parametrize("reason", ["max-age", "late"])
def test_no_frame_is_given_out_that_is_too_old(reason: str) -> None:
    with live(film(200, 0.002), policy="max-age=0.05" if reason == "max-age" else "block", reconnect=None) as source:
        if reason == "late":
            source.late_age_s = lambda: 0.05
        ages = []
        for frame in source:
            ages.append(frame.age_s)
            time.sleep(0.02)
        time.sleep(0.1)
        counts = source.statistics()
    assert counts.age_p99_s is not None
    assert counts.age_p99_s <= 0.05  # when it was handed over
    assert counts.read == 200
    assert set(counts.dropped) <= {reason, "full"}
    assert 0 < counts.delivered < 200
    assert explained(source) == Counter(counts.dropped)


def test_a_reader_that_waits_for_room_has_it_when_all_that_waits_is_too_old() -> None:
    with live(film(MOST_WAITING + 2), policy="block", reconnect=None) as source:
        while source.statistics().read < MOST_WAITING:
            time.sleep(0.001)
        source.late_age_s = lambda: 0.0
        assert numbers(list(source)) == []
        assert explained(source) == {"late": MOST_WAITING + 2}


def test_frames_that_waited_too_long_are_dropped_for_their_age() -> None:
    released = threading.Event()

    def pictures() -> Iterator[Picture]:
        yield from film(3)()
        released.wait(30)
        yield picture(3)

    with live(pictures, policy="max-age=0.2", reconnect=None) as source:
        while source.statistics().waiting < 3:
            time.sleep(0.001)
        time.sleep(0.3)
        released.set()
        assert numbers(list(source)) == [3]
        assert explained(source) == {"max-age": 3}


@examples(25, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=5), every=st.integers(1, 4))
def test_over_connections_nothing_is_lost_repeated_or_out_of_order(lengths: list[int], every: int) -> None:
    starts = [0, *itertools.accumulate(lengths)]
    connections = [film(n, number=start) for n, start in zip(lengths, starts, strict=False)]
    frames = []
    once = Reconnect(0.001, 0.001, attempts=1)
    with (
        live(*connections, policy=f"every={every}", reconnect=once) as source,
        pytest.raises(VideoError, match=r"cam did not come back in 1 attempts; the last: there is no camera cam"),
    ):
        frames.extend(source)
    wanted = list(range(0, sum(lengths), every))
    assert numbers(frames) == wanted
    assert [frame.index for frame in frames] == wanted
    times = [frame.time_s for frame in frames]
    assert times == sorted(times)
    assert source.statistics().reconnects == len(lengths)
    assert sum(explained(source).values()) == sum(lengths) - len(wanted)


def test_frames_that_come_and_do_not_pass_are_a_problem_that_is_told() -> None:
    """The clock of this camera runs a thousand times too slowly, so that fps=10 takes all its frames for too many."""

    def pictures() -> Iterator[Picture]:
        for index in itertools.count():
            yield picture(index)._replace(time_s=index * 1e-6)

    with live(pictures, policy="fps=10", stall_s=0.1) as source:
        assert next(iter(source)).index == 0
        deadline = time.monotonic() + 10
        while not source.problem and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "cam sends frames, and fps=10 has let none pass for 0.1 s" in source.problem
        assert source.statistics().problem == source.problem
        source.set_policy(parse_policy("latest"))
        assert next(iter(source)).index > 0
        assert source.problem == ""


# Ends, stalls and returns


def test_a_file_that_breaks_gives_its_sound_frames_and_is_not_opened_again(clip: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.ts"
    cut.write_bytes(clip.read_bytes()[: middle_of_packet(clip, 20)])
    frames = []
    with LiveSource(str(cut)) as source, pytest.raises(VideoError, match="breaks off"):
        frames.extend(source)
    assert 17 <= len(frames) <= 20
    assert source.statistics().reconnects == 0


def test_what_cannot_be_opened_at_first_says_so_as_ever(tmp_path: Path) -> None:
    with pytest.raises(VideoError, match="no file or folder"):
        LiveSource(str(tmp_path / "none.mp4"))
    with pytest.raises(OptionError, match=r"ftp:// is not supported"):
        LiveSource("ftp://127.0.0.1/a.ts")
    with pytest.raises(OptionError, match="stall_s is 0"):
        LiveSource("synthetic", stall_s=0)
    for wrong in ({"first_s": 0.0}, {"first_s": 9.0, "longest_s": 1.0}, {"attempts": 0}):
        with pytest.raises(OptionError, match="first_s <= longest_s"):
            Reconnect(**wrong)  # type: ignore[arg-type]


def test_a_camera_that_never_answers_is_given_up_at_once_on_opening() -> None:
    with hanging_after(0) as never, pytest.raises(VideoError, match=r"cam gave no frame for 0\.3 s; check"):
        live(never, stall_s=0.1)


def test_the_back_off_doubles_to_its_limit() -> None:
    assert list(itertools.islice(Reconnect(0.5, 5).waits(), 6)) == [0.5, 1, 2, 4, 5, 5]
    assert list(Reconnect(1, 30, attempts=3).waits()) == [1, 2, 4]


def test_a_camera_that_dies_is_opened_again_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    broken = film(5, error="cam: the cable was pulled")
    with caplog.at_level(logging.WARNING), live(broken, film(number=5)) as source:
        frames = list(itertools.islice(source, 12))
        assert source.statistics().reconnects == 1
    assert numbers(frames) == list(range(12))
    assert "the cable was pulled; opening it again in 0.01 s" in caplog.text


def test_a_camera_that_stalls_is_left_and_opened_again() -> None:
    with hanging_after(4) as stalls, live(stalls, stalls, film(number=8), stall_s=0.2) as source:
        frames = list(itertools.islice(source, 20))
        assert source.statistics().reconnects == 2
    assert numbers(frames)[8:] == list(range(8, 20))
    assert [frame.index for frame in frames] == list(range(20))
    assert frames[8].time_s >= frames[4].time_s + 0.2  # time goes on over the stall
    explained(source)


def test_what_comes_from_a_connection_that_was_left_is_not_given_out() -> None:
    with hanging_after(1) as stalls, live(stalls, film(3, number=1), stall_s=0.1) as source:
        assert numbers(list(itertools.islice(source, 4))) == [0, 1, 2, 3]
    deadline = time.monotonic() + 10
    while not (explained(source)["closed"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert explained(source) == {"closed": 1}


def test_attempts_that_hang_do_not_pile_up() -> None:
    with hanging_after(1) as stalls:
        source = live(*[stalls] * 50, stall_s=0.05, reconnect=Reconnect(0.01, 0.02, attempts=10))
        with source, pytest.raises(VideoError, match="not opened again while 3 attempts to read it hang"):
            list(source)
        assert source.statistics().delivered == 3
        assert sum(thread.name == "reader of cam" for thread in threading.enumerate()) == 3


def test_a_consumer_that_pauses_is_no_stall() -> None:
    with live(film(30), reconnect=None, stall_s=0.1) as source:
        iterator = iter(source)
        next(iterator)
        time.sleep(0.5)
        assert len(list(iterator)) == 29
        assert source.failure is None


def test_without_reconnection_a_stall_is_an_error() -> None:
    with hanging_after(2) as stalls, live(stalls, stall_s=0.1, reconnect=None) as source:
        iterator = iter(source)
        assert numbers([next(iterator), next(iterator)]) == [0, 1]
        with pytest.raises(VideoError, match=r"gave no frame for 0\.1 s"):
            next(iterator)


@pytest.mark.parametrize(
    ("mistake", "kind", "told"),
    [
        (TypeError("a mistake"), TypeError, "a mistake"),
        (SystemExit(3), RunError, "cam was ended by SystemExit: 3; mend"),
    ],
)
def test_a_mistake_in_the_program_is_not_tried_again(mistake: BaseException, kind: type[Exception], told: str) -> None:
    def pictures() -> Iterator[Picture]:
        yield picture(0)
        raise mistake

    with live(pictures, film()) as source, pytest.raises(kind, match=told):
        list(source)
    assert source.statistics().reconnects == 0


@pytest.mark.thorough
def test_closing_ends_the_iteration_though_the_camera_never_answers(caplog: pytest.LogCaptureFixture) -> None:
    with hanging_after(1) as stalls, caplog.at_level(logging.WARNING):
        source = live(stalls, stall_s=60.0)
        threading.Timer(0.1, source.close).start()
        began_s = time.monotonic()
        assert len(list(source)) == 1
        assert time.monotonic() - began_s < 10
        deadline = time.monotonic() + 10
        while "does not answer" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        source.close()
    assert "cam does not answer; its reader is left behind" in caplog.text


def test_closing_ends_a_reader_that_waits_for_room_and_a_long_back_off() -> None:
    began_s = time.monotonic()
    with live(film()) as full:
        next(iter(full))
    assert explained(full)["closed"] > 0
    with live(film(1), reconnect=Reconnect(100.0, 100.0)) as waiting:
        next(iter(waiting))
    assert list(waiting) == []
    assert time.monotonic() - began_s < 10
