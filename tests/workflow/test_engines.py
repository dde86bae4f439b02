"""Engines that compete on the same cores: their devices, their candidates, and a model that two of them run."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("openvino")

from tests.support.fake_backend import make_plan
from tests.support.onnx_models import write_picture_net
from tests.support.threads import cores_of_work, ticks
from tvm_pipeline import Pipeline
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.engine_agreement import disagreement
from tvm_pipeline.backends.operator_timing import OperatorTimer
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.graph import Operator, OperatorGraph, Tensor
from tvm_pipeline.core.platform import Device, Link, Platform
from tvm_pipeline.core.problem import Problem
from tvm_pipeline.errors import OptionError, PlanError, PlatformError, RunError
from tvm_pipeline.planning import plan as planned
from tvm_pipeline.profiling import profile_model
from tvm_pipeline.testing import FakeModel
from tvm_pipeline.workflow import machine as machine_of
from tvm_pipeline.workflow.engines import with_engines
from tvm_pipeline.workflow.steps import compile_source
from tvm_pipeline_openvino import backend as openvino
from tvm_pipeline_openvino import stages

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


@pytest.mark.thorough
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
        operators = graph.operator_names
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
@pytest.mark.skipif(len(CORES) < 2, reason="on one core a plan has one engine")
def test_each_engine_computes_on_the_core_of_its_stage_alone(tmp_path: Path) -> None:
    made = compile_source(write_picture_net(tmp_path / "net.onnx"), engines="openvino,onnxruntime")
    with closing(made.compiled):
        graph = made.compiled.graph
        operators = graph.operator_names
        plan = make_plan(graph, (["onnxruntime-cpu0"], operators[:4]), (["openvino-cpu1"], operators[4:]))
        with Pipeline(made.compiled, plan, made.platform) as pipeline:
            results = pipeline.map(repeat(frame_of_noise(graph)))
            for _ in range(10):  # threads that compiled look for more work for a while
                before, until_s = ticks(), sum(os.times()[:2]) + 0.4
                while sum(os.times()[:2]) < until_s:
                    next(results)
                working = cores_of_work(before, ticks())
                hand_frames_on = {t.native_id for t in threading.enumerate() if not t.name.startswith("stage ")}
                found = [cores for thread, cores in working.items() if thread not in hand_frames_on]
                if found and all(cores in ({CORES[0]}, {CORES[1]}) for cores in found):
                    return
    pytest.fail(f"threads beside those of the stages compute: {found}")


@pytest.mark.usefixtures("desk")
def test_tflite_runs_files_of_its_format_alone(tmp_path: Path) -> None:
    needs("ai_edge_litert")
    from ai_edge_litert.interpreter import Interpreter

    from tests.edgetpu.test_edge_tpu_command import picture_network

    path = tmp_path / "net.tflite"
    path.write_bytes(picture_network())
    with pytest.raises(OptionError, match=r"`engines` openvino: it takes no tflite models; these may: tvm, tflite"):
        compile_source(path, engines="tvm,openvino")
    with pytest.raises(OptionError, match=r"`engines` tflite: it takes no onnx models; these may: tvm, onnx.*, openv"):
        compile_source(write_picture_net(tmp_path / "net.onnx"), engines="tflite")
    made = compile_source(path, engines="tflite")
    with closing(made.compiled):
        graph = made.compiled.graph
        assert names(made.platform) == [f"tflite-{device.name}" for device in HOST]
        operators, frame = graph.operator_names, frame_of_noise(graph)
        plan = make_plan(graph, ([made.platform.devices[0].name], operators))
        with Pipeline(made.compiled, plan, made.platform) as pipeline:
            [result] = pipeline.map([frame])
    interpreter = Interpreter(model_content=path.read_bytes(), num_threads=1)
    interpreter.allocate_tensors()
    for detail in interpreter.get_input_details():
        interpreter.set_tensor(detail["index"], frame[detail["name"]])
    interpreter.invoke()
    for detail in interpreter.get_output_details():
        np.testing.assert_array_equal(result.outputs[detail["name"]], interpreter.get_tensor(detail["index"]))


@pytest.mark.thorough
@pytest.mark.usefixtures("desk")
def test_tvm_alone(tmp_path: Path) -> None:
    needs("tvm")
    made = compile_source(write_picture_net(tmp_path / "net.onnx"), engines="tvm")
    with closing(made.compiled):
        assert {device.backend for device in made.platform.devices} == {"host"}


@pytest.mark.thorough
@pytest.mark.usefixtures("desk")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            lambda array: np.add(array, array.std(), out=array),
            "its result c is off by .*, and 100% of it",
        ),
        (lambda array: array.resize(0), "it fails: OpenVINO cannot compute a frame"),
    ],
    ids=["other values", "failure"],
)
def test_what_an_engine_computes_otherwise_is_named_and_stays_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Array], object], reason: str
) -> None:
    """OpenVINO's stages of conv_2, which makes c, have a fault; onnxruntime cuts the file."""
    sound = stages.OpenvinoStage.run

    def faulty(self: stages.OpenvinoStage, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        sound(self, inputs, outputs)
        for port, array in zip(self.outputs, outputs, strict=True):
            if port.name == "c":
                try:
                    fault(array)
                except ValueError as error:  # numpy does not resize a view
                    raise RunError("OpenVINO cannot compute a frame") from error

    made = compile_source(write_picture_net(tmp_path / "net.onnx"), engines="openvino,onnxruntime")
    with closing(made.compiled):
        device = made.platform.device("openvino-cpu0")
        with monkeypatch.context() as patched:
            patched.setattr(stages.OpenvinoStage, "run", faulty)
            profile = profile_model(made.backend, made.compiled, made.platform, 2)
        [line] = [line for line in profile.warnings if "stays elsewhere" in line]
        assert line.startswith("net on openvino-cpu0 (openvino CPU): conv_2 stays elsewhere, since it")
        assert re.search(reason, line), line
        assert "conv_2" not in made.compiled.computes(device)
        assert "conv_2" in made.compiled.computes(made.platform.device("onnxruntime-cpu0"))
        assert profile.devices["openvino-cpu0"].seconds["conv_2"] is None
        with pytest.raises(PlanError, match="device openvino-cpu0 cannot compute operator conv_2 of net: it"):
            made.compiled.stage(["conv_2"], device)


@pytest.mark.thorough
@pytest.mark.usefixtures("desk")
def test_engines_that_agree_say_nothing(tmp_path: Path) -> None:
    made = compile_source(write_picture_net(tmp_path / "net.onnx"), engines="openvino,onnxruntime")
    with closing(made.compiled):
        affinity = os.sched_getaffinity(0)
        assert made.compiled.check_engines(made.platform.devices) == []
        assert os.sched_getaffinity(0) == affinity


def test_a_device_that_rounds_to_fewer_bits_may_be_as_far_off() -> None:
    for target, precision in (("CPU", "float32"), ("GPU INFERENCE_PRECISION_HINT=f16", "float16"), ("NPU", "float16")):
        assert openvino.precision(Device("one", "openvino", (), target)) == precision
    x, y = Tensor("x", (4,)), Tensor("y", (4,))
    graph = OperatorGraph("net", (x,), (Operator("double", "mul", ("x",), (y,)),), ("y",))
    values = {"x": np.ones(4, "float32"), "y": np.full(4, 2, "float32")}
    with closing(FakeModel(graph, {"double": lambda x: [2.002 * x]}).stage(["double"], Device("d0", "fake"))) as runner:
        assert "off by 0.002" in disagreement(graph, ["double"], runner, values, "float32")
        assert disagreement(graph, ["double"], runner, values, "float16") == ""
