"""A trace holds every frame of every stage, on its own row and for as long as it took, nested as viewers want it."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.plugins.video.watch.watched import watching
from tests.support.fake_backend import chain_model
from tvm_pipeline.core.plan import Stage
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.core.statistics import Bar, Sample
from tvm_pipeline.cost.simulate import simulate
from tvm_pipeline_video.watch import chrome_trace, stage_bars

# What the format asks of an event of each phase, beside `ph`, `pid`, `tid`, `name` and `ts`.
FIELDS = {"X": {"cat", "dur", "args"}, "i": {"s"}, "M": {"args"}}


def rows(trace):
    """The slices of each row, by its name; raises where an event is not as the format wants it."""
    names, slices = {}, {}
    for event in json.loads(json.dumps(trace))["traceEvents"]:
        assert event.keys() == {"ph", "pid", "tid", "name", "ts"} | FIELDS[event["ph"]]
        if event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault(event["tid"], []).append(event)
    return {names[row]: found for row, found in slices.items()}


def ends(event):
    return event["ts"], event["ts"] + event["dur"]


def test_a_run_is_drawn_as_it_was_recorded():
    watched = watching()
    watched.run(10)
    found = rows(chrome_trace(watched.bars(0.0), "chain"))
    assert list(found) == ["stage 0 on d0", "stage 1 on d1", "stage 1 on d2"]
    for (stage, device), label in zip([(0, "d0"), (1, "d1"), (1, "d2")], found, strict=True):
        timed = [t for r in watched.records if (r.stage, r.device) == (stage, device) for t in r.timed]
        for part in ("transfer", "compute"):
            drawn_us = sum(event["dur"] for event in found[label] if event["name"] == part)
            assert drawn_us == pytest.approx(1e6 * sum(getattr(t, f"{part}_s") for t in timed), abs=len(timed))
        assert sum(event["cat"] == "frame" for event in found[label]) == len(timed)


def test_only_what_ended_in_the_window():
    samples = [Sample(0.5, 0.1, 0.4, frame, float(frame)) for frame in range(1, 6)]
    assert stage_bars(0, "d0", samples, since_s=3.0) == [
        Bar(0, "d0", frame, pytest.approx(frame - 0.5), 0.1, 0.4) for frame in (4, 5)
    ]
    assert len(stage_bars(0, "d0", samples)) == 5


def test_a_simulation_is_drawn_too():
    graph = chain_model().graph
    platform = Platform("box", (Device("d0", "fake"), Device("d1", "fake")), (Link("d0", "d1", latency_s=0.001),))
    measured = dict.fromkeys(("d0", "d1"), DeviceProfile.in_order(graph, (0.002, 0.003)))
    problem = Problem(graph, platform, Profile(graph.name, graph.fingerprint, measured))
    bars = simulate(problem, (Stage(("d0",), ("op0",)), Stage(("d1",), ("op1",))), frames=8).events
    found = rows(chrome_trace(bars, "chain"))
    first, second = found["stage 0 on d0"], found["stage 1 on d1"]
    assert [e["dur"] for e in first if e["name"] != "wait"] == [2000] * 16  # each frame, and its computing
    assert [e["dur"] for e in second if e["name"] in ("transfer", "compute")] == [1000, 3000] * 8


parts = st.floats(0, 0.01)


@given(st.lists(st.tuples(parts, parts, parts), min_size=1), st.floats(0, 1e6))
def test_slices_nest_and_waits_fill_the_rest(samples, start_s):
    bars, now = [], start_s
    for frame, (wait, transfer, compute) in enumerate(samples):
        bars.append(Bar(0, "d0", frame, now + wait, transfer, compute))
        now += wait + transfer + compute
    [found] = rows(chrome_trace(bars, "chain")).values()
    frames = [event for event in found if event["cat"] == "frame"]
    assert [event["name"] for event in frames] == [f"frame {index}" for index in range(len(samples))]
    for event in found:
        (begin, end), frame = ends(event), frames[event["args"]["frame"]]
        if event["name"] in ("transfer", "compute"):
            assert ends(frame)[0] <= begin <= end <= ends(frame)[1]
    outer = sorted(ends(event) for event in found if event["cat"] in ("frame", "wait"))
    assert all(early[1] == late[0] for early, late in pairwise(outer))


def test_what_was_decided_is_marked():
    trace = chrome_trace([], "chain", [(2.5, "switched to plan 2")])
    assert (
        trace["traceEvents"][-1] | {"ts": 2_500_000, "name": "switched to plan 2", "s": "g"} == trace["traceEvents"][-1]
    )
