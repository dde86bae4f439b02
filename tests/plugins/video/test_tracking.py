"""Objects over frames: their numbers, zones and lines against paths that were drawn, and settings that are wrong."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.parts import needs

needs("tracking")

from tvm_pipeline import PipelineError
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video import Annotation, Frame, ObjectEvent, Trackers, Tracking
from tvm_pipeline_video.tracking import Line, Zone

WIDTH, HEIGHT, FPS = 640, 480, 25.0
IMAGE = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
QUICK = Tracking(appears_after=0.0)
GATE = Zone(name="gate", polygon=[(0.5, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1.0)])
DOOR = Line(name="door", start=(0.5, 0.0), end=(0.5, 1.0))


def at(x: float, y: float = 240.0, label: str = "person", score: float = 0.9) -> Annotation:
    """Return a thing of 40 x 80 whose lower edge has its middle there."""
    return Annotation(label, score, (x - 20, y - 80, x + 20, y))


def followed(
    settings: Tracking, film: list[list[Annotation]], source: str = "yard"
) -> tuple[list[list[Annotation]], list[tuple[int, ObjectEvent]]]:
    """Return what is found in each frame, with numbers, and the events with their frames, the end among these."""
    trackers, found, events = Trackers(settings), [], []
    for index, seen in enumerate(film):
        here, happened = trackers(Frame(index, index / FPS, IMAGE, source), seen)
        found.append(list(here))
        events += [(index, event) for event in happened]
    for frame, happened in trackers.end():
        assert frame.source == source
        events += [(len(film), event) for event in happened]
    return found, events


def kinds(events: list[tuple[int, ObjectEvent]]) -> list[tuple[int, str, str]]:
    return [(index, event.kind, event.place) for index, event in events]


def test_two_that_meet_keep_their_numbers_and_one_is_hidden_meanwhile() -> None:
    film = [
        [at(40 + 12 * number, 200), *([at(520 - 12 * number, 300)] if number not in (19, 20, 21) else [])]
        for number in range(40)
    ]
    found, events = followed(QUICK, film)
    numbers = {(one.box[3], one.track) for frame in found[1:] for one in frame}
    assert len(numbers) == 2
    assert {bottom for bottom, _ in numbers} == {200, 300}
    assert sorted(track for _, track in numbers) == [1, 2]
    assert [kind for _, kind, _ in kinds(events) if kind != "moves"] == ["appears", "appears", "leaves", "leaves"]


def test_labels_are_followed_apart() -> None:
    """A rider stands where the bicycle is; neither takes the other's number."""
    film = [
        [at(100 + 5 * n, label=label) for label in (("person", "bicycle") if n % 2 else ("bicycle", "person"))]
        for n in range(20)
    ]
    found, _ = followed(QUICK, film)
    assert len({(one.label, one.track) for frame in found[1:] for one in frame}) == 2


def test_an_object_that_is_gone_for_long_is_another_one() -> None:
    film = [[at(100)]] * 10 + [[]] * 30 + [[at(100)]] * 10
    found, events = followed(Tracking(appears_after=0.0, leaves_after=0.5), film)
    assert (found[9][0].track, found[-1][0].track) == (1, 2)
    assert [(kind, place) for _, kind, place in kinds(events)] == [("appears", ""), ("leaves", "")] * 2
    left, leaves = events[1]
    assert 9 + 0.5 * FPS <= left <= 9 + 0.5 * FPS + 2
    assert leaves.seconds == pytest.approx(8 / FPS)  # from the second frame, in which it has a number, to the tenth


def test_one_that_flickers_never_counts() -> None:
    film = [[at(100)] if number % 10 < 4 else [] for number in range(60)]
    _, events = followed(Tracking(appears_after=0.3, leaves_after=0.1), film)
    assert events == []


def test_zones_and_lines_are_where_they_were_drawn() -> None:
    """One walks to the right through the middle and back; the middle of its lower edge counts."""
    xs = [*range(100, 540, 10), *range(540, 100, -10)]
    settings = Tracking(appears_after=0.0, zone=[GATE], line=[DOOR], moves=1.0)
    found, events = followed(settings, [[at(x)] for x in xs])
    enters, exits = (
        next(index for index, kind, _ in kinds(events) if kind == wanted) for wanted in ("enters", "exits")
    )
    assert (xs[enters - 1], xs[enters]) == (310, 320)
    assert xs[exits] in (310, 320)
    assert exits > 44
    assert [(e.direction, e.place) for _, e in events if e.kind == "crosses"] == [("in", "door"), ("out", "door")]
    assert next(e.seconds for _, e in events if e.kind == "exits") == pytest.approx((exits - enters) / FPS)
    assert all(frame[0].zones == (("gate",) if enters <= index < exits else ()) for index, frame in enumerate(found))


def test_a_zone_with_a_minimum_time_and_classes_and_a_source() -> None:
    film = [[at(500), at(400, 400, "dog")]] * 50
    slow = Zone(name="gate", polygon=GATE.polygon, classes=["dog"], seconds=1.0)
    settings = Tracking(appears_after=0.0, zone=[slow], line=[DOOR])
    _, events = followed(settings, film)
    (enters,) = [(index, event) for index, event in events if event.kind == "enters"]
    assert enters[1].annotation.label == "dog"
    assert enters[0] == 1 + FPS
    elsewhere = Tracking(appears_after=0.0, zone=[Zone(name="gate", polygon=GATE.polygon, source="hall")])
    assert not any(event.kind == "enters" for _, event in followed(elsewhere, film)[1])
    assert any(event.kind == "enters" for _, event in followed(elsewhere, film, "hall")[1])


def test_a_weak_annotation_continues_an_object_and_begins_none() -> None:
    found, _ = followed(
        QUICK, [[at(100, score=0.9 if number < 5 else 0.3), at(400, score=0.3)] for number in range(10)]
    )
    assert [one.track for one in found[-1]] == [1, None]


def test_a_source_that_begins_anew_has_other_objects_and_no_warning() -> None:
    trackers = Trackers(QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in (*range(5), *range(5)):
            found, _ = trackers(Frame(index, index / FPS, IMAGE, "film"), [at(100 + index)])
    assert found[0].track == 1


boxes = st.lists(
    st.builds(at, st.floats(-50, 700), st.floats(0, 560), st.sampled_from(["person", "dog"]), st.floats(0, 1)),
    max_size=4,
)


@examples(25)
@given(st.lists(boxes | st.lists(st.builds(Annotation, st.just("scene"))), min_size=1, max_size=40))
def test_whatever_is_found_events_are_in_pairs(film: list[list[Annotation]]) -> None:
    settings = Tracking(appears_after=0.05, leaves_after=0.2, zone=[GATE], line=[DOOR], moves=0.01)
    found, events = followed(settings, film)
    assert [[(one.label, one.box) for one in frame] for frame in found] == [
        [(one.label, one.box) for one in frame] for frame in film
    ]
    for frame in found:
        numbers = [one.track for one in frame if one.track is not None]
        assert len(numbers) == len(set(numbers))
    for number in {event.annotation.track for _, event in events}:
        own = [event for _, event in events if event.annotation.track == number]
        assert [one.kind for one in own].count("appears") == [one.kind for one in own].count("leaves") == 1
        assert (own[0].kind, own[-1].kind) == ("appears", "leaves")
        passed = [one.kind for one in own if one.kind in ("enters", "exits")]
        assert passed == ["enters", "exits"] * (len(passed) // 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("score = 2", r"tracking.toml, line 1: score: Expected `float` <= 1"),
        ("leaves-after = -1", r"line 1: leaves-after: Expected `float` >= 0"),
        ('results = "all"', r"line 1: results: Invalid enum value 'all'"),
        ("zones = []", r"line 1: there is no key zones; .*zone"),
        ('\n[[zone]]\nname = "gate"', r"line 2: zone gate: it has no polygon"),
        (
            '[[zone]]\nname = "gate"\npolygon = [[0, 0], [1, 1]]',
            r"line 3: zone gate: polygon: Expected `array` of length >= 3",
        ),
        (
            '[[zone]]\nname = "gate"\npolygon = [[0, 0], [320, 0], [1, 1]]',
            r"line 3: zone gate: polygon: Expected `float` <= 1",
        ),
        ('[[line]]\nname = "door"\nstart = [0, 0]\nend = [0, 0]', r"line 1: line door: start and end are one point"),
        (
            '[[line]]\nname = "a"\nstart = [0, 0]\nend = [0, 1]\n[[line]]\nname = "a"\nstart = [0, 0]\nend = [1, 1]',
            r"line 5: line a: the name a is given twice",
        ),
        ('snapshots = "nowhere"', r"line 1: snapshots: there is no folder .*nowhere; make it first"),
    ],
)
def test_settings_that_are_wrong_are_said_with_their_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "tracking.toml").write_text(text)
    with pytest.raises(OptionError, match=message):
        Tracking.from_toml(tmp_path / "tracking.toml")


def test_a_zone_of_a_source_that_is_not_there() -> None:
    settings = Tracking(zone=[Zone(name="gate", polygon=GATE.polygon, source="hal")])
    with pytest.raises(OptionError, match="gate is of the source hal, and the sources are hall, yard"):
        settings.check_sources(["hall", "yard"])
    settings.check_sources(["hal"])


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trackers", None)
    with pytest.raises(
        PipelineError, match=r"following objects needs an extra: pip install 'tvm-pipeline\[tracking\]'"
    ):
        Trackers(QUICK)
