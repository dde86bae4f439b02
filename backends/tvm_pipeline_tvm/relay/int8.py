"""Products of int8 on x86, in place of TOPI's: these build with LLVM 22, and they are exact. One fault of aarch64.

TVM 0.19 has one tensor intrinsic for uint8 by int8 and all x86 targets, and four faults with it:

* With AVX-512 VNNI it calls `llvm.x86.avx512.vpdpbusd.512` with vectors of int32.  LLVM has since changed the
  operands to vectors of bytes, and an assertion of LLVM ends the process ("Calling a function with a bad signature!").
* It takes AVX-VNNI, whose vectors have 256 bits, for AVX-512 VNNI, and asks for 16 lanes where the schedule has 8.
* Without VNNI it adds pairs of products in 16 bits, and these saturate: 255 x 127 twice becomes 32767.
* It schedules dense layers for AMX where the target has it.  The tiles of AMX must be configured by a function
  (`runtime.amx_init`) that the packages of TVM do not hold.

:func:`exact_int8` mends all four while a build runs: an intrinsic of ours, with VNNI in 512 or 256 bits or with
bytes widened to int16, and VNNI in place of AMX.  So the outputs of a network are the same for every x86 with SSE 4.1.

For a triple of aarch64 TVM rounds a requantized number twice wherever a schedule makes vectors of four lanes.  While a
build runs it is rounded once, as everywhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import tvm
from tvm import te
from tvm.target.codegen import target_has_features
from tvm.target.x86 import get_simd_32bit_lanes
from tvm.topi.arm_cpu import tensor_intrin

from tvm_pipeline_tvm.relay.topi import Replacement

_log = logging.getLogger(__name__)

# Modules of TOPI that imported the names that are replaced.
_SCHEDULES = ("conv2d_avx_common", "conv2d_avx_1x1", "dense")
_USERS_OF_AMX = ("dense", "batch_matmul", "dense_alter_op")

_PRODUCTS = 4  # products of bytes that one lane of int32 adds up

# By the lanes of int32 in a vector: int16 times int16, added by two in int32.
_ADD_PAIRS = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}

# Add to sums (one a lane) the products of four bytes of data and the kernel's four of each lane.
_Add: TypeAlias = Callable[[tvm.tir.PrimExpr, tvm.tir.PrimExpr, tvm.tir.PrimExpr, int], tvm.tir.PrimExpr]


@contextmanager
def exact_int8() -> Iterator[None]:
    """Have TOPI's schedules multiply int8 with our intrinsic until the block ends."""
    _said.clear()
    with _ours.active():
        yield


def _say_once(message: str) -> None:
    """Warn once a build, not once a layer."""
    if message not in _said:
        _said.add(message)
        _log.warning(message)


_said: set[str] = set()


def _has_features_but_amx(features: Any, target: Any = None) -> bool:
    if features == "amx-int8":
        if target_has_features(features, target):
            _say_once("AMX is not used: this build of TVM cannot configure its tiles; int8 layers use AVX-512 VNNI")
        return False
    return bool(target_has_features(features, target))


def has_vnni(lanes: int) -> bool:
    """Return whether the current target multiplies and adds four bytes at once, in vectors of so many int32."""
    features = {16: ("avx512vnni",), 8: ("avxvnni", "avx512vnni")}.get(lanes, ())
    return any(target_has_features(feature) for feature in features)


def dot_product(lanes: int) -> te.TensorIntrin:
    """Return the intrinsic for the current target that adds to sums; many of them must be in flight."""
    return _intrinsic(lanes, _add_by_vnni if has_vnni(lanes) else _add_by_pairs)


def _dot_product() -> te.TensorIntrin:
    """Return the intrinsic for TOPI's loops, which have few sums in flight."""
    lanes = get_simd_32bit_lanes()
    return _intrinsic(lanes, _add_apart_by_vnni if has_vnni(lanes) else _add_by_pairs)


_ours = Replacement(
    {
        **{(name, "dot_16x1x16_uint8_int8_int32"): _dot_product for name in _SCHEDULES},
        **{(name, "target_has_features"): _has_features_but_amx for name in _USERS_OF_AMX},
    }
)


def _rounded_once(multiply_shift: tvm.tir.PrimExpr) -> tvm.tir.PrimExpr:
    """Leave a product with a scale to TVM's lowering for all targets; outside of our builds, to that for aarch64."""
    return multiply_shift if _ours.is_active else tensor_intrin._q_multiply_shift_arm(multiply_shift)


# TVM's own has the level 99, and none can be taken back.
tvm.ir.register_intrin_lowering("tir.q_multiply_shift", target="llvm.aarch64", f=_rounded_once, level=100)


def _intrinsic(lanes: int, add: _Add) -> te.TensorIntrin:
    """Return the tensor intrinsic ``out[i] += sum(data[k] * kernel[i, k] for k in range(4))`` for `lanes` lanes.

    `data` is uint8, `kernel` int8 of shape (lanes, 4), `out` int32; nothing saturates.  The four bytes of `data` go to
    every lane.
    """
    data = te.placeholder((_PRODUCTS,), "uint8", "data")
    kernel = te.placeholder((lanes, _PRODUCTS), "int8", "kernel")
    k = te.reduce_axis((0, _PRODUCTS), "k")
    out = te.compute(
        (lanes,), lambda i: te.sum(data[k].astype("int32") * kernel[i, k].astype("int32"), axis=k), name="out"
    )

    def code(ins: Any, outs: Any) -> tuple[tvm.tir.Stmt, tvm.tir.Stmt, tvm.tir.Stmt]:
        zeros = tvm.tir.const(0, f"int32x{lanes}")

        def added_to(sums: tvm.tir.PrimExpr) -> tvm.tir.Stmt:
            four = tvm.tir.call_intrin("int32", "tir.reinterpret", ins[0].vload([0], "uint8x4"))
            return outs[0].vstore(0, add(sums, four, ins[1].vload([0, 0], f"int8x{_PRODUCTS * lanes}"), lanes))

        # The whole sum, its start, and one more part of it.
        return added_to(zeros), outs[0].vstore(0, zeros), added_to(outs[0].vload([0], f"int32x{lanes}"))

    def buffer(tensor: te.Tensor, strides: list[Any]) -> tvm.tir.Buffer:
        return tvm.tir.decl_buffer(tensor.shape, tensor.dtype, offset_factor=1, strides=strides)

    return te.decl_tensor_intrin(
        out.op,
        code,
        binds={data: buffer(data, [1]), kernel: buffer(kernel, [te.var("ldw"), 1])},
        default_buffer_params={"offset_factor": 1},
    )


def _add_by_vnni(sums: tvm.tir.PrimExpr, four: tvm.tir.PrimExpr, kernel: tvm.tir.PrimExpr, lanes: int) -> Any:
    return add_fours(sums, tvm.tir.call_intrin(kernel.dtype, "tir.reinterpret", tvm.tir.Broadcast(four, lanes)), kernel)


def _add_apart_by_vnni(sums: tvm.tir.PrimExpr, four: tvm.tir.PrimExpr, kernel: tvm.tir.PrimExpr, lanes: int) -> Any:
    # A chain of additions waits one cycle each, and one of VNNI four or five.
    return sums + _add_by_vnni(tvm.tir.const(0, sums.dtype), four, kernel, lanes)


def _add_by_pairs(sums: tvm.tir.PrimExpr, four: tvm.tir.PrimExpr, kernel: tvm.tir.PrimExpr, lanes: int) -> Any:
    # The sum of two products of bytes may not fit into 16 bits, so they are multiplied as words: the first and third
    # of the four, then the second and fourth.
    words = f"int16x{2 * lanes}"
    data = tvm.tir.call_intrin(f"u{words}", "tir.reinterpret", tvm.tir.Broadcast(four, lanes))
    kernel = tvm.tir.call_intrin(words, "tir.reinterpret", kernel)
    eight = tvm.tir.const(8, words)
    evens = tvm.tir.bitwise_and(data, tvm.tir.const(0xFF, f"u{words}")), (kernel << eight) >> eight
    odds = data >> tvm.tir.const(8, f"u{words}"), kernel >> eight
    pairs = tvm.tir.const(0, sums.dtype)
    for of_data, of_kernel in (evens, odds):
        pairs = add_pairs(pairs, of_data.astype(words), of_kernel)
    return sums + pairs


def add_fours(sums: tvm.tir.PrimExpr, data: tvm.tir.PrimExpr, kernel: tvm.tir.PrimExpr) -> tvm.tir.PrimExpr:
    """Add to each lane of sums four products of bytes, those of data without a sign; with VNNI alone."""
    # AVX-VNNI's instruction has the same name in LLVM, in 256 bits.
    return _llvm(f"llvm.x86.avx512.vpdpbusd.{32 * lanes_of(sums)}", sums.dtype, sums, data, kernel)


def add_pairs(sums: tvm.tir.PrimExpr, data: tvm.tir.PrimExpr, kernel: tvm.tir.PrimExpr) -> tvm.tir.PrimExpr:
    """Add to each lane of sums two products of int16."""
    return sums + _llvm(_ADD_PAIRS[lanes_of(sums)], sums.dtype, data, kernel)


def lanes_of(vector: tvm.tir.PrimExpr) -> int:
    return tvm.DataType(vector.dtype).lanes


def _llvm(name: str, dtype: str, *operands: tvm.tir.PrimExpr) -> tvm.tir.PrimExpr:
    return tvm.tir.call_llvm_pure_intrin(dtype, name, tvm.tir.const(len(operands), "uint32"), *operands)
