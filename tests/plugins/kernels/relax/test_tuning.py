"""Tuning with Relax: a choice keeps the bits, what is found is used, and libraries tell what is tuned."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.plugins.kernels.races import twice_as_fast
from tests.relax.fused import MCPU, target_of
from tests.relax.test_integer_layers import Net
from tests.support.command import run_command
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.backends.contract import TunedKernels, TuningReport
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.frontends import load
from tvm_pipeline_kernels import tiles
from tvm_pipeline_kernels.choices import (
    CONV2D,
    DEPTHWISE,
    Choice,
    Workload,
    is_winograd,
    macs_of,
    possible_choices,
    static_choice,
    winograd_choices,
)
from tvm_pipeline_kernels.relax.emitter import RelaxEmitter
from tvm_pipeline_kernels.tuning import tuner
from tvm_pipeline_kernels.tuning.candidates import Candidate, Stopwatch
from tvm_pipeline_kernels.tuning.targets import cores_of
from tvm_pipeline_kernels.tuning.tuning_records import Record, append_record, read_records, recorded_choices
from tvm_pipeline_tvm.relax.build import build_library
from tvm_pipeline_tvm.relax.compiled import RelaxModel

LANES = 8
TARGET = f"llvm -mcpu={MCPU[LANES]}"
DEVICE = Device("cpu0", "host", (min(os.sched_getaffinity(0)),), TARGET)

pytestmark = pytest.mark.usefixtures("own_cache", "runs_here")


@pytest.fixture
def runs_here() -> None:
    target_of(LANES)


def network(tolerance: float = 0.0) -> Model:
    """Return a dense 3 x 3 convolution twice, with other operators behind it, a depthwise one and one of 1 x 1."""
    draw, nodes, weights = np.random.default_rng(3), [], []

    def conv(data: str, name: str, outputs: int, inputs: int, extent: int, groups: int = 1) -> str:
        shape = (outputs, inputs // groups, extent, extent)
        array = (draw.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype("float32")
        weights.append(numpy_helper.from_array(array, f"{name}_weights"))
        window = {"kernel_shape": [extent] * 2, "pads": [extent // 2] * 4}
        nodes.append(helper.make_node("Conv", [data, f"{name}_weights"], [name], name, group=groups, **window))
        return name

    first = conv("data", "first", 32, 32, 3)
    nodes.append(helper.make_node("Relu", [first], ["relu"], "relu"))
    second = conv("relu", "second", 32, 32, 3)
    nodes.append(helper.make_node("Tanh", [second], ["tanh"], "tanh"))
    last = conv(conv("tanh", "depthwise", 32, 32, 3, 32), "last", 24, 32, 1)
    image = [helper.make_tensor_value_info("data", TensorProto.FLOAT, (1, 32, 18, 22))]
    result = [helper.make_tensor_value_info(last, TensorProto.FLOAT, (1, 24, 18, 22))]
    graph = helper.make_graph(nodes, "net", image, result, weights)
    opset = [helper.make_opsetid("", 13)]
    content = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    return Model("net", "onnx", content, tolerance=tolerance)


def outputs(model: Model, folder: Path | None = None) -> tuple[np.ndarray, RelaxModel]:
    compiled = RelaxModel.compile(model, [TARGET], lambda _: None)
    if folder:
        folder.mkdir()
        compiled.save(folder)
        compiled = RelaxModel.load(folder, lambda _: None)
    names = compiled.graph.operator_names
    [found] = model_outputs(compiled, run_stages(compiled, [(names, DEVICE)], random_frame(compiled.graph.inputs)))
    return found, compiled


def workloads_of(model: Model) -> list[Workload]:
    return sorted(set(build_library(model, TARGET, choices={}).workloads.values()))


def choose(chosen: dict[Workload, Choice], *, winograd: bool = False) -> None:
    for workload, choice in chosen.items():
        append_record(TARGET, Record(workload, choice, 1e-5, proven=True, winograd=winograd))


@pytest.mark.parametrize(("lanes", "place"), [(16, 1), (8, 5), (8, -1), (4, 2)])
def test_every_tile_has_the_bits_of_the_rule(lanes: int, place: int) -> None:
    target_of(lanes)
    target, model = f"llvm -mcpu={MCPU[lanes]}", network()
    library = build_library(model, target, choices={})
    workloads = set(library.workloads.values())
    assert {template for template, *_ in workloads} == {CONV2D, DEPTHWISE}
    possible = {each: possible_choices(each, cores_of(target)) for each in workloads}
    tuned = build_library(model, target, choices={each: of[place % len(of)] for each, of in possible.items()})
    assert len(tuned.choices) == 3
    device = Device("cpu0", "host", (0,), target)
    found = []
    for each in (library, tuned):
        compiled = RelaxModel("net", [each], lambda _: None)
        names = compiled.graph.operator_names
        frame = random_frame(compiled.graph.inputs)
        found.append(model_outputs(compiled, run_stages(compiled, [(names, device)], frame))[0])
    np.testing.assert_array_equal(*found)


def test_a_model_is_compiled_again_for_its_own_records_and_tells_of_them(tmp_path: Path) -> None:
    model = network()
    expected, plain = outputs(model)
    assert plain.tuned() == []
    workloads = workloads_of(model)
    kernels = plain.kernels_to_tune(DEVICE)
    assert set(kernels) <= set(plain.graph.operator_names)
    assert {each for own in kernels.values() for each in own} == set(workloads)
    other = [("TENSOR", (1, 32, 9, 9), "float32"), ("TENSOR", (32, 32, 3, 3), "float32")]
    stranger = (CONV2D, *other, (1, 1), (1, 1, 1, 1), (1, 1), "NCHW", "NCHW", "float32")
    choose({stranger: possible_choices(stranger, cores_of(TARGET))[1]})
    assert outputs(model)[1].libraries[TARGET].folder == plain.libraries[TARGET].folder
    choose({each: possible_choices(each, cores_of(TARGET))[2] for each in workloads[:2]})
    tuned, compiled = outputs(model)
    assert compiled.tuned() == [TunedKernels(TARGET, 2, 3)]
    assert compiled.libraries[TARGET].folder != plain.libraries[TARGET].folder
    np.testing.assert_array_equal(tuned, expected)
    loaded, bundle = outputs(model, tmp_path / "bundle")
    assert bundle.tuned() == compiled.tuned()
    np.testing.assert_array_equal(loaded, expected)
    assert RelaxModel.compile(model, [TARGET], lambda _: None).libraries[TARGET].folder == (
        compiled.libraries[TARGET].folder
    )
    untuned = RelaxModel.build(model, [TARGET], "", {}, tuned=False, processor="")
    assert untuned[0].folder == plain.libraries[TARGET].folder


@pytest.mark.thorough
def test_winograds_algorithm_is_chosen_within_a_tolerance_only() -> None:
    exact, allowed, cores = network(), network(1e-5), cores_of(TARGET)
    [large] = [each for each in workloads_of(exact) if winograd_choices(each, cores)]
    other = next(form for form in winograd_choices(large, cores) if form != static_choice(large, cores, winograd=True))
    choose({large: other}, winograd=True)
    assert recorded_choices(TARGET) == {}
    expected, direct = outputs(exact)
    assert direct.tuned() == []
    found, fast = outputs(allowed)
    [told] = fast.tuned()
    assert (told.tuned, told.kernels, told.winograd) == (1, 3, 2)
    assert told.error is not None
    assert 0 < told.error <= 1e-5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    # A tile where the rule has Winograd's algorithm:
    choose({large: possible_choices(large, cores)[0]}, winograd=True)
    append_record(TARGET, Record(large, possible_choices(large, cores)[0], 1e-6, proven=True, winograd=True))
    direct_again, _ = outputs(allowed)
    np.testing.assert_array_equal(direct_again, expected)


@pytest.mark.thorough
def test_candidates_compute_what_the_function_of_the_network_does() -> None:
    """Both functions of a workload, by a tile and by each form."""
    emitter = RelaxEmitter(network(1e-5), TARGET)
    task = max(emitter.tasks(), key=lambda task: task.macs)
    assert [calls for _, calls in task.functions] == [1, 1]
    assert task.macs == 32 * 32 * 9 * 18 * 22
    forms = [possible_choices(task.workload, emitter.cores)[3], *winograd_choices(task.workload, emitter.cores)]
    candidates = [Candidate(task.workload, choice, task.functions) for choice in forms]
    emitter.compile(candidates)
    draw = np.random.default_rng(0)
    weights = (draw.standard_normal((32, 32, 3, 3)) / 17).astype("float32")
    image = draw.standard_normal((1, 4, 18, 22, 8)).astype("float32")
    for index in range(2):
        expected = None
        for candidate in candidates:
            kernel = candidate.kernels[index]
            packed = _packed(weights, candidate.choice)
            arrays = [image, packed, *(np.zeros(shape, dtype) for shape, dtype in kernel.arguments[2:])]
            assert [each.shape for each in arrays] == [shape for shape, _ in kernel.arguments]
            tensors = [emitter.tensor(each) for each in arrays]
            kernel.call(*tensors)
            found = np.from_dlpack(tensors[-1])
            expected = found if expected is None else expected
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * max(1.0, np.abs(expected).max()))


def _packed(weights: np.ndarray, choice: Choice) -> np.ndarray:
    from tvm_pipeline_kernels import winograd
    from tvm_pipeline_kernels.relax.schedules import conv2d

    if is_winograd(choice):
        return winograd.packed(weights, choice[0], LANES, LANES)
    return conv2d.packed(weights, LANES, LANES)


@pytest.mark.thorough
def test_better_tiles_than_those_of_a_poor_rule_are_found_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SUMS_TO_HIDE_LATENCY", 0)  # the rule prefers tiles of one sum
    monkeypatch.setattr(tiles, "CYCLES_PER_INPUT", -0.3)
    monkeypatch.setattr(tuner, "WORTHWHILE", 0.0)
    monkeypatch.setattr(tuner, "CANDIDATES", 6)
    monkeypatch.setattr(tuner, "race", twice_as_fast)  # on a busy machine hardly a kernel wins every comparison
    model = network()
    expected, _ = outputs(model)
    backend = find_backend("host")
    assert backend.can_tune
    report: TuningReport = backend.tune(model, DEVICE, 250.0)
    assert (report.kernels, report.measured, report.ratio) == (3, 3, 2.0)
    assert 0 < report.tuned <= 3
    assert report.candidates > report.measured
    assert len(read_records(TARGET)) == 6  # of the search, and of the race
    found, compiled = outputs(model)
    assert compiled.tuned()[0].tuned == report.tuned
    np.testing.assert_array_equal(found, expected)
    again = backend.tune(model, DEVICE, 250.0)
    assert (again.measured, again.tuned, again.stopped) == (0, report.tuned, "all of it was measured before")


def test_what_is_computed_in_integers_is_not_searched() -> None:
    """Of a network with quantised layers the functions are those that are built."""
    net = Net("uint8", (1, 8, 9, 9)).conv(8, (3, 3), pads=(1, 1, 1, 1))
    assert RelaxEmitter(net.model(), TARGET).tasks() == []


def test_a_kernel_is_timed_on_the_core_of_the_thread() -> None:
    emitter = RelaxEmitter(network(), TARGET)
    reference = emitter.reference()
    candidate = Candidate(
        reference.workload, possible_choices(reference.workload, emitter.cores)[0], reference.functions
    )
    emitter.compile([candidate])
    Stopwatch(emitter.tensor).time(candidate)
    assert 0 < candidate.seconds < 10
    assert reference.macs == macs_of(reference.workload) == 64 * 64 * 25 * 14 * 14


def test_the_command_tunes_and_later_commands_tell(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tmp_path / "net.onnx"
    net.write_bytes(network().content)
    file = tmp_path / "platform.toml"
    device = f'name = "cpu0"\nbackend = "host"\ncores = [{DEVICE.cores[0]}]\ntarget = "{TARGET}"\n'
    file.write_text(f'name = "board"\n[[device]]\n{device}')
    options = ("--platform", file, "--tolerance", "0")
    told = run_command(capfd, monkeypatch, "tune", net, "--seconds", "0", "--json", *options)
    assert told.code == 0, told.err
    [target] = told.json["targets"]
    assert (target["kernels"], target["tuned"], target["stopped"]) == (3, 0, "there was no time for it")
    choose({each: possible_choices(each, cores_of(TARGET))[2] for each in workloads_of(load(net))})
    compile_ = ("compile", net, "-o", tmp_path / "net.tar", "--verify", "0", *options)
    made = run_command(capfd, monkeypatch, *compile_)
    assert f"kernels for {TARGET}: 3 of 3 tuned" in " ".join(made.out.split()), made.err
