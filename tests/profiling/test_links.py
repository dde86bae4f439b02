"""Links: which devices get one, what is timed for it, and the line through the times."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fake_backend import FakeRunner, chain_model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.profiling.links import SIZES, fit_link, fit_links, measure_link


def runners(*devices: Device) -> dict[Device, FakeRunner]:
    model = chain_model(1)
    return {device: model.stage(["op0"], device) for device in devices}


@given(st.floats(0, 1e-2), st.floats(1e6, 1e12))
def test_a_line_is_found_again(latency_s: float, bandwidth: float) -> None:
    seconds = [latency_s + size / bandwidth for size in SIZES]
    link = fit_link("d0", "d1", list(SIZES), seconds)
    assert (link.source, link.destination) == ("d0", "d1")
    for size, second in zip(SIZES, seconds, strict=True):
        assert link.seconds(size) == pytest.approx(second, rel=1e-6, abs=1e-9)


def test_the_quality_of_a_fit() -> None:
    exact = fit_link("d0", "d1", list(SIZES), [1e-5 + size / 1e9 for size in SIZES])
    assert (exact.latency_s, exact.bandwidth_bytes_per_s) == pytest.approx((1e-5, 1e9))
    assert exact.r2 == pytest.approx(1.0)
    bent = fit_link("d0", "d1", list(SIZES), [1e-5 + size / 1e9 * (1.3 if size > 1e6 else 0.7) for size in SIZES])
    assert bent.r2 is not None
    assert 0.5 < bent.r2 < 0.999
    flat = fit_link("d0", "d1", list(SIZES), [2e-6] * len(SIZES))
    assert flat.latency_s == pytest.approx(2e-6)
    assert flat.seconds(SIZES[-1]) == pytest.approx(2e-6)


def test_neither_part_is_negative() -> None:
    """Seconds are differences of two copies, so noise may bring them below zero."""
    falling = fit_link("d0", "d1", list(SIZES), [1e-3 - size * 1e-10 for size in SIZES])
    assert falling.bandwidth_bytes_per_s is None
    assert falling.latency_s > 0
    steep = fit_link("d0", "d1", list(SIZES), [size / 1e9 - 1e-4 for size in SIZES])
    assert steep.latency_s == 0
    assert steep.bandwidth_bytes_per_s == pytest.approx(1e9)


@given(st.lists(st.floats(-1, 1), min_size=len(SIZES), max_size=len(SIZES)))
def test_whatever_was_measured_gives_a_possible_link(seconds: list[float]) -> None:
    link = fit_link("d0", "d1", list(SIZES), seconds)
    assert link.is_possible
    assert link.seconds(SIZES[0]) <= link.seconds(SIZES[-1])


def test_a_link_is_timed_on_both_devices() -> None:
    """The writer is bound to the source, the reader to the destination, and the caller to neither."""
    source, destination = Device("d0", "fake"), Device("d1", "fake")
    found = runners(source, destination)
    threads: dict[str, threading.Thread] = {}
    for device, runner in found.items():
        runner.bind = lambda name=device.name: threads.update({name: threading.current_thread()})  # type: ignore[method-assign]
    sizes, seconds = measure_link(found[source], found[destination])
    assert tuple(sizes) == SIZES
    assert len(seconds) == len(SIZES)
    assert np.isfinite(seconds).all()
    assert threads.keys() == {"d0", "d1"}
    assert len({*threads.values(), threading.current_thread()}) == 3
    assert not any(thread.is_alive() for thread in threads.values())


def test_a_link_for_each_ordered_pair_that_can_work_at_once() -> None:
    devices = (
        Device("d0", "fake", (0,)),
        Device("d1", "fake", (1,)),
        Device("both", "fake", (0, 1)),
        Device("gpu", "fake"),
    )
    links = fit_links(runners(*devices))
    pairs = [("d0", "d1"), ("d0", "gpu"), ("d1", "gpu"), ("both", "gpu")]
    assert {(link.source, link.destination) for link in links} == {*pairs, *((b, a) for a, b in pairs)}
    assert len(links) == 2 * len(pairs)
    assert all(link.is_possible for link in links)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("failing", ["d0", "d1"])
def test_a_device_that_cannot_be_bound_ends_both_threads(failing: str) -> None:
    """The thread of the other device waits for a turn that never comes."""
    devices = Device("d0", "fake"), Device("d1", "fake")
    model = chain_model(1, bind_errors={failing: OSError("no such core")})
    source, destination = (model.stage(["op0"], device) for device in devices)
    with pytest.raises(OSError, match="no such core"):
        measure_link(source, destination)
