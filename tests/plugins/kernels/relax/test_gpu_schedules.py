"""Schedules for CUDA devices: their kernels run, thread by thread, on the CUDA device made of software."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.relax import op
from tvm.relax.op import nn

from tests.relax.fused import module_of
from tests.support.software_cuda import SoftwareCuda
from tvm_pipeline.errors import ModelError
from tvm_pipeline_kernels.gpu_tiles import GpuTile, gpu_of
from tvm_pipeline_kernels.relax.gpu_conv2d import as_product, convolution_of
from tvm_pipeline_tvm.devices.device_arrays import part
from tvm_pipeline_tvm.relax.build import functions_of
from tvm_pipeline_tvm.relax.cuda_kernels import cuda_target, load_cuda_kernels, write_cuda_kernels
from tvm_pipeline_tvm.relax.gpu_schedules import gpu_fused, gpu_kernels, gpu_scheduled

Array = np.ndarray
Emit = Callable[[Any], Any]
ORIN = cuda_target("sm_87", tvm.target.Target({"kind": "llvm"}))


def kernel_of(build: Callable[..., Any], *shapes: Sequence[int]) -> tuple[tirx.PrimFunc, str]:
    """Return the only kernel of a function, scheduled, and its rule."""
    rules: dict[str, str] = {}
    kernels = gpu_kernels(gpu_fused(module_of(build, *shapes), ORIN), ORIN, rules)
    (function,) = (each for each in kernels.functions.values() if isinstance(each, tirx.PrimFunc))
    return function, *rules.values()


def convolution(
    image: Array, kernel: Array, strides: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1
) -> Array:
    """Return a convolution of any number of dimensions, as its definition says."""
    count = image.ndim - 2
    image = np.pad(image, ((0, 0), (0, 0), *((padding, padding),) * count))
    reach = [(extent - 1) * dilation + 1 for extent in kernel.shape[2:]]
    windows = np.lib.stride_tricks.sliding_window_view(image, reach, tuple(range(2, 2 + count)))
    windows = windows[(..., *(slice(None, None, strides),) * count, *(slice(None, None, dilation),) * count)]
    axes = [1, *range(2 + count, 2 + 2 * count)]
    parts = [
        np.moveaxis(np.tensordot(part, weights, (axes, [1, *range(2, 2 + count)])), -1, 1)
        for part, weights in zip(np.split(windows, groups, 1), np.split(kernel, groups, 0), strict=True)
    ]
    return np.concatenate(parts, 1)


def transposed(image: Array, kernel: Array, strides: int, padding: int) -> Array:
    """Return a transposed convolution: that of the image with zeros between, by the kernel turned round."""
    n, channels, height, width = image.shape
    spread = np.zeros((n, channels, (height - 1) * strides + 1, (width - 1) * strides + 1), image.dtype)
    spread[:, :, ::strides, ::strides] = image
    turned = np.flip(kernel, (2, 3)).swapaxes(0, 1)
    return convolution(spread, turned, padding=kernel.shape[2] - 1 - padding)


def sigmoid(value: Array) -> Array:
    return 1 / (1 + np.exp(-value))


def _relu(**options: int) -> tuple[Callable[..., Any], Callable[..., Array]]:
    return (
        lambda emit, x, w: emit(nn.relu(emit(nn.conv2d(x, w, **options)))),
        lambda x, w: np.maximum(convolution(x, w, **options), 0),
    )


def _residual(emit: Emit, x: Any, w: Any, bias: Any, other: Any) -> Any:
    return emit(nn.relu(emit(op.add(emit(op.add(emit(nn.conv2d(x, w, padding=1, strides=2)), bias)), other))))


# Name: rule, what is computed and how numpy computes it, and the shapes of the tensors.
CASES: dict[str, tuple[str, tuple[Callable[..., Any], Callable[..., Array]], tuple[tuple[int, ...], ...]]] = {
    "tiles that reach over both edges": ("conv2d", _relu(padding=1), ((1, 5, 9, 7), (13, 5, 3, 3))),
    "1x1": ("conv2d", _relu(), ((1, 16, 6, 6), (32, 16, 1, 1))),
    "two images, dilated": ("conv2d", _relu(padding=2, dilation=2), ((2, 4, 6, 5), (8, 4, 3, 3))),
    "first layer": ("conv2d", _relu(padding=3, strides=2), ((1, 3, 20, 20), (16, 3, 7, 7))),
    "groups": ("conv2d", _relu(padding=1, groups=3), ((1, 12, 6, 6), (24, 4, 3, 3))),
    "small groups": ("conv2d_by_threads", _relu(padding=1, groups=4), ((1, 12, 6, 6), (8, 3, 3, 3))),
    "depthwise": ("conv2d_by_threads", _relu(padding=1, groups=12), ((1, 12, 9, 7), (12, 1, 3, 3))),
    "depthwise, fewer results than threads": (
        "conv2d_by_threads",
        (lambda emit, x, w: emit(nn.conv2d(x, w, groups=3)), lambda x, w: convolution(x, w, groups=3)),
        ((1, 3, 5, 5), (3, 1, 3, 3)),
    ),
    "depthwise, strided, several": (
        "conv2d_by_threads",
        _relu(padding=2, strides=2, groups=6),
        ((1, 6, 13, 13), (12, 1, 5, 5)),
    ),
    "bias, residual": (
        "conv2d",
        (
            _residual,
            lambda x, w, bias, other: np.maximum(convolution(x, w, padding=1, strides=2) + bias + other, 0),
        ),
        ((1, 8, 11, 11), (24, 8, 3, 3), (1, 24, 1, 1), (1, 24, 6, 6)),
    ),
    "swish": (
        "conv2d",
        (
            lambda emit, x, w: emit(nn.silu(emit(nn.conv2d(x, w)))),
            lambda x, w: (y := convolution(x, w)) * sigmoid(y),
        ),
        ((1, 8, 7, 7), (16, 8, 1, 1)),
    ),
    "broadcast in a larger tensor": (
        "conv2d",
        (
            lambda emit, x, w, y: emit(op.multiply(emit(op.sigmoid(emit(nn.conv2d(x, w)))), y)),
            lambda x, w, y: sigmoid(convolution(x, w)) * y,
        ),
        ((1, 8, 3, 1), (16, 8, 1, 1), (1, 16, 3, 5)),
    ),
    "one pixel": ("gemv", _relu(), ((1, 64, 1, 1), (16, 64, 1, 1))),
    "one dimension": (
        "conv2d",
        (
            lambda emit, x, w: emit(nn.conv1d(x, w, padding=1)),
            lambda x, w: convolution(x, w, padding=1),
        ),
        ((1, 8, 20), (16, 8, 3)),
    ),
    "three dimensions": (
        "conv2d",
        (
            lambda emit, x, w: emit(nn.conv3d(x, w, padding=1)),
            lambda x, w: convolution(x, w, padding=1),
        ),
        ((1, 3, 4, 5, 4), (8, 3, 3, 3, 3)),
    ),
    "transposed": (
        "conv2d",
        (
            lambda emit, x, w: emit(nn.conv2d_transpose(x, w, strides=2, padding=1)),
            lambda x, w: transposed(x, w, 2, 1),
        ),
        ((1, 6, 5, 5), (6, 8, 4, 4)),
    ),
    "matrices": (
        "matmul",
        (lambda emit, x, y: emit(op.matmul(x, y)), np.matmul),
        ((2, 20, 16), (2, 16, 24)),
    ),
    "softmax": (
        "general_reduction",
        (
            lambda emit, x: emit(nn.softmax(x)),
            lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
        ),
        ((3, 50),),
    ),
    "maximum, scaled": (
        "window",
        (
            lambda emit, x, y: emit(nn.relu(emit(op.multiply(emit(nn.max_pool2d(x, (2, 2), (2, 2), (1, 1))), y)))),
            lambda x, y: np.maximum(
                np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
                .reshape(1, 4, 4, 2, 4, 2)
                .max((3, 5))
                * y,
                0,
            ),
        ),
        ((1, 4, 6, 6), (1, 4, 1, 1)),
    ),
    "maximum, fewer results than threads": (
        "window",
        (
            lambda emit, x: emit(nn.max_pool2d(x, (2, 2), (2, 2))),
            lambda x: x.reshape(1, 4, 3, 2, 3, 2).max((3, 5)),
        ),
        ((1, 4, 6, 6),),
    ),
    "mean": (
        "window",
        (
            lambda emit, x: emit(nn.avg_pool2d(x, (2, 2), (2, 2))),
            lambda x: x.reshape(1, 4, 3, 2, 3, 2).mean((3, 5)),
        ),
        ((1, 4, 6, 6),),
    ),
    "elements": (
        "fallback",
        (lambda emit, x, y: emit(op.exp(emit(op.add(x, y)))), lambda x, y: np.exp(x + y)),
        ((3, 5), (5,)),
    ),
}


@pytest.fixture(scope="module")
def scheduled() -> dict[str, tuple[tirx.PrimFunc, str]]:
    return {name: kernel_of(build, *shapes) for name, (_, (build, _), shapes) in CASES.items()}


@pytest.fixture(scope="module")
def library(
    scheduled: dict[str, tuple[tirx.PrimFunc, str]], tmp_path_factory: pytest.TempPathFactory, _software_cuda: Any
) -> Any:
    """Return the kernels of all cases, compiled at once: the function of case 3 is `k3`."""
    functions = {
        f"k{index}": function.with_attr("global_symbol", f"k{index}")
        for index, (function, _) in enumerate(scheduled.values())
    }
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVM_PIPELINE_CACHE", str(folder / "cache"))
        write_cuda_kernels(tvm.IRModule(functions), ORIN, folder)
        return load_cuda_kernels(folder)


@pytest.mark.parametrize("name", CASES)
def test_kernels_compute_what_numpy_does(
    name: str, scheduled: dict[str, tuple[tirx.PrimFunc, str]], library: Any, software_cuda: SoftwareCuda
) -> None:
    rule, (_, in_numpy), shapes = CASES[name]
    assert scheduled[name][1] == rule
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(shape).astype("float32") for shape in shapes]
    right, there = in_numpy(*arrays), tvm.runtime.device("cuda", 0)
    memory = tvm.runtime.tensor(np.full(right.size + 1024, np.nan, "float32"), there)
    result = part(memory, 0, right.shape, "float32")
    library[f"k{list(CASES).index(name)}"](*(tvm.runtime.tensor(array, there) for array in arrays), result)
    np.testing.assert_allclose(result.numpy(), right, rtol=1e-4, atol=1e-4)
    assert np.isnan(memory.numpy()[right.size :]).all(), "it writes beyond its result"


@pytest.mark.parametrize("tile", [GpuTile(16, 32, 8, 2, 4), GpuTile(64, 32, 16, 8, 4), GpuTile(32, 16, 32, 4, 1)])
def test_tiles_of_every_shape(tile: GpuTile, tmp_path: Path, software_cuda: SoftwareCuda, own_cache: Path) -> None:
    """A tile need not divide the outputs, the pixels or the terms."""
    module = gpu_fused(
        module_of(lambda emit, x, w: emit(nn.conv2d(x, w, padding=1)), (1, 5, 9, 9), (44, 5, 3, 3)), ORIN
    )
    with ORIN:
        functions = functions_of(relax.transform.FuseTIR()(module))
    ((name, function),) = ((each.name_hint, function) for each, function in functions.functions.items())
    s = s_tir.Schedule(function)
    anchor, extents = convolution_of(s) or pytest.fail("no convolution")
    as_product(s, anchor, extents, gpu_of(87), tile)
    write_cuda_kernels(tvm.IRModule({name: s.mod["main"].with_attr("global_symbol", name)}), ORIN, tmp_path)
    draw, there = np.random.default_rng(0), tvm.runtime.device("cuda", 0)
    image, kernel = (draw.standard_normal(shape).astype("float32") for shape in ((1, 5, 9, 9), (44, 5, 3, 3)))
    result = tvm.runtime.empty((1, 44, 9, 9), "float32", there)
    load_cuda_kernels(tmp_path)[name](tvm.runtime.tensor(image, there), tvm.runtime.tensor(kernel, there), result)
    np.testing.assert_allclose(result.numpy(), convolution(image, kernel, padding=1), rtol=1e-4, atol=1e-4)


def test_a_convolution_is_one_kernel_with_tiles_in_shared_memory() -> None:
    """Padding, bias and addition are computed within it, and nothing but its result is stored in device memory."""
    build, shapes = CASES["bias, residual"][1][0], CASES["bias, residual"][2]
    function, _ = kernel_of(build, *shapes)
    text = function.script()
    assert text.count('thread="blockIdx.x"') == 1
    assert text.count('scope="shared"') == 2
    assert all("scope=" in line for line in text.splitlines() if "sblock_alloc_buffer" in line)


def test_a_target_without_an_architecture_is_refused() -> None:
    """TVM would guess one."""
    module = module_of(lambda emit, x, w: emit(nn.conv2d(x, w)), (1, 8, 7, 7), (16, 8, 1, 1))
    target = tvm.target.Target({"kind": "llvm"})
    with target:
        (function,) = functions_of(relax.transform.FuseTIR()(gpu_fused(module, ORIN))).functions.values()
    with pytest.raises(ModelError, match="does not say which GPU it is for"):
        gpu_scheduled(function, target)
