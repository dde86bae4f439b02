"""Building: what is in the cache is not compiled again, what is damaged is said to be, and so is what TVM refuses."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.support.log_lines import log_lines
from tests.support.parts import needs

needs("tvm")

from tests.support.networks import as_model, relay_module
from tests.support.stages import model_outputs, random_frame, run_stages
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.core.platform import Device
from tvm_pipeline.errors import BundleError, ModelError
from tvm_pipeline_tvm.relay.build import build_library
from tvm_pipeline_tvm.relay.compiled import RelayModel
from tvm_pipeline_tvm.relay.importer import import_model
from tvm_pipeline_tvm.relay.library import load_library

import tvm  # isort: skip
from tvm import relay  # isort: skip
from tvm.contrib import graph_executor  # isort: skip


def text_model(body: str, parameters: str = "%x: Tensor[(1, 8), float32]") -> Model:
    return Model("net", "relay", f'#[version = "0.0.5"]\ndef @main({parameters}) {{ {body} }}'.encode())


def onnx_model(nodes: list[onnx.NodeProto], *weights: onnx.TensorProto, shape: tuple[int, ...] = (1, 4)) -> Model:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return Model("net", "onnx", proto.SerializeToString(), (Tensor("x", shape),))


def test_the_second_time_it_comes_from_the_cache(own_cache: Path, target: str) -> None:
    model, said = text_model("tanh(%x)"), log_lines("INFO")
    first = build_library(model, target)
    assert [line for line in said if "%" not in line][:2] == ["importing net", f"compiling net for {target}"]
    said.clear()
    made = {file: file.stat().st_mtime_ns for file in own_cache.rglob("*") if file.is_file()}
    again = build_library(model, target)
    assert said == [], "it was compiled again"
    assert made == {file: file.stat().st_mtime_ns for file in own_cache.rglob("*") if file.is_file()}
    assert again.folder == first.folder
    assert again.kernels == first.kernels


@pytest.mark.thorough
def test_another_model_or_target_is_compiled(own_cache: Path, target: str) -> None:
    said = log_lines("INFO")
    build_library(text_model("tanh(%x)"), target)
    build_library(text_model("exp(%x)"), target)
    build_library(text_model("tanh(%x)"), "llvm")
    assert sum(line.startswith("importing") for line in said) == 3, "imported and compiled twice"
    assert sum(line.startswith("compiling") and "%" not in line for line in said) == 3


@pytest.mark.thorough
def test_a_failure_leaves_nothing_in_the_cache(own_cache: Path) -> None:
    with pytest.raises(ModelError, match="TVM cannot compile it for llvm -mcpu=x86-64-v3 -no-such"):
        build_library(text_model("tanh(%x)"), "llvm -mcpu=x86-64-v3 -no-such=1")
    assert not [file for file in own_cache.rglob("*") if file.is_file()]


@pytest.mark.thorough
def test_saved_and_loaded_it_computes_the_same(
    tmp_path: Path, compiled: Callable[..., RelayModel], cpu: Device
) -> None:
    model = compiled("two_in_two_out")
    model.save(tmp_path)
    loaded = RelayModel.load(tmp_path, lambda _: None)
    assert loaded.graph == model.graph
    frame = random_frame(model.graph.inputs)
    stages = [(model.graph.operator_names, cpu)]
    pairs = zip(*(model_outputs(m, run_stages(m, stages, frame)) for m in (model, loaded)), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("file", ["kernels.json", "graph.json", "weights.bin", "params.json", "kernels.so"])
@pytest.mark.parametrize("damage", [Path.unlink, shorten, lambda file: file.write_bytes(b"")])
def test_damage_is_said(
    file: str, damage: Callable[[Path], object], tmp_path: Path, compiled: Callable[..., RelayModel], target: str
) -> None:
    folder = compiled("branching").libraries[target].folder
    assert folder is not None
    copy = tmp_path / "library"
    shutil.copytree(folder, copy)
    damage(copy / file)
    with pytest.raises(BundleError, match=rf"{copy}.*compile it again"):
        load_library(copy)


def _called(graph: Any) -> Any:
    """Return the last call of a kernel in the executor's graph."""
    return next(node for node in reversed(graph["nodes"]) if node["op"] != "null")


@pytest.mark.parametrize(
    "forge",
    [
        lambda graph: _called(graph).pop("inputs"),
        lambda graph: _called(graph)["inputs"].append([0, 0, 0]),
        lambda graph: _called(graph)["inputs"][0].__setitem__(0, 10**6),
        lambda graph: _called(graph)["inputs"][0].__setitem__(0, len(graph["nodes"]) - 1),
        lambda graph: _called(graph)["inputs"][0].__setitem__(2, -1),
        lambda graph: _called(graph)["attrs"].pop("func_name"),
        lambda graph: _called(graph)["attrs"].update(func_name="another"),
        lambda graph: _called(graph)["attrs"].update(num_inputs="x"),
        lambda graph: _called(graph)["attrs"].update(num_outputs="2"),
        lambda graph: graph["nodes"].pop(),
        lambda graph: graph["node_row_ptr"].reverse(),
        lambda graph: graph["attrs"]["shape"][1].pop(),
        lambda graph: graph["attrs"]["shape"].__setitem__(1, [[7, 7]] * graph["node_row_ptr"][-1]),
        lambda graph: _called(graph)["attrs"].update(hash=5),
        lambda graph: _called(graph).update(op="another"),
        lambda graph: graph["attrs"]["device_index"].__setitem__(1, [2]),
        lambda graph: graph["heads"][0].__setitem__(0, 10**6),
    ],
)
def test_a_graph_that_does_not_fit_the_kernels_is_said(
    forge: Callable[[Any], object], tmp_path: Path, compiled: Callable[..., RelayModel], target: str
) -> None:
    """Slices are only made of it when a stage is: what is forged must be noticed before."""
    folder = compiled("branching").libraries[target].folder
    assert folder is not None
    copy = tmp_path / "library"
    shutil.copytree(folder, copy)
    graph = json.loads((copy / "graph.json").read_text())
    forge(graph)
    (copy / "graph.json").write_text(json.dumps(graph))
    index = json.loads((copy / "kernels.json").read_text())
    index[3]["graph.json"] = (copy / "graph.json").stat().st_size
    (copy / "kernels.json").write_text(json.dumps(index))
    with pytest.raises(BundleError, match=rf"{copy}.*compile it again"):
        load_library(copy)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=f"{tmp_path}: the compiled model is missing"):
        RelayModel.load(tmp_path, lambda _: None)
    (tmp_path / "name").write_text("net")
    with pytest.raises(BundleError, match=f"{tmp_path}: the compiled model is missing"):
        RelayModel.load(tmp_path, lambda _: None)


IMPORT_ERRORS = {
    r"net: TVM cannot import it: .*Sigmoidal": onnx_model([helper.make_node("Sigmoidal", ["x"], ["y"])]),
    r"net: operator argwhere \(node of n\) has a shape that depends on its data": onnx_model(
        [helper.make_node("NonZero", ["x"], ["n"]), helper.make_node("Cast", ["n"], ["y"], to=TensorProto.FLOAT)]
    ),
    r"net: operator reshape \(node of y\) has a shape that depends on its data": onnx_model(
        [
            helper.make_node("Cast", ["x"], ["s"], to=TensorProto.INT64),
            helper.make_node("Reshape", ["w", "s"], ["y"]),
        ],
        numpy_helper.from_array(np.ones((2, 3), "float32"), "w"),
        shape=(2,),
    ),
    r"net: input x has no fixed shape; give `input_shapes`": text_model("tanh(%x)", "%x: Tensor[(?, 8), float32]"),
    r"net: it has no inputs besides its parameters": text_model("tanh(2f)", ""),
    r"net: TVM cannot import it": text_model("no_such_operator(%x)"),
    r"net: .*input x is a tuple": text_model("%x.0", "%x: (Tensor[(1), float32], Tensor[(1), float32])"),
}


@pytest.mark.parametrize("message", IMPORT_ERRORS)
def test_what_cannot_be_imported_is_named(message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        import_model(IMPORT_ERRORS[message])
    assert "Stack trace" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_parameters_beside_the_file_are_no_inputs() -> None:
    mod, params = relay_module("branching")
    imported, found = import_model(as_model("branching", mod, params))
    assert found.keys() == params.keys()
    tvm.ir.assert_structural_equal(imported["main"], mod["main"])
    weights_only = relay.Function([relay.var("w0", shape=(2,))], relay.exp(relay.const(1.0)))
    model = as_model("net", tvm.IRModule.from_expr(weights_only), {"w0": tvm.nd.array(np.ones(2, "float32"))})
    with pytest.raises(ModelError, match="no inputs besides its parameters"):
        import_model(model)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="LLVM refuses it in code for x86")
def test_what_llvm_refuses_under_a_name_compiles(own_cache: Path, cpu: Device, target: str) -> None:
    image = relay.var("image", shape=(1, 16, 8, 6))
    mod = tvm.IRModule.from_expr(relay.Function([image], relay.image.resize2d(image, (16, 12))))
    mod = relay.transform.InferType()(mod)
    with pytest.raises(tvm.TVMError, match="dbg_declare"), tvm.transform.PassContext(opt_level=3):
        relay.build(mod, target)
    with tvm.transform.PassContext(opt_level=3, config={"tir.disable_cse_tir": True}):
        executor = graph_executor.GraphModule(relay.build(mod, target)["default"](tvm.cpu()))
    frame = random_frame([Tensor("image", (1, 16, 8, 6))])
    executor.run(**frame)
    model = RelayModel.compile(as_model("resized", mod, {}), [target], lambda _: None)
    stages = [(model.graph.operator_names, cpu)]
    (output,) = model_outputs(model, run_stages(model, stages, frame))
    np.testing.assert_array_equal(output, executor.get_output(0).numpy())
