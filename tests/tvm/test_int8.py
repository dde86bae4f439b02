"""int8 on every x86: it builds, VNNI is used where the target has it, and the sums are exact."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.parts import needs

needs("tvm")

from tests.tvm.targets import TARGETS, WITHOUT_VNNI, built
from tvm_pipeline.backends.contract import Array
from tvm_pipeline_tvm.relay.fold import fast_build, fast_context
from tvm_pipeline_tvm.relay.int8 import exact_int8

import tvm  # isort: skip
from tvm import relay  # isort: skip

ALIKE = ("x86-64-v3", "sapphirerapids", "znver5", "avxvnni")  # which compute bytes as others of these do
VNNI = ("alderlake", "cascadelake", "znver5")  # of 256 bits, of 512, and of both


def bytes_of(*shape: int) -> Array:
    """Bytes of the whole range, so that sums of two products leave the range of int16."""
    return np.random.default_rng(len(shape)).integers(-128, 128, shape).astype("int8")


def products() -> tuple[tvm.IRModule, dict[str, Array], list[Array]]:
    """Layers of int8 weights, a frame, and what they make of it."""
    frame = {"image": bytes_of(1, 20, 7, 7), "rows": bytes_of(3, 5, 70)}
    point, square, matrix, matrices = (bytes_of(*s) for s in ((19, 20, 1, 1), (32, 20, 3, 3), (32, 72), (3, 21, 70)))
    image, rows = (relay.var(name, shape=array.shape, dtype="int8") for name, array in frame.items())
    padded_rows = relay.reshape(relay.nn.pad(rows, ((0, 0), (0, 0), (0, 2))), (15, 72))
    body = relay.Tuple(
        [
            relay.nn.conv2d(image, relay.const(point), channels=19, kernel_size=(1, 1), out_dtype="int32"),
            relay.nn.conv2d(image, relay.const(square), channels=32, kernel_size=(3, 3), out_dtype="int32"),
            relay.nn.dense(padded_rows, relay.const(matrix), out_dtype="int32"),
            relay.nn.batch_matmul(rows, relay.const(matrices), out_dtype="int32"),
        ]
    )
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([image, rows], body)))
    wide = {name: array.astype("int32") for name, array in frame.items()}
    windows = np.lib.stride_tricks.sliding_window_view(wide["image"], (3, 3), axis=(2, 3))
    padded = np.pad(wide["rows"], ((0, 0), (0, 0), (0, 2))).reshape(15, 72)
    expected = [
        np.einsum("nchw,oc->nohw", wide["image"], point[:, :, 0, 0].astype("int32")),
        np.einsum("nchwij,ocij->nohw", windows, square.astype("int32")),
        padded @ matrix.astype("int32").T,
        np.einsum("bmk,bnk->bmn", wide["rows"], matrices.astype("int32")),
    ]
    return mod, frame, expected


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [target for target in TARGETS if not target.endswith(ALIKE)])
def test_sums_are_exact(target: str) -> None:
    mod, frame, expected = products()
    outputs = built(mod, target, {}, frame)
    if outputs is not None:
        for output, sums in zip(outputs, expected, strict=True):
            np.testing.assert_array_equal(output, sums)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("target", [*(f"llvm -mcpu={cpu}" for cpu in VNNI), WITHOUT_VNNI])
def test_vnni_is_used_where_the_target_has_it(target: str) -> None:
    image = relay.var("image", shape=(1, 16, 4, 4), dtype="uint8")
    weights = relay.const(bytes_of(16, 16, 1, 1))
    body = relay.nn.conv2d(image, weights, channels=16, kernel_size=(1, 1), out_dtype="int32")
    library = fast_build(tvm.IRModule.from_expr(relay.Function([image], body)), target)
    assert ("vpdpbusd" in library.lib.get_source("asm")) == (target != WITHOUT_VNNI)


@pytest.mark.thorough
def test_layers_are_not_scheduled_for_amx_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = relay.var("rows", shape=(4, 64), dtype="uint8")
    body = relay.nn.dense(rows, relay.const(bytes_of(16, 64)), out_dtype="int32")
    with caplog.at_level("INFO", "tvm_pipeline_tvm.relay.int8"):
        library = fast_build(tvm.IRModule.from_expr(relay.Function([rows], body)), "llvm -mcpu=sapphirerapids")
    assert "tdpb" not in library.lib.get_source("asm")
    assert "AMX is not used" in caplog.text


@pytest.mark.thorough
def test_numbers_are_rounded_once_on_arm() -> None:
    """`sqrdmulh` rounds the product with a scale, and the shift behind it rounds once more."""
    sums = relay.var("sums", shape=(1, 16, 4, 4), dtype="int32")
    one, zero = relay.const(0.05), relay.const(0)
    scaled = relay.qnn.requantize(sums, relay.const(0.0025), zero, one, zero, out_dtype="int8")
    mod = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function([sums], scaled)))
    target = "llvm -keys=cpu -mtriple=aarch64-linux-gnu"  # schedules of x86, whose vectors have four lanes here
    assert "sqrdmulh" not in fast_build(mod, target).get_lib().get_source("asm")
    with fast_context():
        assert "sqrdmulh" in relay.build(mod, target).get_lib().get_source("asm")  # TVM's own again


def test_topi_is_itself_again_after_the_last_build() -> None:
    from tvm.topi.x86 import conv2d_avx_1x1, tensor_intrin

    stock = tensor_intrin.dot_16x1x16_uint8_int8_int32
    assert conv2d_avx_1x1.dot_16x1x16_uint8_int8_int32 is stock
    with pytest.raises(ValueError, match="stop"), exact_int8():  # noqa: PT012
        with exact_int8():
            assert conv2d_avx_1x1.dot_16x1x16_uint8_int8_int32 is not stock
        assert conv2d_avx_1x1.dot_16x1x16_uint8_int8_int32 is not stock
        raise ValueError("stop")
    assert conv2d_avx_1x1.dot_16x1x16_uint8_int8_int32 is stock
