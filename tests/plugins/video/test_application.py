"""An application as one pipeline: the same results as by hand, in order, and clear errors where a part of it fails."""

from __future__ import annotations

import itertools
import os
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.parts import needs

needs("av")

from tests.support.fake_backend import FakeModel, with_calls_of
from tvm_pipeline import Pipeline, Plan, Problem, planning
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.plan import Prediction, Stage
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.core.profile import DeviceProfile, Profile
from tvm_pipeline.errors import OptionError, ProfileError, RunError, StageError
from tvm_pipeline_video import (
    Annotation,
    Application,
    HostSetting,
    LiveSource,
    Picture,
    Preprocessing,
    Rehearsal,
    Source,
    draw,
    host_graph,
    host_profile,
    open_source,
    preprocess,
    profile_host,
)
from tvm_pipeline_video.errors import VideoError

CORE = min(os.sched_getaffinity(0))
SETTINGS = Preprocessing(size=(8, 8))
FILM = "synthetic:32x24@30:20"


def means(x):
    return [x.mean(axis=(2, 3))]


def model() -> FakeModel:
    """Return a model that takes pictures of 8 x 8 and gives the mean of each colour, negated twice."""
    x, a, y = Tensor("x", (1, 3, 8, 8)), Tensor("a", (1, 3)), Tensor("y", (1, 3))
    operators = Operator("means", "mean", ("x",), (a,)), Operator("negate", "negative", ("a",), (y,))
    graph = OperatorGraph("colours", (x,), operators, ("y",))
    return FakeModel(graph, {"means": means, "negate": lambda a: [-a]})


def colour(outputs, transform):
    return [Annotation("colour", float(-outputs["y"].sum()), box=(1.0, 1.0, 9.0, 9.0))]


def platform_of(*names: str) -> Platform:
    """Return fake devices, the first on a core of this machine."""
    first, *others = (Device(name, "fake") for name in names)
    return Platform("box", (replace(first, cores=(CORE,)), *others))


def plan_of(graph: OperatorGraph, *stages: tuple[str, str]) -> Plan:
    made = tuple(Stage((device,), tuple(operators.split())) for device, operators in stages)
    return Plan(graph.name, "by hand", "throughput", made, Prediction(1.0, 1.0))


def profile_of(compiled: FakeModel, platform: Platform) -> Profile:
    graph = compiled.graph
    devices = {
        device.name: DeviceProfile.in_order(graph, [1e-3] * len(graph), [0.0] * len(graph))
        for device in platform.devices
    }
    return Profile(graph.name, graph.fingerprint, devices)


WHOLE = "host/read host/prepare means negate host/decode host/draw host/write"


def run(frames, *, decode=colour, write=lambda seen, picture: None, stages=None, batch=1, **options):
    """Run an application on frames; return what came out, before any error that is raised."""
    compiled, platform = with_calls_of(batch, model()) if batch > 1 else model(), platform_of("d0", "d1")
    graph = host_graph(compiled.graph, 32, 24, draws=True, writes=True)
    application = Application(compiled.graph, graph, frames, SETTINGS, decode, write, **options)
    plan = plan_of(graph, *(stages or (("d0", WHOLE),)))
    found = []
    with Pipeline(compiled, plan, platform, host=application.host) as pipeline:
        try:
            found.extend(application.run(pipeline))
        except Exception as error:
            return found, error
    return found, None


@pytest.mark.parametrize(
    "stages",
    [
        [("d0", WHOLE)],
        [("d0", "host/read host/prepare means"), ("d1", "negate host/decode host/draw host/write")],
        [("d1", "host/read host/prepare means negate"), ("d0", "host/decode host/draw host/write")],
    ],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_it_gives_what_the_parts_give_one_after_the_other(stages, batch):
    written = []
    with open_source(FILM) as source:
        found, error = run(source, write=lambda *seen: written.append(seen), stages=stages, batch=batch)
    assert error is None
    with open_source(FILM) as source:
        for seen, (line, picture), frame in itertools.zip_longest(found, written, source):
            expected = float(means(preprocess(frame.image, SETTINGS))[0].sum())
            (annotation,) = seen.annotations
            assert annotation.score == pytest.approx(expected)
            assert (seen.frame.index, line.frame.index) == (frame.index, frame.index)
            assert seen.result.latency_s >= line.result.latency_s > 0
            np.testing.assert_array_equal(picture, draw(frame.image, [annotation]))


def test_a_decoder_that_raises_or_returns_nonsense_is_named_with_the_frame():
    def broken(outputs, transform):
        raise KeyError("heat")

    def deep(outputs, transform):
        return np.concatenate([np.zeros(2), np.zeros((2, 2))])

    class Spread:
        def __call__(self, outputs, transform):
            raise IndexError

    line = broken.__code__.co_firstlineno + 1

    for decode, words in (
        (
            broken,
            rf"broken failed at frame 0 of synthetic.*KeyError: 'heat' \({__file__}, line {line}\); the outputs are",
        ),
        (broken, r"the outputs are y \[1, 3\]; mend the function"),
        (deep, rf"deep failed at frame 0.*\({__file__}, line {line + 3}\)"),  # not the line inside of numpy
        (Spread(), rf"Spread failed at frame 0.*\({__file__}, line"),
        (lambda outputs, transform: {"face": 1}, r"returned .*face.* at frame 0 of synthetic.*must return a list of"),
        (lambda outputs, transform: None, r"returned 'None' at frame 0"),
    ):
        with open_source(FILM) as source:
            found, error = run(source, decode=decode)
        assert found == []
        assert isinstance(error, RunError)
        with pytest.raises(RunError, match=words):
            raise error


def test_a_source_that_breaks_and_a_file_that_cannot_be_written_are_the_errors_that_they_are():
    def breaking():
        with open_source(FILM) as source:
            yield from itertools.islice(source, 7)
        raise VideoError("film.mp4 breaks off at frame 7")

    def full(seen, picture):
        if seen.frame.index == 4:
            raise VideoError("cannot write out.mp4: no space left")

    found, error = run(breaking())
    assert [seen.frame.index for seen in found] == list(range(7))
    assert (type(error), str(error)) == (VideoError, "film.mp4 breaks off at frame 7")
    with open_source(FILM) as source:
        found, error = run(source, write=full)
    assert [seen.frame.index for seen in found] == list(range(4))
    assert (type(error), str(error)) == (VideoError, "cannot write out.mp4: no space left")


def test_it_ends_with_the_frames_inside_once_it_is_stopped():
    compiled, platform = model(), platform_of("d0")
    graph = host_graph(compiled.graph, 32, 24, draws=False, writes=False)
    with open_source("synthetic:32x24") as source:  # has no end
        application = Application(compiled.graph, graph, source, SETTINGS)
        plan = plan_of(graph, ("d0", "host/read host/prepare means negate host/decode"))
        with Pipeline(compiled, plan, platform, host=application.host) as pipeline:
            found = []
            for seen in application.run(pipeline, lambda: len(found) >= 10):
                found.append(seen.frame.index)
    assert found == list(range(len(found)))
    assert 10 <= len(found) < 30
    assert list(seen.result.outputs) == ["y"]


def test_a_file_is_read_at_a_rate():
    with open_source("synthetic:32x24@30:4") as source:
        found, error = run(source, rate_fps=100.0)
    assert error is None
    assert len(found) == 4


def test_the_threads_of_a_live_source_run_where_frames_are_read():
    compiled, platform = model(), platform_of("d0")
    graph = host_graph(compiled.graph, 32, 24, draws=False, writes=False)
    with LiveSource("synthetic:32x24") as source:
        application = Application(
            compiled.graph, graph, source, SETTINGS, place=lambda device: source.place(device.cores)
        )
        plan = plan_of(graph, ("d0", "host/read host/prepare means negate host/decode"))
        with Pipeline(compiled, plan, platform, host=application.host) as pipeline:
            frames = [seen.frame for seen in itertools.islice(application.run(pipeline), 5)]
            assert os.sched_getaffinity(source._reader.native_id) == {CORE}
    assert [frame.index for frame in frames] == list(range(5))
    assert all(frame.read_s > 0 for frame in frames)


def rehearsal(spec=FILM, **options) -> Rehearsal:
    return Rehearsal(model().graph, spec, SETTINGS, colour, decoder="found.py:colour", **options)


def test_host_operators_are_measured_where_there_are_cores():
    compiled, platform = model(), platform_of("d0", "d1")
    app = rehearsal()
    profile = profile_host(app, compiled, platform, profile_of(compiled, platform), seconds=0.1)
    own = ["host/read", "host/prepare", "host/decode"]
    assert [operator.name for operator in app.graph.operators if operator.ordered] == own
    for name in own:
        assert profile.devices["d0"].seconds[name] > 0
        assert profile.devices["d1"].seconds[name] is None
        assert name in profile.devices["d0"].spread
    others = len(os.sched_getaffinity(0)) > 1
    assert sorted(profile.lock_s) == (sorted(own) if others else [])
    assert all(held >= 0 for held in profile.lock_s.values())
    best = planning.plan(Problem(app.graph, platform, profile)).plan
    for stage in best.stages:
        if not set(own).isdisjoint(stage.operators):
            assert stage.devices == ("d0",)


def test_host_operators_take_their_time_for_each_frame_of_a_call(monkeypatch):
    own = ["host/read", "host/prepare", "host/decode"]
    monkeypatch.setattr(host_profile, "_timed", lambda *_: {name: [0.01, 0.02] for name in own})
    monkeypatch.setattr(host_profile, "_lock_seconds", lambda *_: dict.fromkeys(own, 0.001))
    compiled, platform = with_calls_of(4, model()), platform_of("d0")
    app = Rehearsal(compiled.graph, FILM, SETTINGS, colour)
    profile = profile_host(app, compiled, platform, profile_of(compiled, platform))
    assert app.graph.batch == 4
    assert [profile.devices["d0"].seconds[name] for name in own] == pytest.approx([0.06] * 3)
    assert profile.lock_s == pytest.approx(dict.fromkeys(own, 0.004))


def test_a_decoder_that_hangs_while_it_is_measured_is_named(monkeypatch):
    monkeypatch.setattr("tvm_pipeline_video.host_profile.PATIENCE_S", 0.2)
    let_go = threading.Event()
    compiled, platform = model(), platform_of("d0")
    app = Rehearsal(compiled.graph, FILM, SETTINGS, lambda outputs, transform: let_go.wait() and ())
    with pytest.raises(StageError, match=r"failed at frame 0: .* the decoder .*<lambda> did not end within 0.2 s"):
        profile_host(app, compiled, platform, profile_of(compiled, platform), seconds=0.1)
    let_go.set()


def test_a_platform_without_a_cpu_cannot_be_measured():
    compiled, platform = model(), Platform("box", (Device("d0", "fake"),))
    with pytest.raises(ProfileError, match="no device of platform box is a CPU that runs the whole of colours"):
        profile_host(rehearsal(), compiled, platform, profile_of(compiled, platform))


def test_plans_are_compared_at_the_same_places_of_a_file(monkeypatch):
    opened = []

    def open_and_note(spec, start=0.0, **options):
        opened.append(round(start, 3))
        return open_source(spec, start=start, **options)

    monkeypatch.setattr("tvm_pipeline_video.rehearsals.open_source", open_and_note)
    compiled, platform = model(), platform_of("d0")
    app = rehearsal("synthetic:32x24@30", overlay=True)
    names = tuple(app.graph.operator_names)
    plan = Plan(app.graph.name, "by hand", "throughput", (Stage(("d0",), names),), Prediction())
    run, few = app.runner(compiled, platform), replace(plan, in_flight=1)
    opened.clear()
    for each in (plan, few, few, plan, plan, few):
        run(each, 0.01)
    assert opened == [0.0, 0.0, 0.618, 0.618, 0.236, 0.236]


def test_a_turn_at_a_rate_has_the_times_of_frames_at_that_rate():
    """A core that waits between two frames is slower. A full turn has another number of frames: all that it makes."""
    compiled, platform = model(), platform_of("d0")
    app = rehearsal("synthetic:32x24@30")
    names = tuple(app.graph.operator_names)
    plan = Plan(app.graph.name, "by hand", "throughput", (Stage(("d0",), names),), Prediction(), in_flight=1)
    turn = app.runner(compiled, platform, rate_fps=100.0)(plan, 0.2)
    assert [len(times) for times in turn.times_s] == [20 - 1]  # but for those that fill the pipeline
    assert turn.latency_s >= min(turn.times_s[0])


def test_settings_say_what_differs():
    known = rehearsal().setting
    assert known == HostSetting(32, 24, "", False, "found.py:colour")
    other = replace(known, width=64, codec="h264", video=".mp4")
    text = "frame width 64 instead of 32, codec h264 instead of none, video to write .mp4 instead of none"
    assert other.differences(known) == text
    assert known.differences(known) == ""


def test_a_model_of_several_inputs_is_no_application():
    x, y, z = Tensor("x", (1, 3, 8, 8)), Tensor("y", (1, 3, 8, 8)), Tensor("z", (1, 3, 8, 8))
    graph = OperatorGraph("two", (x, y), (Operator("add", "add", ("x", "y"), (z,)),), ("z",))
    with pytest.raises(OptionError, match=r"two has several inputs \(x, y\)"):
        host_graph(graph, 32, 24, draws=False, writes=False)


def test_a_live_source_is_recorded_and_a_file_that_breaks_off_begins_again(monkeypatch):
    compiled, platform = model(), platform_of("d0")
    live = rehearsal("synthetic:32x24")
    live.setting = replace(live.setting, live=True)
    live._is_recorded = True  # as that of a camera is, which is not here
    profile = profile_host(live, compiled, platform, profile_of(compiled, platform), seconds=0.1)
    assert profile.devices["d0"].seconds["host/read"] >= live.recorded_read_s > 0

    def breaking(spec):
        source = open_source("synthetic:32x24@30:9")

        def pictures():
            for frame in source:
                if frame.index == 5:
                    raise VideoError("it breaks off at frame 5")
                yield Picture(frame.time_s, frame.image)

        return Source(spec, pictures(), fps=30.0, frames=None, limit=None)

    broken = rehearsal()
    monkeypatch.setattr("tvm_pipeline_video.rehearsals.open_source", breaking)
    profile = profile_host(broken, compiled, platform, profile_of(compiled, platform), seconds=0.1)
    assert profile.devices["d0"].seconds["host/read"] > 0
