"""Tensors of the types that ml_dtypes gives numpy: into a model, across a cut, and out of it."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("onnxruntime")
needs("onnx")
needs("ml_dtypes")

from onnx import TensorProto, helper

from tests.support.onnx_models import onnx_bytes
from tests.support.stages import model_outputs, run_stages
from tvm_pipeline import Pipeline, load
from tvm_pipeline.backends.contract import Array
from tvm_pipeline.backends.ports import frame_of_noise
from tvm_pipeline.backends.registry import find_backend
from tvm_pipeline.backends.sliced import SlicedBackend
from tvm_pipeline.core import number_types
from tvm_pipeline.core.graph import Tensor
from tvm_pipeline.core.number_types import NARROW, dtype_of, packed, packed_bits, unpacked
from tvm_pipeline.core.plan import Plan
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError, OptionError
from tvm_pipeline_onnxruntime import backend

DEVICE = Device("cpu0", "onnxruntime", (0,), "cpu")
SHAPE = 3, 5  # an odd number of elements, so that the last packed byte is not full


def kind_of(dtype: str) -> int:
    shorter = {"float8_e8m0fnu": "FLOAT8E8M0", "float4_e2m1fn": "FLOAT4E2M1"}
    name = shorter.get(dtype, dtype.upper().replace("_", ""))
    if not hasattr(TensorProto, name):
        pytest.skip(f"the installed onnx has no {name}")
    return int(getattr(TensorProto, name))


def write_net(folder: Path, dtype: str) -> Path:
    """Write a model of which an input, an output and the tensor between two operators are of a type.

    a [3, 5] of the type, x [3, 5] float32;  f = float32(a);  s = f + x;  k = type(s), an output;  y = float32(k)
    """
    kind = kind_of(dtype)
    nodes = [
        helper.make_node("Cast", ["a"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["f", "x"], ["s"]),
        helper.make_node("Cast", ["s"], ["k"], to=kind),
        helper.make_node("Cast", ["k"], ["y"], to=TensorProto.FLOAT),
    ]
    taken = [helper.make_tensor_value_info("a", kind, SHAPE), helper.make_tensor_value_info("x", 1, SHAPE)]
    given = [helper.make_tensor_value_info("k", kind, SHAPE), helper.make_tensor_value_info("y", 1, SHAPE)]
    opset = 25 if hasattr(TensorProto, "INT2") else 21
    made = helper.make_model(
        helper.make_graph(nodes, "net", taken, given), opset_imports=[helper.make_opsetid("", opset)], ir_version=10
    )
    made.ir_version = 10 if opset == 21 else 13
    path = folder / "net.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def frame_of(dtype: str) -> dict[str, Array]:
    """Return a frame whose sums the type has, so that they are rounded alike by everybody."""
    draw = np.random.default_rng(1)
    if dtype == "float8_e8m0fnu":  # powers of two
        a = (2.0 ** draw.integers(-3, 4, SHAPE)).astype("float32")
        return {"a": a.astype(dtype_of(dtype)), "x": a}
    least, end = {"int4": (-4, 4), "uint4": (0, 8), "int2": (-1, 1), "uint2": (0, 2)}.get(dtype, (-3, 4))
    a, x = (draw.integers(least, end, SHAPE).astype("float32") for _ in range(2))
    return {"a": a.astype(dtype_of(dtype)), "x": x}


def expected(frame: dict[str, Array]) -> list[Array]:
    """Return what ml_dtypes computes of a frame."""
    k = (frame["a"].astype("float32") + frame["x"]).astype(frame["a"].dtype)
    return [k, k.astype("float32")]


def assert_same(found: list[Array], wanted: list[Array]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one.astype("float32"), other.astype("float32"))


@pytest.mark.parametrize("dtype", [dtype for dtype in NARROW if packed_bits(dtype)])
def test_numbers_are_packed_as_in_a_file(dtype: str) -> None:
    """One after another, from the lowest bit of one large number on."""
    bits = NARROW[dtype]
    values = {"int4": range(-8, 8), "uint4": range(16), "int2": range(-2, 2), "uint2": range(4)}.get(
        dtype, (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
    )
    for count in (0, 1, 3, len(values)):
        array = np.array(list(values)[:count], "float32").astype(dtype_of(dtype))
        number = sum((int(byte) & ((1 << bits) - 1)) << bits * at for at, byte in enumerate(array.view(np.uint8)))
        assert packed(array).tobytes() == number.to_bytes(-(-count * bits // 8), "little")
        assert_same([unpacked(packed(array), (count,), dtype)], [array])


@pytest.mark.parametrize("dtype", sorted(NARROW.keys() - {"float4_e2m1fn"}))
def test_a_type_crosses_every_cut(dtype: str, tmp_path: Path) -> None:
    frame = frame_of(dtype)
    with closing(backend.compile(load(write_net(tmp_path, dtype)), [DEVICE])) as compiled:
        assert [tensor.dtype for tensor in compiled.graph.inputs] == [dtype, "float32"]
        assert compiled.graph.tensors["k"].bytes == 15 * dtype_of(dtype).itemsize
        names = compiled.graph.operator_names
        for first in range(1, len(names) + 1):
            cut = [(part, DEVICE) for part in (names[:first], names[first:]) if part]
            assert_same(model_outputs(compiled, run_stages(compiled, cut, frame)), expected(frame))
        assert (compiled.time_operators(DEVICE, 2) > 0).all()
        assert frame_of_noise(compiled.graph)["a"].astype("float32").any()


@pytest.mark.parametrize("dtype", ["bfloat16", "int4"])
def test_a_pipeline_runs_it_also_in_processes_and_from_a_bundle(dtype: str, tmp_path: Path) -> None:
    from tvm_pipeline.runtime.isolation import isolated

    frame = frame_of(dtype)
    platform = Platform("here", (DEVICE,))
    with closing(backend.compile(load(write_net(tmp_path, dtype)), [DEVICE])) as made:
        (tmp_path / "saved").mkdir()
        made.save(tmp_path / "saved", (), platform)
    with closing(backend.load(tmp_path / "saved", [DEVICE])) as compiled:
        stages = [f"  {operator.name}" for operator in compiled.graph.operators]
        lines = "plan net by hand", "objective latency", "status feasible", "predicted latency_s 1"
        plan = Plan.parse("\n".join((*lines, "stage cpu0", *stages[:3], "stage cpu0", *stages[3:], "")))
        with isolated(compiled, platform, plan.stages, every=True) as apart, Pipeline(apart, plan, platform) as pipe:
            results = list(pipe.map([frame] * 3))
        for result in results:
            assert_same([result.outputs[name] for name in ("k", "y")], expected(frame))


def test_what_onnxruntime_lacks_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"onnxruntime refuses it: .* Cast"):
        backend.compile(load(write_net(tmp_path, "float4_e2m1fn")), [DEVICE])


def test_without_ml_dtypes_the_tensor_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_net(tmp_path, "bfloat16")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # as if it were not installed
    number_types.number_type.cache_clear()
    with pytest.raises(ModelError, match=r"input a is of bfloat16, .* run `pip install -U ml_dtypes`"):
        load(path)
    with pytest.raises(OptionError, match=r"input a is of bfloat16, .* run `pip install -U ml_dtypes`"):
        load(path, input_values={"a": 1})
    number_types.number_type.cache_clear()


def test_tvm_and_its_devices_beside_onnxruntime_leave_it_out(tmp_path: Path) -> None:
    needs("tvm")
    host = find_backend("host")
    cpu = host.settle(Device("cpu0", "host", (0,), ""))
    model = load(write_net(tmp_path, "bfloat16"))
    with pytest.raises(ModelError, match=r"input a: TVM has no BFLOAT16"):
        host.compile(model, [cpu])
    both = SlicedBackend([backend, host])
    with closing(both.compile(model, [cpu, replace(DEVICE, name="other")])) as compiled:
        refused = compiled.refusals(cpu)
        assert list(refused) == ["cast_0", "cast_2", "cast_3"]  # not the sum of float32
        assert "tensor a is bfloat16" in refused["cast_0"]


def test_openvino_computes_with_it_between_operators_alone(tmp_path: Path) -> None:
    needs("openvino")
    openvino = find_backend("openvino")
    device = openvino.settle(Device("cpu0", "openvino", (0,), ""))
    with pytest.raises(ModelError, match=r"a is of bfloat16, which this engine is not given"):
        openvino.compile(load(write_net(tmp_path, "bfloat16")), [device])
    x = np.array([[1, 1 + 2**-6, 1 + 2**-10, -3.5]], np.float32)
    nodes = [
        helper.make_node("Cast", ["x"], ["k"], to=TensorProto.BFLOAT16),
        helper.make_node("Cast", ["k"], ["y"], to=TensorProto.FLOAT),
    ]
    path = tmp_path / "inner.onnx"
    path.write_bytes(onnx_bytes(nodes, shape=x.shape))
    with closing(openvino.compile(load(path), [device])) as compiled:
        (operator,) = compiled.graph.operators
        (found,) = model_outputs(compiled, run_stages(compiled, [([operator.name], device)], {"x": x}))
    np.testing.assert_array_equal(found, x.astype(dtype_of("bfloat16")).astype("float32"))


def test_arrays_of_files_stand_for_it() -> None:
    needs("tvm_pipeline_video")
    from tvm_pipeline_video.commands.arrays import frames_of

    tensor, values = Tensor("a", (3,), "int4"), np.array([-8, 0, 7], np.int8)
    (frame,), _ = frames_of({"a": values}, [tensor])
    assert frame["a"].dtype == dtype_of("int4")
    assert frame["a"].astype("int8").tolist() == values.tolist()
    with pytest.raises(ModelError, match="the array a has numbers that int4 has not"):
        frames_of({"a": np.array([1, 2, 8], np.int8)}, [tensor])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_an_input_of_the_type_may_become_a_constant(dtype: str, tmp_path: Path) -> None:
    frame, path = frame_of(dtype), write_net(tmp_path, dtype)
    with closing(backend.compile(load(path, input_values={"a": frame["a"]}), [DEVICE])) as compiled:
        cut = [(compiled.graph.operator_names, DEVICE)]
        assert_same(model_outputs(compiled, run_stages(compiled, cut, {"x": frame["x"]})), expected(frame))
    if dtype == "int4":
        with pytest.raises(OptionError, match="input a is of int4, not 8"):
            load(path, input_values={"a": 8})
