"""TFLite's kernels as an engine: float models, and models that cannot be cut, on `cpu` and `tflite` targets."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.edgetpu.networks import Op, Options, Type, Writer, packed, run, schema
from tests.support.fake_backend import make_plan
from tvm_pipeline import Pipeline, load
from tvm_pipeline.core.platform import Device, Platform
from tvm_pipeline.errors import ModelError
from tvm_pipeline.testing import check_backend
from tvm_pipeline_edgetpu import backend

CORE = min(os.sched_getaffinity(0))
ENGINE = Device("cpu0", "edgetpu", (CORE,), "tflite")


def spectrum() -> bytes:
    """Return |FFT| of the sum of a frame and constants in float16: TVM has no RFFT2D and no complex numbers."""
    writer = Writer()

    def floats(shape: tuple[int, ...], type_: int = Type.FLOAT32, data: np.ndarray | None = None) -> int:
        return writer.tensor(shape, type_, scale=0, data=data)

    x, moved, y = floats((1, 8, 8)), floats((1, 8, 8)), floats((1, 8, 5))
    half = floats((8, 8), Type.FLOAT16, np.linspace(-1, 1, 64, dtype=np.float16))
    offset = floats((8, 8))
    size = writer.tensor((2,), Type.INT32, scale=0, data=np.array([8, 8], np.int32))
    waves = floats((1, 8, 5), Type.COMPLEX64)
    writer.operator(Op.DEQUANTIZE, [half], [offset], version=3)
    writer.operator(Op.ADD, [x, offset], [moved], Options.AddOptions, schema.AddOptionsT(), version=1)
    writer.operator(Op.RFFT2D, [moved, size], [waves], version=1)
    writer.operator(Op.COMPLEX_ABS, [waves], [y], version=1)
    return writer.content([x], [y])


def running_sum() -> bytes:
    """Return a file that adds each frame to a state, which a second subgraph sets to zero once."""
    main = Writer()
    x, before, after = (main.tensor((1, 3), Type.FLOAT32, scale=0) for _ in range(3))
    handle = main.tensor((), Type.RESOURCE, scale=0)
    options = schema.VarHandleOptionsT(sharedName="sum")
    main.operator(Op.CALL_ONCE, [], [], Options.CallOnceOptions, schema.CallOnceOptionsT(1), version=1)
    main.operator(Op.VAR_HANDLE, [], [handle], Options.VarHandleOptions, options, version=1)
    main.operator(Op.READ_VARIABLE, [handle], [before], version=1)
    main.operator(Op.ADD, [x, before], [after], Options.AddOptions, schema.AddOptionsT(), version=1)
    main.operator(Op.ASSIGN_VARIABLE, [handle, after], [], version=1)
    parsed = schema.ModelT.InitFromPackedBuf(main.content([x], [after]), 0)
    zero = np.zeros(3, np.float32)
    parsed.buffers.append(schema.BufferT(data=np.frombuffer(zero.tobytes(), np.uint8)))
    tensors = [
        schema.TensorT(shape=[], type=Type.RESOURCE, name="handle"),
        schema.TensorT(shape=[1, 3], type=Type.FLOAT32, buffer=len(parsed.buffers) - 1, name="zero"),
    ]
    operators = [
        schema.OperatorT(1, [], [0], builtinOptionsType=Options.VarHandleOptions, builtinOptions=options),
        schema.OperatorT(4, [0, 1], []),
    ]
    parsed.subgraphs.append(schema.SubGraphT(tensors, [], [], operators, "once"))
    return packed(parsed)


def written(folder: Path, content: bytes) -> Path:
    (folder / "net.tflite").write_bytes(content)
    return folder / "net.tflite"


@pytest.mark.parametrize("target", ["cpu", "tflite"])
def test_float_models_run_on_tflites_kernels(tmp_path: Path, target: str) -> None:
    """The weights that DEQUANTIZE unpacks are no tensor between stages: each slice that reads them has them."""
    model = load(written(tmp_path, spectrum()))
    device = backend.settle(Device("d", "edgetpu", (CORE,), target))
    assert bool(device.stand_in) == (target == "cpu")
    compiled = backend.compile(model, [device])
    names = compiled.graph.operator_names
    assert names == ["add_1", "rfft2d_2", "complex_abs_3"]
    assert compiled.graph.operators[0].param_bytes == 128
    frame = np.random.default_rng(0).standard_normal((1, 8, 8)).astype(np.float32)
    [expected] = run(model.content, {"tensor/0:0": frame}).values()
    plan = make_plan(compiled.graph, (["d"], names[:1]), (["d"], names[1:2]), (["d"], names[2:]))
    with Pipeline(compiled, plan, Platform("p", (device,))) as pipeline:
        [result] = pipeline.map([frame])
    np.testing.assert_array_equal(result.outputs["tensor/2:0"], expected)
    with ThreadPoolExecutor(1) as bound:  # timing binds the thread that asks for it
        assert (bound.submit(compiled.time_operators, device, 2).result() > 0).all()


def test_an_edge_tpu_still_refuses_them(tmp_path: Path) -> None:
    model = load(written(tmp_path, spectrum()))
    for devices in ([Device("tpu0", "edgetpu", target="usb:0")], [ENGINE, Device("tpu0", "edgetpu", target="usb:0")]):
        with pytest.raises(ModelError, match=r"an Edge TPU only in int8 or uint8"):
            backend.compile(model, devices)
    assert "int8" in backend.refuses(model)


def test_a_state_goes_from_frame_to_frame_in_one_stage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(written(tmp_path, running_sum()))
    with pytest.raises(ModelError, match="it has 2 subgraphs"):
        backend.compile(model, [Device("tpu0", "edgetpu", target="usb:0")])
    compiled = backend.compile(model, [ENGINE])
    assert "net is one stage, because it cannot be cut: it has 2 subgraphs" in caplog.text
    [operator] = compiled.graph.operators
    assert operator.ordered
    compiled.save(tmp_path, [], Platform("p", (ENGINE,)))
    frames = [np.full((1, 3), value, np.float32) for value in (1, 10, 100)]
    for made in (compiled, backend.load(tmp_path, [])):
        plan = make_plan(made.graph, (["cpu0"], [operator.name]))
        with Pipeline(made, plan, Platform("p", (ENGINE,))) as pipeline:
            sums = [result.outputs["tensor/2:0"][0, 0] for result in pipeline.map(frames)]
        assert sums == [1, 11, 111]


def test_it_keeps_the_contract_as_an_engine(tmp_path: Path) -> None:
    from tests.edgetpu.networks import random_network

    check_backend(backend, load(written(tmp_path, random_network(3, 6))), [ENGINE])
