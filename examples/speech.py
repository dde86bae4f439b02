"""Finds who speaks when: Silero VAD on an audio file, whose state the pipeline carries from window to window.

    python examples/speech.py talk.mp3

prints a line for each stretch of speech. The model takes 32 ms of audio and its own state, and gives the probability of
speech and the next state. The same without code, as a bundle:

    tvm-pipeline compile silero_vad_openvino_16k.onnx -o vad.tar --carry state:stateN
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from packaged import SILERO_VAD, fetch

from tvm_pipeline import Pipeline, Problem
from tvm_pipeline.workflow.steps import compile_source, decide, measured_profile

RATE = 16000  # samples a second
WINDOW, CONTEXT = 512, 64  # samples that are new in a frame, and samples of the frame before that it repeats
BEGINS, ENDS = 0.5, 0.35  # speech begins above the one probability and ends below the other
PAUSE_S = 0.1  # a shorter pause ends nothing

Samples = NDArray[np.float32]


def samples(path: Path) -> Iterator[Samples]:
    """Yield the audio of any file that FFmpeg reads, as one channel of `RATE`, from -1 to 1."""
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(str(path)) as file:
        for decoded in file.decode(audio=0):
            yield from (frame.to_ndarray()[0] for frame in resampler.resample(decoded))
        yield from (frame.to_ndarray()[0] for frame in resampler.resample(None))


def windows(pieces: Iterable[Samples]) -> Iterator[Samples]:
    """Yield frames for the model (1 x 576); the last one is filled with silence."""
    context, rest = np.zeros(CONTEXT, np.float32), np.zeros(0, np.float32)
    for piece in (*pieces, np.zeros(WINDOW - 1, np.float32)):
        rest = np.concatenate([rest, piece])
        while len(rest) >= WINDOW:
            frame = np.concatenate([context, rest[:WINDOW]])
            context, rest = frame[-CONTEXT:], rest[WINDOW:]
            yield frame[np.newaxis]


def speech(probabilities: Iterable[float]) -> Iterator[tuple[float, float]]:
    """Yield begin and end of each stretch of speech, in seconds."""
    step = WINDOW / RATE
    begin: float | None = None
    end = now = 0.0
    for probability in probabilities:
        if begin is not None and now - end > PAUSE_S:
            yield begin, end
            begin = None
        if begin is None and probability >= BEGINS:
            begin = now
        now += step
        if begin is not None and probability >= ENDS:
            end = now
    if begin is not None:
        yield begin, end


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Prints when somebody speaks in an audio file")
    parser.add_argument("audio", type=Path)
    parser.add_argument("--model", type=Path, help="another model with the inputs input and state; Silero VAD without")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long candidates run side by side, in all")
    options = parser.parse_args(arguments)

    made = compile_source(options.model or fetch(SILERO_VAD), carry=(("state", "stateN"),))
    problem = Problem(made.compiled.graph, made.platform, measured_profile(made))
    decision, _ = decide(problem, compiled=made.compiled, verify_s=options.seconds)
    print(decision.why, file=sys.stderr)
    with Pipeline(made.compiled, decision.plan, made.platform) as pipeline:
        probabilities = (found.outputs["output"].item() for found in pipeline.map(windows(samples(options.audio))))
        for begin_s, end_s in speech(probabilities):
            print(f"{begin_s:8.2f} s to {end_s:8.2f} s", flush=True)


if __name__ == "__main__":
    main()
