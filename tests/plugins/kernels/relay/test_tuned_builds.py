"""Builds under choices of tuning: they compute the same bits, and a library knows which records it is made with."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.plugins.kernels.relay.test_schedules import layer
from tests.support.networks import Weights, as_model, module_of, relay_module
from tests.support.stages import model_outputs, random_frame, run_stages
from tests.tvm.targets import LEVELS, run, runs_here
from tvm_pipeline.backends.contract import TunedKernels
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline_kernels.choices import CONV2D, DEPTHWISE, Choice, Workload, possible_choices
from tvm_pipeline_kernels.relay.tuning.tasks import optimized, tasks_of
from tvm_pipeline_kernels.tiles import Cores
from tvm_pipeline_kernels.tuning.targets import cores_of
from tvm_pipeline_kernels.tuning.tuning_records import Record, append_record
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.fold import fast_build
from tvm_pipeline_tvm.relay.library import TUNING, Library, load_library

import tvm  # isort: skip
from tvm import relay  # isort: skip

TARGET = "llvm -mcpu=x86-64-v3"
HERE = list(filter(runs_here, LEVELS))
LAYERS = 1  # of random shapes, for each target

pytestmark = pytest.mark.skipif(not runs_here(TARGET), reason="needs an x86-64 processor with AVX2")


def random_choices(mod: tvm.IRModule, params: dict[str, Any], target: str, random: Random) -> dict[Workload, Choice]:
    """Return another choice than the static rule's for each workload that has one."""
    tasks = tasks_of(optimized(mod, target, params))
    possible = {task.workload: possible_choices(task.workload, cores_of(target))[1:] for task in tasks}
    return {workload: random.choice(choices) for workload, choices in possible.items() if choices}


@pytest.mark.thorough
@pytest.mark.parametrize("target", HERE)
def test_every_choice_has_the_bits_of_the_rule(target: str) -> None:
    random, met = Random(target), set()
    for _ in range(LAYERS):
        mod, params, tensor = layer(random)
        frame, choices = random_frame([tensor]), random_choices(mod, params, target, random)
        met |= {template for template, *_ in choices}
        (tuned,) = run(fast_build(mod, target, params, choices), frame)
        (expected,) = run(fast_build(mod, target, params), frame)
        np.testing.assert_array_equal(tuned, expected, err_msg=f"{choices}\n{mod}")
    assert CONV2D in met


@pytest.mark.thorough
def test_a_choice_is_what_is_compiled() -> None:
    """Both templates: code under a choice is other code than without."""
    weights = Weights()
    y = weights.conv(relay.var("data", shape=(1, 16, 9, 9)), 16, 3)
    y = relay.nn.conv2d(y, weights(16, 1, 3, 3), channels=16, groups=16, kernel_size=(3, 3))
    mod = module_of(y)
    params = weights.params
    choices = random_choices(mod, params, TARGET, Random(0))
    plain = fast_build(mod, TARGET, params).get_lib().get_source("asm")
    for template in (CONV2D, DEPTHWISE):
        workload, choice = next(item for item in choices.items() if item[0][0] == template)
        assert fast_build(mod, TARGET, params, {workload: choice}).get_lib().get_source("asm") != plain, workload


def network(channels: int = 16) -> Model:
    """Return two convolutions of different workloads, which also differ with the channels between them."""
    weights = Weights()
    y = weights.conv(weights.conv(relay.var("data", shape=(1, 16, 9, 9)), channels), 16, 1)
    mod = module_of(y)
    return as_model(f"net{channels}", mod, weights.params)


@pytest.mark.thorough
def test_the_workload_of_a_function_is_what_topi_asks_for() -> None:
    asked = set()

    class Asked(tvm.autotvm.task.DispatchContext):
        def _query_inside(self, target: Any, workload: Any) -> None:
            asked.add(workload)

        def update(self, target: Any, workload: Any, config: Any) -> None:
            self._old_ctx.update(target, workload, config)

    mod, params = relay_module("mobile")
    with Asked():
        tasks = tasks_of(optimized(mod, TARGET, params))
    assert tasks
    assert {task.workload for task in tasks} <= asked


@pytest.mark.thorough
def test_a_workload_in_several_functions_is_one_task() -> None:
    """Three epilogues, of which one stands twice."""
    weights = [relay.const(np.ones((16, 16, 3, 3), "float32")) for _ in range(4)]
    x = relay.var("x", shape=(1, 16, 8, 8))

    def convolution(y: relay.Expr, index: int) -> relay.Expr:
        return relay.nn.conv2d(y, weights[index], channels=16, kernel_size=(3, 3), padding=(1, 1))

    y = relay.nn.relu(convolution(relay.nn.relu(convolution(x, 0)), 1))
    y = convolution(relay.tanh(convolution(y, 2)), 3)
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([x], y)))
    [task] = tasks_of(optimized(mod, TARGET))
    assert sorted(calls for _, calls in task.functions) == [1, 1, 2]
    assert (task.calls, task.macs) == (4, 16 * 8 * 8 * 16 * 9)


def choose(library: Library, count: int) -> dict[Workload, Choice]:
    """Record another tile than the rule's for so many workloads of a library."""
    chosen = {w: possible_choices(w, Cores(8, 16))[3] for w in sorted(set(library.tuning.workloads.values()))[:count]}
    for workload, choice in chosen.items():
        append_record(TARGET, Record(workload, choice, 1e-5, proven=True))
    return chosen


@pytest.mark.thorough
def test_a_model_is_compiled_again_for_its_own_records_alone(own_cache: Path, tmp_path: Path) -> None:
    said = log_lines("INFO")
    model, other = network(16), network(32)
    plain, untouched = build_library(model, TARGET), build_library(other, TARGET)
    shared = set(plain.tuning.workloads.values()) & set(untouched.tuning.workloads.values())
    assert not shared
    assert (plain.tuning.tuned, plain.tuning.convolutions) == (0, 2)
    chosen = choose(plain, 1)
    said.clear()
    assert build_library(other, TARGET).folder == untouched.folder
    assert said == []
    tuned = build_library(model, TARGET)
    assert [line for line in said if "%" not in line] == ["importing net16", f"compiling net16 for {TARGET}"]
    said.clear()
    assert (tuned.tuning.tuned, dict(tuned.tuning.choices)) == (1, chosen)
    assert build_library(model, TARGET).folder == tuned.folder != plain.folder
    assert build_library(model, TARGET, choices={}).folder == plain.folder
    assert said == []

    # One that was never compiled takes what applies to it; the library is found again, whatever else is recorded.
    for file in (own_cache / "libraries").iterdir():
        file.rename(tmp_path / file.name)
    tuned = build_library(model, TARGET)
    assert dict(tuned.tuning.choices) == chosen
    said.clear()
    choose(untouched, 1)
    assert build_library(model, TARGET).folder == tuned.folder
    assert said == []
    assert sorted(path.name for path in (own_cache / "libraries").iterdir() if path.name.startswith("new")) == []


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_a_tuned_model_has_the_same_bits_and_says_what_is_tuned(tmp_path: Path) -> None:
    model, device = network(), Device("cpu0", "host", (0,), TARGET)
    compile_ = partial(RelayModel.compile, model, [TARGET], lambda _: None)
    plain = compile_()
    assert plain.tuned() == []
    choose(plain.libraries[TARGET], 9)
    tuned = compile_()
    assert tuned.tuned() == [TunedKernels(TARGET, 2, 2)]
    frame = random_frame(plain.graph.inputs)
    stages = [(plain.graph.operator_names, device)]
    expected = model_outputs(plain, run_stages(plain, stages, frame))
    (tmp_path / "saved").mkdir()
    tuned.save(tmp_path / "saved")
    loaded = RelayModel.load(tmp_path / "saved", lambda _: None)
    assert loaded.tuned() == tuned.tuned()
    for one in (tuned, loaded):
        for found, output in zip(model_outputs(one, run_stages(one, stages, frame)), expected, strict=True):
            np.testing.assert_array_equal(found, output)


@pytest.mark.thorough
@pytest.mark.usefixtures("own_cache")
def test_a_library_of_an_earlier_version_is_not_tuned() -> None:
    folder = build_library(network(), TARGET).folder
    assert folder is not None
    (folder / TUNING).unlink()
    *described, sizes = json.loads((folder / "kernels.json").read_text())
    (folder / "kernels.json").write_text(json.dumps([*described, {k: v for k, v in sizes.items() if k != TUNING}]))
    assert load_library(folder).tuning.convolutions == 0
