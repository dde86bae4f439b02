"""The search for tiles: what it finds runs faster and has the same bits; what does not win leaves no trace."""

from __future__ import annotations

import os
from collections.abc import Collection, Hashable, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.plugins.kernels.races import twice_as_fast
from tests.support.networks import Weights, as_model, image, module_of
from tests.support.stages import model_outputs, random_frame, run_stages
from tests.tvm.targets import runs_here
from tests.tvm.test_build import text_model
from tvm_pipeline.backends.contract import Guide, TuningReport
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline_kernels import tiles
from tvm_pipeline_kernels.choices import possible_choices
from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_kernels.tuning import tuner
from tvm_pipeline_kernels.tuning.race import Times, winners
from tvm_pipeline_kernels.tuning.tuning_records import (
    Record,
    append_record,
    read_records,
    recorded_choices,
)
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.compiled import RelayModel

from tvm import relay  # isort: skip

TARGET = "llvm -mcpu=x86-64-v3"
CORES = Cores(8, 16)
SECONDS = 250.0  # more than any of these needs: a search ends when nothing is left

pytestmark = [
    pytest.mark.skipif(not runs_here(TARGET), reason="needs an x86-64 processor with AVX2"),
    pytest.mark.usefixtures("own_cache"),
]


def network() -> Model:
    """Return three kernels that can be tuned, and one that cannot."""
    weights = Weights()
    y = weights.conv(weights.conv(weights.conv(image(), 16), 16), 8, 1)
    body = relay.nn.softmax(relay.nn.batch_flatten(relay.nn.max_pool2d(y, (4, 4), (4, 4))))
    return as_model("chain", module_of(body), weights.params)


def tuned(model: Model, seconds: float = SECONDS, guide: Guide | None = None) -> TuningReport:
    backend = find_backend("host")
    assert backend.can_tune
    device = Device("cpu0", "host", (min(os.sched_getaffinity(0)),), TARGET)
    return backend.tune(model, device, seconds, guide)


def outputs(model: Model) -> list[np.ndarray]:
    compiled = RelayModel.compile(model, [TARGET], lambda _: None)
    stages = [(compiled.graph.operator_names, Device("cpu0", "host", (0,), TARGET))]
    return model_outputs(compiled, run_stages(compiled, stages, random_frame(compiled.graph.inputs)))


@pytest.fixture
def poor_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the static rule prefer tiles of one sum, which are several times slower than others."""
    build_library(text_model("tanh(%x)"), TARGET)  # so that what follows is compiled in this process
    monkeypatch.setattr(tiles, "SUMS_TO_HIDE_LATENCY", 0)
    monkeypatch.setattr(tiles, "CYCLES_PER_INPUT", -0.3)


@pytest.mark.thorough
@pytest.mark.usefixtures("poor_rule")
def test_better_tiles_than_those_of_a_poor_rule_are_found_where_a_guide_says_and_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "WORTHWHILE", 0.0)
    monkeypatch.setattr(tuner, "race", twice_as_fast)  # on a busy machine hardly a kernel wins every comparison
    model = network()
    expected = outputs(model)
    compiled = RelayModel.compile(model, [TARGET], lambda _: None)
    kernels = compiled.kernels_to_tune(Device("cpu0", "host", (0,), TARGET))
    assert kernels.keys() < set(compiled.graph.operator_names)
    assert {kernel for own in kernels.values() for kernel in own} == set(
        compiled.libraries[TARGET].tuning.workloads.values()
    )
    first, second = sorted({kernel for own in kernels.values() for kernel in own}, key=str)[:2]
    heard: list[dict[Hashable, float]] = []

    def guide(gains: Mapping[Hashable, float]) -> Collection[Hashable]:
        heard.append(dict(gains))
        return [[first], [second], []][len(heard) - 1]

    report = tuned(model, guide=guide)
    assert [set(gains) for gains in heard] == [set(), {first}, {first, second}]
    assert all(gain >= 1 for gain in heard[-1].values())
    assert {record.workload for record in read_records(TARGET)} == {first, second}
    assert (report.measured, report.kernels) == (2, 3)
    assert 0 < report.tuned <= 2
    assert report.candidates > report.measured
    assert report.ratio == 2.0
    choices = recorded_choices(TARGET)
    assert len(choices) == report.tuned
    assert all(np.prod(choice) > 1 for choice in choices.values())
    library = build_library(model, TARGET)
    assert (library.tuning.tuned, dict(library.tuning.choices)) == (report.tuned, choices)
    for found, output in zip(outputs(model), expected, strict=True):
        np.testing.assert_array_equal(found, output)


@pytest.mark.thorough
def test_without_time_nothing_is_measured_and_what_was_searched_is_not_searched_again(own_cache: Path) -> None:
    """A search that was killed has left records that no race has proven; here large kernels have the slowest tiles.

    What does not win is dropped.
    """
    model = network()
    for seconds, says in ((0, "no time"), (1e-3, "the time was over")):  # too little to compare
        report = tuned(model, seconds)
        assert (report.kernels, report.tuned, report.measured, report.candidates) == (3, 0, 0, 0)
        assert says in report.stopped
    assert not (own_cache / "tuning").exists()
    library = build_library(model, TARGET)
    for workload in set(library.tuning.workloads.values()):
        choices = possible_choices(workload, CORES)
        is_large = workload[2][1][1:] == (16, 3, 3)  # of a small one, a tile of one sum may be the best
        slowest = min(choices, key=np.prod) if is_large else choices[0]
        append_record(TARGET, Record(workload, slowest, 1e-9, proven=False))
    report = tuned(model)
    assert (report.measured, report.candidates, report.tuned, report.ratio) == (0, 0, 0, None)
    assert "measured before" in report.stopped
    proven = [record for record in read_records(TARGET) if record.proven]
    assert {record.workload for record in proven} == set(library.tuning.workloads.values())
    assert all(record.choice == possible_choices(record.workload, CORES)[0] for record in proven)
    assert build_library(model, TARGET).folder == library.folder


def test_a_kernel_wins_if_it_is_faster_in_every_comparison() -> None:
    steady, noisy, slower, equal = workloads = [("conv2d_NCHWc.x86", index) for index in range(4)]
    seconds = {steady: [1.0, 1.0], noisy: [0.5, 1.1], slower: [1.2, 1.3], equal: [1.1, 1.1]}
    default = Times(np.full(2, 4.0), {workload: (np.full(2, 1.1), 1) for workload in workloads})
    tuned_ = Times(np.full(2, 4.0), {workload: (np.array(seconds[workload]), 1) for workload in workloads})
    assert winners(default, tuned_, workloads) == {steady}
    assert winners(default, tuned_, [noisy, equal]) == set()


@pytest.mark.thorough
def test_a_model_without_convolutions_has_nothing_to_tune() -> None:
    report = tuned(text_model("tanh(%x)"))
    assert (report.kernels, report.measured, report.ratio) == (0, 0, None)
    assert "no convolution" in report.stopped


def test_the_core_of_the_caller_stays_as_it_was() -> None:
    before = os.sched_getaffinity(0)
    tuned(text_model("tanh(%x)"))
    assert os.sched_getaffinity(0) == before
