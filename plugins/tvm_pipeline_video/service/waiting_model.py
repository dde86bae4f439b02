"""A model that waits for sources: the plan it has without one, and the frame of noise that warms its pipeline.

Read next: changing_inputs.py (the sources), running_model.py (a model that runs).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tvm_pipeline import Bundle, PipelineError, Problem
from tvm_pipeline.core.plan import shown_stages
from tvm_pipeline.cost.evaluate import judged
from tvm_pipeline.runtime import Event, LivePipeline
from tvm_pipeline.runtime.replanning import nearest_plan, quick_plan
from tvm_pipeline.workflow.steps import given_plan
from tvm_pipeline_video.service.control import requested_problem
from tvm_pipeline_video.service.host_planning import HostPlan
from tvm_pipeline_video.service.listener import Listener
from tvm_pipeline_video.service.records import WriteEvent
from tvm_pipeline_video.service.settings import Settings
from tvm_pipeline_video.service.video_extra import Analysed, Decoder, Frame, Preprocessing, stream

LOOK_S = 0.1  # between two looks at whether the run ends, until the noise is through
NOISE_SIZE = 640, 480  # of the picture that warms a pipeline up; a model that takes any size has one of its own


@dataclass(frozen=True, slots=True)
class SourceEvent(Event):
    """What became of a source of a run with `wait`: `source-opened`, `-failed`, `-ended` or `-closed`.

    Attributes:
        source: its name, with passwords hidden.
        tag: the text that it was given; empty without one.
        seconds: that it took, where it was opened.
    """

    source: str = ""
    tag: str = ""
    seconds: float = 0.0


def tell_source(
    pipeline: LivePipeline,
    write_event: WriteEvent,
    listener: Listener,
    kind: str,
    reason: str,
    source: str,
    tag: str,
    seconds: float,
) -> None:
    """Tell what became of a source, as an event of the pipeline that runs; warn where it gives no frames."""
    now_s, shown = time.perf_counter() - pipeline.began_s, shown_stages(pipeline.plan.stages)
    event = SourceEvent(now_s, kind, reason, pipeline.version, plan=shown, source=source, tag=tag, seconds=seconds)
    pipeline.events.append(event)
    write_event(event, "")
    if kind in ("source-failed", "source-ended"):
        again = "; it is tried again" if kind == "source-failed" else ""
        listener.warn(f"{reason}{again}")


def waiting_plan(settings: Settings, bundle: Bundle, plan: Path | None) -> HostPlan:
    """Return the plan of the model alone: there is no source on which the work around it could be measured.

    It is that of a file, the best one for what the settings request, or the bundle's own without its host operators.
    """
    graph = bundle.compiled.graph
    own = Problem(graph, bundle.platform, bundle.profile, bundle.plan.objective)
    problem = requested_problem(own, settings.objective, settings.min_throughput, settings.max_latency)
    if plan:
        return HostPlan(problem, replace(given_plan(problem, plan), objective=problem.objective))
    if settings.objective or settings.min_throughput or settings.max_latency:
        return HostPlan(problem, quick_plan(problem))
    names = {operator.name for operator in graph.operators}
    stages = (
        replace(stage, operators=tuple(name for name in stage.operators if name in names))
        for stage in bundle.plan.stages
    )
    alone = replace(bundle.plan, stages=tuple(stage for stage in stages if stage.operators))
    return HostPlan(problem, judged(problem, alone))


def warmed_results(
    pipeline: LivePipeline,
    frames: Iterator[Frame],
    preprocessing: Preprocessing,
    decoder: Decoder | None,
    input_shape: tuple[int, ...],
    warm: Callable[[], None],
    *,
    replans: bool,
) -> Callable[[Callable[[], bool]], Iterator[Analysed[Frame]]]:
    """Return what gives the results of frames, after a frame of noise went the same way and was left out.

    No frame is taken before: it would grow old inside, and those behind it would be dropped.

    Args:
        input_shape: of the model's input.
        warm: is called when the noise is through.
        replans: whether what a change of plan takes is loaded before, for some seconds.
    """
    noise = _noise(preprocessing, input_shape)

    def results(stopped: Callable[[], bool]) -> Iterator[Analysed[Frame]]:
        through = threading.Event()

        def taken() -> Iterator[Frame]:
            yield noise
            while not through.wait(LOOK_S):
                if stopped():
                    return
            yield from frames

        try:
            for seen in stream(pipeline, taken(), preprocessing, decoder, stopped):
                if seen.frame is noise:
                    pipeline.reset_statistics()
                    if replans:
                        with suppress(PipelineError):
                            nearest_plan(pipeline.given)
                    warm()
                    through.set()
                else:
                    yield seen
        finally:
            through.set()

    return results


def _noise(preprocessing: Preprocessing, input_shape: tuple[int, ...]) -> Frame:
    width, height = NOISE_SIZE
    if preprocessing.size is None:
        _, height, width = input_shape[1:] if preprocessing.layout == "NCHW" else (0, *input_shape[1:3])
    image: Any = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    return Frame(0, 0.0, image, "noise")
