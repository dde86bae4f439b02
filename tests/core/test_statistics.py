"""What a run reports is what an independent computation over the same times gives, in steady state only."""

from __future__ import annotations

import statistics
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import busy, chain_model, chain_pipeline, fake_platform, make_plan, number, numbers
from tvm_pipeline.core.statistics import WINDOW, RunRecord, StageRecord, median_interval
from tvm_pipeline.runtime import Pipeline, RunStatistics

seconds = st.floats(1e-6, 1.0)


def quantiles(latencies: list[float]) -> list[float]:
    """Median, 90 %, 99 % and maximum, by the standard library."""
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return [statistics.median(latencies), cuts[89], cuts[98], max(latencies)]


def reported(run: RunStatistics) -> list[float | None]:
    return [run.latency_p50_s, run.latency_p90_s, run.latency_p99_s, run.latency_max_s]


@given(
    gaps=st.lists(st.tuples(seconds, seconds), min_size=12, max_size=60),
    skip=st.integers(1, 5),
    draining=st.integers(0, 5),
)
def test_the_steady_state_is_between_filling_and_draining(
    gaps: list[tuple[float, float]], skip: int, draining: int
) -> None:
    done = list(accumulate(gap for gap, _ in gaps))
    latencies = [latency for _, latency in gaps]
    record = RunRecord()
    for done_s, latency_s in zip(done, latencies, strict=True):
        record.add(done_s - latency_s, done_s)
    last = len(done) - draining  # frames from here on came out after the last one had gone in
    run = record.summary(skip, done[last - 1], ())
    assert run.frames == len(done)
    assert run.throughput_fps == pytest.approx((last - skip - 1) / (done[last - 1] - done[skip]))
    assert reported(run) == pytest.approx(quantiles(latencies[skip:last]), abs=1e-9)


@given(st.lists(st.tuples(seconds, seconds, seconds), min_size=4, max_size=30))
def test_a_stages_figures(samples: list[tuple[float, float, float]]) -> None:
    record = StageRecord(1, "d1")
    for sample in samples:
        record.add(*sample, record.frames, 0.0)
    stage = record.summary(3)
    wait, transfer, compute = zip(*samples[3:], strict=True)
    assert (stage.stage, stage.device, stage.frames) == (1, "d1", len(samples))
    assert stage.compute_s == pytest.approx(statistics.median(compute))
    assert stage.transfer_s == pytest.approx(statistics.median(transfer))
    assert stage.wait_s == pytest.approx(statistics.median(wait))
    assert stage.bubble_share == pytest.approx(sum(wait) / sum(map(sum, samples[3:])))


def test_frames_sent_alone_report_the_latencies_of_their_results() -> None:
    with chain_pipeline(chain_model(2), in_flight=3) as pipeline:
        latencies = []
        for frame in numbers(40):
            pipeline.submit(frame)
            latencies.append(pipeline.result().latency_s)
        run = pipeline.statistics()
    assert run.frames == 40
    assert reported(run) == pytest.approx(quantiles(latencies[3:-1]))  # the last came out after the last went in


def test_a_full_pipeline_is_as_fast_as_its_bottleneck_can_be() -> None:
    """The bottleneck computes for 3 ms at least, whatever else this machine does."""
    model = chain_model(3, hooks={("op1", "d1"): busy(3e-3)})
    with chain_pipeline(model) as pipeline:
        latencies = [result.latency_s for result in pipeline.map(numbers(40))]
        run = pipeline.statistics()
    # The first of the frames that count may have come out late, so that the rest seem a little faster.
    assert 0 < run.throughput_fps <= 1.1 / 3e-3
    assert 3e-3 <= run.latency_p50_s <= run.latency_p90_s <= run.latency_p99_s <= run.latency_max_s <= max(latencies)
    first, bottleneck, last = run.stages
    assert [(s.stage, s.device, s.frames) for s in run.stages] == [(0, "d0", 40), (1, "d1", 40), (2, "d2", 40)]
    assert bottleneck.compute_s >= 3e-3
    assert first.bubble_share > bottleneck.bubble_share < last.bubble_share
    assert all(0 <= stage.bubble_share <= 1 for stage in run.stages)


def test_replicas_report_each_their_frames() -> None:
    model = chain_model(2)
    plan = make_plan(model.graph, (["d0", "d1"], ["op0"]), (["d2"], ["op1"]))
    with Pipeline(model, plan, fake_platform("d0", "d1", "d2")) as pipeline:
        list(pipeline.map(numbers(50)))
        stages = pipeline.statistics().stages
    assert [stage.device for stage in stages] == ["d0", "d1", "d2"]
    assert stages[0].frames + stages[1].frames == stages[2].frames == 50


def test_too_few_frames_say_nothing() -> None:
    with chain_pipeline(chain_model(2)) as pipeline:
        empty = pipeline.statistics()
        pipeline.submit(number(0))
        pipeline.result()
        one = pipeline.statistics()
    assert (empty.frames, empty.throughput_fps, *reported(empty)) == (0, None, None, None, None, None)
    assert [(stage.frames, stage.compute_s) for stage in empty.stages] == [(0, 0.0), (0, 0.0)]
    assert (one.frames, one.throughput_fps) == (1, None)
    assert one.latency_p50_s == one.latency_max_s > 0


def test_reset_forgets_what_was_before() -> None:
    with chain_pipeline(
        chain_model(2, hooks={("op1", "d1"): lambda call: busy(0.02)(call) if call == 3 else None})
    ) as pipeline:
        for frame in numbers(20):
            pipeline.submit(frame)
            pipeline.result()
        assert pipeline.statistics().frames == 20
        pipeline.reset_statistics()
        fresh = pipeline.statistics()
        assert (fresh.frames, fresh.latency_max_s, [stage.frames for stage in fresh.stages]) == (0, None, [0, 0])
        list(pipeline.map(numbers(30)))
        assert pipeline.statistics().frames == 30
        assert [stage.frames for stage in pipeline.statistics().stages] == [30, 30]


def test_statistics_may_be_read_and_reset_while_frames_run() -> None:
    with chain_pipeline(chain_model(2)) as pipeline, ThreadPoolExecutor(1) as other:
        running = other.submit(lambda: sum(1 for _ in pipeline.map(numbers(300))))
        reads = 0
        while not running.done():
            run = pipeline.statistics()
            assert run.throughput_fps is None or run.throughput_fps > 0
            reads += 1
            if reads % 10 == 0:
                pipeline.reset_statistics()
        assert running.result() == 300


def test_a_long_run_keeps_the_latest_samples_in_bounded_memory() -> None:
    run, stage = RunRecord(), StageRecord(0, "d0")

    def add(frames: int, latency_s: float) -> None:
        for _ in range(frames):
            run.add(run.frames * 1.0, run.frames + latency_s)
            stage.add(1e-3, 2e-3, latency_s, stage.frames, 0.0)

    add(WINDOW, 9.0)
    tracemalloc.start()
    add(1, 9.0)
    before = tracemalloc.get_traced_memory()[0]
    add(WINDOW, 0.5)
    once = tracemalloc.get_traced_memory()[0] - before
    add(4 * WINDOW, 0.5)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 1.1 * once + 10_000
    figures = run.summary(10, float("inf"), (stage.summary(10),))
    assert figures.frames == 6 * WINDOW + 1
    assert figures.latency_max_s == pytest.approx(0.5)
    assert figures.stages[0].compute_s == pytest.approx(0.5)
    assert figures.throughput_fps == pytest.approx(1.0)


@given(st.integers(1, 60))
def test_the_interval_of_the_median_holds_it_95_times_in_100(count: int) -> None:
    """The number of values below the true median is that of heads among `count` coins; fewer than six are too few."""
    low, high = median_interval(range(count))
    assert low == count - 1 - high
    missed = 2 * sum(comb(count, heads) for heads in range(low + 1)) / 2**count
    assert missed <= 0.05 or (low == 0 and count < 6)
    narrower = 2 * sum(comb(count, heads) for heads in range(low + 2)) / 2**count
    assert narrower > 0.05


@pytest.mark.thorough
def test_the_interval_of_the_median_of_very_many_values() -> None:
    low, high = median_interval(range(5000))
    assert (low + high, 2300 < low < 2500) == (4999, True)
