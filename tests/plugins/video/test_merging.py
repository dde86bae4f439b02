"""Several live sources at once: served alike, each in its order, and through a pipeline."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.plugins.video.cameras import explained, film, hanging_after, live, numbers
from tests.plugins.video.test_sources import FRAMES, encode
from tests.support.fake_backend import FakeModel, fake_platform, make_plan
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.errors import StageError
from tvm_pipeline.runtime import Pipeline
from tvm_pipeline_video import LiveFrame, LiveSource, Preprocessing, Reconnect, merge, open_source, preprocess, stream
from tvm_pipeline_video.errors import VideoError


def by_source(frames: list[LiveFrame]) -> dict[str, list[LiveFrame]]:
    found = defaultdict(list)
    for frame in frames:
        found[frame.source].append(frame)
    return found


def test_a_slow_consumer_serves_all_alike_and_in_their_order() -> None:
    specs = [f"synthetic:{16 + 8 * n}x16@{n + 1}" for n in range(4)]
    with ExitStack() as stack:
        sources = [stack.enter_context(LiveSource(spec)) for spec in specs]
        while min(source.statistics().waiting for source in sources) < 2:
            time.sleep(0.001)
        frames = []
        for frame in itertools.islice(merge(sources), 100):
            frames.append(frame)
            time.sleep(0.002)
        for source in sources:
            assert not explained(source)
    found = by_source(frames)
    assert set(found) == set(specs)
    for spec, ones in found.items():
        assert [frame.index for frame in ones] == list(range(len(ones)))
        assert abs(len(ones) - 25) <= 3  # a reader may once be late to its turn
        assert ones[0].image.shape[1] == int(spec[10:12])


def test_a_source_that_floods_does_not_starve_a_slow_one() -> None:
    with live(film(), spec="flood") as flood, live(film(10, 0.02), spec="slow", reconnect=None) as slow:
        slow_ages = []
        for frame in merge([flood, slow]):
            if frame.source == "slow":
                slow_ages.append(frame.age_s)
                if len(slow_ages) == 10:
                    break
            time.sleep(0.001)
    assert max(slow_ages) < 1
    assert flood.statistics().delivered > 10


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("policy", ["latest", "max-age=0.3", "every=2,latest"])
def test_eight_cameras_and_a_consumer_that_cannot_keep_up(policy: str) -> None:
    """Each gets its share, ages stay bounded, and every frame that is missing has its reason."""
    with ExitStack() as stack:
        sources = [
            stack.enter_context(live(film(None, 0.01), spec=f"cam{n}", policy=policy, stall_s=60.0)) for n in range(8)
        ]
        for _ in itertools.islice(merge(sources), 160):
            time.sleep(0.005)
        counts = [source.statistics() for source in sources]
    assert max(c.delivered for c in counts) - min(c.delivered for c in counts) <= 3
    for source, count in zip(sources, counts, strict=True):
        assert count.age_p99_s is not None
        assert count.age_p99_s < 1
        assert count.fps is not None
        assert sum(count.dropped.values()) > 0
        explained(source)


def test_one_that_dies_is_said_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    dies = live(film(3, error="gate: unplugged"), spec="gate", reconnect=Reconnect(0.01, 0.01, attempts=2))
    with caplog.at_level(logging.WARNING), dies, live(film(30, 0.005), spec="hall", reconnect=None) as hall:
        found = by_source(list(merge([dies, hall])))
    assert numbers(found["gate"]) == [0, 1, 2]
    assert numbers(found["hall"]) == list(range(30))
    assert "gate did not come back in 2 attempts" in str(dies.failure)
    assert hall.failure is None
    assert "there is no camera gate; the other sources go on" in caplog.text


def test_when_all_have_died_each_is_named() -> None:
    with (
        live(film(2, error="gate: unplugged"), spec="gate", reconnect=None) as gate,
        live(film(4, error="hall: burnt"), spec="hall", reconnect=None) as hall,
    ):
        frames = []
        with pytest.raises(VideoError, match="every source broke: gate: unplugged; hall: burnt"):
            frames.extend(merge([gate, hall]))
    assert Counter(frame.source for frame in frames) == {"gate": 2, "hall": 4}
    assert list(merge([])) == []


def test_waiting_for_cameras_costs_no_time_of_the_processor() -> None:
    with hanging_after(1) as silent, ExitStack() as stack:
        sources = [stack.enter_context(live(silent, spec=f"cam{n}", stall_s=60.0)) for n in range(3)]
        iterator = merge(sources)
        assert len({next(iterator).source for _ in range(3)}) == 3
        for source in sources:
            threading.Timer(0.8, source.close).start()
        before_s = time.process_time()
        assert list(iterator) == []
        assert time.process_time() - before_s < 0.2


# Through a pipeline


def brightest(batch: np.ndarray) -> list[np.ndarray]:
    return [batch.reshape(3, -1).max(axis=1).astype("int64")]


def brightest_pipeline(functions: dict[str, Callable[..., list[np.ndarray]]] | None = None) -> Pipeline:
    """Two stages on two devices: a picture's brightest red, green and blue, then one more than these."""
    tensors = Tensor("image", (1, 3, 24, 32), "uint8"), Tensor("t", (3,), "int64"), Tensor("y", (3,), "int64")
    nodes = tuple(
        Operator(name, "op", (tensors[i].name,), (tensors[i + 1],), macs=1) for i, name in enumerate(("max", "add"))
    )
    model = FakeModel(
        OperatorGraph("brightest", tensors[:1], nodes, ("y",)),
        {"max": brightest, "add": lambda x: [x + 1], **(functions or {})},
    )
    plan = make_plan(model.graph, (["d0"], ["max"]), (["d1"], ["add"]))
    return Pipeline(model, plan, fake_platform("d0", "d1"))


SETTINGS = Preprocessing(size=(32, 24), dtype="uint8")


def test_results_carry_the_source_they_are_of_whatever_the_size_of_its_pictures(clip: Path, tmp_path: Path) -> None:
    """One source changes its resolution midway, the other is of another size from the start."""
    small = encode(tmp_path / "small.ts", frames=10, size=(96, 64))
    joined = tmp_path / "joined.ts"
    joined.write_bytes(clip.read_bytes() + small.read_bytes())
    specs = [str(joined), "synthetic:64x48:25"]
    with ExitStack() as stack:
        sources = [stack.enter_context(LiveSource(spec)) for spec in specs]
        pipeline = stack.enter_context(brightest_pipeline())
        seen = list(stream(pipeline, merge(sources), SETTINGS))
    assert [one.result.frame for one in seen] == list(range(FRAMES + 10 + 25))
    for spec in specs:
        ours = [one for one in seen if one.frame.source == spec]
        with open_source(spec) as source:
            for one, frame in zip(ours, source, strict=True):
                assert one.frame.index == frame.index
                assert one.frame.image.shape == frame.image.shape
                (wanted,) = brightest(preprocess(frame.image, SETTINGS))
                assert np.array_equal(one.result.outputs["y"], wanted + 1)
    assert {one.frame.image.shape for one in seen} == {(120, 160, 3), (64, 96, 3), (48, 64, 3)}


def test_a_stage_that_fails_is_heard_of_while_cameras_go_on() -> None:
    def fails(_: np.ndarray) -> list[np.ndarray]:
        raise RuntimeError("the device is gone")

    with (
        live(film(None, 0.005), policy="latest") as source,
        brightest_pipeline({"add": fails}) as pipeline,
        pytest.raises(StageError, match="the device is gone"),
    ):
        list(stream(pipeline, source, SETTINGS))


def test_the_source_may_be_closed_while_the_pipeline_runs() -> None:
    with hanging_after(5) as stalls, live(stalls, stall_s=60.0) as source, brightest_pipeline() as pipeline:
        results = stream(pipeline, source, SETTINGS)
        seen = [next(results) for _ in range(5)]
        threading.Thread(target=source.close).start()
        assert list(results) == []
    assert numbers([one.frame for one in seen]) == [0, 1, 2, 3, 4]
