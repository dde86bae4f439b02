"""One schema for the result of a frame, wherever it goes: a file of JSON lines, standard output, an MQTT topic.

docs/results.md explains the fields, and docs/results.schema.json is what `schema` returns. Read next: result_files.py
and mqtt_results.py, which write lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tvm_pipeline_video.service.video_extra import Analysis, Annotation, Frame


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


def schema() -> dict[str, Any]:
    """Return the JSON schema of a line.

    Examples:
        >>> schema()["$defs"]["ResultLine"]["required"]
        ['frame', 'time_s', 'latency_s', 'source', 'annotations']
    """
    return msgspec.json.schema(ResultLine)
