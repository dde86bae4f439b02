"""Tuning for a GPU, on PoCL: choices have the bits of TOPI's defaults, and a candidate that hangs costs only itself."""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.crashes import children_of
from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

import tvm
from tvm import autotvm, relay

from tests.support.networks import as_model
from tests.support.software_cuda import SoftwareCuda
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.backends.contract import TunedKernels
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.files import cache_folder
from tvm_pipeline_kernels.relay.schedules.device_choices import (
    DEFAULT,
    choice_of,
    keeps_order,
    task_of,
    text_of,
    workload_of_text,
)
from tvm_pipeline_kernels.relay.tuning.device_candidates import Bench, DeviceCandidate
from tvm_pipeline_kernels.relay.tuning.device_records import (
    DeviceRecord,
    _record,
    append_device_record,
    device_file,
    device_line,
    read_device_records,
    recorded_device_choices,
)
from tvm_pipeline_kernels.relay.tuning.device_tuner import _DeviceSearch, _point, _State, _threads
from tvm_pipeline_kernels.relay.tuning.runners import DeviceRunner
from tvm_pipeline_kernels.relay.tuning.tasks import device_tasks_of, optimized
from tvm_pipeline_kernels.tuning.race import COMPARISONS, race
from tvm_pipeline_tvm.child_process import ChildReport, run_child
from tvm_pipeline_tvm.devices.runtimes import ready_to_compile, ready_to_run
from tvm_pipeline_tvm.gpu.gpu import bind
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.fold import building

TARGET = "opencl -max_num_threads=256"  # TOPI's schedules of CUDA
HOST = "llvm"


@pytest.fixture(scope="session")
def _pocl() -> None:
    needs("PoCL")
    ready_to_run("opencl")


@pytest.fixture
def _own_cache(empty_cache: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = empty_cache(tmp_path / "cache")
    monkeypatch.setenv("TVM_PIPELINE_CACHE", str(folder))


@pytest.fixture(scope="module")
def compiled_once(
    empty_cache: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory, cpu: Device, _pocl: None
) -> Path:
    """Return a cache in which the network is compiled as it is by default."""
    folder = empty_cache(tmp_path_factory.mktemp("compiled") / "cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(folder))
        RelayModel.compile(network(), [cpu.target, TARGET], bind, host=cpu.target)
    return folder


@pytest.fixture
def _with_default(compiled_once: Path, _own_cache: None) -> None:
    ignored = shutil.ignore_patterns("targets", "addons")  # which all caches share
    shutil.copytree(compiled_once, cache_folder(), dirs_exist_ok=True, ignore=ignored)


def layer(kind: str) -> tvm.IRModule:
    """Return one operator of a kind, small enough to compile quickly."""
    draw = np.random.default_rng(0)
    x = relay.var("x", shape=(1, 8, 6, 6))
    if kind == "dense":
        x = relay.var("x", shape=(1, 64))
        y = relay.nn.dense(x, relay.const(draw.standard_normal((8, 64)).astype("float32")))
    elif kind == "transposed":
        weights = relay.const(draw.standard_normal((8, 4, 2, 2)).astype("float32"))
        y = relay.nn.conv2d_transpose(x, weights, channels=4, kernel_size=(2, 2), strides=(2, 2))
    else:
        groups = {"whole": 1, "grouped": 2, "depthwise": 8}[kind]
        weights = relay.const(draw.standard_normal((8, 8 // groups, 3, 3)).astype("float32"))
        y = relay.nn.conv2d(x, weights, channels=8, kernel_size=(3, 3), padding=(1, 1), groups=groups)
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], relay.nn.relu(y))))


def network(kind: str = "whole") -> Model:
    return as_model(kind, layer(kind), {})


def task(kind: str, target: Any) -> Any:
    [found] = device_tasks_of(optimized(layer(kind), target), target)
    return found


def any_choice(workload: str, target: Any, draw: random.Random) -> str:
    """Return a choice of several threads that keeps the order of sums; unrolled loops take PoCL long to compile."""
    with building():
        space = task_of(workload, target).config_space
    for _ in range(1000):
        config = space.get(draw.randrange(space.range_length))
        choice = choice_of(config)
        if 2 <= _threads(config) <= 64 and not any(word in choice for word in ("512", "1500", 'unroll"]')):
            assert _point(space, choice) == config.index
            return choice
    raise AssertionError(f"no choice of {workload} has threads")


def check_bits(bench: Bench, target: Any, kinds: list[str]) -> None:
    """Compile and run the default of each kind, then other choices; the bench compares them."""
    draw = random.Random(0)
    candidates = []
    for kind in kinds:
        found = task(kind, target)
        choices = [DEFAULT, any_choice(found.workload, target, draw)]
        candidates += [DeviceCandidate(found.workload, choice, found.functions) for choice in choices]
    bench.compile(candidates)
    for candidate in candidates:
        if not candidate.why:
            bench.time(candidate)
        assert candidate.why == "", f"{candidate.workload} {candidate.choice}"
        assert candidate.seconds < np.inf


@pytest.mark.thorough
@pytest.mark.usefixtures("_pocl", "_own_cache")
@pytest.mark.parametrize(
    ("target", "kinds"),
    [
        (TARGET, ["depthwise", "transposed"]),
        ("opencl -device=mali -max_num_threads=256", ["dense"]),
    ],
)
def test_choices_have_the_bits_of_the_default(target: str, kinds: list[str]) -> None:
    parsed = tvm.target.Target(target, HOST)
    check_bits(Bench(parsed, tvm.device("opencl", 0)), parsed, kinds)


@pytest.mark.thorough
def test_choices_have_the_bits_of_the_default_by_cuda(software_cuda: SoftwareCuda, gpu: Device) -> None:
    ready_to_run("cuda")
    parsed = tvm.target.Target(gpu.target, HOST)
    ready_to_compile(gpu.target)
    bench = Bench(parsed, tvm.device("cuda", 0))
    check_bits(bench, parsed, ["whole"])
    check_another_order(bench, parsed)


@pytest.mark.thorough
def test_a_race_on_cuda_times_each_kernel_that_can_be_tuned(cpu: Device, gpu: Device) -> None:
    model = RelayModel.compile(network(), [gpu.target], bind, host=cpu.target)
    library, pulses = model.libraries[gpu.target], []
    runners = [DeviceRunner("whole", library, gpu) for _ in range(2)]
    both = race(runners, COMPARISONS, lambda: pulses.append(1))
    assert len(pulses) == 2 * (COMPARISONS + 1)
    for times in both:
        assert times.workloads.keys() == set(library.tuning.workloads.values())
        assert sum(kernels for _, kernels in times.workloads.values()) == 1
        for seconds in (times.whole, *(seconds for seconds, _ in times.workloads.values())):
            assert seconds.shape == (COMPARISONS,)
            assert (seconds > 0).all()


def check_another_order(bench: Bench, target: Any) -> None:
    """Time a choice with channels inside of rows and columns, which TOPI's default has outside: other bits."""
    found = task("whole", target)
    entities = {name: (name, kind, value) for name, kind, value in json.loads(some_choice(found.workload))}
    for name, value in (("tile_rc", [-1, 4]), ("tile_ry", [-1, 1]), ("tile_rx", [-1, 1])):
        entities[name] = name, "sp", value
    other = json.dumps(list(entities.values()), separators=(",", ":"))
    assert not keeps_order(found.workload, other)
    candidates = [DeviceCandidate(found.workload, choice, found.functions) for choice in (DEFAULT, other)]
    bench.compile(candidates)
    for candidate in candidates:
        bench.time(candidate)
    assert [candidate.why for candidate in candidates] == [
        "",
        "its results have other bits than those of TOPI's default",
    ]
    with pytest.raises(ValueError, match="would change results"):
        _record(device_line(str(target), DeviceRecord(found.workload, other, 1e-5, proven=True)), str(target))


def test_what_a_vendor_cannot_schedule_is_tuned_by_the_schedules_that_it_is_compiled_with() -> None:
    device = Device("gpu", "gpu", (), "opencl -device=mali -max_num_threads=256")
    search = _DeviceSearch(network("grouped"), device, HOST, 0.0, lambda *_: None)
    [found] = search._tasks()
    assert found.workload == task("grouped", tvm.target.Target(TARGET, HOST)).workload
    assert "-device=" not in str(search._target)


def test_a_choice_that_hangs_in_the_whole_network_is_the_best_no_more() -> None:
    state = _State()
    for choice, seconds in ((DEFAULT, 3.0), ("slower", 4.0), ("good", 2.0), ("best", 1.0)):
        state.note(DeviceRecord("workload", choice, seconds))
    assert (state.best, state.is_new, state.stale) == ("best", True, 0)
    state.note(DeviceRecord("workload", "best", float("inf")))
    assert (state.best, state.best_s, state.is_new) == ("good", 2.0, True)
    state.note(DeviceRecord("workload", DEFAULT, 3.0, proven=True))
    assert not state.is_new, "it was compared"
    state.note(DeviceRecord("workload", "other", 5.0))
    assert (state.best, state.is_new, state.stale) == ("good", False, 1)


def test_templates_whose_choices_change_values_are_not_tuned() -> None:
    small, square = ["TENSOR", [1, 8, 6, 6], "float32"], [[1, 1], [1, 1, 1, 1], [1, 1]]
    kernel = ["TENSOR", [8, 8, 3, 3], "float32"]
    assert text_of(["conv2d_nchw.cuda", small, kernel, *square, "float32"])
    assert text_of(["conv2d_nchw_winograd.cuda", small, kernel, *square, "float32"]) is None
    assert text_of(["dense_small_batch.gpu", small, kernel, None, "float32"]) is None
    wide = ["TENSOR", [8, 4, 1, 3], "float32"]  # TOPI splits its rows by the factor of its columns
    assert text_of(["group_conv2d_nchw.cuda", small, wide, *square, 2, "float32"]) is None


def some_choice(workload: str) -> str:
    with tvm.target.Target(TARGET, HOST) as parsed:
        return any_choice(workload, parsed, random.Random(1))


@pytest.mark.usefixtures("software_cuda", "_own_cache")
def test_autotvm_reads_what_is_written_and_broken_lines_are_skipped(gpu: Device, caplog: Any) -> None:
    target = gpu.target
    workload = task("whole", tvm.target.Target(target, HOST)).workload
    written = [
        DeviceRecord(workload, some_choice(workload), 1e-4),
        DeviceRecord(workload, some_choice(workload), float("inf")),
        DeviceRecord(workload, DEFAULT, 2e-4, proven=True),
    ]
    for record in written:
        append_device_record(target, record)
    lines = device_file(target).read_text().splitlines()
    read, result = autotvm.record.decode(lines[0])
    assert read.task.workload == workload_of_text(workload)
    assert result.costs == (1e-4,)
    good = json.loads(lines[0])
    broken = [
        {**good, "input": ["opencl", *good["input"][1:]]},
        {**good, "input": [good["input"][0], "conv2d_nchw_winograd.cuda", *good["input"][2:]]},
        {**good, "input": [*good["input"][:2], [], {}]},
        {**good, "config": {"entity": [["tile_f", "sp", [-1, 0, 1, 1]], *good["config"]["entity"]]}},
        {**good, "config": {"entity": [["tile_f", "sp", [-1, {}, 1, 1]], *good["config"]["entity"]]}},
        {**good, "config": {"entity": good["config"]["entity"][:-2]}},
        {**good, "result": [[-1.0], 0, 0.0, 0.0]},
    ]
    old = {**good, "tvm_version": "0.1"}
    with device_file(target).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [*broken, old])
    with caplog.at_level(logging.WARNING):
        assert read_device_records(target) == written
    assert f"{len(broken)} lines are no records" in caplog.text


@pytest.mark.thorough
@pytest.mark.usefixtures("_with_default")
def test_a_model_is_compiled_with_what_is_recorded_for_it_and_has_the_same_bits(cpu: Device) -> None:
    """Slices of a platform of both kinds too, whose operators stay aligned."""
    model, device = network(), Device("gpu", "gpu", (), TARGET)
    said = log_lines("INFO")

    def compiled() -> RelayModel:
        return RelayModel.compile(model, [cpu.target, TARGET], bind, host=cpu.target)

    def outputs(compiled_: RelayModel) -> list[np.ndarray]:
        stages = [([operator.name], device) for operator in compiled_.graph.operators]
        return model_outputs(compiled_, run_stages(compiled_, stages, random_frame(compiled_.graph.inputs)))

    plain = compiled()
    assert plain.tuned() == []
    [workload] = plain.libraries[TARGET].tuning.workloads.values()
    choice = some_choice(str(workload))
    append_device_record(TARGET, DeviceRecord(str(workload), choice, 1e-6))
    assert recorded_device_choices(TARGET) == {}, "nothing is proven"
    append_device_record(TARGET, DeviceRecord(str(workload), choice, 1e-5, proven=True))
    said.clear()
    tuned = compiled()
    assert [line for line in said if re.match("compiling [^%]*$", line)] == [f"compiling whole for {TARGET}"]
    assert tuned.tuned() == [TunedKernels(TARGET, 1, 1)]
    assert tuned.libraries[TARGET].folder != plain.libraries[TARGET].folder
    sources = [
        library.module.imported_modules[0].get_source()
        for library in (plain.libraries[TARGET], tuned.libraries[TARGET])
    ]
    assert sources[0] != sources[1]
    assert tuned.graph == plain.graph
    for found, expected in zip(outputs(tuned), outputs(plain), strict=True):
        np.testing.assert_array_equal(found, expected)


# The first child dies in its first candidate beside the default, and the second one ends.
FAULT = """
import os, signal
from collections.abc import Callable
from pathlib import Path
from tvm_pipeline_kernels.relay.tuning import device_candidates, device_tuner
device_tuner.GENERATION, device_tuner.PATIENCE, device_tuner.ROUNDS = 2, 1, 4
folder, run = Path({folder!r}), device_candidates.Bench.time
def time(self, candidate, best_s):
    if candidate.choice != device_candidates.DEFAULT:
        if not (folder / "died").exists():
            (folder / "died").write_text(candidate.choice)
            os.kill(os.getpid(), signal.SIGKILL)
        with (folder / "ran").open("a") as file:
            file.write(candidate.choice + "\\n")
    run(self, candidate, best_s)
device_candidates.Bench.time = time
"""


@pytest.mark.thorough
@pytest.mark.usefixtures("_with_default")
def test_a_candidate_that_ends_its_process_costs_only_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sitecustomize.py").write_text(FAULT.format(folder=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    backend = find_backend("gpu")
    assert backend.can_tune
    device = backend.settle(Device("gpu", "gpu", (), TARGET))
    report = backend.tune(network(), device, 100.0)
    ran = (tmp_path / "ran").read_text().splitlines()
    assert (report.kernels, report.measured, report.candidates) == (1, 1, 1 + len(ran))
    assert report.stopped == "nothing became faster any more"
    died = (tmp_path / "died").read_text()
    assert [record.choice for record in read_device_records(TARGET) if record.seconds == np.inf] == [died]
    assert len({died, *ran}) == 1 + len(ran), "nothing is tried twice"
    assert "SIGKILL" in caplog.text
    assert len(recorded_device_choices(TARGET)) == report.tuned


def test_a_child_that_is_silent_for_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that hangs; here a child says when it must be heard again, and sleeps."""
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = log_lines("INFO")

    def limit_s(_: ChildReport) -> float | None:
        return float(said[-1].split()[1]) if said[-1].startswith("within") else None

    before = children_of(os.getpid())
    with pytest.raises(TimeoutError):
        run_child("sleeper:serve", ChildReport(("tvm_pipeline", 20, "an order")), ChildReport, limit_s)
    assert said == ["an order", "within 0.2"]
    assert children_of(os.getpid()) == before


SLEEPER = """
import msgspec, time
def serve(order, channel):
    channel.send(msgspec.json.encode(msgspec.msgpack.decode(order)))
    time.sleep(0.7)  # a child that has set no limit may be silent
    channel.send(b'{"log": ["tvm_pipeline", 20, "within 0.2"]}')
    time.sleep(1000)
"""
