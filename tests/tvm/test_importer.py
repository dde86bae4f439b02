"""TVM's importer of ONNX with constants folded in numpy: the same modules, and those that LLVM refuses."""

from __future__ import annotations

import contextlib
import sys
import threading

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

import onnx
import tvm
from onnx import TensorProto, helper
from tvm import relay
from tvm.relay.frontend import common
from tvm.relay.frontend import onnx as importer

from tests.support.onnx_models import onnx_bytes
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.model import Model
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.onnx_walk import LACKING, OF_OTHER_DOMAINS
from tvm_pipeline_tvm.relay.import_folding import faster_importer
from tvm_pipeline_tvm.relay.importer import import_model


def imported(content: bytes) -> tvm.IRModule:
    mod, _ = relay.frontend.from_onnx(onnx.load_from_string(content), freeze_params=True)
    return relay.transform.InferType()(mod)


SHAPES = onnx_bytes(
    [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Slice", ["s", "two", "four"], ["hw"]),
        helper.make_node("Mul", ["hw", "scale"], ["larger"]),
        helper.make_node("Concat", ["nc", "larger"], ["size"], axis=0),
        helper.make_node("Resize", ["x", "", "", "size"], ["r"], mode="nearest", nearest_mode="floor"),
        helper.make_node("Split", ["r"], ["a", "b", "c"], axis=1),
        helper.make_node("Sub", ["a", "b"], ["d"]),
        helper.make_node("Div", ["w", "v"], ["q"]),
        helper.make_node("Add", ["d", "q"], ["e"]),
        helper.make_node("Concat", ["e", "c"], ["y"], axis=1),
    ],
    {
        "two": np.array([2]),
        "four": np.array([4]),
        "scale": np.array([2, 3]),
        "nc": np.array([1, 3]),
        "w": np.arange(4, dtype="float32").reshape(1, 1, 4, 1),
        "v": np.array([3], "float32"),
    },
    shape=(1, 3, 2, 4),
)
# A vector floor_divide as exporters write it: Mod and Div of shapes.
REFUSED_BY_LLVM = onnx_bytes(
    [helper.make_node("Mod", ["w", "v"], ["m"]), helper.make_node("Add", ["x", "m"], ["y"])],
    {"w": np.arange(-6, 6), "v": np.full(12, 4)},
    shape=(12,),
    dtype=TensorProto.INT64,
)


def test_the_module_is_that_of_tvms_own_folding() -> None:
    expected = imported(SHAPES)
    with faster_importer():
        mod = imported(SHAPES)
    tvm.ir.assert_structural_equal(mod, expected)
    assert isinstance(mod["main"].body.args[0].fields[0].args[1], relay.Constant)  # w / v


def test_a_vector_floor_divide_that_llvm_refuses_is_folded() -> None:
    with faster_importer():
        body = imported(REFUSED_BY_LLVM)["main"].body
    np.testing.assert_array_equal(body.args[1].data.numpy(), np.arange(-6, 6) % 4)


def test_what_numpy_does_not_fold_is_left_to_tvm() -> None:
    content = onnx_bytes(
        [helper.make_node("Softmax", ["w"], ["s"]), helper.make_node("Mul", ["x", "s"], ["y"])],
        {"w": np.arange(4, dtype="float32").reshape(1, 4)},
        shape=(1, 4),
    )
    expected = imported(content)
    with faster_importer():
        tvm.ir.assert_structural_equal(imported(content), expected)


def test_the_importer_is_as_it_was_afterwards_and_serves_one_thread_at_a_time() -> None:
    names = [(common, "fold_constant"), (importer, "fold_constant"), (common, "infer_type"), (importer, "infer_type")]
    names.append((importer, "_get_convert_map"))
    before = [getattr(module, name) for module, name in names]
    inside = threading.Event()

    def enter() -> None:
        with faster_importer():
            inside.set()

    other = threading.Thread(target=enter)
    with contextlib.suppress(ZeroDivisionError), faster_importer():
        other.start()
        assert not inside.wait(0.1)
        raise ZeroDivisionError
    other.join()
    assert inside.is_set()
    assert [getattr(module, name) for module, name in names] == before


# --- What TVM refuses ---

WRAPPED = helper.make_node("Pad", ["x", "pads"], ["p"], mode="wrap", name="around")
PADS = {"pads": np.array([0, 1, 0, 1])}


def model(content: bytes, **fields: object) -> Model:
    return Model("net", "onnx", content, (Tensor("x", (2, 3)),), **fields)


def test_the_tables_of_the_walk_are_tvms() -> None:
    known = set(importer._get_convert_map(21)) | set(importer._identity_list) | {"Constant"}
    of_onnx = {schema.name for schema in onnx.defs.get_all_schemas() if schema.domain == ""}
    assert of_onnx - known == LACKING
    assert known - of_onnx == OF_OTHER_DOMAINS


def test_an_operator_that_is_refused_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxslim", None)  # as if it were not installed
    content = onnx_bytes([WRAPPED, helper.make_node("Neg", ["p"], ["y"])], PADS, opset=19)
    with pytest.raises(ModelError) as raised:
        import_model(model(content, shaped=("x",)))
    text = str(raised.value)
    assert text.startswith("net: TVM cannot import it: operator Pad (node around): ")
    assert "wrap" in text
    assert "; the shapes given for x may be the reason: " in text
    assert text.endswith("pip install 'tvm-pipeline[simplify]'")
    unnamed = helper.make_node("Pad", ["x", "pads"], ["y"], mode="wrap")
    with pytest.raises(ModelError, match=r"operator Pad \(node of y\): ") as raised:
        import_model(model(onnx_bytes([unnamed], PADS, opset=19)))
    assert "shapes" not in str(raised.value)


def test_an_import_that_takes_too_long_names_the_operator_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tvm_pipeline_tvm.relay.importer.LONGEST_S", 0.0)
    nodes = [helper.make_node("Relu", ["x"], ["y"], name="only")]
    told = (
        r"net: importing it into TVM takes more than 0 s .*, the last at operator Relu \(node only\); run it on another"
    )
    with pytest.raises(ModelError, match=told):
        import_model(model(onnx_bytes(nodes)))


def test_what_onnxslim_simplifies_imports_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """What is refused feeds no output here: TVM's importer takes every node of a file."""
    needs("onnxslim")
    content = onnx_bytes([WRAPPED, helper.make_node("Neg", ["x"], ["y"])], PADS, opset=19)
    mod, _ = import_model(model(content, outputs=("y",)))
    assert mod["main"].body.op.name == "negative"
    assert [record.message for record in caplog.records if "onnxslim" in record.message] == [
        "net: imported as onnxslim simplifies it, since TVM refuses it: " + refusal(content)
    ]


def refusal(content: bytes) -> str:
    """Return what TVM says of the file as it is, without onnxslim."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "onnxslim", None)
        with pytest.raises(ModelError) as raised:
            import_model(model(content))
    return str(raised.value).removeprefix("net: TVM cannot import it: ").partition("; simplified")[0]


def test_obstacles_are_told_before_the_importer_runs() -> None:
    with pytest.raises(ModelError, match=r"net: TVM cannot import it: operator Det .*; weight w"):
        import_model(model(b"", obstacles=("operator Det (node d): TVM's importer has none", "weight w: of a type")))
