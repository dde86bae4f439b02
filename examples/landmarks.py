"""Finds 468 points on each face of a video by two models in a row: CenterFace finds faces, MediaPipe's face mesh looks
at a crop of each.

    python examples/landmarks.py street.mp4 --output faces.mp4

Both models run on the same devices, and are planned as one problem: a stretch of the video tells how many faces a frame
has, and the mesh is placed at that rate beside the detector.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from packaged import CENTERFACE, CENTERFACE_SHAPES, FACE_MESH, fetch

from tvm_pipeline import Pipeline, Problem, Result
from tvm_pipeline.frontends import parse_shapes
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.workflow.steps import Compiled, compile_source, measured_profile
from tvm_pipeline_video import Annotation, Preprocessing, Source, VideoFile, draw, open_source, preprocess
from tvm_pipeline_video.cascade import Cascade, measured_crops, plan_cascade
from tvm_pipeline_video.interpret import Interpretation, interpret

MARGIN = 1.5  # side of a crop against the longer side of the face's box
STRETCH = 60  # frames on which the faces are counted

Square = tuple[int, int, int]  # left, top and side in pixels of the frame


@dataclass(frozen=True)
class Faces:
    """What stands between the two models, and behind them."""

    detector: Interpretation
    mesh: Interpretation

    def cut(self, result: Result) -> list[Tagged]:
        """Return what the mesh is given of a frame: a crop of each face, which carries its square along."""
        squares = [square_around(one.box) for one in _found(self.detector, result, result.tag.image) if one.box]
        settings = self.mesh.preprocessing
        return [Tagged(preprocess(crop(result.tag.image, square), settings), square) for square in squares]

    def points(self, result: Result) -> list[Annotation]:
        """Return the points of a crop in pixels of the frame; nothing where the mesh sees no face in it."""
        left, top, side = result.tag
        found = _found(self.mesh, result, np.empty((side, side, 3), np.uint8))
        box = (float(left), float(top), float(left + side), float(top + side))
        return [replace(one, box=box, points=tuple((x + left, y + top) for x, y in one.points)) for one in found]


def _found(reading: Interpretation, result: Result, image: NDArray[np.uint8]) -> Sequence[Annotation]:
    height, width = image.shape[:2]
    return reading.decode(result.outputs, reading.preprocessing.transform(width, height)) if reading.decode else ()


def square_around(box: Sequence[float]) -> Square:
    """Return the square that a crop takes around a box; it may reach beyond the picture."""
    left, top, right, bottom = box
    side = max(1, round(MARGIN * max(right - left, bottom - top)))
    return round((left + right - side) / 2), round((top + bottom - side) / 2), side


def crop(image: NDArray[np.uint8], square: Square) -> NDArray[np.uint8]:
    """Return the square of a picture; what lies beyond the picture is black."""
    left, top, side = square
    found = np.zeros((side, side, 3), np.uint8)
    seen = image[max(0, top) : max(0, top + side), max(0, left) : max(0, left + side)]
    y, x = max(0, -top), max(0, -left)
    found[y : y + seen.shape[0], x : x + seen.shape[1]] = seen
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Finds faces and the points of each by two models in a row")
    parser.add_argument("source", help="a video, a camera or a folder of pictures")
    parser.add_argument("--output", type=Path, help="a video with the points drawn")
    parser.add_argument("--frames", type=int, help="stop after so many")
    parser.add_argument("--detector", type=Path, help="another detector; CenterFace without")
    parser.add_argument("--mesh", type=Path, help="another model of points; MediaPipe's face mesh without")
    options = parser.parse_args(arguments)

    shapes = None if options.detector else parse_shapes(CENTERFACE_SHAPES)
    first = compile_source(options.detector or fetch(CENTERFACE), shapes)
    second = compile_source(options.mesh or fetch(FACE_MESH))
    faces = Faces(_reading(first), _reading(second))
    settings = faces.detector.preprocessing
    problems = _problem(first), _problem(second)
    with (
        open_source(options.source, limit=STRETCH) as stretch,
        Pipeline(first.compiled, plan_cascade(problems, 1.0).plans[0], first.platform) as pipeline,
    ):
        per_frame = measured_crops(pipeline, _frames(stretch, settings), faces.cut)
    with open_source(options.source, limit=options.frames) as source:
        deployment = plan_cascade(problems, per_frame, source.fps or 25.0)
        print(f"{per_frame:.2f} faces a frame; {deployment.why}", file=sys.stderr)
        with (
            Pipeline(first.compiled, deployment.plans[0], first.platform) as detector,
            Pipeline(second.compiled, deployment.plans[1], second.platform) as mesh,
            VideoFile(options.output, source.fps or 25.0) if options.output else nullcontext() as video,
        ):
            for seen in Cascade(detector, mesh, faces.cut).map(_frames(source, settings)):
                found = [one for result in seen.crops for one in faces.points(result)]
                centres = (np.mean(one.points, axis=0) for one in found)
                where = ", ".join(f"a face at {x:.0f}, {y:.0f}" for x, y in centres) or "no face"
                print(f"frame {seen.first.tag.index}: {where}", flush=True)
                if video:
                    video.write(draw(seen.first.tag.image, found))


def _reading(made: Compiled) -> Interpretation:
    reading = interpret(made.compiled.graph, made.metadata)
    print(*reading.said, sep="\n", file=sys.stderr)
    return reading


def _problem(made: Compiled) -> Problem:
    return Problem(made.compiled.graph, made.platform, measured_profile(made))


def _frames(source: Source, settings: Preprocessing) -> Iterator[Tagged]:
    for frame in source:
        yield Tagged(preprocess(frame.image, settings), frame)


if __name__ == "__main__":
    main()
