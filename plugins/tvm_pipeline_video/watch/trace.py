"""The work of each device, as a trace that https://ui.perfetto.dev and chrome://tracing open.

Source of the format: "Trace Event Format" (the Chromium project, docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): the JSON object form with complete (`X`), instant (`i`) and metadata
(`M`) events. The bars may be those of a run or of a simulation (`cost/simulate.py`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from tvm_pipeline.core.statistics import Bar, Sample

Event = dict[str, Any]


def stage_bars(
    stage: int,
    device: str,
    samples: Sequence[Sample],
    since_s: float = -math.inf,
) -> list[Bar]:
    """Return the bars of one stage on one device that ended after `since_s`.

    Args:
        samples: one of each frame, in the order in which the frames were done.
    """
    bars = []
    for sample in reversed(samples):
        if sample.done_s <= since_s:
            break
        start_s = sample.done_s - sample.transfer_s - sample.compute_s
        bars.append(Bar(stage, device, sample.frame, start_s, sample.transfer_s, sample.compute_s))
    return bars[::-1]


def chrome_trace(bars: Iterable[Bar], name: str, marks: Iterable[tuple[float, str]] = ()) -> dict[str, Any]:
    """Return the trace of a run: a row for each stage and device, with a bar for each frame.

    A bar holds the frame's `transfer`, then its `compute`; the time of sending, which comes after computing, is drawn
    in the `transfer`. Between two bars of a row is a `wait`.

    Args:
        name: the graph that ran; the heading of the rows.
        marks: seconds on the clock of the bars, and what happened then.
    """
    rows: defaultdict[tuple[int, str], list[Bar]] = defaultdict(list)
    for bar in bars:
        rows[bar.stage, bar.device].append(bar)
    events = [_metadata("process_name", 0, name=name)]
    for row, ((stage, device), work) in enumerate(sorted(rows.items()), 1):
        events.append(_metadata("thread_name", row, name=f"stage {stage} on {device}"))
        events.append(_metadata("thread_sort_index", row, sort_index=row))
        work.sort(key=lambda bar: bar.start_s)
        for bar in work:
            events.extend(_frame(bar, row))
        for early, late in pairwise(work):
            ended, began = _us(early.end_s), _us(late.start_s)
            if began > ended:
                events.append(_slice("wait", row, ended, began, late.frame))
    events.extend({"ph": "i", "s": "g", "pid": 1, "tid": 0, "name": text, "ts": _us(at)} for at, text in marks)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _frame(bar: Bar, row: int) -> Iterator[Event]:
    # Viewers draw a slice inside another only where its rounded ends lie in it: all share these three.
    began, received, ended = _us(bar.start_s), _us(bar.start_s + bar.transfer_s), _us(bar.end_s)
    yield _slice(f"frame {bar.frame}", row, began, ended, bar.frame)
    if received > began:
        yield _slice("transfer", row, began, received, bar.frame)
    if ended > received:
        yield _slice("compute", row, received, ended, bar.frame)


def _slice(name: str, row: int, began: int, ended: int, frame: int) -> Event:
    times = {"ts": began, "dur": ended - began}
    return {"ph": "X", "cat": name.split()[0], "name": name, "pid": 1, "tid": row, **times, "args": {"frame": frame}}


def _metadata(what: str, row: int, **args: object) -> Event:
    return {"ph": "M", "name": what, "pid": 1, "tid": row, "ts": 0, "args": args}


def _us(seconds: float) -> int:
    """Whole microseconds, the format's unit."""
    return round(seconds * 1e6)
