"""Table 5 and Figure 12 of `ieee_access.py`: plans, Algorithm 2 and re-planning under the loads of `loads.py`.

Read before: ieee_measure.py, which makes the subjects and the plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import repeat, takewhile

from ieee_measure import Row, Subject, shown
from loads import Load

from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.errors import PipelineError
from tvm_pipeline.runtime import Adaptation, LivePipeline, Pipeline
from tvm_pipeline.runtime.comparison import compare
from tvm_pipeline.runtime.frame_stream import FrameStream
from tvm_pipeline_papers.every_cut import every_cut
from tvm_pipeline_papers.line_search import LineSearch

SETTLED_S = 1.0  # until the load is as heavy as it will be
WARM_S = 0.3  # of a plan that stays, before its frames are counted


def under_load(found: Subject, load: Load, plans: dict[str, Plan], seconds: float, adapted_s: float) -> Row:
    """Return what each plan, Algorithm 2 and re-planning do under the load, one after the other.

    Algorithm 2 begins with the best two stages of the unloaded machine, re-planning with its `best`. Both have
    `adapted_s` seconds before their frames are counted.
    """
    row: Row = {"load": load.name, "stands_for": load.stands_for, "here": load.available() or load.here(), "fps": {}}
    if load.available():
        return row
    try:
        with load.prepared() as running:
            running.start()
            time.sleep(SETTLED_S)
            return row | _rates(found, plans, seconds, adapted_s)
    except PipelineError as error:
        return row | {"here": f"failed: {error}"}


def _rates(found: Subject, plans: dict[str, Plan], seconds: float, adapted_s: float) -> Row:
    """Return the frames a second by what runs, and the plans that each strategy of adaptation had."""
    platform = found.whole.platform
    distinct = {plan.stages: plan for plan in plans.values()}
    rates = {
        stages: _rate(Pipeline(found.compiled, plan, platform), found, WARM_S, seconds)[0]
        for stages, plan in distinct.items()
    }
    fps = {title: rates[plan.stages] for title, plan in plans.items()}
    searches: dict[str, LivePipeline] = {
        "re-planning": LivePipeline(found.compiled, found.whole, plans["best"], adaptation=Adaptation())
    }
    if "two stages" in plans:
        searches["Algorithm 2"] = LivePipeline(
            found.compiled, found.problem, plans["two stages"], adaptation=LineSearch()
        )
    walks = {}
    for title, live in searches.items():
        fps[title], walk = _rate(live, found, adapted_s, seconds)
        walks[title] = [shown(plan) for plan in walk]
    return {"fps": fps, "walks": walks}


def _rate(pipeline: FrameStream, found: Subject, warm_s: float, seconds: float) -> tuple[float, list[Plan]]:
    """Return frames a second after the first `warm_s`, and the plans that the pipeline had, if it changes plans."""
    frame = frame_of_noise(found.compiled.graph)
    walk: list[Plan] = []
    counted = 0
    with pipeline:
        begin_s = time.perf_counter() + warm_s
        end_s = begin_s + seconds
        for _ in pipeline.map(takewhile(lambda _: time.perf_counter() < end_s, repeat(frame))):
            counted += begin_s <= time.perf_counter() <= end_s
            if isinstance(pipeline, LivePipeline) and (not walk or walk[-1].stages != pipeline.plan.stages):
                walk.append(pipeline.plan)
    return counted / seconds, walk


def loaded_sweep(found: Subject, load: Load, order: tuple[str, str], seconds: float, rounds: int) -> list[Row]:
    """Return the measured period of every cut of one order under the load, one device alone included at both ends."""
    cuts = list(_of_order(found, order))
    plans = [plan for _, plan in cuts]
    with load.prepared() as running:
        running.start()
        time.sleep(SETTLED_S)
        results = compare(found.compiled, found.whole.platform, plans, seconds=seconds, rounds=rounds)
    return [
        {"operators": operators, "measured_s": 1 / max(result.throughput_fps, 1e-9)}
        for (operators, _), result in zip(cuts, results, strict=True)
    ]


def _of_order(found: Subject, order: tuple[str, str]) -> Iterator[tuple[int, Plan]]:
    total = len(found.compiled.graph)
    for cut in every_cut(found.problem, *order):
        if cut.plan and (cut.devices == order or cut.operators == total):
            yield (cut.operators if cut.devices == order else 0), cut.plan
