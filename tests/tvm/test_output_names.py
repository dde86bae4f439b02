"""Outputs keep the names that they have in the file, whatever TVM fuses, merges or shows under another shape."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

import onnx
import tvm
from onnx import helper
from onnx.reference import ReferenceEvaluator
from tvm import relay

from tests.support.onnx_models import onnx_bytes
from tests.support.stages import random_frame
from tests.tvm.test_alignment import PICTURE, add, conv
from tvm_pipeline.backends.contract import CompiledModel
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.plan import Plan, Prediction, Stage
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends import load
from tvm_pipeline_tvm.alignment import align
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.extraction import ExtractOperatorGraph, operator_graph
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.output_names import output_names
from tvm_pipeline_tvm.relay.partition_pipeline import PartitionPipeline

# Outputs of every awkward kind. The last matrix product comes after all that is an output.
NODES = [
    helper.make_node("MatMul", ["x", "w"], ["read too"]),  # an output that others read
    helper.make_node("Reshape", ["read too", "flat"], ["shown"]),  # ... and that is shown under another shape
    helper.make_node("Identity", ["read too"], ["again"]),  # ... and that has a second name
    helper.make_node("Identity", ["read too"], ["and again"]),
    helper.make_node("Relu", ["read too"], ["equal"]),  # two that compute the same
    helper.make_node("Relu", ["read too"], ["as well"]),
    helper.make_node("Identity", ["x"], ["input itself"]),
    helper.make_node("Softmax", ["equal"], ["s"]),
    helper.make_node("MatMul", ["s", "w"], ["softmax_1"]),  # called as an operator might be
    helper.make_node("Transpose", ["softmax_1"], ["turned"]),
]
NAMES = tuple(node.output[0] for node in NODES if node.output[0] != "s")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    weights = np.random.default_rng(0).standard_normal((4, 4)).astype("float32")
    path = tmp_path_factory.mktemp("names") / "names.onnx"
    path.write_bytes(onnx_bytes(NODES, {"w": weights, "flat": np.array([8])}, shape=(2, 4), outputs=NAMES))
    return load(path)


@pytest.fixture(scope="module")
def compiled(model: Model, target: str) -> RelayModel:
    return RelayModel.compile(model, (target,), lambda _: None)


def results(model: CompiledModel, stages: list[list[str]], device: Device) -> dict[str, np.ndarray]:
    """Run the stages one after the other; return what bears the names of outputs."""
    tensors = random_frame(model.graph.inputs)
    for operators in stages:
        stage = model.stage(operators, device)
        outputs = [port.buffer() for port in stage.outputs]
        inputs = [port.buffer() for port in stage.inputs]
        for port, array in zip(stage.inputs, inputs, strict=True):
            array[:] = tensors[port.name].reshape(port.shape)
        stage.run(inputs, outputs)
        tensors |= {port.name: array for port, array in zip(stage.outputs, outputs, strict=True)}
    return {name: tensors[name] for name in model.graph.outputs}


@pytest.mark.thorough
def test_a_compiled_model_has_the_names_and_the_values_of_the_file(
    model: Model, compiled: RelayModel, cpu: Device
) -> None:
    assert model.outputs == compiled.graph.outputs == NAMES
    frame = random_frame(compiled.graph.inputs)
    expected = ReferenceEvaluator(onnx.load_from_string(model.content)).run(None, frame)
    operators = compiled.graph.operator_names
    whole = results(compiled, [operators], cpu)
    for name, value in zip(NAMES, expected, strict=True):
        np.testing.assert_allclose(whole[name].reshape(value.shape), value, atol=1e-6, err_msg=name)
    for cut in range(1, len(operators)):
        for name, array in results(compiled, [operators[:cut], operators[cut:]], cpu).items():
            np.testing.assert_array_equal(array, whole[name], err_msg=f"{name}, cut {cut}")


def test_they_are_saved_with_the_model_and_earlier_ones_load_without(compiled: RelayModel, tmp_path: Path) -> None:
    compiled.save(tmp_path)
    assert RelayModel.load(tmp_path, lambda _: None).graph == compiled.graph
    (tmp_path / "0" / "outputs.json").unlink()
    described = json.loads((tmp_path / "0" / "kernels.json").read_text())
    del described[3]["outputs.json"]
    (tmp_path / "0" / "kernels.json").write_text(json.dumps(described))
    earlier = RelayModel.load(tmp_path, lambda _: None).graph
    assert len(set(earlier.outputs)) == len(NAMES)
    assert not set(earlier.outputs) & set(NAMES) - {"softmax_1"}


def test_passes_keep_them(model: Model) -> None:
    mod, _ = import_model(model)
    passes = [relay.transform.SimplifyInference(), relay.transform.FuseOps(2), ExtractOperatorGraph("names")]
    mod = tvm.transform.Sequential(passes)(mod)
    graph = operator_graph(mod)
    assert graph.outputs == NAMES
    operators = graph.operator_names
    stages = tuple(Stage((f"d{index}",), tuple(part)) for index, part in enumerate((operators[:3], operators[3:])))
    cut = PartitionPipeline(Plan("names", "by-hand", "throughput", stages, Prediction(1.0, 1.0)))(mod)
    assert output_names(cut) == NAMES


def test_an_output_that_depends_on_no_input_is_named(tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Neg", ["w"], ["anchors"])]
    (tmp_path / "a.onnx").write_bytes(onnx_bytes(nodes, {"w": np.ones(3, "float32")}, outputs=("y", "anchors")))
    with pytest.raises(ModelError, match=r"a: .*output anchors does not depend on the inputs"):
        import_model(load(tmp_path / "a.onnx"))


# Names that cannot stand as they are: of another output, of an input, of a tensor inside, none at all.
@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        (("left", "right"), ("left", "right")),
        (("same", "same"), ("same", "add_1")),
        (("x", "sum"), ("conv2d_0", "sum")),
        (("add_1", "sum"), ("add_1", "sum")),
        (("", "sum"), ("conv2d_0", "sum")),
        ((), ("conv2d_0", "add_1")),
    ],
)
def test_names_that_clash(outputs: tuple[str, ...], named: tuple[str, ...]) -> None:
    kernels = [conv(1), add((0, 0), (-1, 0))]
    graph, _ = align("net", PICTURE, [kernels, kernels], [[(0, 0), (1, 0)]] * 2, outputs)
    assert graph.outputs == named
    assert graph.operators[1].inputs == (named[0], "x")


def test_an_inner_tensor_gives_way() -> None:
    kernels = [conv(1), conv(2, (0, 0))]
    graph, _ = align("net", PICTURE, [kernels], [[(1, 0)]], ("conv2d_0",))
    assert [operator.outputs[0].name for operator in graph.operators] == ["conv2d_0'", "conv2d_0"]
