"""The backend of onnxruntime: its stages are bit-equal to the unsplit session, and its errors name what is wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("onnx")

import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from tests.support.graphs import random_order
from tests.support.onnx_models import write_picture_net
from tests.support.onnx_unknown import write_determinants
from tests.support.stages import model_outputs, run_stages
from tests.support.threads import ticks
from tvm_pipeline import load
from tvm_pipeline.backends.contract import Array, CompiledModel
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import BundleError, ModelError, PlatformError, RunError
from tvm_pipeline.testing import check_backend
from tvm_pipeline_onnxruntime import backend

CORES = sorted(os.sched_getaffinity(0))
DEVICE = Device("cpu0", "onnxruntime", (CORES[0],))


def net(
    nodes: Sequence[object],
    outputs: Mapping[str, Sequence[int | str]],
    *constants: tuple[str, Array],
    kind: int = 1,
    opset: int = 13,
) -> Model:
    """Return a model of a picture x [1, 2, 4, 4] in float32."""
    from tvm_pipeline.core.graph import Tensor

    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, 4, 4])],
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in constants],
    )
    domains = {"": opset} | {node.domain: 1 for node in nodes if node.domain}
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains.items()]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return Model("net", "onnx", made.SerializeToString(), (Tensor("x", (1, 2, 4, 4)),))


def unsplit(model: Model, frame: Mapping[str, Array], level: str) -> dict[str, Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(frame)), strict=True))


def noise(model: Model) -> dict[str, Array]:
    draw = np.random.default_rng(1)
    return {t.name: draw.standard_normal(t.shape).astype(t.dtype) for t in model.inputs}


def in_stages(compiled: CompiledModel, groups: Sequence[Sequence[str]], frame: Mapping[str, Array]) -> dict[str, Array]:
    tensors = dict(frame)
    for group in groups:
        stage = compiled.stage(group, DEVICE)
        outputs = [port.buffer() for port in stage.outputs]
        stage.run([tensors[port.name] for port in stage.inputs], outputs)
        tensors |= {port.name: array for port, array in zip(stage.outputs, outputs, strict=True)}
        stage.close()
    return tensors


@pytest.mark.quick_cases(1)
def test_it_keeps_the_contract(tmp_path: Path) -> None:
    devices = [Device(f"cpu{core}", "onnxruntime", (core,)) for core in CORES[:2]]
    check_backend(backend, load(write_picture_net(tmp_path / "net.onnx")), devices)


@pytest.mark.parametrize("write", [write_picture_net, write_determinants])
def test_every_cut_has_the_bits_of_the_unsplit_session(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """The session optimises the whole file as the backend does; one that fuses more is equal within rounding."""
    import random

    model = load(write(tmp_path / "net.onnx"))
    compiled = backend.compile(model, [DEVICE])
    frame = noise(model)
    same, fused = (unsplit(model, frame, f"ORT_ENABLE_{level}") for level in ("BASIC", "ALL"))
    for seed in range(6):
        draw = random.Random(seed)
        order = random_order(draw, compiled.graph)
        first, second = sorted(draw.sample(range(1, len(order)), 2))
        found = in_stages(compiled, [order[:first], order[first:second], order[second:]], frame)
        for name, expected in same.items():
            np.testing.assert_array_equal(found[name], expected)
            np.testing.assert_allclose(found[name], fused[name], rtol=1e-5, atol=1e-5)


def test_what_depends_on_data_is_one_operator() -> None:
    """NonZero's extents depend on x, so its readers stay with it, and with them what reads the same tensor."""
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("NonZero", ["a"], ["places"]),
        helper.make_node("Cast", ["places"], ["real"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["real"], ["mean"], keepdims=0),
        helper.make_node("Exp", ["mean"], ["b"]),
        helper.make_node("GatherND", ["a", "there"], ["c"]),
        helper.make_node("Transpose", ["places"], ["there"]),
        helper.make_node("ReduceMax", ["c"], ["most"], keepdims=0),
        helper.make_node("Add", ["b", "most"], ["y"]),
    ]
    nodes[5], nodes[6] = nodes[6], nodes[5]
    model = net(nodes, {"y": []})
    compiled = backend.compile(model, [DEVICE])
    kinds = [operator.kind for operator in compiled.graph.operators]
    assert len(kinds) == 4
    assert {"relu", "exp", "add"} < set(kinds)
    frame = noise(model)
    names = [[operator.name] for operator in compiled.graph.operators]
    found = in_stages(compiled, names, frame)
    np.testing.assert_array_equal(found["y"], unsplit(model, frame, "ORT_DISABLE_ALL")["y"])
    assert compiled.time_operators(DEVICE, 3).shape == (3, 4)
    assert (compiled.time_operators(DEVICE, 3) > 0).all()


def test_subgraphs_take_what_they_read_along() -> None:
    """The branches of If read tensors and weights from outside, which are no inputs of its node."""
    branches = [
        helper.make_graph(
            [helper.make_node(kind, ["a", "weight"], [kind])],
            kind,
            [],
            [helper.make_tensor_value_info(kind, TensorProto.FLOAT, [1, 2, 4, 4])],
        )
        for kind in ("Mul", "Sub")
    ]
    nodes = [
        helper.make_node("Tanh", ["x"], ["a"]),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    constants = (("weight", np.full((4,), 3, np.float32)), ("zero", np.zeros((), np.float32)))
    model = net(nodes, {"y": [1, 2, 4, 4]}, *constants)
    compiled = backend.compile(model, [DEVICE])
    [chosen] = [operator for operator in compiled.graph.operators if operator.kind == "if"]
    assert set(chosen.inputs) == {"positive", "a"}
    assert chosen.param_bytes == 16
    for sign in (1, -1):
        frame = {"x": sign * np.abs(noise(model)["x"])}
        found = in_stages(compiled, [[operator.name] for operator in compiled.graph.operators], frame)
        np.testing.assert_array_equal(found["y"], unsplit(model, frame, "ORT_DISABLE_ALL")["y"])


def one(kind: str, **attributes: object) -> list[object]:
    return [helper.make_node(kind, ["x"], ["y"], **attributes)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Model("net", "tflite", b""), "net is tflite, onnxruntime takes .onnx: export the model to ONNX"),
        (lambda: net(one("Relu", domain="nobody"), {"y": [1, 2, 4, 4]}), "onnxruntime refuses it: .*nobody"),
        (lambda: net(one("NonZero"), {"y": [4, "n"]}, kind=7), "output y has extents that depend on data"),
        (lambda: Model("net", "onnx", b"\xff\x00"), "not a valid ONNX file"),
    ],
)
def test_what_it_cannot_run(make: Callable[[], Model], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        backend.compile(make(), [DEVICE])
    assert backend.refuses(make())


def test_devices_are_cores() -> None:
    assert list(backend.detect()) == []
    assert backend.settle(DEVICE).target == "cpu"
    for wrong, message in (
        (Device("odd", "onnxruntime", (CORES[0],), target="cpu a=b"), "device odd: cpu takes no property 'a' = 'b'"),
        (Device("none", "onnxruntime"), "device none names cores"),
        (Device("far", "onnxruntime", (9999,)), r"device far names cores \[9999\]"),
    ):
        with pytest.raises(PlatformError, match=message):
            backend.settle(wrong)


def test_its_threads_keep_to_the_cores_of_the_device(tmp_path: Path) -> None:
    """A device that names its core twice has two threads there, as a machine of few cores can tell."""
    core = max(os.sched_getaffinity(0))
    device = Device("cpu", "onnxruntime", (core, core), "cpu")
    with closing(backend.compile(load(write_picture_net(tmp_path / "net.onnx")), [device])) as compiled:
        before = ticks()
        with closing(compiled.stage(compiled.graph.operator_names, device)):
            made = [cores for thread, (_, cores) in ticks().items() if thread not in before]
    assert made
    assert all(cores == {core} for cores in made)


def test_a_frame_that_it_cannot_compute() -> None:
    nodes = [
        helper.make_node("Cast", ["x"], ["places"], to=TensorProto.INT64),
        helper.make_node("Gather", ["table", "places"], ["y"]),
    ]
    compiled = backend.compile(net(nodes, {"y": [1, 2, 4, 4]}, ("table", np.ones(3, np.float32))), [DEVICE])
    stage = compiled.stage(compiled.graph.operator_names, DEVICE)
    outputs = [port.buffer() for port in stage.outputs]
    with pytest.raises(RunError, match=r"net: onnxruntime cannot compute a frame: .*Gather"):
        stage.run([np.full((1, 2, 4, 4), 77, np.float32)], outputs)
    stage.run([np.full((1, 2, 4, 4), 2, np.float32)], outputs)
    assert (outputs[0] == 1).all()
    stage.close()
    with pytest.raises(RunError, match="the stage was closed"):
        stage.run([np.zeros((1, 2, 4, 4), np.float32)], outputs)


def test_a_damaged_saved_model(tmp_path: Path) -> None:
    compiled = backend.compile(load(write_picture_net(tmp_path / "net.onnx")), [DEVICE])
    compiled.save(tmp_path, [], Platform("p", (DEVICE,)))
    (tmp_path / "model.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:99])
    with pytest.raises(BundleError, match="damaged compiled model"):
        backend.load(tmp_path, [])


def test_replicas_share_the_weights_and_compute_at_the_same_time(tmp_path: Path) -> None:
    with closing(backend.compile(load(write_picture_net(tmp_path / "net.onnx")), [DEVICE])) as compiled:
        names = compiled.graph.operator_names
        stages = [compiled.stage(names, replace(DEVICE, cores=(core,))) for core in (CORES[0], CORES[-1])]
        assert stages[0].made is stages[1].made
        assert compiled.stage(names[:2], DEVICE).made is not stages[0].made
        frame = frame_of_noise(compiled.graph)
        inputs = [frame[port.name] for port in stages[0].inputs]
        outputs = [[port.buffer() for port in stage.outputs] for stage in stages for _ in range(8)]
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda n: stages[n % 2].run(inputs, outputs[n]), range(len(outputs))))
        for found in outputs[1:]:
            for one, other in zip(outputs[0], found, strict=True):
                np.testing.assert_array_equal(one, other)
        for stage in stages:
            stage.close()
        assert not compiled._sessions


def test_an_output_that_is_a_constant_is_an_operator() -> None:
    """onnxruntime computes a Shape when it reads the file, and leaves the result as a weight of the output's name."""
    model = net([helper.make_node("Shape", ["x"], ["y"])], {"y": [4]}, kind=TensorProto.INT64)
    with closing(backend.compile(model, [DEVICE])) as compiled:
        (operator,) = compiled.graph.operators
        assert (operator.kind, operator.inputs, operator.outputs[0].name) == ("identity", (), "y")
        stages = [([operator.name], DEVICE)]
        (found,) = model_outputs(compiled, run_stages(compiled, stages, frame_of_noise(compiled.graph)))
    assert found.tolist() == [1, 2, 4, 4]


def test_a_prelu_of_before_opset_7_has_its_slopes_along_the_channels() -> None:
    slopes = np.array([0.25, 0.5], np.float32)
    model = net([helper.make_node("PRelu", ["x", "slope"], ["y"])], {"y": [1, 2, 4, 4]}, ("slope", slopes), opset=6)
    frame = frame_of_noise(backend.compile(model, [DEVICE]).graph)
    expected = np.where(frame["x"] < 0, slopes[:, None, None] * frame["x"], frame["x"])
    np.testing.assert_array_equal(whole_outputs(model, frame)["y"], expected)


@pytest.mark.skipif(onnx.defs.onnx_opset_version() < 28, reason="older operators are onnxruntime's own")
def test_an_operator_that_onnxruntime_lacks_is_tried_in_other_words() -> None:
    """Its QuantizeLinear is of opset 25, and it has no FlexAttention, which ONNX defines by other operators."""
    scale = np.array(0.5, np.float32)
    quantize = helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])
    constants = ("scale", scale), ("zero", np.array(3, np.uint8))
    model = net([quantize], {"y": [1, 2, 4, 4]}, *constants, kind=TensorProto.UINT8, opset=28)
    frame = frame_of_noise(backend.compile(model, [DEVICE]).graph)
    expected = np.clip(np.rint(frame["x"] / scale) + 3, 0, 255).astype(np.uint8)
    np.testing.assert_array_equal(whole_outputs(model, frame)["y"], expected)
    attention = helper.make_node("FlexAttention", ["x", "x", "x"], ["y"], domain="ai.onnx.preview")
    model = net([attention], {"y": [1, 2, 4, 4]}, opset=28)
    scores = np.einsum("bhqd,bhkd->bhqk", frame["x"], frame["x"]) / 2  # the root of 4
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), frame["x"])
    np.testing.assert_allclose(whole_outputs(model, frame)["y"], expected, rtol=1e-5, atol=1e-6)


def whole_outputs(model: Model, frame: Mapping[str, Array]) -> dict[str, Array]:
    with closing(backend.compile(model, [DEVICE])) as compiled:
        names = compiled.graph.operator_names
        found = model_outputs(compiled, run_stages(compiled, [(names, DEVICE)], frame))
        return dict(zip(compiled.graph.outputs, found, strict=True))
