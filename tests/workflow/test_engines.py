"""Engines that compete on the same cores: their devices, their candidates, and a model that two of them run."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("openvino")

from tests.support.fake_backend import make_plan
from tests.support.onnx_models import write_picture_net
from tvm_pipeline import Pipeline
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError, PlatformError
from tvm_pipeline.planning import plan as planned
from tvm_pipeline.profiling import profile_model
from tvm_pipeline.workflow import machine as machine_of
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_openvino import backend as openvino

CORES = sorted(os.sched_getaffinity(0))[:2]
HOST = tuple(Device(f"cpu{index}", "host", (core,), "llvm") for index, core in enumerate(CORES))
DESK = Platform("desk", HOST, (Link("cpu0", "cpu1", 1e-5),) if len(HOST) > 1 else ())


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_of, "this_machine", lambda *_: DESK)


def names(platform: Platform) -> list[str]:
    return [device.name for device in platform.devices]


def test_each_engine_has_devices_on_the_same_cores() -> None:
    assert with_engines(DESK, "") is DESK
    assert with_engines(DESK, "tvm") == DESK
    all_ = with_engines(DESK, "tvm, OpenVINO,onnxruntime")
    assert names(all_) == [
        *names(DESK),
        *(f"{engine}-{device.name}" for engine in ("openvino", "onnxruntime") for device in HOST),
    ]
    assert all_.device("openvino-cpu0") == Device("openvino-cpu0", "openvino", HOST[0].cores, "CPU")
    # Stages of onnxruntime need not have the bits of the whole beside those of another engine.
    assert all_.device("onnxruntime-cpu0").target == "cpu optimization=all"
    assert all_.links == DESK.links
    alone = with_engines(all_, "openvino")
    assert names(alone) == [f"openvino-{device.name}" for device in HOST]
    assert alone.links == ()


def test_engines_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="`engines` opnvino: there is no such engine; did you mean openvino"):
        with_engines(DESK, "tvm,opnvino")
    with pytest.raises(PlatformError, match="desk has no device of tvm; `tvm-pipeline devices` lists"):
        with_engines(Platform("desk", (Device("one", "openvino", HOST[0].cores, "CPU"),)), "tvm")
    monkeypatch.setattr(type(openvino), "packages", ("openvino", "no_such_package"))
    with pytest.raises(PlatformError, match=r"no_such_package is not installed: run `pip install 'tvm-pip"):
        with_engines(DESK, "tvm,openvino")


@pytest.mark.usefixtures("desk")
@pytest.mark.skipif(len(CORES) < 2, reason="on one core there are no replicas")
def test_the_whole_model_by_each_engine_is_a_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And OpenVINO's operators are timed by its own counters, inside of the whole model, although another one cuts."""
    path = write_picture_net(tmp_path / "net.onnx")
    made = compile_source(path, engines="openvino,onnxruntime")
    monkeypatch.setattr(OperatorTimer, "seconds", lambda *_: pytest.fail("operators were timed one by one"))
    with closing(made.compiled):
        profile = profile_model(made.backend, made.compiled, made.platform, 2)
        assert profile.devices.keys() == set(names(made.platform))
        decision = planned(Problem(made.compiled.graph, made.platform, profile))
    found = {plan.devices for plan in decision.candidates if len(plan.stages) == 1}
    for engine in ("openvino", "onnxruntime"):
        assert any({f"{engine}-cpu0"} == set(devices) or {f"{engine}-cpu1"} == set(devices) for devices in found)
        assert (f"{engine}-cpu0", f"{engine}-cpu1") in found


@pytest.mark.usefixtures("desk")
@pytest.mark.skipif(len(CORES) < 2, reason="on one core a plan has one engine")
def test_stages_of_several_engines_give_the_results_of_one(tmp_path: Path) -> None:
    needs("tvm")
    path = write_picture_net(tmp_path / "net.onnx")
    made = compile_source(path, engines="tvm,openvino,onnxruntime")
    with closing(made.compiled):
        graph = made.compiled.graph
        operators = [operator.name for operator in graph.operators]
        frame = frame_of_noise(graph)
        results = []
        for parts in (
            [(["onnxruntime-cpu0"], operators)],
            [(["openvino-cpu0"], operators)],
            [(["cpu0"], operators)],
            [(["openvino-cpu0"], operators[:3]), (["cpu1"], operators[3:5]), (["openvino-cpu0"], operators[5:])],
            [(["onnxruntime-cpu1"], operators[:4]), (["openvino-cpu0"], operators[4:])],
        ):
            with Pipeline(made.compiled, make_plan(graph, *parts), made.platform) as pipeline:
                [result] = pipeline.map([frame])
                results.append(result.outputs["scores"])
        for other in results[1:]:
            np.testing.assert_allclose(other, results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("desk")
def test_tvm_alone(tmp_path: Path) -> None:
    needs("tvm")
    made = compile_source(write_picture_net(tmp_path / "net.onnx"), engines="tvm")
    with closing(made.compiled):
        assert {device.backend for device in made.platform.devices} == {"host"}
