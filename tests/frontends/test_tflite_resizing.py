"""TFLite files with open inputs: what `input_shapes` makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from ai_edge_litert.interpreter import Interpreter

from tests.edgetpu.networks import Op, Options, Type, Writer, run, schema
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline.frontends import load
from tvm_pipeline.frontends.batching import batched

NAME = "tensor/0:0"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a sum over an open extent beside an operator of the same extents; the file's own extents are 1."""
    writer = Writer()
    x, y = (writer.tensor((1, 1, 3), Type.FLOAT32, scale=0) for _ in range(2))
    total = writer.tensor((1, 3), Type.FLOAT32, scale=0)
    axis = writer.tensor((1,), Type.INT32, scale=0, data=np.array([1], np.int32))
    for index in (x, y):
        writer.tensors[index].shapeSignature = [-1, -1, 3]
    writer.operator(Op.ABS, [x], [y], version=1)
    writer.operator(Op.SUM, [y, axis], [total], Options.ReducerOptions, schema.ReducerOptionsT(), version=1)
    path = tmp_path / "net.tflite"
    path.write_bytes(writer.content([x], [y, total]))
    return path


def test_every_tensor_gets_the_extents_that_follow(path: Path) -> None:
    model = load(path, {NAME: (2, 5, 3)})
    assert model.inputs == (Tensor(NAME, (2, 5, 3)),)
    frame = np.random.default_rng(0).standard_normal((2, 5, 3)).astype(np.float32)
    by_itself = Interpreter(model_path=str(path))
    by_itself.resize_tensor_input(0, frame.shape)
    by_itself.allocate_tensors()
    by_itself.set_tensor(0, frame)
    by_itself.invoke()
    found = run(model.content, {NAME: frame})
    assert [array.shape for array in found.values()] == [(2, 5, 3), (2, 3)]
    for detail in by_itself.get_output_details():
        np.testing.assert_array_equal(found[detail["name"]], by_itself.get_tensor(detail["index"]))
    parsed = schema.ModelT.InitFromPackedBuf(model.content, 0).subgraphs[0]
    assert [list(tensor.shape) for tensor in parsed.tensors] == [[2, 5, 3], [2, 5, 3], [2, 3], [1]]
    assert all(tensor.shapeSignature is None for tensor in parsed.tensors)


def test_frames_of_a_call_are_those_alone(path: Path) -> None:
    model = load(path, {NAME: (1, 5, 3)})
    wide = batched(model, model.inputs, 4)
    assert wide.inputs == (Tensor(NAME, (4, 5, 3)),)
    frames = np.random.default_rng(0).standard_normal((4, 5, 3)).astype(np.float32)
    found, alone = run(wide.content, {NAME: frames}), [run(model.content, {NAME: frame[None]}) for frame in frames]
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.concatenate([one[name] for one in alone]))


def test_what_is_missing_or_does_not_fit_is_said(path: Path) -> None:
    told = r'net\.tflite: input tensor/0:0 has the open shape \[-1, -1, 3\]; fix it with `input_shapes` "tensor/0:0:\['
    with pytest.raises(ModelError, match=told + r"\?,\?,3\]\", with a number in place of each \?"):
        load(path)
    for shapes in ({NAME: (2, 5, 4)}, {NAME: (2, 5)}, {NAME: (2, 5, 3), "y": (1, 1, 3)}):
        with pytest.raises(OptionError, match=r"fixes its inputs itself: tensor/0:0:\[-1, -1, 3\]"):
            load(path, shapes)


def test_without_litert_it_says_what_to_install(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai_edge_litert.interpreter", None)
    with pytest.raises(ModelError, match=r"pip install 'tvm-pipeline\[edgetpu\]'. Or convert the model again"):
        load(path, {NAME: (2, 5, 3)})


def test_shapes_that_its_kernels_refuse(tmp_path: Path) -> None:
    writer = Writer()
    x, other = (writer.tensor(shape, Type.FLOAT32, scale=0) for shape in ((1, 1), (1, 1)))
    y = writer.tensor((1, 1), Type.FLOAT32, scale=0)
    for index in (x, other):
        writer.tensors[index].shapeSignature = [1, -1]
    writer.operator(Op.ADD, [x, other], [y], Options.AddOptions, schema.AddOptionsT(), version=1)
    (tmp_path / "net.tflite").write_bytes(writer.content([x, other], [y]))
    with pytest.raises(ModelError, match=r"LiteRT cannot run it with the shapes tensor/0:0:\[1, 2\], tensor/1:0:\["):
        load(tmp_path / "net.tflite", {NAME: (1, 2), "tensor/1:0": (1, 3)})
