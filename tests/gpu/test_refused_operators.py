"""Operators that a GPU must not compute stay on the CPU: when a model is compiled, measured, planned, saved and run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

import tvm
from tvm import relay

from tests.support.fake_backend import make_plan
from tests.support.networks import Weights, as_model, image, module_of
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import random_frame
from tvm_pipeline import Bundle, Pipeline, Plan, Problem, open_bundle, planning, profile_model, write_bundle
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlanError
from tvm_pipeline.report import devices_table
from tvm_pipeline_tvm.agreement import check_agreement
from tvm_pipeline_tvm.compiled_model import SliceStage
from tvm_pipeline_tvm.devices.targets import compiler_target
from tvm_pipeline_tvm.gpu import backend
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.relay.compiled import RelayModel

FRAMES = 6
CHECKING = "checking that both targets compute the same"


def detector() -> Model:
    """Return the head of a single-shot detector: boxes and scores of a convolution, then non-maximum suppression."""
    w = Weights()
    stem = w.conv(image(extent=8), 16, strides=(2, 2))

    def rows(x: relay.Expr, columns: int) -> relay.Expr:
        return relay.reshape(relay.transpose(relay.sigmoid(x), (0, 2, 3, 1)), (1, -1, columns))

    boxes, scores = rows(w.conv(stem, 8), 4), rows(w.conv(stem, 2), 1)
    data = relay.concatenate([relay.zeros_like(scores), scores, boxes], axis=2)
    count, valid, indices = relay.vision.get_valid_counts(data, 0.55)
    kept = relay.vision.non_max_suppression(
        valid, count, indices, iou_threshold=0.5, return_indices=False, invalid_to_bottom=True
    )
    body = relay.nn.relu(relay.add(kept, relay.const(0.25)))
    mod = tvm.IRModule.from_expr(relay.Function(relay.analysis.free_vars(body), body))
    return as_model("detector", relay.transform.InferType()(mod), w.params)


@pytest.fixture
def platform(cpu: Device, gpu: Device) -> Platform:
    return Platform("both", (cpu, gpu))


@pytest.fixture
def model(platform: Platform) -> Iterator[RelayModel]:
    compiled = backend.compile(detector(), platform.devices)
    yield compiled
    compiled.close()


def nms_of(model: RelayModel) -> str:
    [found] = [operator.name for operator in model.graph.operators if "non_max_suppression" in operator.kind]
    return found


def results(model: RelayModel, plan: Plan, platform: Platform) -> list[Array]:
    with Pipeline(model, plan, platform) as pipeline:
        found = pipeline.map(random_frame(model.graph.inputs, index) for index in range(FRAMES))
        return [next(iter(result.outputs.values())) for result in found]


def around_nms(model: RelayModel) -> Plan:
    """Return a plan of what the GPU computes on the GPU, and the rest on the CPU."""
    cut = model.graph.operator_names.index(nms_of(model))
    before, nms, after = (
        model.graph.operator_names[:cut],
        model.graph.operator_names[cut : cut + 1],
        model.graph.operator_names[cut + 1 :],
    )
    return make_plan(model.graph, (("gpu",), before), (("cpu0",), nms), (("gpu",), after))


def check_results(model: RelayModel, plan: Plan, platform: Platform) -> None:
    expected = results(model, make_plan(model.graph, (("cpu0",), model.graph.operator_names)), platform)
    assert all(np.ptp(array) > 0 for array in expected)
    for own, wanted in zip(results(model, plan, platform), expected, strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_nms_stays_on_the_cpu(model: RelayModel, platform: Platform, gpu: Device, cpu: Device, tmp_path: Path) -> None:
    nms = nms_of(model)
    assert list(model.refused) == [compiler_target(gpu.target)]
    assert list(model.refused[compiler_target(gpu.target)]) == [nms]
    assert model.computes(cpu) == model.graph.operator_names
    assert model.computes(gpu) == [name for name in model.graph.operator_names if name != nms]
    for operators in ([nms], model.graph.operator_names):
        with pytest.raises(
            PlanError, match=rf"device gpu .* cannot compute operator {nms} of detector: against the CPU"
        ):
            model.stage(operators, gpu)

    profile = profile_model(backend, model, platform, repeats=2)
    assert [name for name, seconds in profile.device("gpu").seconds.items() if seconds is None] == [nms]
    assert profile.device("gpu").receive is not None
    assert f"runs {len(model.graph) - 1} of {len(model.graph)} operators" in devices_table(platform, profile).rows[1]
    decision = planning.plan(Problem(model.graph, platform, profile))
    for candidate in decision.candidates:
        for stage in candidate.stages:
            assert "gpu" not in stage.devices or nms not in stage.operators
        check_results(model, candidate, platform)

    plan = around_nms(model)
    check_results(model, plan, platform)
    write_bundle(tmp_path / "detector.tar", Bundle(model.graph, platform, profile, plan, model))
    with open_bundle(tmp_path / "detector.tar") as bundle:
        loaded = bundle.compiled
        assert isinstance(loaded, RelayModel)
        assert loaded.refused == model.refused
        check_results(loaded, bundle.plan, bundle.platform)


@pytest.mark.thorough
def test_it_is_said_at_each_compile_and_found_out_once(
    platform: Platform, own_cache: Path, folder_of_the_run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = folder_of_the_run / "cache" / "libraries"  # what was compiled may be found: not what was found out
    shared.mkdir(exist_ok=True)
    (own_cache / "libraries").symlink_to(shared)
    lines = log_lines("INFO")
    found = []
    for _ in range(2):
        model = backend.compile(detector(), platform.devices)
        [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert record.getMessage().startswith(
            f"gpu: {nms_of(model)} stays on other devices: against the CPU, its result"
        )
        found.append(model.refused)
        caplog.clear()
    assert found[0] == found[1]
    assert lines.count(CHECKING) == 1
    [record_file] = (own_cache / "agreed").iterdir()
    record_file.write_text("damaged")
    assert backend.compile(detector(), platform.devices).refused == found[0]
    assert lines.count(CHECKING) == 2


def test_what_was_saved_before_there_was_this_file_is_read(branching: RelayModel, gpu: Device, tmp_path: Path) -> None:
    branching.save(tmp_path)
    (tmp_path / "refused.json").write_text("[")
    with pytest.raises(BundleError, match=r"refused\.json.*compile the model again"):
        RelayModel.load(tmp_path, bind)
    (tmp_path / "refused.json").unlink()
    assert RelayModel.load(tmp_path, bind).computes(gpu) == branching.graph.operator_names


# Other networks, whose GPU library is spoilt


def spoilt(model: RelayModel, gpu: Device, operators: Sequence[str], gpu_first: bool = False) -> RelayModel:
    """Return the model with other parameters of these operators in the GPU's library, and in no cache."""
    own = compiler_target(gpu.target)
    library = model.libraries[own]
    used = {name for operator in operators for name in model.cut([operator], gpu).params.values()}
    changed = {name: tvm.nd.array(library.params[name].numpy() * np.float32(1.01)) for name in used}
    libraries = [
        replace(library, params={**library.params, **changed}, folder=None) if target == own else each
        for target, each in model.libraries.items()
    ]
    return RelayModel(model.graph.name, libraries[::-1] if gpu_first else libraries, bind)


@pytest.fixture
def branching(mixed: Callable[[str], RelayModel]) -> RelayModel:
    return mixed("branching")


def convolutions(model: RelayModel) -> list[str]:
    return [operator.name for operator in model.graph.operators if "conv2d" in operator.kind]


@pytest.mark.parametrize("gpu_first", [False, True])
def test_operators_that_differ_are_refused_whatever_the_order(
    gpu_first: bool, branching: RelayModel, platform: Platform, gpu: Device, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = convolutions(branching)[1:3]
    model = spoilt(branching, gpu, chosen, gpu_first)
    devices = platform.devices[::-1] if gpu_first else platform.devices
    check_agreement(model, devices)
    assert set(model.refused) == {compiler_target(gpu.target)}
    assert model.computes(gpu) == [name for name in model.graph.operator_names if name not in chosen]
    assert f"gpu: {', '.join(chosen)} stay on other devices: against the CPU, its result" in caplog.text
    seconds = model.time_operators(gpu, 2)
    assert [
        name for name, timed in zip(model.graph.operator_names, np.isnan(seconds).T, strict=True) if timed.all()
    ] == chosen
    assert np.isnan(seconds).sum() == 2 * len(chosen)


@pytest.mark.thorough
def test_without_a_cpu_a_difference_is_an_error(cpu: Device, gpu: Device) -> None:
    other, weights = replace(gpu, name="other", target="cuda -arch=sm_72 -max_num_threads=128"), Weights()
    described = as_model("layer", module_of(weights.conv(image(extent=8), 8)), weights.params)
    model = RelayModel.compile(described, [gpu.target, other.target], bind, host=cpu.target)
    [first] = convolutions(model)
    with pytest.raises(ModelError, match=r"computes something else for 'cuda .* than for 'cuda .*128"):
        check_agreement(spoilt(model, gpu, [first], gpu_first=True), [gpu, other])


def test_a_gpu_that_computes_nothing_is_an_error(branching: RelayModel, platform: Platform, gpu: Device) -> None:
    model = Off(branching.graph.name, [replace(each, folder=None) for each in branching.libraries.values()], bind)
    model.is_off = lambda operators: True
    with pytest.raises(
        ModelError, match=r"branching: 'cuda .*' can compute none of its \d+ operators .*leave that device"
    ):
        check_agreement(model, platform.devices)
    assert model.refused == {}


class OffStage(SliceStage):
    """A stage whose outputs are off."""

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        super().run(inputs, outputs)
        for array in outputs:
            array += 1


class Off(RelayModel):
    """A model whose stages on the GPU are off where `is_off` says so of their operators."""

    is_off: Callable[[Sequence[str]], bool] = staticmethod(lambda operators: len(operators) > 1)

    def stage(self, operators: Sequence[str], device: Device) -> SliceStage:
        runner = super().stage(operators, device)
        if device.backend == "gpu" and self.is_off(operators):
            runner.__class__ = OffStage
        return runner


@pytest.mark.thorough
def test_cuts_that_differ_in_front_of_nms_are_an_error(model: RelayModel, platform: Platform) -> None:
    """All results of the model come out of the CPU, and those of the GPU's stages are compared where NMS reads them."""
    wrong = Off("detector", [replace(each, folder=None) for each in model.libraries.values()], bind)
    with pytest.raises(ModelError, match=r"detector: cut into .* for 'cuda .*than unsplit: output get_valid_counts"):
        check_agreement(wrong, platform.devices)


def test_an_operator_that_fails_is_refused(
    branching: RelayModel, platform: Platform, gpu: Device, software_cuda: SoftwareCuda
) -> None:
    model = spoilt(branching, gpu, [])
    software_cuda.fail_allocation()
    check_agreement(model, platform.devices)
    [(name, why)] = model.refused[compiler_target(gpu.target)].items()
    assert name == model.graph.operator_names[0]
    assert why.startswith("it fails there: ")
    assert "cannot hold a stage" in why


def test_a_failure_that_ends_all_work_of_the_gpu_is_an_error(
    branching: RelayModel, platform: Platform, gpu: Device, software_cuda: SoftwareCuda
) -> None:
    model = spoilt(branching, gpu, [])
    software_cuda.fail_launch(2)
    with pytest.raises(ModelError, match=r"operator \S+ ends all work of this process for 'cuda .*; leave that device"):
        check_agreement(model, platform.devices)
    assert model.refused == {}
