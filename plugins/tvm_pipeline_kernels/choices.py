"""What tuning may choose of a convolution: its tile, and an algorithm of other values where the user allows it.

A convolution is known by its *workload*, AutoTVM's tuple of what TOPI is asked to compute. Its *choice* is the numbers
of a `Tile`, or of a `Band` where it is depthwise; without one, the static rule of `tiles.py` stands. Both IRs have the
same workloads and choices. Free of TVM. Next: `tuning/tuning_records.py`.

On a GPU, with Relax, a workload is the extents of the convolution's loops, and a choice is the numbers of a `GpuTile`.
Relay names the workloads of GPUs otherwise (`relay/schedules/device_choices.py`).

The choice may also be the numbers of a `Winograd`, another algorithm, whose rounding errors are others. Only a model
with `Model.tolerance` is tuned and built so; there the static rule chooses it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeGuard

import msgspec

from tvm_pipeline_kernels import gpu_tiles
from tvm_pipeline_kernels.gpu_tiles import Extents, Gpu, GpuTile
from tvm_pipeline_kernels.tiles import Band, Cores, Tile, band_rule, bands, channel_block, tiles
from tvm_pipeline_kernels.winograd import KERNEL, Winograd, has_blocks, winograd_forms, winograd_rule

GENERATION = 3  # raise it when a schedule of this room changes: what was measured before is void

CONV2D, DEPTHWISE, GPU_CONV2D = "conv2d_NCHWc.x86", "depthwise_conv2d_NCHWc.x86", "conv2d.gpu"
KNOBS = {
    CONV2D: tuple(f"own_{name}" for name in Tile._fields),
    DEPTHWISE: tuple(f"own_{name}" for name in Band._fields),
    GPU_CONV2D: tuple(f"own_{name}" for name in GpuTile._fields),
}
WINOGRAD_KNOBS = tuple(f"own_{name}" for name in Winograd._fields)

_Extent = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
_Tensor: TypeAlias = tuple[Literal["TENSOR"], tuple[_Extent, _Extent, _Extent, _Extent], str]
# The template; data (NCHW) and kernel (OIHW); strides, padding (top, left, bottom, right), dilation; layouts; dtype.
_CpuWorkload: TypeAlias = tuple[
    Literal["conv2d_NCHWc.x86", "depthwise_conv2d_NCHWc.x86"],
    _Tensor,
    _Tensor,
    tuple[_Extent, _Extent],
    tuple[_Offset, _Offset, _Offset, _Offset],
    tuple[_Extent, _Extent],
    str,
    str,
    str,
]
_Extents: TypeAlias = Annotated[tuple[_Extent, ...], msgspec.Meta(min_length=1, max_length=3)]
# The template, the fields of `gpu_tiles.Extents`, and the shape of the image with its padding, in which strides and
# dilation show. All is float32.
_GpuWorkload: TypeAlias = tuple[
    Literal["conv2d.gpu"], _Extent, _Extent, _Extent, _Extents, _Extent, _Extents, tuple[_Extent, ...]
]
Workload: TypeAlias = tuple[Any, ...]  # one of the two
Choice: TypeAlias = tuple[int, ...]
Choices: TypeAlias = Mapping[Workload, Choice]


def workload_of(
    template: str,
    data: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: str = "float32",
) -> Any:
    """Return the workload of a convolution.

    Args:
        data: the shape of the image (NCHW).
        kernel: the shape of the weights (OIHW).
        padding: top, left, bottom, right.
        dtype: of the output.
    """
    tensors = (("TENSOR", tuple(shape), "float32") for shape in (data, kernel))
    return (template, *tensors, tuple(strides), tuple(padding), tuple(dilation), "NCHW", "NCHW", dtype)


def gpu_workload_of(extents: Extents, image: Sequence[int]) -> Workload:
    """Return the workload of a convolution of float32 on a GPU.

    Args:
        image: the shape of what the kernel reads, with its padding.
    """
    return (GPU_CONV2D, *extents, tuple(image))


def workload_in(parts: Sequence[Any]) -> Workload:
    """Return the workload that JSON has made these parts of; raise ValueError where they are none."""
    if parts[0] != GPU_CONV2D:
        return msgspec.convert(parts, _CpuWorkload)
    workload = msgspec.convert(parts, _GpuWorkload)
    extents, image = _extents_of(workload), workload[-1]
    if image[:2] != (extents.images, extents.groups * extents.channels) or not (
        len(image) - 2 == len(extents.pixels) == len(extents.window)
    ):
        raise ValueError(f"an image of {image} is none of the convolution {extents}"[:300])
    return workload


def _extents_of(workload: Workload) -> Extents:
    return Extents(*workload[1:-1])


class Output(NamedTuple):
    """What a convolution computes: channel blocks, vectors in a block, rows, columns, bytes of weights of a block."""

    blocks: int
    vectors: int
    height: int
    width: int
    block_bytes: int


def output_of(workload: Workload, lanes: int) -> Output:
    """Return what a workload computes in vectors of so many float32."""
    _, data, kernel, strides, padding, dilation, *_ = workload
    channels = kernel[1][0]
    block = channel_block(channels, lanes)
    height, width = (
        (data[1][2 + axis] + padding[axis] + padding[2 + axis] - (kernel[1][2 + axis] - 1) * dilation[axis] - 1)
        // strides[axis]
        + 1
        for axis in (0, 1)
    )
    return Output(channels // block, -(-block // lanes), height, width, 4 * block * math.prod(kernel[1][1:]))


def macs_of(workload: Workload) -> int:
    """Return the multiply-accumulates of a workload."""
    if workload[0] == GPU_CONV2D:
        extents = _extents_of(workload)
        return extents.groups * extents.outputs * extents.columns * extents.terms
    _, _, height, width, _ = output_of(workload, 1)
    images, weights = workload[1][1][0], workload[2][1]
    return int(images * height * width * math.prod(weights))


def possible_choices(workload: Workload, cores: Cores | Gpu) -> list[Choice]:
    """Return all choices of a workload by tiles: first that of the static rule, then by their estimates.

    There is none where the workload is not one of such cores, or of a GPU.
    """
    if isinstance(cores, Gpu) or workload[0] == GPU_CONV2D:
        return _gpu_choices(workload, cores) if isinstance(cores, Gpu) and workload[0] == GPU_CONV2D else []
    blocks, vectors, height, width, block_bytes = output_of(workload, cores.lanes)
    if height < 1 or width < 1:
        return []
    if workload[0] == CONV2D:
        return [tuple(tile) for _, tile in sorted(tiles(blocks, vectors, height, width, cores.registers, block_bytes))]
    rule = band_rule(height, width)
    others = [band for _, band in sorted(bands(height, width, cores.registers)) if band != rule]
    return [tuple(rule), *map(tuple, others)]


def _gpu_choices(workload: Workload, gpu: Gpu) -> list[Choice]:
    extents = _extents_of(workload)
    ranked = gpu_tiles.ranked_tiles(extents.groups, extents.outputs, extents.columns, extents.terms, gpu)
    return [tuple(tile) for tile in ranked]


def is_for_winograd(workload: Workload) -> bool:
    """Return whether Winograd's algorithm can compute a workload, if its channels fill vectors."""
    if workload[0] != CONV2D:
        return False
    _, data, kernel, strides, _, dilation, *_, dtype = workload
    is_plain = kernel[1][2:] == (KERNEL, KERNEL) and kernel[1][1] == data[1][1]
    return bool(is_plain and strides == (1, 1) and dilation == (1, 1) and dtype == "float32")


def winograd_choices(workload: Workload, cores: Cores | Gpu) -> list[Choice]:
    """Return the choices of a workload by Winograd's algorithm, the most promising first."""
    sizes = _sizes(workload, cores)
    return [tuple(form) for _, form in sorted(winograd_forms(*sizes))] if sizes else []


def winograd_by_rule(workload: Workload, cores: Cores | Gpu) -> list[Choice]:
    """Return the choices by Winograd's algorithm that the static rule prefers to direct sums, the fastest first."""
    sizes = _sizes(workload, cores)
    return [tuple(form) for form in winograd_rule(*sizes)] if sizes else []


def static_choice(workload: Workload, cores: Cores | Gpu, *, winograd: bool) -> Choice:
    """Return what is taken of a workload without measurement, if its weights lose no more than the tolerance."""
    return [*(winograd_by_rule(workload, cores)[:1] if winograd else []), *possible_choices(workload, cores)][0]


def _sizes(workload: Workload, cores: Cores | Gpu) -> tuple[int, int, int, int, int, int] | None:
    """Return the arguments of `winograd_forms`; None where the algorithm does not serve the workload."""
    if isinstance(cores, Gpu) or not is_for_winograd(workload):
        return None
    kernel, lanes = workload[2], cores.lanes
    _, _, height, width, _ = output_of(workload, lanes)
    if height < 1 or width < 1 or not has_blocks(kernel[1][1], kernel[1][0], lanes):
        return None
    return kernel[1][1], kernel[1][0], lanes, height, width, cores.registers


def is_winograd(choice: Any) -> TypeGuard[Choice]:
    """Return whether a choice is that of Winograd's algorithm."""
    return isinstance(choice, tuple) and len(choice) == len(Winograd._fields)
