"""Devices that compute a stage as one: their figures follow from a few stages that are measured whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from tests.calibration.test_measuring import D0, LAW, Clock
from tests.profiling.test_layer_times import several
from tests.support.log_lines import log_lines
from tvm_pipeline import Device, DeviceProfile, Platform, Problem, Profile
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.calibration.stage_profile import with_stage_times
from tvm_pipeline.core.graph import OperatorGraph
from tvm_pipeline.core.partition import longest_stages
from tvm_pipeline.core.profile import SegmentProfile
from tvm_pipeline.cost.device_costs import cost_of
from tvm_pipeline.cost.modelled_stage import roofline_seconds, stage_seconds
from tvm_pipeline.errors import PlanError
from tvm_pipeline.planning import plan
from tvm_pipeline.planning.measured import SegmentTimer
from tvm_pipeline.profiling import profile_model
from tvm_pipeline.profiling.device_bench import SHARED_OUT_BY
from tvm_pipeline.testing import FakeBackend, FakeModel, example_graph

[GRAPH] = several(1)
NAMES = GRAPH.operator_names


class StagesOnly(FakeModel):
    """A model of which `d0` tells no times of operators."""

    def has_operator_times(self, device: Device) -> bool:
        return device.name != "d0"

    def time_operators(self, device: Device, repeats: int) -> np.ndarray:
        assert self.has_operator_times(device)
        return super().time_operators(device, repeats)


def shared_out(names: Sequence[str] = NAMES) -> Profile:
    """Return a profile in which the whole model's time is shared out among operators that take the same time."""
    whole_s = stage_seconds(LAW, GRAPH, NAMES)
    each = [whole_s / len(names) if name in names else None for name in NAMES]
    return Profile(GRAPH.name, GRAPH.fingerprint, {"d0": DeviceProfile.in_order(GRAPH, each, busy_factor=1.2)})


def by_work(graph: OperatorGraph) -> Mapping[str, float | None]:
    return roofline_seconds(graph, SHARED_OUT_BY)


def off(profile: Profile) -> float:
    """Return the median error of random stages of the graph's order, against the law of the device."""
    costs = cost_of(Problem(GRAPH, Platform("box", (D0,)), replace(profile, segments=())), D0)
    chance = np.random.default_rng(3)
    errors = []
    for _ in range(40):
        start, end = sorted(chance.choice(len(NAMES) + 1, 2, replace=False).tolist())
        for stage in longest_stages(GRAPH, NAMES[start:end]):
            operators = [GRAPH.operators[GRAPH.edges.index[name]] for name in stage]
            law_s = stage_seconds(LAW, GRAPH, stage)
            errors.append(abs(costs.operators_s(operators) + costs.receive.seconds(0) - law_s) / law_s)
    return float(np.median(errors))


def test_stages_tell_what_operators_take():
    clock, model = Clock(), StagesOnly(GRAPH, {})
    found = with_stage_times(model, [D0, Device("d1", "fake")], shared_out(), clock)
    assert {name for name, _, _ in clock.timed} == {"d0"}
    figures = found.devices["d0"]
    assert off(found) < 0.12 < off(shared_out())
    assert figures.busy_factor == 1.2
    assert len(found.segments) == len(clock.timed) <= 16
    assert set(figures.uncertainty.values()) != {0.0}
    [line] = found.warnings
    assert f"device d0 tells no times of operators: they follow from {len(found.segments)} measured stages" in line
    decision = plan(Problem(GRAPH, Platform("box", (D0,)), found))
    assert decision.plan.predicted.uncertainty > 0.02


def test_a_stage_that_was_measured_counts_as_it_is():
    found = with_stage_times(StagesOnly(GRAPH, {}), [D0], shared_out(), Clock(lambda _, __, seconds: seconds * 3))
    whole = plan(Problem(GRAPH, Platform("box", (D0,)), found)).plan
    assert [stage.operators for stage in whole.stages] == [tuple(NAMES)]
    [measured] = [segment for segment in found.segments if set(segment.operators) == set(NAMES)]
    assert whole.predicted.latency_s == pytest.approx(measured.seconds)


def test_what_the_device_does_not_compute_has_no_seconds():
    model = StagesOnly(GRAPH, {}, refused={"d0": [NAMES[-1]]})
    found = with_stage_times(model, [D0], shared_out(NAMES[:-1]), Clock()).devices["d0"]
    assert [name for name, seconds in found.seconds.items() if seconds is None] == [NAMES[-1]]


def test_a_device_that_refuses_most_stages_keeps_what_it_has_and_says_why():
    def refusing(compiled: CompiledModel) -> SegmentTimer:
        def timed(operators: Sequence[str], device: Device) -> SegmentProfile:
            if len(operators) < len(NAMES):
                raise PlanError("the compiler is out of tiles")
            return SegmentProfile(device.name, tuple(operators), 0.5)

        return timed

    log_lines("WARNING")
    found = with_stage_times(StagesOnly(GRAPH, {}), [D0], shared_out(), refusing)
    assert found.devices["d0"].seconds == shared_out().devices["d0"].seconds
    assert set(found.devices["d0"].uncertainty.values()) == {1.0}
    [stage] = found.segments
    assert stage.seconds == 0.5
    [line] = found.warnings
    assert "tells no times of operators: they are shared out by the operators' work, since" in line
    assert "the compiler is out of tiles" in line


def test_a_profile_asks_such_a_device_for_no_times_of_operators():
    graph = example_graph()
    model = StagesOnly(graph, {"double": lambda x: [x * 2], "increment": lambda x: [x + 1]})
    devices = (Device("d0", "fake"), Device("d1", "fake"))
    found = profile_model(FakeBackend(devices), model, Platform("box", devices), repeats=2)
    shared_s, by_work_s = (np.array(list(each.values())) for each in (found.devices["d0"].seconds, by_work(graph)))
    np.testing.assert_allclose(shared_s / shared_s.sum(), by_work_s / by_work_s.sum())
