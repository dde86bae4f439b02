"""Convolutions of uint8 by int8 have numpy's sums, by each instruction of the targets that this machine runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import te
from tvm.s_tir import Schedule

from tests.plugins.kernels.relax.layers import blocked, convolution, plain
from tests.relax.fused import target_of
from tests.support.examples import examples
from tvm_pipeline_kernels.relax.schedules import conv2d_int8, depthwise_int8, lowering
from tvm_pipeline_kernels.relax.schedules.cores import cores_of
from tvm_pipeline_kernels.relax.schedules.depthwise_int8 import columns_at_once
from tvm_pipeline_kernels.relax.schedules.epilogue import RULE, blocks_of
from tvm_pipeline_kernels.tiles import Cores

# Of aarch64:
WORDS, DOT_PRODUCTS = r"smlal2?\s+v\d+\.4s, v\d+\.[48]h", r"sdot\s+v\d+\.4s, v\d+\.16b"
VNNI = {16: "znver4", 8: "alderlake"}
AT_ONCE = [(16, 4), (8, 4), (16, 2), (8, 2), (4, 2), (4, 1)]  # lanes of a target, products of bytes at once
SIZES = st.integers(1, 19)


def cores_for(lanes: int, at_once: int) -> tuple[Any, Cores]:
    """Return a target, and cores that have these instructions; skip the test where this machine lacks them."""
    target = target_of(lanes)
    if at_once == 4:
        target = tvm.target.Target({"kind": "llvm", "mcpu": VNNI[lanes]})
        here = tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})
        if not tvm.target.codegen.llvm_cpu_has_features("avx512vnni" if lanes == 16 else "avxvnni", here):
            pytest.skip("this machine has no such instruction")
    return target, cores_of(target)._replace(bytes_at_once=at_once)


def sums_of(
    rule: ModuleType, layer: Callable[..., te.Tensor], arrays: list[np.ndarray], target: Any, cores: Cores
) -> Any:
    library, shape = built(rule, layer, arrays, target, cores)
    held = [tvm.runtime.tensor(each) for each in (*arrays, np.full(shape, -1, "int32"))]
    library.jit()["main"](*held)
    return plain(held[-1].numpy())


def built(
    rule: ModuleType, layer: Callable[..., te.Tensor], arrays: list[np.ndarray], target: Any, cores: Cores
) -> tuple[Any, list[int]]:
    """Return a layer compiled by its rule, and the shape of its output."""
    tensors = [te.placeholder(array.shape, array.dtype.name) for array in arrays]
    output = layer(*tensors)
    s = Schedule(te.create_prim_func([*tensors, output]))
    (anchor,) = (found for found in blocks_of(s) if s.get(found).annotations.get(RULE) == rule.NAME)
    rule.schedule(s, anchor, cores)
    return tvm.compile(s.mod, target=target, tir_pipeline=lowering.PIPELINE), list(map(int, output.shape))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("lanes", "at_once"), AT_ONCE)
@examples(8)
@given(
    batch=st.sampled_from([1, 1, 2]),
    channels=st.sampled_from([3, 4, 6, 8, 16, 24, 32]),
    block=st.sampled_from([4, 8, 16]),
    blocks=st.integers(1, 4),
    extents=st.tuples(SIZES, SIZES),
    window=st.sampled_from([(1, 1), (3, 3), (1, 5)]),
    strides=st.sampled_from([(1, 1), (2, 2), (2, 1)]),
    dilation=st.sampled_from([(1, 1), (1, 1), (2, 2)]),
    groups=st.sampled_from([1, 2]),
)
def test_sums_of_all_channels(
    lanes: int,
    at_once: int,
    batch: int,
    channels: int,
    block: int,
    blocks: int,
    extents: Any,
    window: Any,
    strides: Any,
    dilation: Any,
    groups: int,
) -> None:
    target, cores = cores_for(lanes, at_once)
    block, groups = min(block, max(8, lanes)), groups if channels % (4 * groups) == 0 else 1
    draw, read = np.random.default_rng(0), channels // groups
    extents = [max(e, (w - 1) * d + 1) for e, w, d in zip(extents, window, dilation, strict=True)]
    data = draw.integers(0, 256, (batch, channels, *extents)).astype("uint8")
    weights = draw.integers(-128, 128, (groups * blocks * block, read, *window)).astype("int8")
    inner = 4 if channels % 4 else next(each for each in (16, 8, 4) if read % each == 0)
    given_ = data if channels % 4 else blocked(data, inner)
    found = sums_of(
        conv2d_int8,
        lambda x, kernel: conv2d_int8.compute(x, kernel, strides, dilation, groups=groups),
        [given_, conv2d_int8.packed(weights, inner, block)],
        target,
        cores,
    )
    np.testing.assert_array_equal(found, convolution(data, weights, groups, strides, dilation=dilation))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("lanes", "at_once"), AT_ONCE)
@examples(8)
@given(
    batch=st.sampled_from([1, 1, 2]),
    block=st.sampled_from([4, 8, 16]),
    blocks=st.integers(1, 4),
    extents=st.tuples(SIZES, SIZES),
    window=st.sampled_from([(1, 1), (3, 3), (5, 5), (3, 7)]),
    strides=st.sampled_from([(1, 1), (2, 2), (1, 2)]),
    dilation=st.sampled_from([(1, 1), (1, 1), (2, 1), (2, 3)]),
    padding=st.sampled_from([(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 3)]),
)
def test_sums_of_each_channel(
    lanes: int,
    at_once: int,
    batch: int,
    block: int,
    blocks: int,
    extents: Any,
    window: Any,
    strides: Any,
    dilation: Any,
    padding: Any,
) -> None:
    target, cores = cores_for(lanes, at_once)
    block = min(block, max(8, lanes))
    draw, channels = np.random.default_rng(1), blocks * block
    extents = [max(e, (w - 1) * d + 1) for e, w, d in zip(extents, window, dilation, strict=True)]
    data = draw.integers(0, 256, (batch, channels, *extents)).astype("uint8")
    weights = draw.integers(-128, 128, (channels, 1, *window)).astype("int8")
    found = sums_of(
        depthwise_int8,
        lambda x, kernel: depthwise_int8.compute(x, kernel, strides, dilation, window[1], padding, 77),
        [blocked(data, block), depthwise_int8.packed(weights, block, columns_at_once(cores, dilation[1]))],
        target,
        cores,
    )
    top, left, bottom, right = padding
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=77)
    np.testing.assert_array_equal(found, convolution(padded, weights, channels, strides, dilation=dilation))


@pytest.mark.parametrize(
    ("mcpu", "instruction"),
    [
        ("cascadelake", r"vpdpbusd.*%zmm"),
        ("alderlake", r"vpdpbusd.*%ymm"),
        ("skylake-avx512", r"vpmaddwd.*%zmm"),
        ("haswell", r"vpmaddwd.*%ymm"),
        ("nehalem", r"pmaddwd.*%xmm"),
        ("cortex-a53", WORDS),
        ("cortex-a72", WORDS),
        ("cortex-a76", DOT_PRODUCTS),
        ("neoverse-n1", DOT_PRODUCTS),
    ],
)
def test_every_processor_gets_its_instruction(mcpu: str, instruction: str) -> None:
    """Also where this machine cannot run the code."""
    processor = "aarch64" if mcpu.startswith(("cortex", "neoverse")) else "x86_64"
    target = tvm.target.Target({"kind": "llvm", "mtriple": f"{processor}-linux-gnu", "mcpu": mcpu})
    cores = cores_of(target)
    block = max(8, cores.lanes)
    data = np.zeros((1, 1, 6, 8, block), "uint8")
    dense, depthwise = (np.ones((block, read, 3, 3), "int8") for read in (block, 1))
    added = [conv2d_int8.added(dense, block)] if cores.signed else []
    library, _ = built(
        conv2d_int8,
        lambda x, w, *more: conv2d_int8.compute(x, w, (1, 1), (1, 1), *more),
        [data, conv2d_int8.packed(dense, block, block), *added],
        target,
        cores,
    )
    assert re.search(instruction, library.mod.inspect_source("asm"))
    library, _ = built(
        depthwise_int8,
        lambda x, w: depthwise_int8.compute(x, w, (1, 1), (1, 1), 3, (0, 0, 0, 0), 0),
        [data, depthwise_int8.packed(depthwise, block, columns_at_once(cores))],
        target,
        cores,
    )
    assert re.search(WORDS if cores.signed else instruction, library.mod.inspect_source("asm"))
