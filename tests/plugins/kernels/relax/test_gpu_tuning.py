"""Tuning for GPUs with Relax: on PoCL, on the CUDA device made of software, and compiled for a GPU that is not here."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm.relax.op import nn

from tests.plugins.kernels.races import twice_as_fast
from tests.relax.fused import module_of
from tests.support.command import run_command
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.backends.contract import Array, TunedKernels
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import RunError
from tvm_pipeline_kernels.choices import Choice, Workload, macs_of, possible_choices
from tvm_pipeline_kernels.gpu_tiles import GpuTile, gpu_of, opencl_gpu
from tvm_pipeline_kernels.relax import device_child, kernel_set
from tvm_pipeline_kernels.relax.device_emitter import DeviceEmitter, DeviceStopwatch
from tvm_pipeline_kernels.tuning import tuner
from tvm_pipeline_kernels.tuning.candidates import Candidate
from tvm_pipeline_kernels.tuning.device_child import DeviceLostError
from tvm_pipeline_kernels.tuning.targets import written
from tvm_pipeline_kernels.tuning.tuning_records import (
    Record,
    append_line,
    append_record,
    line_of,
    read_records,
    recorded_choices,
    records_file,
)
from tvm_pipeline_tvm.gpu.detection import survey
from tvm_pipeline_tvm.gpu.gpu import GpuBackend, bind
from tvm_pipeline_tvm.relax.build import functions_of
from tvm_pipeline_tvm.relax.compiled import RelaxModel
from tvm_pipeline_tvm.relax.cuda_kernels import compiled_source, cuda_target
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused, gpu_kernels

HOST, ORIN = "llvm", "cuda -arch=sm_87"
SHAPE = (1, 8, 7, 6)
# Of the network below: a convolution of 3 x 3 that two functions hold, and one of 1 x 1.
LARGE: Workload = ("conv2d.gpu", 1, 1, 8, (7, 6), 8, (3, 3), (1, 8, 9, 8))
SMALL: Workload = ("conv2d.gpu", 1, 1, 16, (7, 6), 8, (1, 1), SHAPE)

pytestmark = pytest.mark.usefixtures("own_cache")


def network(*, is_small: bool = False) -> Model:
    """Return two convolutions of 3 x 3, a depthwise one and one of 1 x 1, or the last one alone."""
    draw, nodes, weights = np.random.default_rng(3), [], []

    def conv(data: str, name: str, outputs: int, inputs: int, extent: int) -> str:
        array = draw.standard_normal((outputs, inputs, extent, extent)).astype("float32")
        weights.append(numpy_helper.from_array(array, f"{name}_weights"))
        window = {"kernel_shape": [extent] * 2, "pads": [extent // 2] * 4, "group": SHAPE[1] // inputs}
        nodes.append(helper.make_node("Conv", [data, f"{name}_weights"], [name], name, **window))
        return name

    last = "data"
    if not is_small:
        nodes.append(helper.make_node("Relu", [conv("data", "first", 8, 8, 3)], ["relu"], "relu"))
        nodes.append(helper.make_node("Neg", [conv("relu", "second", 8, 8, 3)], ["neg"], "neg"))
        last = conv("neg", "depthwise", 8, 1, 3)
    image = [helper.make_tensor_value_info("data", TensorProto.FLOAT, SHAPE)]
    result = [helper.make_tensor_value_info(conv(last, "last", 16, 8, 1), TensorProto.FLOAT, (1, 16, 7, 6))]
    graph = helper.make_graph(nodes, "net", image, result, weights)
    opset = [helper.make_opsetid("", 13)]
    return Model("net", "onnx", helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString())


@pytest.fixture(scope="module", params=["software_cuda_device", "pocl"])
def gpu(request: pytest.FixtureRequest) -> Device:
    device: Device = request.getfixturevalue(request.param)
    return device


def outputs(model: Model, device: Device) -> tuple[Array, RelaxModel]:
    compiled = RelaxModel.compile(model, [device.target], bind, host=HOST)
    names = compiled.graph.operator_names
    [found] = model_outputs(compiled, run_stages(compiled, [(names, device)], random_frame(compiled.graph.inputs)))
    return found, compiled


def no_limit(*_: Any) -> None:
    """Nobody waits for the search."""


def emitter_of(model: Model, device: Device) -> DeviceEmitter:
    return DeviceEmitter(model, device, HOST, no_limit)


def pair(emitter: DeviceEmitter) -> list[Candidate]:
    """Return the candidate of the rule and another one, of SMALL."""
    [task] = [task for task in emitter.tasks() if task.workload == SMALL]
    return [Candidate(SMALL, choice, task.functions) for choice in possible_choices(SMALL, emitter.cores)[:2]]


@pytest.mark.quick_cases(1)  # PoCL takes a second for each kernel
def test_every_tile_has_the_bits_of_the_rule(gpu: Device) -> None:
    """In a network, and kernel by kernel, as tuning compares them."""
    expected, plain = outputs(network(), gpu)
    [library] = plain.libraries.values()
    assert set(library.workloads.values()) == {LARGE, SMALL}
    emitter = emitter_of(network(), gpu)
    tasks = {task.workload: task for task in emitter.tasks()}
    assert {workload: task.calls for workload, task in tasks.items()} == {LARGE: 2, SMALL: 1}
    assert tasks[LARGE].macs == macs_of(LARGE) == 8 * 8 * 9 * 42
    possible = {workload: possible_choices(workload, emitter.cores) for workload in tasks}
    places = (0, -1) if "opencl" in gpu.target else (0, len(possible[LARGE]) // 2, -1)
    candidates = [Candidate(LARGE, possible[LARGE][place], tasks[LARGE].functions) for place in places]
    emitter.compile(candidates)
    watch = emitter.stopwatch()
    for candidate in candidates:
        watch.time(candidate)
        assert 0 < candidate.seconds < 10
    for workload, of in possible.items():
        append_record(gpu.target, Record(workload, of[places[-1]], 1e-5, proven=True))
    found, tuned = outputs(network(), gpu)
    np.testing.assert_array_equal(found, expected)
    assert tuned.tuned() == [TunedKernels(next(iter(tuned.libraries)), 2, 2)]
    assert sorted(map(str, tuned.kernels_to_tune(gpu).values())) == [f"[{SMALL}]", f"[{LARGE}]", f"[{LARGE}]"]


def test_a_candidate_of_other_bits_has_failed(pocl: Device) -> None:
    emitter = emitter_of(network(is_small=True), pocl)
    rule, wrong = pair(emitter)
    emitter.compile([rule, wrong])
    [kernel], ones = wrong.kernels, emitter._bench.holding(np.ones(SHAPE, "float32"))
    run = kernel.call
    kernel.call = lambda image, *others: run(ones, *others)
    watch = emitter.stopwatch()
    assert watch.halve([rule, wrong]) is rule
    assert rule.seconds < 10
    assert (wrong.seconds, kernel.call) == (float("inf"), None)


def test_a_candidate_that_the_device_refuses_has_failed_and_spoils_no_other(
    pocl: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    emitter = emitter_of(network(is_small=True), pocl)
    rule, refused = pair(emitter)
    scheduled = emitter._scheduled

    def refusing(function: Any, choices: dict[Workload, Choice]) -> Any:
        if refused.choice in choices.values():
            raise ValueError("no such schedule")
        return scheduled(function, choices)

    monkeypatch.setattr(emitter, "_scheduled", refusing)
    emitter.compile([rule, refused])
    watch = emitter.stopwatch()
    assert watch.halve([rule, refused]) is rule
    assert (rule.seconds < 10, refused.seconds) == (True, float("inf"))
    emitter.compile([refused])
    with pytest.raises(RunError, match=r"fails without tuning: no such schedule"):
        emitter.stopwatch().time(refused)  # the first that is run stands for the untuned kernel


def test_a_device_that_does_not_even_copy_is_lost(pocl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    emitter = emitter_of(network(is_small=True), pocl)
    rule, other = pair(emitter)
    emitter.compile([rule, other])
    watch = emitter.stopwatch()
    watch.time(rule)

    def lost(*_: Any) -> None:
        raise RunError("the device is gone")

    other.kernels[0].call = lost
    monkeypatch.setattr(emitter._bench, "holding", lost)
    with pytest.raises(DeviceLostError, match="gone"):
        watch.time(other)


def serve(request: bytes, channel: socket.socket) -> None:
    """Tune as the child of the next test, with few candidates and passes; one of SMALL ends the first child."""
    tuner.CANDIDATES, tuner.ROUNDS = 2, 4
    time, seconds, rule = DeviceStopwatch.time, DeviceStopwatch._seconds, possible_choices(SMALL, opencl_gpu(256))[0]
    mark, now = Path(os.environ["TVM_PIPELINE_CACHE"]) / "died", list[Candidate]()

    def watched(self: DeviceStopwatch, candidate: Candidate, **options: Any) -> None:
        now[:] = [candidate]
        time(self, candidate, **options)

    def deadly(self: DeviceStopwatch, kernel: Any, function: Any) -> float:
        if now[0].workload == SMALL and now[0].choice != rule and not mark.exists():
            mark.touch()
            os._exit(7)
        return seconds(self, kernel, function)

    DeviceStopwatch.time, DeviceStopwatch._seconds = watched, deadly  # type: ignore[method-assign]
    device_child.serve(request, channel)


@pytest.fixture
def _found(pocl: Device) -> Iterator[None]:
    """Let PoCL be found where this process lists devices."""
    survey.cache_clear()
    yield
    survey.cache_clear()


@pytest.mark.thorough
@pytest.mark.usefixtures("_found")
def test_a_candidate_that_ends_its_process_costs_its_convolution_alone(
    pocl: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_set, "SERVE", f"{__name__}:serve")
    backend = GpuBackend()
    assert backend.can_tune
    device = backend.settle(pocl)
    report = backend.tune(network(), device, 250.0)
    assert f"a candidate for {json.dumps(SMALL)[:100]} on gpu" in caplog.text
    assert "it ended with status 7" in caplog.text
    records = read_records(device.target)
    rule = possible_choices(SMALL, opencl_gpu(256))[0]
    assert [(each.choice, each.proven) for each in records if each.workload == SMALL] == [(rule, True)]
    found, raced = (each.proven for each in records if each.workload == LARGE)
    assert (found, raced) == (False, True)
    assert (report.kernels, report.measured) == (2, 1)
    again = backend.tune(network(), device, 250.0, tuner.once({SMALL}))
    assert (again.measured, again.stopped) == (0, "all of it was measured before")


def test_what_is_found_is_kept_and_used(pocl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "CANDIDATES", 2)
    monkeypatch.setattr(tuner, "race", twice_as_fast)  # on a busy machine hardly a kernel wins every comparison
    rule, other = possible_choices(SMALL, opencl_gpu(256))[:2]
    run = DeviceStopwatch.time

    def slow_rule(self: DeviceStopwatch, candidate: Candidate, **options: Any) -> None:
        run(self, candidate, **options)
        for kernel in candidate.kernels if candidate.choice == rule else ():
            kernel.seconds = 1.0

    monkeypatch.setattr(DeviceStopwatch, "time", slow_rule)
    expected, plain = outputs(network(is_small=True), pocl)
    assert plain.tuned() == []
    report = tuner.tune(emitter_of(network(is_small=True), pocl), 250.0)
    assert (report.kernels, report.tuned, report.measured, report.candidates, report.ratio) == (1, 1, 1, 2, 2.0)
    assert recorded_choices(pocl.target) == {SMALL: other}
    found, tuned = outputs(network(is_small=True), pocl)
    np.testing.assert_array_equal(found, expected)
    assert tuned.tuned() == [TunedKernels(next(iter(tuned.libraries)), 1, 1)]
    again = tuner.tune(emitter_of(network(is_small=True), pocl), 250.0)
    assert (again.tuned, again.measured) == (1, 0)


@pytest.mark.usefixtures("_found")
def test_the_command_tunes_and_later_commands_tell(
    pocl: Device, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net, file = tmp_path / "net.onnx", tmp_path / "platform.toml"
    net.write_bytes(network(is_small=True).content)
    file.write_text(f'name = "board"\n[[device]]\nname = "gpu"\nbackend = "gpu"\ntarget = "{pocl.target}"\n')
    append_record(pocl.target, Record(SMALL, possible_choices(SMALL, opencl_gpu(256))[1], 1e-5, proven=True))
    told = run_command(capfd, monkeypatch, "tune", net, "--seconds", "0", "--json", "--platform", file)
    assert told.code == 0, told.err
    [target] = told.json["targets"]
    assert (target["kernels"], target["tuned"], target["stopped"]) == (1, 1, "all of it was measured before")
    bundle = tmp_path / "net.tar"
    made = run_command(capfd, monkeypatch, "compile", net, "-o", bundle, "--verify", "0", "--platform", file)
    assert "1 of 1 tuned" in " ".join(made.out.split()), made.err
    shown = run_command(capfd, monkeypatch, "show", bundle, "-o", tmp_path, "--format", "svg")
    assert "1 of 1 tuned" in " ".join(shown.out.split()), shown.err


def orin_kernels(choices: dict[Workload, Choice]) -> tuple[str, dict[str, Any]]:
    """Return the CUDA source of a convolution for Jetson Orin, and its workloads: no GPU is needed."""
    compiler, workloads = cuda_target("sm_87", tvm.target.Target({"kind": "llvm"})), dict[str, Any]()
    module = module_of(lambda emit, x, w: emit(nn.conv2d(x, w, padding=1)), SHAPE, (8, 8, 3, 3))
    kernels = functions_of(gpu_kernels(gpu_fused(module, compiler), compiler, None, choices, workloads))
    [source] = compiled_source(kernels, compiler).imports
    return str(source.inspect_source("cuda")), workloads


def test_a_gpu_that_is_not_here_is_compiled_for_by_a_recorded_tile() -> None:
    """Its record is one that was taken of another machine, and the threads of a block are those of the tile."""
    possible = possible_choices(LARGE, gpu_of(87))
    rule = GpuTile(*possible[0])
    other = next(choice for choice in possible if GpuTile(*choice).threads != rule.threads)
    append_line(records_file(ORIN, "Orin"), line_of(ORIN, Record(LARGE, other, 1e-5, proven=True)))
    choices = recorded_choices(ORIN, measured_on="Orin")
    assert choices == {LARGE: other}
    plain, workloads = orin_kernels({})
    assert list(workloads.values()) == [LARGE]
    for source, tile in ((plain, rule), (orin_kernels(choices)[0], GpuTile(*other))):
        assert set(re.findall(r"__launch_bounds__\((\d+)\)", source)) == {str(tile.threads)}


def test_a_tile_that_the_device_cannot_have_leaves_the_rules() -> None:
    plain = orin_kernels({})
    for tile in ((128, 128, 32, 1, 1), (8, 16, 8, 3, 1), (0, 0, 0, 0, 0), (8, 16), (16, 16, 8, 2, 2, 1)):
        assert tile not in possible_choices(LARGE, gpu_of(87))
        assert orin_kernels({LARGE: tile}) == plain


def test_lines_that_are_no_records_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """They come from files of other machines."""
    file = records_file(ORIN, "Orin")
    right = possible_choices(LARGE, gpu_of(87))[1]
    good = line_of(ORIN, Record(LARGE, right, 1e-5, proven=True))
    read = json.loads(good)
    assert read["input"][1:3] == ["conv2d.gpu", json.loads(json.dumps(LARGE[1:]))]

    def changed(*path: Any, to: Any) -> bytes:
        line = json.loads(good)
        *before, last = path
        place = line
        for step in before:
            place = place[step]
        place[last] = to
        return json.dumps(line).encode()

    tile = read["config"]["entity"].index(["own_rows", "ot", right[0]])
    bad = [
        changed("input", 0, to="llvm"),
        changed("input", 1, to="conv2d.gpus"),
        changed("input", 1, to="conv2d_NCHWc.x86"),
        changed("input", 2, 0, to=0),
        changed("input", 2, 2, to=1 << 21),
        changed("input", 2, 3, to=[7] * 4),
        changed("input", 2, 3, to=[7]),
        changed("input", 2, 6, to=[1, 8, 9]),
        changed("input", 2, 6, to=[1, 9, 9, 8]),
        changed("input", 2, 6, to="(1, 8, 9, 8)"),
        changed("input", 2, to=list(LARGE[1:-1])),
        changed("config", "entity", tile, 2, to=1 << 40),
        changed("config", "entity", tile, 2, to=float(right[0])),
        changed("config", "entity", tile, 2, to="8"),
        changed("config", "entity", tile, 0, to="own_winograd"),
        changed("result", 0, to=[-1.0]),
        changed("result", 1, to=4),
        good[:-9],
    ]
    for line in (*bad, good):
        append_line(file, line)
    assert read_records(ORIN, "Orin") == [Record(LARGE, right, 1e-5, proven=True)]
    assert f"{len(bad)} lines are no records of tuning" in caplog.text
    cpu = "llvm -mcpu=x86-64-v3"
    append_line(records_file(cpu, "a PC"), good)
    append_line(records_file(cpu, "a PC"), changed("input", 0, to=written(cpu)))
    assert read_records(cpu, "a PC") == []
