"""Stages are chosen that tell the constants apart, and the report names what is not known yet."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.calibration.boards import PRIOR, ROOFLINE, board, networks, stages, timed
from tests.calibration.test_fit import params
from tvm_pipeline.calibration.fit import calibrated
from tvm_pipeline.calibration.stage_choice import candidates, next_stages, report
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.partition import check_stage
from tvm_pipeline.cost.modelled_stage import stage_seconds


def test_candidates_are_stages_of_every_size() -> None:
    """Each is legal, none comes twice, and there are whole networks, single operators, and much between."""
    found = candidates(networks())
    for candidate in found:
        check_stage(candidate.graph, candidate.operators)
    assert len({(c.graph.name, c.operators) for c in found}) == len(found)
    sizes = {len(c.operators) for c in found}
    assert {1, 24} <= sizes
    assert len(sizes) > 10
    assert {c.graph.name for c in found} == {"net0", "net1", "net2", "net3"}


def test_operators_of_the_host_are_no_candidates() -> None:
    x, y, z = Tensor("x", (4,)), Tensor("y", (4,)), Tensor("z", (4,))
    read, conv = Operator("read", "read", ("x",), (y,), ordered=True), Operator("conv", "conv2d", ("y",), (z,))
    graph = OperatorGraph("net", (x,), (read, conv), ("z",))
    assert {c.operators for c in candidates([graph])} == {("conv",)}
    assert candidates([OperatorGraph("host", (x,), (read,), ("y",))]) == []


@pytest.mark.thorough
def test_chosen_stages_tell_more_than_others() -> None:
    """On some boards the model that was fitted to chosen stages is better than those fitted to drawn ones."""
    pool, unseen = candidates(networks()), candidates([networks(6)[5]], count=30)
    chosen = next_stages(PRIOR, pool, 8)
    assert len(chosen) == 8
    errors: dict[str, list[float]] = {"chosen": [], "drawn": []}
    for seed in range(6):
        chance = np.random.default_rng(seed)
        true = board(PRIOR, [*chance.lognormal(0, 0.7, 7), 1.0])
        drawn = [pool[index] for index in chance.permutation(len(pool))[:8]]
        for name, some in (("chosen", chosen), ("drawn", drawn)):
            model = calibrated(PRIOR, timed(true, some)).model
            errors[name] += [
                abs(stage_seconds(model, c.graph, c.operators) / stage_seconds(true, c.graph, c.operators) - 1)
                for c in unseen
            ]
    assert np.mean(errors["chosen"]) < 0.8 * np.mean(errors["drawn"])


def test_no_stage_is_chosen_twice() -> None:
    pool = stages(12)
    measured = timed(PRIOR, pool[:5])
    chosen = next_stages(PRIOR, pool, 100, measured)
    assert sorted(c.name for c in chosen) == sorted(c.name for c in pool[5:])


def test_the_report_names_the_constant_and_the_stage_that_tells() -> None:
    """Nothing spilled yet: the report asks for a stage that spills, and after it was measured no more."""
    pool = candidates(networks())
    cached = [c for c in pool if params(c) < 100_000][:15]
    true = board(PRIOR, [2.0, 0.5, 1.5])
    times = timed(true, cached)
    found = calibrated(PRIOR, times)
    sentences = report(found, pool, times)
    (about,) = [sentence for sentence in sentences if sentence.startswith("refill_bytes_per_s")]
    named = [c for c in pool if about.endswith(f"measure {c.name}")]
    assert any(params(c) > PRIOR.cached_bytes for c in named if PRIOR.cached_bytes)
    assert "would lower what the constants contribute" in sentences[-1]
    times += timed(true, [c for c in pool if params(c) > 10**6][:6])
    assert not any(s.startswith("refill") for s in report(calibrated(PRIOR, times), pool, times))


def test_the_report_says_where_another_network_is_needed() -> None:
    """No stage of these networks spills on this board."""
    roomy = replace(PRIOR, cached_bytes=10**9)
    pool = stages(20)
    times = timed(roomy, pool)
    sentences = report(calibrated(roomy, times), pool, times)
    assert any(s.startswith("refill_bytes_per_s") and "calibrate with another network as well" in s for s in sentences)


def test_the_report_names_kinds_that_were_not_measured() -> None:
    """A roofline's factor of a kind that only stages beside the measured ones have; no stage at all is said, too."""
    pool = candidates(networks())
    without = [c for c in pool if all(name.startswith("relu") for name in c.operators)][:15]
    times = timed(ROOFLINE, without)
    sentences = report(calibrated(ROOFLINE, times), pool, times)
    (about,) = [sentence for sentence in sentences if " was not measured: measure " in sentence]
    assert about.startswith("factor of conv")
    assert report(calibrated(ROOFLINE, times), [], times)[0].startswith("every stage of these networks was measured")
