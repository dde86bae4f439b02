"""Winograd's algorithm: its values stay within the tolerance of the model, and without one there are none of it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.parts import needs

needs("tvm")

from tests.plugins.kernels.relay.test_tuner import tuned
from tests.support.networks import Weights, as_model, module_of
from tests.support.stages import model_outputs, random_frame, random_stages, run_stages
from tests.tvm.targets import LEVELS, run, runs_here
from tvm_pipeline.backends.contract import Array, TunedKernels
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline_kernels import winograd
from tvm_pipeline_kernels.choices import (
    Choice,
    Workload,
    possible_choices,
    static_choice,
    winograd_choices,
)
from tvm_pipeline_kernels.relay.tuning.emitter import compile_candidates
from tvm_pipeline_kernels.relay.tuning.tasks import optimized, tasks_of
from tvm_pipeline_kernels.tiles import ARM_REGISTERS, Cores
from tvm_pipeline_kernels.tuning import tuner
from tvm_pipeline_kernels.tuning.candidates import Candidate
from tvm_pipeline_kernels.tuning.targets import cores_of
from tvm_pipeline_kernels.tuning.tuning_records import (
    Record,
    append_record,
    read_records,
    recorded_choices,
    records_file,
)
from tvm_pipeline_kernels.winograd import (
    MOST_BYTES,
    NEAR_BYTES,
    input_transform,
    kernel_matrix,
    output_transform,
    rounding_error,
    winograd_forms,
    winograd_rule,
)
from tvm_pipeline_tvm.relay.build import as_compiled, build_library
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import Library
from tvm_pipeline_tvm.relay.reference import in_float64

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip

TARGET, CORES = "llvm -mcpu=x86-64-v3", Cores(8, 16)
LIMIT = {2: 2e-6, 4: 1e-5}  # of the largest output
HERE = list(filter(runs_here, LEVELS))

x86 = pytest.mark.skipif(not runs_here(TARGET), reason="needs an x86-64 processor with AVX2")


@pytest.mark.parametrize("size", [2, 4])
def test_the_transforms_give_a_convolution(size: int) -> None:
    draw = np.random.default_rng(0)
    tile, kernel = draw.standard_normal((size + 2, size + 2)), draw.standard_normal((3, 3))
    matrix = kernel_matrix(size)
    half = np.array(input_transform(list(tile), size))
    transformed = np.array(input_transform(list(half.T), size)).T
    products = transformed * (matrix @ kernel @ matrix.T)
    half = np.array(output_transform(list(products), size))
    found = np.array(output_transform(list(half.T), size)).T
    windows = np.lib.stride_tricks.sliding_window_view(tile, (3, 3))
    np.testing.assert_allclose(found, np.einsum("yxij,ij->yx", windows, kernel), rtol=0, atol=1e-13)


channels, extents = st.integers(1, 40).map(lambda blocks: 16 * blocks), st.integers(1, 120)


@given(channels, channels, extents, extents)
def test_forms_fit_into_the_registers_and_the_image(inputs: int, outputs: int, height: int, width: int) -> None:
    found = [form for _, form in winograd_forms(inputs, outputs, 16, height, width, 32)]
    assert {form.winograd for form in found} == {2, 4}
    for size, chunks, rows, columns in found:
        down, across = -(-height // size), -(-width // size)
        assert outputs // 16 % chunks == 0
        assert chunks * columns + chunks + 1 < 32
        assert columns <= rows * across
        assert 1 <= rows <= down
        points = 4 * (size + 2) ** 2
        is_least = rows == min(down, -(-14 // across))
        assert is_least or points * rows * across * (inputs + outputs) <= MOST_BYTES
        assert is_least or points * inputs * outputs > NEAR_BYTES


def test_channels_that_fill_no_vector_have_no_form() -> None:
    assert list(winograd_forms(16, 24, 16, 14, 14, 32))  # in halves of vectors
    assert not list(winograd_forms(16, 20, 16, 14, 14, 32))
    assert not list(winograd_forms(3, 32, 16, 14, 14, 32))


@given(channels, channels, st.integers(1, 60), st.integers(1, 60))
def test_the_rule_takes_only_forms_that_are_cheaper_by_the_estimate(
    inputs: int, outputs: int, height: int, width: int
) -> None:
    sizes = inputs, outputs, 16, height, width, 32
    cycles = {form: estimate for estimate, form in winograd_forms(*sizes)}
    chosen = winograd_rule(*sizes)
    assert set(chosen) <= cycles.keys()
    assert [cycles[form] for form in chosen] == sorted(cycles[form] for form in chosen)


@pytest.mark.parametrize(
    ("channels", "height", "width"), [(64, 56, 56), (128, 28, 28), (256, 20, 20), (32, 80, 80)], ids=str
)
def test_the_rule_takes_it_where_it_was_measured_to_be_faster(channels: int, height: int, width: int) -> None:
    for lanes, registers in ((8, 16), (16, 32)):
        assert winograd_rule(channels, channels, lanes, height, width, registers)
    assert not winograd_rule(512, 512, 16, 2, 2, 32)  # as many weights as ever, for four outputs


@pytest.mark.parametrize("size", [2, 4])
def test_the_estimated_error_grows_with_what_cancels(size: int) -> None:
    weights = np.random.default_rng(0).standard_normal((32, 64, 3, 3)).astype("float32")
    error = rounding_error(weights, size)
    assert 1e-8 < error < LIMIT[size]
    weights[:, :, 1, 1], weights[:, :, 1, 2] = 1e4, -1e4  # large products whose sum is small
    assert rounding_error(weights, size) > error
    assert rounding_error(np.zeros((8, 8, 3, 3), "float32"), size) == 0.0


@x86
@pytest.mark.parametrize(
    "options",
    [
        {"strides": (2, 2)},
        {"dilation": (2, 2)},
        {"groups": 2},
        {"kernel_size": (1, 3)},
        {"channels": 20},
    ],
    ids=str,
)
def test_other_convolutions_have_no_choice(options: dict[str, Any]) -> None:
    options = {"channels": 16, "kernel_size": (3, 3), "padding": (1, 1), "groups": 1, **options}
    weights = Weights()
    shape = options["channels"], 16 // options["groups"], *options["kernel_size"]
    body = relay.nn.conv2d(relay.nn.relu(relay.var("data", shape=(1, 16, 12, 12))), weights(*shape), **options)
    for task in tasks_of(optimized(module_of(body), TARGET, weights.params)):
        assert winograd_choices(task.workload, CORES) == []


def direct(data: Array, weights: Array, padding: tuple[int, ...]) -> Array:
    """Return a convolution in float64."""
    top, left, bottom, right = padding
    padded = np.pad(data.astype("float64"), ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    return np.asarray(np.einsum("nchwij,ocij->nohw", windows, weights.astype("float64"), optimize=True))


def imported(model: Model) -> tuple[tvm.IRModule, dict[str, Any]]:
    mod, params = import_model(model)
    return as_compiled(mod, params), params


@pytest.mark.quick_cases(1)
@x86
@pytest.mark.parametrize("target", HERE)
@pytest.mark.parametrize("size", [2, 4])
def test_values_are_within_the_stated_tolerance(target: str, size: int) -> None:
    """Of a direct convolution in float64: images, padding and batches that no tile divides, and what may follow."""
    random, weights = Random(f"{target} {size}"), Weights()
    shape = random.choice([1, 2]), random.choice([32, 64, 160]), random.randint(3, 23), random.randint(3, 40)
    padding, channels = random.choice([(1, 1, 1, 1), (0, 0, 0, 0), (0, 1, 2, 1)]), random.choice([16, 48, 64])
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")
    kernel = weights(channels, shape[1], 3, 3)
    y = relay.nn.conv2d(relay.var("data", shape=shape), kernel, channels=channels, kernel_size=(3, 3), padding=padding)
    expected = direct(data, weights.params["w0"].numpy(), padding)
    limit = LIMIT[size] * np.abs(expected).max()
    if random.random() < 0.6:
        y = relay.add(relay.nn.relu(relay.nn.bias_add(y, weights(channels))), relay.const(0.5))
        expected = np.maximum(expected + weights.params["w1"].numpy()[:, None, None], 0) + 0.5
    mod = module_of(y)
    [task] = tasks_of(optimized(mod, target, weights.params))
    forms = [form for form in winograd_choices(task.workload, cores_of(target)) if form[0] == size]
    choices = {task.workload: random.choice(forms)}
    library = fast_build(mod, target, weights.params, choices, tolerance=1e-4)
    assert "winograd" in " ".join(library.function_metadata.keys()), (choices, mod)
    (found,) = run(library, {"data": data})
    assert np.abs(found - expected).max() <= limit, (choices, mod)


@pytest.mark.thorough
@x86
def test_what_follows_may_store_another_type() -> None:
    weights, [tensor] = Weights(), [Tensor("data", (1, 16, 9, 9))]
    kernel = weights(16, 16, 3, 3)
    y = relay.nn.conv2d(relay.var("data", shape=tensor.shape), kernel, channels=16, kernel_size=(3, 3))
    [task] = tasks_of(optimized(module_of(y), TARGET, weights.params))
    choices, frame = {task.workload: winograd_choices(task.workload, CORES)[0]}, random_frame([tensor])
    library = fast_build(module_of(relay.cast(y, "float64")), TARGET, weights.params, choices, tolerance=1e-4)
    assert "winograd" in " ".join(library.function_metadata.keys())
    (found,) = run(library, frame)
    expected = direct(frame["data"], weights.params["w0"].numpy(), (0, 0, 0, 0))
    assert found.dtype == "float64"
    assert np.abs(found - expected).max() <= LIMIT[4] * np.abs(expected).max()


@pytest.fixture
def _no_records() -> Iterator[None]:
    """Libraries stay in the cache of all tests, and records go."""
    yield
    records_file(TARGET).unlink(missing_ok=True)


def choose(library: Library) -> dict[Workload, Choice]:
    """Record a form of Winograd's algorithm that the static rule does not choose, for every workload that has one."""
    workloads = [w for w in sorted(set(library.tuning.workloads.values())) if winograd_choices(w, CORES)]
    chosen = {w: (set(winograd_choices(w, CORES)) - {static_choice(w, CORES, winograd=True)}).pop() for w in workloads}
    for workload, choice in chosen.items():
        append_record(TARGET, Record(workload, choice, 1e-5, proven=True, winograd=True))
    return chosen


def network(tolerance: float) -> Model:
    """Return three convolutions of two workloads, and an addition."""
    weights = Weights()
    first = weights.conv(relay.var("data", shape=(1, 16, 12, 13)), 16)
    body = weights.conv(relay.add(weights.conv(first, 16), first), 32)
    return replace(as_model("residual", module_of(body), weights.params), tolerance=tolerance)


@pytest.mark.thorough
@x86
@pytest.mark.usefixtures("_no_records")
def test_only_a_model_that_allows_it_is_built_so_and_its_slices_have_the_bits_of_the_whole() -> None:
    compile_ = partial(RelayModel.compile, targets=[TARGET], bind=lambda _: None)
    plain = compile_(network(0.0))
    chosen = choose(plain.libraries[TARGET])
    assert len(chosen) == 2
    assert recorded_choices(TARGET) == {}
    assert recorded_choices(TARGET, winograd=True) == chosen
    assert build_library(network(0.0), TARGET).folder == plain.libraries[TARGET].folder

    fast = compile_(network(1e-4))
    [tuned_kernels] = fast.tuned()
    assert tuned_kernels == TunedKernels(TARGET, 2, 2, 2, tuned_kernels.error)
    assert tuned_kernels.error is not None
    assert 0 < tuned_kernels.error <= 1e-4
    said = f"2 of 2 tuned, 2 by Winograd's algorithm (error against float64: {tuned_kernels.error:.1e}"
    assert said in str(tuned_kernels)
    assert [(o.name, o.macs) for o in fast.graph.operators] == [(o.name, o.macs) for o in plain.graph.operators]

    frame, device = random_frame(plain.graph.inputs), Device("cpu0", "host", (0,), TARGET)

    def outputs(model: RelayModel, cut: list[list[str]]) -> list[Array]:
        return model_outputs(model, run_stages(model, [(names, device) for names in cut], frame))

    whole = [plain.graph.operator_names]
    (expected,), (found,) = outputs(plain, whole), outputs(fast, whole)
    assert not np.array_equal(found, expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    for seed in range(3):
        (sliced,) = outputs(fast, random_stages(plain.graph, Random(seed), 3))
        np.testing.assert_array_equal(sliced, found)


def uneven() -> Model:
    """Return a convolution of large products that cancel."""
    weights = Weights()
    kernel = weights(16, 16, 3, 3)
    large = np.ones((16, 16, 3, 3), "float32")
    large[:, ::2] = 1e5
    large[:, 1::2] = -1e5
    weights.params["w0"] = tvm.nd.array(weights.params["w0"].numpy() + large)
    data = relay.repeat(relay.var("data", shape=(1, 8, 40, 40)), 2, 1)  # so that the large products cancel
    body = relay.nn.conv2d(data, kernel, channels=16, kernel_size=(3, 3), padding=(1, 1))
    return replace(as_model("uneven", module_of(body), weights.params), tolerance=1e-5)


@x86
def test_the_static_rule_is_compiled_and_its_error_measured(caplog: pytest.LogCaptureFixture) -> None:
    weights = Weights()
    body = weights.conv(relay.var("data", shape=(1, 32, 40, 40)), 32)
    model = replace(as_model("plain", module_of(body), weights.params), tolerance=1e-5)
    library = build_library(model, TARGET, choices={})
    assert library.tuning.winograd == 1
    assert library.tuning.choices == ()
    assert library.tuning.error is not None
    assert 0 < library.tuning.error < 1e-5
    frame = random_frame(library.inputs)
    [exact] = in_float64(*imported(model), frame)
    executor = graph_executor.create(json.dumps(library.graph), library.module, tvm.cpu())
    executor.set_input(**library.params, **frame)
    executor.run()
    found = executor.get_output(0).numpy()
    assert np.abs(found - exact).max() <= 1e-5 * np.abs(exact).max()
    assert build_library(replace(model, tolerance=0.0), TARGET, choices={}).tuning.winograd == 0
    # The code runs elsewhere: the estimate of each layer alone decides.
    there = build_library(model, TARGET, choices={}, elsewhere=True).tuning
    assert (there.winograd, there.error) == (1, None)


def test_arm_cores_have_it() -> None:
    """As a board finds its target, for which TVM takes its schedules for x86."""
    weights = Weights()
    mod = module_of(weights.conv(relay.var("data", shape=(1, 32, 40, 40)), 32))
    target = "llvm -keys=cpu -mtriple=aarch64-linux-gnu -mcpu=cortex-a72"
    assert cores_of(target) == Cores(4, ARM_REGISTERS)
    library = fast_build(mod, target, weights.params, tolerance=1e-5)
    assert "winograd" in " ".join(library.function_metadata.keys())


@x86
def test_a_layer_that_would_lose_too_much_keeps_direct_sums() -> None:
    tight = replace(uneven(), tolerance=1e-8)
    assert build_library(tight, TARGET, choices={}, elsewhere=True).tuning.winograd == 0


@x86
def test_a_model_that_is_too_far_off_is_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    """No layer alone tells that its inputs cancel."""
    with caplog.at_level(logging.INFO):
        library = build_library(uneven(), TARGET, choices={})
    assert library.tuning.winograd == 0
    assert library.tuning.error is None
    assert "is compiled again: it is" in caplog.text


@pytest.mark.thorough
@x86
@pytest.mark.usefixtures("_no_records")
def test_libraries_of_two_targets_align_where_one_has_it() -> None:
    targets = [TARGET, "llvm -mcpu=x86-64-v2"]
    for workload in choose(build_library(network(0.0), TARGET)):
        append_record(
            targets[1], Record(workload, possible_choices(workload, Cores(4, 16))[0], 1e-5, proven=True, winograd=True)
        )
    try:
        model = RelayModel.compile(network(1e-4), targets, lambda _: None)
    finally:
        records_file(targets[1]).unlink()
    assert [kernels.winograd for kernels in model.tuned()] == [2, 0]
    first, second = (Device(f"cpu{i}", "host", (i,), target) for i, target in enumerate(targets))
    frame = random_frame(model.graph.inputs)
    cut = random_stages(model.graph, Random(1), 2)
    (found,) = model_outputs(model, run_stages(model, list(zip(cut, (first, second), strict=True)), frame))
    (expected,) = model_outputs(model, run_stages(model, [([*cut[0], *cut[1]], second)], frame))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.thorough
@x86
@pytest.mark.usefixtures("_no_records")
def test_a_record_that_is_not_marked_applies_to_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever edits the file cannot have a model that allows nothing computed by Winograd's algorithm."""
    workload = next(iter(choose(build_library(network(0.0), TARGET))))
    file = records_file(TARGET)
    assert all(record.winograd for record in read_records(TARGET))
    file.write_text(file.read_text().replace("own_winograd_allowed", "own_something"))
    with caplog.at_level(logging.WARNING):
        assert read_records(TARGET) == []
    assert "2 lines are no records of tuning" in caplog.text
    tile = possible_choices(workload, CORES)[2]
    append_record(TARGET, Record(workload, tile, 1e-5, proven=True))
    assert recorded_choices(TARGET, winograd=True) == {}  # the static rule may be faster than the best of direct sums
    rule = static_choice(workload, CORES, winograd=True)
    append_record(TARGET, Record(workload, rule, 1e-3, proven=True, winograd=True))
    assert recorded_choices(TARGET, winograd=True) == {}
    assert recorded_choices(TARGET) == {workload: tile}


@pytest.mark.thorough
@x86
@pytest.mark.usefixtures("_no_records")
def test_tuning_tries_it_for_a_model_that_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search without it neither reads nor writes what a search with it found."""
    monkeypatch.setattr(tuner, "CANDIDATES", 2)
    monkeypatch.setattr(winograd, "MOST_FORMS", 1)
    weights = Weights()
    model = as_model("layer", module_of(weights.conv(relay.var("data", shape=(1, 16, 12, 12)), 16)), weights.params)
    allowing = replace(model, tolerance=1e-5)
    report = tuned(allowing)
    assert (report.kernels, report.measured, report.candidates) == (1, 1, 4)
    assert {record.winograd for record in read_records(TARGET)} == {True}
    assert report.tuned == len(recorded_choices(TARGET, winograd=True))
    assert recorded_choices(TARGET) == {}
    assert tuned(model).candidates == 2
    assert tuned(allowing).candidates == 0


@pytest.mark.thorough
@x86
def test_a_candidate_computes_what_the_library_will() -> None:
    """From the same data and the same weights, which were transformed when the library was compiled."""
    weights = Weights()
    mod = module_of(weights.conv(relay.var("data", shape=(1, 16, 9, 11)), 32))
    [task] = tasks_of(optimized(mod, TARGET, weights.params))
    choice = winograd_choices(task.workload, CORES)[0]
    factory = fast_build(mod, TARGET, weights.params, {task.workload: choice}, tolerance=1e-4)
    candidate = Candidate(task.workload, choice, task.functions)
    compile_candidates([candidate], tvm.target.Target(TARGET))
    [kernel] = candidate.kernels
    data = random_frame([Tensor("data", (1, 16, 9, 11))])["data"]
    blocked = data.reshape(1, 2, 8, 9, 11).transpose(0, 1, 3, 4, 2)
    shapes = {tuple(array.shape): array for array in factory.params.values()}
    arrays = [tvm.nd.array(blocked), *(shapes[shape] for shape, _ in kernel.arguments[1:-1])]
    result = tvm.nd.empty(kernel.arguments[-1][0])
    kernel.call(*arrays, result)
    (expected,) = run(factory, {"data": data})
    found = result.numpy().transpose(0, 1, 4, 2, 3).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)
