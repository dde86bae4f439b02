"""Follows faces through a video: a detector in a pipeline, and behind it a tracker that gives each face a number.

    python examples/track.py --output tracked.mp4

downloads CenterFace and a video of cyclists. Any detector does, such as a YOLO; `--decoder` is for those whose outputs
are not recognised:

    python examples/track.py street.mp4 --model yolov8n.onnx

The tracker stands behind the pipeline, where frames come out in order and once each, also where a device failed and
some of them ran twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from packaged import BIKES, CENTERFACE, CENTERFACE_SHAPES, fetch

from tvm_pipeline import Pipeline, Problem
from tvm_pipeline.frontends import parse_shapes
from tvm_pipeline.workflow.steps import compile_source, decide, measured_profile
from tvm_pipeline_video import Annotation, VideoFile, draw, open_source, stream
from tvm_pipeline_video.decoders import Request
from tvm_pipeline_video.interpret import interpret

OVERLAP = 0.3  # a box that shares less with where a thing should be now is another thing
PATIENCE = 15  # frames that a thing may be out of sight

Box = tuple[float, float, float, float]


@dataclass(slots=True)
class Track:
    """A thing that is followed: its last box, how far that moves in a frame, and for how long it was not seen."""

    number: int
    box: Box
    step: Box = (0.0, 0.0, 0.0, 0.0)
    unseen: int = 0

    @property
    def expected(self) -> Box:
        """Where it should be in the next frame."""
        left, top, right, bottom = (
            edge + (self.unseen + 1) * move for edge, move in zip(self.box, self.step, strict=True)
        )
        return left, top, right, bottom


class Tracker:
    """Follows things by the overlap of their boxes from frame to frame (Bochinski et al., AVSS 2017).

    Examples:
        >>> tracker = Tracker()
        >>> [one.label for one in tracker.update([Annotation("face", 0.9, (0, 0, 10, 10))])]
        ['face 1']
        >>> moved = [Annotation("face", 0.9, (80, 0, 90, 10)), Annotation("face", 0.8, (2, 0, 12, 10))]
        >>> [one.label for one in tracker.update(moved)]
        ['face 2', 'face 1']
    """

    def __init__(self) -> None:
        self._tracks: list[Track] = []
        self._given = 0

    def update(self, found: Sequence[Annotation]) -> list[Annotation]:
        """Return what was found in the next frame with the numbers in the labels; what has no box is left out."""
        boxed = [(one, one.box) for one in found if one.box is not None]
        pairs = sorted(
            (
                (overlap(track.expected, box), index, track)
                for index, (_, box) in enumerate(boxed)
                for track in self._tracks
            ),
            key=lambda pair: -pair[0],
        )
        taken: dict[int, Track] = {}
        for shared, index, track in pairs:
            if shared >= OVERLAP and index not in taken and track not in taken.values():
                taken[index] = track
        numbered = []
        for track in self._tracks:
            track.unseen += 1
        for index, (one, box) in enumerate(boxed):
            if (track := taken.get(index)) is None:
                self._given += 1
                track = Track(self._given, box)
                self._tracks.append(track)
            else:
                left, top, right, bottom = ((now - old) / track.unseen for now, old in zip(box, track.box, strict=True))
                track.box, track.step = box, (left, top, right, bottom)
            track.unseen = 0
            numbered.append(replace(one, label=f"{one.label} {track.number}"))
        self._tracks = [track for track in self._tracks if track.unseen <= PATIENCE]
        return numbered


def overlap(one: Box, other: Box) -> float:
    """Return the intersection of two boxes over their union."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return shared / (sum(areas) - shared) if shared else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Follows what a detector finds through a video")
    parser.add_argument("source", nargs="?", help="a video, a camera or a folder of pictures; bikes.mp4 without")
    parser.add_argument("--output", type=Path, help="a video with the boxes drawn")
    parser.add_argument("--frames", type=int, help="stop after so many")
    parser.add_argument("--model", type=Path, help="another detector; CenterFace without")
    parser.add_argument("--shapes", default="", help="of its inputs, where the file leaves them open")
    parser.add_argument("--decoder", default="", help="its family, or file.py:function")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long candidates run side by side, in all")
    options = parser.parse_args(arguments)
    shapes = options.shapes or ("" if options.model else CENTERFACE_SHAPES)

    made = compile_source(options.model or fetch(CENTERFACE), parse_shapes(shapes) if shapes else None)
    reading = interpret(made.compiled.graph, made.metadata, Request(options.decoder))
    print(*reading.said, sep="\n", file=sys.stderr)
    problem = Problem(made.compiled.graph, made.platform, measured_profile(made))
    decision, _ = decide(problem, compiled=made.compiled, verify_s=options.seconds)
    print(decision.why, file=sys.stderr)
    tracker = Tracker()
    with (
        open_source(options.source or str(fetch(BIKES)), limit=options.frames) as source,
        Pipeline(made.compiled, decision.plan, made.platform) as pipeline,
        VideoFile(options.output, source.fps or 25.0) if options.output else nullcontext() as video,
    ):
        for seen in stream(pipeline, source, reading.preprocessing, reading.decode):
            followed = tracker.update(seen.annotations)
            print(f"frame {seen.frame.index}: " + (", ".join(map(_shown, followed)) or "nothing"), flush=True)
            if video:
                video.write(draw(seen.frame.image, followed))


def _shown(found: Annotation) -> str:
    assert found.box is not None
    left, top, right, bottom = found.box
    return f"{found.label} at {(left + right) / 2:.0f}, {(top + bottom) / 2:.0f}"


if __name__ == "__main__":
    main()
