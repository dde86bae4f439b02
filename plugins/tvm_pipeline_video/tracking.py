"""Objects over frames: which annotations are of the same thing, where it is, and what becomes of it.

Identities are those of ByteTrack (Zhang et al., ECCV 2022) as the package trackers has it, with one tracker for each
label; zones and lines are those of the package supervision. Both are an extra: `pip install 'tvm-pipeline[tracking]'`.
Read next: detections.py.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from tvm_pipeline.documents import TomlFile
from tvm_pipeline.errors import OptionError
from tvm_pipeline_video.annotations import Annotation
from tvm_pipeline_video.detections import detections, tracking_package
from tvm_pipeline_video.sources import Frame

BUFFER_FPS = 30.0  # of the frames in which ByteTrack counts how long an object may be missing

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]  # of the width or the height of the picture
Corner = tuple[Share, Share]
Name = Annotated[str, msgspec.Meta(min_length=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Kind = Literal["appears", "moves", "enters", "exits", "crosses", "leaves"]


class Zone(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the picture. An object is inside where the middle of its lower edge is.

    Attributes:
        polygon: its corners, each as shares of the width and the height of the picture.
        source: the tag of the source that it is in, or the name of one without a tag; empty for each source.
        classes: the labels that count; empty for all.
        seconds: for which an object must be inside before it counts.
    """

    name: Name
    polygon: Annotated[list[Corner], msgspec.Meta(min_length=3)]
    source: str = ""
    classes: list[str] = []
    seconds: Seconds = 0.0


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line that objects cross: in, from the right of a walker who goes from its start to its end, or out.

    Attributes:
        start: of it, as shares of the width and the height of the picture; `end` likewise.
        source, classes: as in `Zone`.
    """

    name: Name
    start: Corner
    end: Corner
    source: str = ""
    classes: list[str] = []


class Tracking(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """How objects are followed.

    Attributes:
        results: whether `results` gets a line for each event, or for each frame.
        snapshots: the folder for a picture of each object, of the frame in which it appears.
        score: the least of an annotation that begins an object; one of less only continues it.
        appears_after: seconds after which an object counts.
        leaves_after: seconds without an annotation after which it is gone.
        moves: the share of the picture's diagonal after which it has moved.
        zone, line: the zones and the lines.
    """

    results: Literal["events", "frames"] = "events"
    snapshots: Path | None = None
    score: Share = 0.5
    appears_after: Seconds = 0.5
    leaves_after: Seconds = 1.0
    moves: Share = 0.1
    zone: list[Zone] = []
    line: list[Line] = []

    @classmethod
    def from_toml(cls, path: Path) -> Tracking:
        """Read them from a file; raise OptionError with the line that is wrong."""
        file = TomlFile(path, OptionError)
        found: Tracking = file.convert(cls)
        if found.snapshots and not found.snapshots.is_dir():
            raise file.mistake(f"snapshots: there is no folder {found.snapshots}; make it first", "snapshots")
        places: list[tuple[str, int, Zone | Line]] = []
        places += [("zone", index, zone) for index, zone in enumerate(found.zone)]
        places += [("line", index, line) for index, line in enumerate(found.line)]
        for number, (key, index, place) in enumerate(places):
            if place.name in [other.name for _, _, other in places[:number]]:
                raise file.mistake(f"the name {place.name} is given twice; give another", key, index)
            if isinstance(place, Line) and place.start == place.end:
                raise file.mistake("start and end are one point; a line needs two", key, index)
        return found

    def check_sources(self, names: Sequence[str]) -> None:
        """Raise OptionError where a zone or a line is of a source that has none of these tags or names."""
        places: list[Zone | Line] = [*self.zone, *self.line]
        for place in places:
            if place.source and place.source not in names:
                raise OptionError(
                    f"`tracking`: {place.name} is of the source {place.source}, and the sources are "
                    f"{', '.join(names)}; give the tag of one, or its name where it has none",
                    option="tracking",
                )


@dataclass(frozen=True, slots=True)
class ObjectEvent:
    """What became of an object in a frame.

    Attributes:
        kind: it appears, moves, enters or exits a zone, crosses a line, or leaves.
        annotation: the last one of the object.
        seconds: for which the object has been there, or in the zone.
        place: the name of the zone or the line; empty without one.
        direction: of a crossing, in or out; else empty.
    """

    kind: Kind
    annotation: Annotation
    seconds: float
    place: str = ""
    direction: str = ""


@dataclass
class _Object:
    """An object of a source.

    Attributes:
        annotation: the last one.
        first_s, last_s: the times of the frames in which it was first and last found.
        told_at: its middle when its last event was told; None before it appears.
        since_s: by the zone in which it is, since when.
        told_in: the zones that it is known to be in.
    """

    annotation: Annotation
    first_s: float
    last_s: float
    told_at: tuple[float, float] | None = None
    since_s: dict[str, float] = field(default_factory=dict)
    told_in: set[str] = field(default_factory=set)


# Follows objects: returns the annotations of a frame, each with its object, and what happened in it.
Follow = Callable[[Frame, Sequence[Annotation]], tuple[Sequence[Annotation], Sequence[ObjectEvent]]]


class Trackers:
    """Follows the objects of each source of a model, whose frames come in order.

    Raises PipelineError where the packages are not installed.
    """

    def __init__(self, settings: Tracking) -> None:
        tracking_package("trackers")  # rather now than at the first frame
        self._settings = settings
        self._of: dict[str, tuple[Tracker, Frame]] = {}  # by source, with its last frame

    def __call__(
        self, frame: Frame, annotations: Sequence[Annotation]
    ) -> tuple[Sequence[Annotation], Sequence[ObjectEvent]]:
        """Return the annotations of a frame with their objects, and what happened in it."""
        source = frame.tag or frame.source
        tracker, last = self._of.get(source, (None, frame))
        if tracker is None or frame.time_s < last.time_s:  # the source began anew
            tracker = Tracker(self._settings, source)
        self._of[source] = tracker, frame
        height, width = frame.image.shape[:2]
        return tracker.follow(annotations, frame.time_s, (width, height))

    def end(self) -> Iterator[tuple[Frame, Sequence[ObjectEvent]]]:
        """Yield the last frame of each source, and what happens as the objects in it leave."""
        for tracker, last in self._of.values():
            yield last, tracker.end()
        self._of.clear()


class Tracker:
    """Follows the objects of one source.

    Args:
        source: its tag, or its name where it has none.
    """

    def __init__(self, settings: Tracking, source: str) -> None:
        self._settings = settings
        self._zones = [zone for zone in settings.zone if zone.source in ("", source)]
        self._lines = [line for line in settings.line if line.source in ("", source)]
        self._followers: dict[str, Any] = {}  # by label
        self._numbers: dict[tuple[str, int], int] = {}  # of the objects, by label and the follower's number
        self._objects: dict[int, _Object] = {}
        self._next = 1
        self._size = (0, 0)
        self._drawn_zones: list[Any] = []
        self._drawn_lines: list[Any] = []

    def follow(
        self, annotations: Sequence[Annotation], time_s: float, size: tuple[int, int]
    ) -> tuple[Sequence[Annotation], Sequence[ObjectEvent]]:
        """Return the annotations of the next frame, each with its object and its zones, and what happened in it.

        Args:
            time_s: the frame's time in its source.
            size: width and height of the frame.
        """
        if size != self._size:
            self._draw(size)
        found = list(annotations)
        seen = self._seen(found, time_s)
        gone = self._gone()
        for number, index in seen.items():
            one = self._objects.setdefault(number, _Object(found[index], time_s, time_s))
            one.annotation, one.last_s = replace(found[index], track=number), time_s
        events: list[ObjectEvent] = []
        for number in gone:
            events += self._left(self._objects.pop(number))
        events += self._moved(math.hypot(*size), time_s)
        for number, index in seen.items():
            found[index] = self._objects[number].annotation
        return found, events

    def end(self) -> Sequence[ObjectEvent]:
        """Return what happens when the source ends: each object leaves."""
        events = [event for one in self._objects.values() for event in self._left(one)]
        self._objects.clear()
        return events

    def _seen(self, found: Sequence[Annotation], time_s: float) -> dict[int, int]:
        """Return the number of each object that the followers see now, with the index of its annotation."""
        by_label: dict[str, list[int]] = defaultdict(list)
        for index, annotation in enumerate(found):
            if annotation.box is not None:
                by_label[annotation.label].append(index)
        seen: dict[int, int] = {}
        for label in [*self._followers, *(label for label in by_label if label not in self._followers)]:
            follower = self._followers.get(label) or self._followers.setdefault(label, self._follower())
            indices = by_label.get(label, [])
            now = detections([replace(found[index], mask=None) for index in indices])
            tracked = follower.update(now, timestamp=time_s)
            for row, number in enumerate(() if tracked.tracker_id is None else tracked.tracker_id.tolist()):
                if number >= 0:
                    key = label, number
                    if key not in self._numbers:
                        self._numbers[key] = self._next
                        self._next += 1
                    seen[self._numbers[key]] = indices[tracked.data["index"][row]]
        return seen

    def _follower(self) -> Any:
        return tracking_package("trackers").ByteTrackTracker(
            lost_track_buffer=round(self._settings.leaves_after * BUFFER_FPS),
            track_activation_threshold=self._settings.score,
            high_conf_det_threshold=self._settings.score,
        )

    def _gone(self) -> list[int]:
        """Return the objects that their followers have given up, and forget followers without any."""
        alive = {(label, one.tracker_id) for label, follower in self._followers.items() for one in follower.tracks}
        gone = [key for key in self._numbers if key not in alive]
        for label in [label for label, follower in self._followers.items() if not follower.tracks]:
            del self._followers[label]
        return [self._numbers.pop(key) for key in gone]

    def _draw(self, size: tuple[int, int]) -> None:
        """Lay the zones and the lines over pictures of a size."""
        library = tracking_package("supervision")
        self._size, anchors = size, [library.Position.BOTTOM_CENTER]
        self._drawn_zones = [
            library.PolygonZone(np.rint(np.array(zone.polygon) * size).astype(int), anchors) for zone in self._zones
        ]
        self._drawn_lines = [
            library.LineZone(*(library.Point(x * size[0], y * size[1]) for x, y in (line.start, line.end)), anchors)
            for line in self._lines
        ]

    def _moved(self, diagonal: float, time_s: float) -> list[ObjectEvent]:
        """Return the events of the objects that are there, and remember where each one is."""
        if not self._objects:
            return []
        inside, crossed = self._at_places() if self._zones or self._lines else ([], [])
        events: list[ObjectEvent] = []
        for row, one in enumerate(self._objects.values()):
            age_s, middle = time_s - one.first_s, _middle(one.annotation)
            happened: list[ObjectEvent] = []
            if one.told_at is None:
                if age_s < self._settings.appears_after:
                    continue
                happened.append(ObjectEvent("appears", one.annotation, age_s))
            elif math.dist(middle, one.told_at) > self._settings.moves * diagonal:
                happened.append(ObjectEvent("moves", one.annotation, age_s))
            for zone, is_inside in zip(self._zones, inside, strict=True):
                happened += self._at_zone(one, zone, bool(is_inside[row]), time_s)
            for line, (crossed_in, crossed_out) in zip(self._lines, crossed, strict=True):
                if (crossed_in[row] or crossed_out[row]) and _counts(one, line):
                    direction = "in" if crossed_in[row] else "out"
                    happened.append(ObjectEvent("crosses", one.annotation, age_s, line.name, direction))
            one.annotation = replace(one.annotation, zones=tuple(sorted(one.told_in)))
            if happened:
                one.told_at = middle
            events += [replace(event, annotation=one.annotation) for event in happened]
        return events

    def _at_places(self) -> tuple[list[Any], list[Any]]:
        """Return for each zone which objects are inside, and for each line which ones cross it, in and out."""
        placed = detections([replace(one.annotation, mask=None) for one in self._objects.values()])
        placed.tracker_id = np.array(list(self._objects))
        return [zone.trigger(placed) for zone in self._drawn_zones], [
            line.trigger(placed) for line in self._drawn_lines
        ]

    @staticmethod
    def _at_zone(one: _Object, zone: Zone, is_inside: bool, time_s: float) -> list[ObjectEvent]:
        if not _counts(one, zone):
            return []
        since_s = one.since_s.setdefault(zone.name, time_s) if is_inside else one.since_s.pop(zone.name, time_s)
        if is_inside and zone.name not in one.told_in and time_s - since_s >= zone.seconds:
            one.told_in.add(zone.name)
            return [ObjectEvent("enters", one.annotation, time_s - since_s, zone.name)]
        if not is_inside and zone.name in one.told_in:
            one.told_in.remove(zone.name)
            return [ObjectEvent("exits", one.annotation, time_s - since_s, zone.name)]
        return []

    @staticmethod
    def _left(one: _Object) -> list[ObjectEvent]:
        """Return the events of an object that is gone; none where it never counted."""
        if one.told_at is None:
            return []
        exits = [
            ObjectEvent("exits", one.annotation, one.last_s - one.since_s[zone], zone) for zone in sorted(one.told_in)
        ]
        return [*exits, ObjectEvent("leaves", one.annotation, one.last_s - one.first_s)]


def _counts(one: _Object, place: Zone | Line) -> bool:
    return not place.classes or one.annotation.label in place.classes


def _middle(annotation: Annotation) -> tuple[float, float]:
    left, top, right, bottom = annotation.box or (0.0, 0.0, 0.0, 0.0)
    return (left + right) / 2, (top + bottom) / 2
