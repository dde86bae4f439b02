"""One schema for results, wherever they go: a file of JSON lines, standard output, an MQTT topic.

docs/results.md and docs/tracking.md explain the fields of a frame's line and of an object's; docs/results.schema.json
and docs/objects.schema.json are what `schema` returns of them. Read next: result_files.py and mqtt_results.py, which
write lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tvm_pipeline_video.service.video_extra import Analysis, Annotation, Frame, ObjectEvent


class OutputSummary(msgspec.Struct, frozen=True):
    """One output of the model, in short.

    Attributes:
        shape: of the tensor.
        argmax: the place of the largest value in the flattened tensor, such as the class of a classifier.
        max: that value; None where it is no number.
    """

    shape: Sequence[int]
    argmax: int
    max: float | None


class ResultLine(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in one frame. A field without a value is left out.

    Attributes:
        frame: the number of the frame in its source, from 0; dropped frames leave gaps.
        time_s: the frame's time in its source, seconds since the first frame.
        latency_s: seconds from when the frame was taken until its result was there.
        source: the name of the source, with passwords hidden.
        annotations: what the decoder found; empty where it found nothing, or there is no decoder.
        model: the label of the model, where the run has several.
        tag: the text that the source was given in the settings, where it was given one.
        age_s: seconds since the frame was decoded, where the source is read ahead.
        stand_ins: the devices that something else stands in for, where there are any.
        outputs: each output of the model, where there is no decoder.
    """

    frame: int
    time_s: float
    latency_s: float
    source: str
    annotations: Sequence[Annotation]
    model: str | msgspec.UnsetType = msgspec.UNSET
    tag: str | msgspec.UnsetType = msgspec.UNSET
    age_s: float | msgspec.UnsetType = msgspec.UNSET
    stand_ins: Sequence[str] | msgspec.UnsetType = msgspec.UNSET
    outputs: Mapping[str, OutputSummary] | msgspec.UnsetType = msgspec.UNSET

    @property
    def counted_as(self) -> str:
        """Return what tells its source from the others of the run: the tag, or the name where it has none."""
        return self.tag or self.source


class ObjectLine(msgspec.Struct, frozen=True, kw_only=True):
    """What became of an object that is followed. A field without a value is left out.

    Attributes:
        frame, time_s, source, model, tag: of the frame in which it happened, as in the line of a frame.
        event: appears, moves, enters or exits (a zone), crosses (a line), or leaves.
        object: its last annotation, with its number as `track`.
        seconds: for which it has been there; in the zone, of `enters` and `exits`.
        zone: the name of the zone that it enters or exits.
        line: the name of the line that it crosses.
        direction: in or out, of a crossing.
        snapshot: the file with the picture of the frame, of an object that appears.
    """

    frame: int  # first, as in the line of a frame: by its begin a line that a crash cut short is known
    time_s: float
    source: str
    event: str
    object: Annotation
    seconds: float
    model: str | msgspec.UnsetType = msgspec.UNSET
    tag: str | msgspec.UnsetType = msgspec.UNSET
    zone: str | msgspec.UnsetType = msgspec.UNSET
    line: str | msgspec.UnsetType = msgspec.UNSET
    direction: str | msgspec.UnsetType = msgspec.UNSET
    snapshot: str | msgspec.UnsetType = msgspec.UNSET


def object_line(event: ObjectEvent, frame: Frame, model: str = "", snapshot: Path | None = None) -> ObjectLine:
    """Return the line of an event in a frame of the model of that label."""
    is_crossing = event.kind == "crosses"
    return ObjectLine(
        frame=frame.index,
        time_s=frame.time_s,
        source=frame.source,
        event=event.kind,
        object=event.annotation,
        seconds=event.seconds,
        model=model or msgspec.UNSET,
        tag=frame.tag or msgspec.UNSET,
        zone=event.place if event.place and not is_crossing else msgspec.UNSET,
        line=event.place if is_crossing else msgspec.UNSET,
        direction=event.direction or msgspec.UNSET,
        snapshot=str(snapshot) if snapshot else msgspec.UNSET,
    )


def result_line(
    seen: Analysis[Frame], *, decoded: bool, stand_ins: Mapping[str, str] | None = None, model: str = ""
) -> ResultLine:
    """Return the line of a frame.

    Args:
        decoded: whether there is a decoder; without one, the line has the outputs in short.
        stand_ins: device -> what stands in for it.
        model: the label of the model, empty where the run has one.
    """
    frame = seen.frame
    return ResultLine(
        frame=frame.index,
        time_s=frame.time_s,
        latency_s=seen.result.latency_s,
        source=frame.source,
        annotations=seen.annotations,
        model=model or msgspec.UNSET,
        tag=frame.tag or msgspec.UNSET,
        age_s=msgspec.UNSET if (age_s := frame.age_s) is None else age_s,
        stand_ins=list(stand_ins) if stand_ins else msgspec.UNSET,
        outputs=msgspec.UNSET
        if decoded
        else {
            name: OutputSummary(array.shape, int(array.argmax()), float(array.max()))
            for name, array in seen.result.outputs.items()
        },
    )


def schema(kind: type[ResultLine] | type[ObjectLine] = ResultLine) -> dict[str, Any]:
    """Return the JSON schema of a line.

    Examples:
        >>> schema()["$defs"]["ResultLine"]["required"]
        ['frame', 'time_s', 'latency_s', 'source', 'annotations']
    """
    found = msgspec.json.schema(kind)
    for described in found["$defs"].values():  # msgspec before 0.23 leaves the indentation of docstrings
        if "description" in described:
            described["description"] = inspect.cleandoc(described["description"])
    return found
