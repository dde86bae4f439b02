"""Reads the text of pictures: PP-OCR's detector finds the lines, and its recogniser reads a crop of each.

    python examples/read_text.py page.png
    python examples/read_text.py folder/of/pictures

The models share the devices as those of landmarks.py do. The recogniser gives the probability of each character at 40
places of a line; CTC makes text of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packaged import PPOCR_DETECTOR, PPOCR_READER, fetch
from PIL import Image

from tvm_pipeline import Pipeline, Problem, Result
from tvm_pipeline.frontends import parse_shapes
from tvm_pipeline.runtime.frame_stream import Tagged
from tvm_pipeline.workflow.steps import Compiled, compile_source, measured_profile
from tvm_pipeline_video import Annotation, Preprocessing, open_source, preprocess
from tvm_pipeline_video.cascade import Cascade, measured_crops, plan_cascade
from tvm_pipeline_video.decoders import Request
from tvm_pipeline_video.interpret import Interpretation, interpret

STRETCH = 8  # pictures on which the lines are counted
LEAST_SCORE = 0.5  # of a line, the mean over its characters


@dataclass(frozen=True)
class Lines:
    """What stands between the two models."""

    detector: Interpretation
    reader: Preprocessing

    def cut(self, result: Result) -> list[Tagged]:
        """Return what the reader is given of a picture: each line, levelled; its place comes along."""
        image = result.tag.image
        assert self.detector.decode
        transform = self.detector.preprocessing.transform(image.shape[1], image.shape[0])
        found = self.detector.decode(result.outputs, transform)
        return [Tagged(preprocess(levelled(image, one, self.reader), self.reader), one) for one in found]


def reader_settings(shape: tuple[int, ...]) -> Preprocessing:
    """Return how PaddleOCR gives lines to its recogniser: at full height, grey beyond their end."""
    size = (shape[3], shape[2])
    return Preprocessing(size=size, fit="pad", fill=128, color="bgr", mean=(127.5,), std=(127.5,))


def levelled(image: NDArray[np.uint8], line: Annotation, reader: Preprocessing) -> NDArray[np.uint8]:
    """Return the turned rectangle of a line as a level picture of the reader's height."""
    (left, top), (right, high), (far, low), (near, bottom) = line.polygon
    most_width, height = reader.size or (1, 1)
    length, thickness = np.hypot(right - left, high - top), np.hypot(near - left, bottom - top)
    width = int(np.clip(round(length * height / max(thickness, 1e-6)), 1, most_width))
    corners = (left, top, near, bottom, far, low, right, high)
    turned = Image.fromarray(image).transform((width, height), Image.Transform.QUAD, corners, Image.Resampling.BILINEAR)
    return np.asarray(turned)


def read(scores: NDArray[Any], characters: Sequence[str]) -> tuple[str, float]:
    """Return the text of a line, and how sure that is, by CTC: repetitions are one, and class 0 is between characters.

    Args:
        scores: [places, classes], the probabilities of each place.
        characters: of class 1, 2 and so on.

    Examples:
        >>> read(np.eye(3)[[1, 1, 0, 1, 2, 2, 0]], "ab")
        ('aab', 1.0)
    """
    best = scores.argmax(axis=1)
    kept = np.flatnonzero((best > 0) & (best != np.concatenate([[0], best[:-1]])))
    text = "".join(characters[index - 1] for index in best[kept])
    return text, float(scores.max(axis=1)[kept].mean()) if len(kept) else 0.0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Reads the text of pictures")
    parser.add_argument("source", help="a picture, a folder of pictures or a video")
    parser.add_argument("--detector", type=Path, help="another detector of lines; PP-OCRv4's without")
    parser.add_argument("--reader", type=Path, help="another recogniser; PP-OCRv4's without")
    options = parser.parse_args(arguments)

    first = compile_source(
        options.detector or fetch(PPOCR_DETECTOR), None if options.detector else parse_shapes("x:[1,3,480,480]")
    )
    second = compile_source(
        options.reader or fetch(PPOCR_READER), None if options.reader else parse_shapes("x:[1,3,48,320]")
    )
    detector = interpret(first.compiled.graph, first.metadata, Request("text"))
    lines = Lines(detector, reader_settings(second.compiled.graph.inputs[0].shape))
    characters = [*second.metadata["character"].split("\n"), " "]
    (scores,) = second.compiled.graph.outputs
    problems = _problem(first), _problem(second)
    with Pipeline(first.compiled, plan_cascade(problems, 1.0).plans[0], first.platform) as pipeline:
        per_picture = measured_crops(pipeline, _pictures(options.source, detector, STRETCH), lines.cut)
    deployment = plan_cascade(problems, per_picture)
    print(f"{per_picture:.2f} lines a picture; {deployment.why}", file=sys.stderr)
    with (
        Pipeline(first.compiled, deployment.plans[0], first.platform) as finding,
        Pipeline(second.compiled, deployment.plans[1], second.platform) as reading,
    ):
        for seen in Cascade(finding, reading, lines.cut).map(_pictures(options.source, detector)):
            for line in seen.crops:
                text, score = read(line.outputs[scores][0], characters)
                if score >= LEAST_SCORE:
                    print(f"{seen.first.tag.index}: {text}", flush=True)


def _problem(made: Compiled) -> Problem:
    return Problem(made.compiled.graph, made.platform, measured_profile(made))


def _pictures(source: str, detector: Interpretation, limit: int | None = None) -> Iterator[Tagged]:
    with open_source(source, limit=limit) as opened:
        for frame in opened:
            yield Tagged(preprocess(frame.image, detector.preprocessing), frame)


if __name__ == "__main__":
    main()
