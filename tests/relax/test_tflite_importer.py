"""TFLite files as Relax modules: the values of TFLite's own kernels, channels first, and refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.parts import needs

needs("ai_edge_litert")

from tests.edgetpu.networks import Op, Options, Type, Writer, random_network, run, schema
from tests.edgetpu.test_engine import spectrum
from tests.relax.imported import computed, kinds
from tests.support.tflite_files import (
    IMAGE,
    alone,
    custom,
    floats,
    frame_of,
    model_of,
    of_one_operator,
    sparse_weights,
    stateful,
    transposed,
)
from tvm_pipeline.errors import ModelError
from tvm_pipeline.frontends.tflite import read
from tvm_pipeline_tvm.relax.dataflow import name_of
from tvm_pipeline_tvm.relax.importer import import_model
from tvm_pipeline_tvm.relax.simplify import simplified


def slopes(shape: tuple[int, ...]) -> Callable[[], bytes]:
    """Return what makes a file of PRELU with slopes of this shape."""

    def build() -> bytes:
        writer = Writer()
        x, y = floats(writer, IMAGE), floats(writer, IMAGE)
        data = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
        writer.operator(Op.PRELU, [x, floats(writer, shape, data)], [y], version=1)
        return writer.content([x], [y])

    return build


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (sparse_weights, IMAGE),
        (lambda: transposed(False, 3, 2, True), IMAGE),
        (slopes((1, 1, 2)), IMAGE),
        (slopes((4, 6, 2)), IMAGE),
        (spectrum, (1, 8, 8)),
    ],
    ids=["sparse", "transposed", "slopes of channels", "slopes of pixels", "spectrum"],
)
def test_it_computes_what_tflite_computes(build: Callable[[], bytes], shape: tuple[int, ...]) -> None:
    content, frame = build(), {"tensor/0:0": frame_of(shape)}
    [expected] = run(content, frame).values()
    [found] = computed(model_of(content, shape=shape), frame)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("kernel", "stride", "same"), [(3, 2, True), (2, 2, True), (4, 2, True), (3, 2, False)])
def test_mediapipes_transposed_convolution_is_tflites_with_a_bias(kernel: int, stride: int, same: bool) -> None:
    frame = {"tensor/0:0": frame_of()}
    [expected] = run(transposed(False, kernel, stride, same), frame).values()
    [found] = computed(model_of(transposed(True, kernel, stride, same)), frame)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("seed", [4, 0, 5, 7])
def test_integers_are_those_of_tflite_but_for_a_step_of_few(seed: int) -> None:
    """TFLite multiplies by fixed-point scales, TVM by floats: some values between two steps go to the other one."""
    content = random_network(seed)
    model = read("net", Path("net.tflite"), content, {})
    draw = np.random.default_rng(seed)
    frame = {tensor.name: draw.integers(-128, 128, tensor.shape).astype(tensor.dtype) for tensor in model.inputs}
    expected, found = run(content, frame), computed(model, frame)
    for name, own in zip(model.outputs, found, strict=True):
        assert own.dtype == expected[name].dtype == np.int8
        off = np.abs(own.astype(int) - expected[name])
        assert off.max() <= 1, name
        assert off.mean() < 0.05, name


def backbone() -> bytes:
    """Return a float network as of a vision model: padding, convolutions, a join, slopes, pools, a mean."""
    draw, writer = np.random.default_rng(5), Writer()

    def layer(code: int, reads: list[int], shape: tuple[int, ...], kind: int = 0, options: object = None) -> int:
        return writer.operator(code, reads, [floats(writer, shape)], kind, options, version=1)[0]

    def convolved(x: int, shape: tuple[int, ...], filters: tuple[int, ...]) -> int:
        weights = floats(writer, filters, draw.standard_normal(filters).astype(np.float32))
        bias = floats(writer, filters[:1], draw.standard_normal(filters[0]).astype(np.float32))
        options = schema.Conv2DOptionsT(strideW=1, strideH=1, padding=1)
        return layer(Op.CONV_2D, [x, weights, bias], shape, Options.Conv2DOptions, options)

    x = floats(writer, IMAGE)
    around = writer.tensor((4, 2), Type.INT32, scale=0, data=np.array([[0, 0], [1, 1], [1, 1], [0, 2]], np.int32))
    padded = layer(Op.PAD, [x, around], (1, 6, 8, 4))
    left, right = (convolved(padded, (1, 4, 6, 8), (8, 3, 3, 4)) for _ in range(2))
    steep = layer(
        Op.PRELU, [left, floats(writer, (1, 1, 8), draw.standard_normal((1, 1, 8)).astype(np.float32))], (1, 4, 6, 8)
    )
    added = layer(Op.ADD, [steep, right], (1, 4, 6, 8), Options.AddOptions, schema.AddOptionsT())
    pool = schema.Pool2DOptionsT(strideW=2, strideH=2, filterWidth=2, filterHeight=2)
    pooled = [
        layer(code, [added], (1, 2, 3, 8), Options.Pool2DOptions, pool) for code in (Op.MAX_POOL_2D, Op.AVERAGE_POOL_2D)
    ]
    joined = layer(
        Op.CONCATENATION, pooled, (1, 2, 3, 16), Options.ConcatenationOptions, schema.ConcatenationOptionsT(axis=3)
    )
    sides = writer.tensor((2,), Type.INT32, scale=0, data=np.array([1, 2], np.int32))
    means = layer(Op.MEAN, [joined, sides], (1, 16), Options.ReducerOptions, schema.ReducerOptionsT(keepDims=False))
    return writer.content([x], [means])


def test_pictures_are_channels_first_from_end_to_end() -> None:
    content, frame = backbone(), {"tensor/0:0": frame_of()}
    model = model_of(content)
    [expected] = run(content, frame).values()
    np.testing.assert_allclose(computed(model, frame)[0], expected, rtol=1e-5, atol=1e-5)
    mod = simplified(import_model(model))
    assert kinds(mod).count("permute_dims") == 1  # of the input
    calls = [binding.value for binding in mod["main"].body.blocks[0].bindings if "2d" in name_of(binding.value)]
    layouts = [call.attrs.data_layout if "conv2d" in name_of(call) else call.attrs.layout for call in calls]
    assert layouts == ["NCHW"] * 4


@pytest.mark.parametrize(
    ("change", "subgraphs", "message"),
    [
        (alone(Op.IF), 3, "operator if_0 runs other subgraphs of the file, by what was computed (IF); export"),
        (alone(Op.READ_VARIABLE), 1, "operator read_variable_0 keeps a state between frames (READ_VARIABLE); export"),
        (stateful, 1, "operator add_0 keeps a state between frames in the tensor tensor/1:0; export the model with"),
        (custom, 1, "operator custom_0 (TransformLandmarks) is a custom operator, which only the program"),
        (alone(250), 1, "operator number 250_0 is number 250, which TVM 0.27 does not import; convert the model"),
        (alone(Op.ABS), 2, "it has 2 subgraphs, and TVM imports one; export the one that is to run alone"),
    ],
)
def test_a_file_that_tvm_cannot_take_names_the_operator(
    change: Callable[[Writer, int], int], subgraphs: int, message: str
) -> None:
    with pytest.raises(ModelError) as raised:
        import_model(model_of(of_one_operator(change, subgraphs)))
    assert str(raised.value).startswith(f"net: TVM cannot import it: {message}")


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("code", "shape", "constants", "kind", "options"),
    [
        (Op.PACK, (1, *IMAGE), [], Options.PackOptions, schema.PackOptionsT(1, 0)),
        (Op.UNPACK, IMAGE[1:], [], Options.UnpackOptions, schema.UnpackOptionsT(1, 0)),
        (Op.GATHER, (1, 4, 2, 2), [[3, 1]], Options.GatherOptions, schema.GatherOptionsT(axis=2)),
        (Op.SLICE, (1, 2, 3, 2), [[0, 1, 2, 0], [1, 2, 3, 2]], 0, None),
        (
            Op.STRIDED_SLICE,
            (1, 2, 3, 2),
            [[0] * 4, IMAGE, [1, 2, 2, 1]],
            Options.StridedSliceOptions,
            schema.StridedSliceOptionsT(),
        ),
        (Op.SQUEEZE, IMAGE[1:], [], Options.SqueezeOptions, schema.SqueezeOptionsT([0])),
        (Op.TILE, (1, 8, 6, 2), [[1, 2, 1, 1]], 0, None),
        (Op.TRANSPOSE, (1, 2, 4, 6), [[0, 3, 1, 2]], 0, None),
        (Op.PAD, (1, 6, 6, 2), [[[0, 0], [1, 1], [0, 0], [0, 0]]], 0, None),
        (Op.SPACE_TO_DEPTH, (1, 2, 3, 8), [], Options.SpaceToDepthOptions, schema.SpaceToDepthOptionsT(2)),
    ],
)
def test_integers_that_move_keep_their_values(
    code: int, shape: tuple[int, ...], constants: list[object], kind: int, options: object
) -> None:
    writer = Writer()
    x, y = writer.tensor(IMAGE), writer.tensor(shape)
    arrays = [np.array(values, np.int32) for values in constants]
    reads = [x, *(writer.tensor(array.shape, Type.INT32, scale=0, data=array) for array in arrays)]
    writer.operator(code, reads, [y], kind, options, version=1)
    content = writer.content([x], [y])
    model = read("net", Path("net.tflite"), content, {})
    frame = {model.inputs[0].name: np.random.default_rng(0).integers(-128, 128, IMAGE).astype(np.int8)}
    [expected] = run(content, frame).values()
    np.testing.assert_array_equal(computed(model, frame)[0], expected)


def test_what_moves_integers_may_not_change_their_scale() -> None:
    writer = Writer()
    x, y = writer.tensor((1, 4), scale=0.5), writer.tensor((1, 6), scale=0.25)
    around = writer.tensor((2, 2), Type.INT32, scale=0, data=np.array([[0, 0], [1, 1]], np.int32))
    writer.operator(Op.PAD, [x, around], [y])
    with pytest.raises(ModelError, match=r"net: TVM cannot import it: .*PAD changes the scale of the numbers"):
        import_model(read("net", Path("net.tflite"), writer.content([x], [y]), {}))
