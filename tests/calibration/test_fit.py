"""Constants of a board are found again from its stages, and what cannot be fitted is refused with the reason."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st

from tests.calibration.boards import PRIOR, ROOFLINE, board, networks, stages, timed
from tests.support.examples import examples
from tvm_pipeline.calibration.constants import constants_of
from tvm_pipeline.calibration.fit import calibrated
from tvm_pipeline.calibration.stage_choice import Candidate, candidates
from tvm_pipeline.calibration.stage_time import StageTime
from tvm_pipeline.core.device_model import DeviceModel, KindFactor
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.cost.modelled_stage import stage_seconds
from tvm_pipeline.errors import ProfileError

FACTORS = st.lists(st.floats(-1.1, 1.1).map(lambda log: float(np.exp(log))), min_size=8, max_size=8)


@examples(8, phases=[Phase.generate])
@given(factors=FACTORS)
def test_the_constants_of_a_board_are_found_again(factors: list[float]) -> None:
    """Noiseless stages of a board, each constant up to three times as large or as small as the shipped one."""
    # How much a chip keeps is known better than the others.
    true = replace(board(PRIOR, factors), cached_bytes=round(500_000 * factors[7] ** 0.1))
    found = calibrated(PRIOR, timed(true, stages()))
    for name, value in constants_of(true).items():
        constant = found.constants[name]
        assert abs(np.log(constant.fitted / value)) < 3 * constant.sd, name
        assert constant.sd > 0.12 or constant.fitted == pytest.approx(value, rel=0.12), name
    assert sum(constant.sd < 0.12 for constant in found.constants.values()) >= 3
    for stage in candidates([networks(6)[5]], count=30):
        expected = stage_seconds(true, stage.graph, stage.operators)
        assert stage_seconds(found.model, stage.graph, stage.operators) == pytest.approx(expected, rel=0.1)
    assert found.error < 0.05
    assert found.left_out == "each of 4 networks"


@examples(5, phases=[Phase.generate])
@given(factors=FACTORS)
def test_the_constants_of_a_roofline_are_found_again(factors: list[float]) -> None:
    """The factor of a kind that was measured, too; that of another kind stays as it was shipped."""
    shipped = replace(ROOFLINE, kind=(*ROOFLINE.kind, KindFactor("lrn float32", 7.0)))
    true = replace(board(shipped, factors), kind=(KindFactor("elementwise float32", 1.5 * factors[6] ** 0.5),))
    found = calibrated(shipped, timed(true, stages()))
    for stage in candidates([networks(6)[5]], count=30):
        expected = stage_seconds(true, stage.graph, stage.operators)
        assert stage_seconds(found.model, stage.graph, stage.operators) == pytest.approx(expected, rel=0.1)
    assert KindFactor("lrn float32", 7.0) in found.model.kind
    assert "factor of lrn float32" not in found.constants


def test_the_prior_holds_where_nothing_tells() -> None:
    """Stages whose parameters all stay in the cache say nothing of how fast others are fetched."""
    cached = [c for c in candidates(networks()) if params(c) < 100_000]
    found = calibrated(PRIOR, timed(board(PRIOR, [2.0, 0.5, 0.5, 2.0, 2.0, 3.0]), cached))
    refill = found.constants["refill_bytes_per_s"]
    assert refill.fitted == pytest.approx(refill.prior, rel=1e-3)
    assert refill.sd == pytest.approx(refill.prior_sd, rel=1e-2)
    assert not refill.is_known
    assert found.constants["operator_s"].is_known


def params(candidate: Candidate) -> int:
    index = candidate.graph.edges.index
    return sum(candidate.graph.operators[index[name]].param_bytes for name in candidate.operators)


def test_the_order_of_stages_does_not_matter() -> None:
    times = timed(board(PRIOR, [2.0, 0.5, 1.5]), stages(20), spread=0.03)
    shuffled = random.Random(1).sample(times, len(times))
    assert calibrated(PRIOR, shuffled) == calibrated(PRIOR, times)


def test_another_unit_of_time_changes_nothing() -> None:
    """A prior and stages that are all ten times as slow give constants that are ten times as slow."""
    true = board(PRIOR, [2.0, 0.5, 1.5])
    found = calibrated(PRIOR, timed(true, stages(20)))
    slow = calibrated(slower(PRIOR), [replace(time, seconds=10 * time.seconds) for time in timed(true, stages(20))])
    expected, got = constants_of(slower(found.model)), constants_of(slow.model)
    assert got == pytest.approx(expected, rel=1e-4)
    assert slow.error == pytest.approx(found.error, rel=1e-3)


def slower(model: DeviceModel) -> DeviceModel:
    return board(
        model, [0.1 if name.endswith("per_s") else 10 if name.endswith("_s") else 1 for name in constants_of(model)]
    )


@pytest.mark.thorough
def test_cross_validation_leaves_each_network_out() -> None:
    """The error is that of models which were fitted without the network, here fitted one by one."""
    chance = np.random.default_rng(0)
    times = [
        replace(time, seconds=time.seconds * float(chance.lognormal(0, 0.2)))
        for time in timed(board(PRIOR, [2.0, 0.5, 1.5]), stages(30))
    ]
    errors = []
    for left_out in {time.graph.name for time in times}:
        others = calibrated(PRIOR, [time for time in times if time.graph.name != left_out]).model
        errors += [
            abs(stage_seconds(others, time.graph, time.operators) / time.seconds - 1)
            for time in times
            if time.graph.name == left_out
        ]
    assert calibrated(PRIOR, times).error == pytest.approx(float(np.mean(errors)), rel=1e-6)


def test_stages_are_left_out_where_networks_are_few() -> None:
    """Of two networks neither can be spared; a stage that was measured twice is left out as a whole."""
    times = timed(board(PRIOR, [2.0]), candidates(networks(2))[:8])
    found = calibrated(PRIOR, [*times, times[0]])
    assert found.left_out == "each of 8 stages"
    assert found.stages == 9


def test_a_network_of_one_operator() -> None:
    """Networks of one operator each are networks, too."""
    times = []
    for macs in (10**7, 3 * 10**7, 10**8, 3 * 10**8, 10**9, 3 * 10**9):
        conv = Operator("conv", "conv2d", ("x",), (Tensor("y", (10,), "int8"),), macs=macs)
        graph = OperatorGraph(f"net{macs}", (Tensor("x", (10,), "int8"),), (conv,), ("y",))
        times.append(StageTime(graph, ("conv",), 2e-3 + macs / 4e10))
    found = calibrated(PRIOR, times)
    assert found.model.macs_per_s == pytest.approx(4e10, rel=0.1)
    assert found.error < 0.1


def test_too_few_stages_are_refused() -> None:
    times = timed(PRIOR, stages(3))
    with pytest.raises(ProfileError, match=r"3 different stages are too few .*measure 2 more\. The model stays"):
        calibrated(PRIOR, [*times, *times])


def test_two_measurements_of_a_stage_that_differ_are_named() -> None:
    times = timed(PRIOR, stages(10))
    again = replace(times[4], seconds=2 * times[4].seconds)
    with pytest.raises(ProfileError, match=r"contradict each other: net\d.* ms, took .* ms another time; stop other"):
        calibrated(PRIOR, [*times, again])
    calibrated(PRIOR, [*times, replace(again, seconds=1.05 * times[4].seconds)])


@pytest.mark.thorough
def test_stages_that_no_constants_explain_are_refused() -> None:
    """Seconds that have nothing to do with the work; those furthest off are named."""
    chance = np.random.default_rng(0)
    times = [replace(time, seconds=float(chance.lognormal(-4, 2))) for time in timed(PRIOR, stages(30))]
    with pytest.raises(ProfileError, match=r"no constants bring half .* The worst are net\d.*where the others say"):
        calibrated(PRIOR, times)


def test_a_device_that_varies_is_refused() -> None:
    times = timed(board(PRIOR, [2.0]), stages(20), spread=0.25)
    times[3] = replace(times[3], spread=0.6)
    with pytest.raises(ProfileError, match=r"vary by 25% from run to run \(the worst: net\d.* by 60%\), .* error of"):
        calibrated(PRIOR, times)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_seconds_are_refused(seconds: float) -> None:
    times = timed(PRIOR, stages(10))
    with pytest.raises(ProfileError, match=r"took .* s with a spread of 0.0; measure it again"):
        calibrated(PRIOR, [*times, replace(times[0], seconds=seconds)])


def test_one_wrong_stage_hardly_moves_the_constants_and_is_named() -> None:
    true = board(PRIOR, [2.0, 0.5, 1.5])
    times = timed(true, stages(30))
    whole = max(range(len(times)), key=lambda index: len(times[index].operators))
    times[whole] = replace(times[whole], seconds=6 * times[whole].seconds)
    found = calibrated(PRIOR, times)
    assert found.model.operator_s == pytest.approx(true.operator_s, rel=0.1)
    (sentence,) = found.doubtful
    assert times[whole].graph.name in sentence
    assert "measure it again" in sentence
