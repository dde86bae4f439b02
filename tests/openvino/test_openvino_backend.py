"""The backend of OpenVINO: its stages are bit-equal to the uncut model, and its threads stay on the device's cores.

GPUs and NPUs are not here. What OpenVINO would list of them is faked where names matter, and `HETERO:CPU`, a device of
OpenVINO that is no CPU for the backend, takes the path of a GPU: without cores, with properties, compiled by a plug-in.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.parts import needs

needs("openvino")
needs("onnx")

from onnx import TensorProto, helper

from tests.support.examples import seeds
from tests.support.graphs import random_order
from tests.support.onnx_models import onnx_bytes, write_picture_net
from tests.support.stages import run_stages
from tests.support.threads import cores_of_work, frames, ticks
from tvm_pipeline import load
from tvm_pipeline.backends import engine
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError, PlatformError, RunError
from tvm_pipeline.testing import check_backend
from tvm_pipeline_openvino import OpenvinoBackend, backend, stages

CORES = sorted(os.sched_getaffinity(0))
DEVICE = Device("cpu0", "openvino", (CORES[0],), "CPU")


def varied_net() -> Model:
    """Return a net whose layers OpenVINO fuses, folds or lays out in its own way: a stem and an attention."""
    draw = np.random.default_rng(0)

    def weight(*shape: int) -> Array:
        return (draw.standard_normal(shape) / 4).astype("float32")

    node = helper.make_node
    shapes = {"w1": (16, 3, 3, 3), "w2": (16, 16, 1, 1), "w3": (16, 1, 3, 3), "w4": (16, 16, 1, 1)}
    shapes |= dict.fromkeys(("q", "k", "v"), (16, 16))
    shapes |= dict.fromkeys(("gamma", "beta", "mean", "norm", "shift"), (16,))
    constants: dict[str, Any] = {name: weight(*shape) for name, shape in shapes.items()}
    constants |= {"var": np.abs(weight(16)) + 1, "half": np.float32(0.5), "root": np.float32(2**0.5)}
    constants |= {"one": np.float32(1), "places": np.array([0, 1]), "halves": np.array([16, 16])}
    constants |= {"tokens": np.array([1, 16, -1]), "scales": np.array([1, 1, 2, 2], "float32"), "axes": np.array([1])}
    nodes = [
        node("Conv", ["x", "w1"], ["c1"], pads=[1, 1, 1, 1], strides=[2, 2]),
        node("BatchNormalization", ["c1", "gamma", "beta", "mean", "var"], ["n1"]),
        node("Sigmoid", ["n1"], ["s1"]),
        node("Mul", ["n1", "s1"], ["a1"]),
        node("Conv", ["a1", "w3"], ["c2"], pads=[1, 1, 1, 1], group=16),
        node("HardSwish", ["c2"], ["a2"]),
        node("GlobalAveragePool", ["a2"], ["g"]),
        node("Conv", ["g", "w4"], ["e"]),
        node("HardSigmoid", ["e"], ["gate"]),
        node("Mul", ["a2", "gate"], ["a3"]),
        node("Conv", ["a3", "w2"], ["c3"]),
        node("Add", ["c3", "a1"], ["r1"]),
        node("MaxPool", ["r1"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Resize", ["p", "", "scales"], ["up"], mode="nearest"),
        node("Concat", ["up", "r1"], ["joined"], axis=1),
        node("AveragePool", ["joined"], ["pooled"], kernel_shape=[4, 4], strides=[4, 4]),
        node("Shape", ["pooled"], ["shape"]),
        node("Gather", ["shape", "places"], ["two"]),
        node("Mul", ["two", "two"], ["unused"]),
        node("Split", ["pooled", "halves"], ["left", "right"], axis=1),
        node("Add", ["left", "right"], ["both"]),
        node("Reshape", ["both", "tokens"], ["columns"]),
        node("Transpose", ["columns"], ["t"], perm=[0, 2, 1]),
        node("LayerNormalization", ["t", "norm", "shift"], ["ln"], axis=-1),
        *(node("MatMul", ["ln", one], [f"{one}x"]) for one in ("q", "k", "v")),
        node("Transpose", ["kx"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["qx", "kt"], ["scores"]),
        node("Softmax", ["scores"], ["weights"], axis=-1),
        node("MatMul", ["weights", "vx"], ["mixed"]),
        node("Add", ["mixed", "t"], ["r2"]),
        node("Div", ["r2", "root"], ["d"]),
        node("Erf", ["d"], ["erf"]),
        node("Add", ["erf", "one"], ["e1"]),
        node("Mul", ["r2", "e1"], ["m1"]),
        node("Mul", ["m1", "half"], ["gelu"]),
        node("ReduceSum", ["gelu", "axes"], ["y"], keepdims=0),
        node("TopK", ["y", "axes"], ["most", "which"]),
    ]
    content = onnx_bytes(nodes, constants, shape=(1, 3, 32, 32), outputs=("y", "which", "p"), opset=18)
    return Model("varied", "onnx", content, (Tensor("x", (1, 3, 32, 32)),))


def in_stages(
    compiled: CompiledModel, groups: Sequence[Sequence[str]], frame: Mapping[str, Array], device: Device = DEVICE
) -> dict[str, Array]:
    written = run_stages(compiled, [(group, device) for group in groups], frame)
    return {name: array for name, (_, array) in written.items()}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("device", [DEVICE, Device("hetero", "openvino", (), "HETERO:CPU")], ids=lambda d: d.name)
def test_it_keeps_the_contract(device: Device, tmp_path: Path) -> None:
    check_backend(backend, load(write_picture_net(tmp_path / "net.onnx")), [device])


def test_every_cut_has_the_bits_of_the_uncut_model() -> None:
    with closing(backend.compile(varied_net(), [DEVICE])) as compiled:
        frame = frame_of_noise(compiled.graph)
        whole = in_stages(compiled, [compiled.graph.operator_names], frame)
        kinds = [set(operator.kind.split("+")) for operator in compiled.graph.operators]
        assert len(kinds) > 12
        assert {"conv", "batchnormalization"} <= next(kind for kind in kinds if "conv" in kind)
        assert not any("shape" in kind for kind in kinds)  # it is known before the model runs
        for seed in seeds(20):
            draw = random.Random(seed)
            order = random_order(draw, compiled.graph)
            first, second = sorted(draw.sample(range(1, len(order)), 2))
            found = in_stages(compiled, [order[:first], order[first:second], order[second:]], frame)
            for name in compiled.graph.outputs:
                np.testing.assert_array_equal(found[name], whole[name], err_msg=f"seed {seed}, {name}")


def test_values_and_times_of_operators() -> None:
    """Every tensor has a value, every operator seconds; on a plug-in of OpenVINO, too."""
    device = backend.settle(Device("hetero", "openvino", (), "HETERO:CPU"))
    with closing(backend.compile(varied_net(), [DEVICE, device])) as compiled:
        values = compiled.values()
        assert values.keys() == compiled.graph.tensors.keys()
        for each in (DEVICE, device):
            seconds = compiled.time_operators(each, 3)
            assert seconds.shape == (3, len(compiled.graph))
            assert (seconds > 0).all()


# ------------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("core", [CORES[0], CORES[-1]])
def test_a_stage_computes_on_the_core_of_its_device_alone(core: int, tmp_path: Path) -> None:
    device = Device("cpu", "openvino", (core,), "CPU")
    compiled = backend.compile(load(write_picture_net(tmp_path / "net.onnx")), [device])
    with closing(compiled.stage(compiled.graph.operator_names, device)) as stage:
        seen: list[dict[int, tuple[int, set[int]]]] = []
        worker = threading.Thread(target=frames, args=(stage, seen))
        worker.start()
        worker.join()
    computing = cores_of_work(*seen)
    assert computing
    assert all(cores == {core} for cores in computing.values())


@pytest.mark.thorough
def test_all_cores_are_in_this_process_and_others_in_one_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO's threads are one pool of a process, so a process with fewer cores is what holds them there.

    No machine of two cores has a part of several, so this one is told that it has one more.
    """
    device = Device("cpu", "openvino", tuple(CORES), "CPU")
    with closing(backend.compile(varied_net(), [device])) as compiled:
        names, frame = compiled.graph.operator_names, frame_of_noise(compiled.graph)
        with closing(compiled.stage(names, device)) as stage:
            assert isinstance(stage, stages.OpenvinoStage)
        here = in_stages(compiled, [names], frame, device)
        monkeypatch.setattr(engine, "CORES", frozenset((*CORES, max(CORES) + 1)))
        apart = compiled.stage(names, device) if len(CORES) > 1 else compiled.isolated_stage(names, device)
        with closing(apart) as stage:
            assert not isinstance(stage, stages.OpenvinoStage)
        found = in_stages(compiled, [names[:5], names[5:]], frame, device)
        for name in compiled.graph.outputs:
            np.testing.assert_array_equal(found[name], here[name])


@pytest.mark.thorough
def test_every_thread_of_such_a_process_has_the_cores_of_the_device() -> None:
    core = CORES[-1]
    device = Device("cpu", "openvino", (core,), "CPU")
    with closing(backend.compile(varied_net(), [device])) as compiled:
        before = children()
        with closing(compiled.isolated_stage(compiled.graph.operator_names, device)) as stage:
            inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
            for _ in range(3):
                stage.run(inputs, outputs)
            [child] = children() - before
            threads = ticks(child)
            assert len(threads) > 0
            assert all(cores == {core} for _, cores in threads.values())


def children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        found |= set(map(int, (task / "children").read_text().split()))
    return found


# ------------------------------------------------------------------------------------------------------- devices


@pytest.fixture
def with_intel(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenvinoBackend]:
    """Yield a backend that OpenVINO tells of a machine with two GPUs and an NPU, as its documentation lists them."""
    fresh = OpenvinoBackend()
    listed = {
        "CPU": ("Intel(R) Core(TM) Ultra 7 155H", ["NUM_STREAMS"]),
        "GPU.0": ("Intel(R) Arc(TM) Graphics (iGPU)", ["INFERENCE_PRECISION_HINT"]),
        "GPU.1": ("Intel(R) Arc(TM) A770 Graphics (dGPU)", ["INFERENCE_PRECISION_HINT"]),
        "NPU": ("Intel(R) AI Boost", ["NPU_COMPILER_TYPE"]),
    }
    monkeypatch.setattr(fresh, "_listed", listed)
    yield fresh
    fresh.close()


def test_it_offers_cores_gpus_and_npus(with_intel: OpenvinoBackend) -> None:
    offered = with_intel.engine_devices([Device("cpu0", "host", (CORES[0],), "llvm")])
    assert [(device.name, device.cores, device.target) for device in offered] == [
        ("cpu0", (CORES[0],), "CPU"),
        ("gpu.0", (), "GPU.0"),
        ("gpu.1", (), "GPU.1"),
        ("npu", (), "NPU"),
    ]
    assert [with_intel.settle(device) for device in offered] == offered
    assert with_intel.describe(offered[3]) == "Intel(R) AI Boost"
    both = Device("both", "openvino", (), "HETERO:GPU,NPU INFERENCE_PRECISION_HINT=f16")
    assert with_intel.describe(with_intel.settle(both)) == "Intel(R) Arc(TM) Graphics (iGPU), Intel(R) AI Boost"


def test_devices_that_are_not_here() -> None:
    assert list(backend.detect()) == []
    assert backend.settle(Device("cpu0", "openvino", (CORES[0],))) == DEVICE
    for wrong, message in (
        (
            Device("npu", target="NPU"),
            r"device npu: target 'NPU'; OpenVINO finds only CPU; NPU needs Intel's NPU driver",
        ),
        (Device("gpu", target="GPU.1"), "GPU.1 needs Intel's compute runtime and libOpenCL.so.1"),
        (Device("tpu", target="TPU"), "target 'TPU'; OpenVINO finds only CPU; give one of these"),
        (Device("none"), "device none: target ''; OpenVINO finds only CPU; give one of these"),
        (Device("none", target="CPU"), "device none names cores"),
        (Device("far", cores=(9999,)), r"device far names cores \[9999\]"),
        (Device("odd", cores=(CORES[0],), target="CPU NUM_STREAM=1"), "no property 'NUM_STREAM'.*mean NUM_STREAMS"),
        (Device("odd", cores=(CORES[0],), target="CPU NUM_STREAMS"), "property 'NUM_STREAMS'.*written KEY=VALUE"),
    ):
        with pytest.raises(PlatformError, match=message):
            backend.settle(wrong)


@pytest.mark.thorough
def test_a_model_of_which_openvino_dies_costs_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies in the child that tries the model first, and a later model has a new child."""
    fresh = OpenvinoBackend()
    with closing(fresh):
        monkeypatch.setattr(fresh._trial, "_function", "tests.support.dying_engine:serve")
        with pytest.raises(
            ModelError, match=r"varied: OpenVINO on CPU: .* was killed by SIGSEGV \(no such instruction\)"
        ):
            fresh.compile(varied_net(), [DEVICE])
        with pytest.raises(PlatformError, match=r"OpenVINO cannot list its devices: .* killed by SIGSEGV"):
            fresh.settle(DEVICE)
        monkeypatch.undo()
        fresh.compile(varied_net(), [DEVICE]).close()


def test_nothing_of_it_is_imported_that_sends_what_it_knows() -> None:
    """Its Python package sends a message when it is imported; `test_network.py` counts packets of whole commands."""
    look = (
        "import sys; from tvm_pipeline_openvino.stages import core; core().available_devices; "
        "print([name for name, module in sys.modules.items() if name.startswith('openvino_telemetry') and module])"
    )
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True).stdout.strip() == "[]"


# -------------------------------------------------------------------------------------------------------- faults


def test_what_it_cannot_run() -> None:
    unknown = helper.make_graph(
        [helper.make_node("Nothing", ["x"], ["y"], domain="nobody")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("nobody", 1)]
    content = helper.make_model(unknown, opset_imports=opsets, ir_version=8).SerializeToString()
    for model, message in (
        (Model("net", "tflite", b""), "net is tflite, openvino takes .onnx: export the model to ONNX"),
        (Model("net", "onnx", b"\xff\x00"), "not a valid ONNX file"),
        (Model("net", "onnx", content, (Tensor("x", (2,)),)), "net: OpenVINO refuses it on CPU: .*Nothing"),
    ):
        with pytest.raises(ModelError, match=message):
            backend.compile(model, [DEVICE])
        assert backend.refuses(model)


def test_a_stage_that_was_closed() -> None:
    with closing(backend.compile(varied_net(), [DEVICE])) as compiled:
        stage = compiled.stage(compiled.graph.operator_names, DEVICE)
        inputs, outputs = [port.buffer() for port in stage.inputs], [port.buffer() for port in stage.outputs]
        with pytest.raises(RunError, match="OpenVINO cannot compute a frame on cpu0"):
            stage.run([np.zeros((1, 3, 8, 8), np.float32)], outputs)
        stage.run(inputs, outputs)
        stage.close()
        with pytest.raises(RunError, match="the stage was closed"):
            stage.run(inputs, outputs)
